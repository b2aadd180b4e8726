"""Start of a rank that calls at the leader's door.

The leader did not start its process itself. No torch here.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from multiprocessing.connection import Connection

from preheat.parallel.wire import Address, Door, call


def be_rank(rank: int, leader: Address, key: bytes) -> None:
    """Be ``rank`` until this process ends.

    Raises OSError if the ``leader`` cannot be reached.
    """
    doors = []

    def hello(host: str) -> bytes:
        doors.append(Door(host, key))
        return pickle.dumps((rank, doors[0].address))

    caller = call(leader, key, hello)
    from preheat.parallel import worker  # torch takes its time to import; the leader goes on meanwhile

    worker.run(rank, caller, doors[0], asleep=True)


def callers(door: Door, count: int, check: Callable[[], None]) -> dict[int, tuple[Connection, Address]]:
    """Return connection and door address of ``count`` ranks, by rank.

    ``check`` raises if they will not come.
    """
    found: dict[int, tuple[Connection, Address]] = {}
    while len(found) < count:
        caller, hello = door.accept(check)
        rank, address = pickle.loads(hello)
        found[rank] = caller, address
    return found
