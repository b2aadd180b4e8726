"""A death is noticed by the lock that the dead process held; an end that a process says itself is none."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from preheat.utils.lifeline import AVAILABLE, Lifeline

pytestmark = pytest.mark.skipif(not AVAILABLE, reason="this system has no robust mutexes")

HOLDER = """
import sys
from pathlib import Path
from preheat.utils.lifeline import Lifeline

line = Lifeline.hold(Path(sys.argv[1]))
print("held", flush=True)
sys.stdin.read()
line.release()
"""


def waiting(line: Lifeline) -> tuple[threading.Thread, list[bool]]:
    """Return a thread that waits for a death, and the list that gets its outcome."""
    found = list[bool]()
    thread = threading.Thread(target=lambda: found.append(line.died()))
    thread.start()
    return thread, found


@pytest.mark.parametrize("killed", [True, False], ids=["killed", "lets go"])
def test_a_death_is_told_from_an_end(tmp_path: Path, killed: bool) -> None:
    line = Lifeline.create(tmp_path / "line")
    assert line is not None
    thread, found = waiting(line)
    command = [sys.executable, "-c", HOLDER, str(tmp_path / "line")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdin is not None and holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        line.note_held()
        assert thread.is_alive() and not found, "the holder lives"
        if killed:
            holder.send_signal(signal.SIGKILL)
        else:
            holder.stdin.close()
        thread.join(60)
        assert found == [killed]


def test_a_lifeline_that_nobody_held_tells_of_no_death(tmp_path: Path) -> None:
    assert Lifeline.hold(tmp_path / "line") is None
    line = Lifeline.create(tmp_path / "line")
    assert line is not None
    thread, found = waiting(line)
    line.close()
    thread.join(60)
    assert found == [False]
