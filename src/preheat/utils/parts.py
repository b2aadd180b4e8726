"""Long sequences in parts, so that no single call of C code holds Python's lock for long.

A thread gives the lock up between calls, never within one: ``max`` of a million numbers takes 25 ms on a slow
processor, and the event loop would wait so long at each of a request's events.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import TypeVar

Item = TypeVar("Item")

MOST = 1 << 14
"""Items of a part: a call takes a fraction of a millisecond."""


def parts(items: Iterable[Item]) -> Iterator[list[Item]]:
    """Yield ``items`` in order, in lists of at most :data:`MOST`."""
    left = iter(items)
    while part := list(islice(left, MOST)):
        yield part
