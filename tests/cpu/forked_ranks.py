"""Ranks that are forked from one process with torch: see ``tests/forked.py``."""

from __future__ import annotations

import os
from collections.abc import Callable
from multiprocessing import Pipe

from preheat.parallel import ranks
from preheat.parallel.ranks import Child, Started
from tests import forked

IMPORTED = ("preheat.parallel.worker", "preheat.backends.cpu.backend", "torch.distributed")

CODE = """
import os, sys
from multiprocessing.connection import Connection
from preheat.parallel import worker

code = 1
try:
    worker.run(int(sys.argv[1]), Connection(int(sys.argv[2])), door=None)
    code = 0
except SystemExit as left:
    code = left.code if isinstance(left.code, int) else 1
finally:
    os._exit(code)
"""

start_a_process = ranks._child


class ForkedRank(forked.Forked):
    """A forked rank, with the methods of a child process that leaders call."""

    reason = Child.reason

    def leave(self) -> None:
        self.kill()
        self.wait()


def install() -> Callable[[], None]:
    """Fork the ranks of this process from now on, and return a function that ends this."""
    forks = forked.Forks(*IMPORTED, process=ForkedRank)

    def child(rank: int, device: str) -> Started:
        """Start ``rank`` as :func:`preheat.parallel.ranks._child` does."""
        environment = dict(os.environ)
        if not forks.fit(environment):
            return start_a_process(rank, device)
        ours, theirs = Pipe()
        with theirs:
            started = forks.run(CODE, str(rank), environment=environment, more=[theirs.fileno()])
        return Started(started, ours, None, device=rank)

    def undo() -> None:
        ranks._child = start_a_process
        forks.close()

    ranks._child = child
    return undo
