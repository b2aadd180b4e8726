"""A rank that waits for others learns of a death at once.

That holds even if the group's files vanish with the death.
"""

import shutil
import threading
import time

import pytest

from preheat.backends.process_group import join_group
from preheat.backends.rendezvous import OneNode
from preheat.errors import RankDied

PATIENCE_SECONDS = 30


@pytest.mark.parametrize("notices", ["before the files go", "after the files went"])
def test_the_wait_for_a_dead_rank_ends(tmp_path, notices):
    folder, errors, dead = tmp_path / "group", list[BaseException](), threading.Event()
    folder.mkdir()

    def check():
        if dead.is_set():
            raise RankDied("rank 1 ended with status 1")

    def join():
        try:
            join_group("gloo", OneNode(folder, 0, 2), check)
        except BaseException as error:
            errors.append(error)

    waiting = threading.Thread(target=join, daemon=True)
    waiting.start()
    time.sleep(0.3)
    if notices.startswith("before"):
        dead.set()
    shutil.rmtree(folder)
    time.sleep(0.3)
    dead.set()
    waiting.join(PATIENCE_SECONDS)
    assert not waiting.is_alive()
    assert [type(error) for error in errors] == [RankDied]
