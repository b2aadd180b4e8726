"""Which adapters have a place on the device. Running sequences hold the place of theirs; when nobody does, it may be
given to another, that of the adapter first with which least recently a sequence began.

A waiting sequence whose adapter finds no place is passed over by others. So that it is not passed over for ever, it
claims a place: sequences behind it begin with that adapter no more, until its rows have ended.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Collection
from typing import Any, Protocol

BASE = ""
"""Stands for the digest of an adapter where there is none."""


class Adapter(Protocol):
    """An adapter on the host, ``packed`` as a place holds it; equal ``digest``, equal numbers. ``source`` is what other
    ranks know it by; None: there are none.
    """

    @property
    def digest(self) -> str: ...
    @property
    def packed(self) -> Any: ...
    @property
    def source(self) -> Any: ...


Loads = list[tuple[int, Adapter]]
"""Adapters, each with the place that it is put into."""


class AdapterPlaces:
    """``count`` places. ``loads`` must be put into theirs before the next step."""

    def __init__(self, count: int = 0) -> None:
        self.count = count
        self._free = list(range(count))
        self._placed: OrderedDict[str, int] = OrderedDict()  # by digest, the least recently begun first
        self._users: Counter[str] = Counter()
        self._loads: Loads = []

    def has_room_for(self, adapter: Adapter | None) -> bool:
        """Whether a sequence with ``adapter`` may begin."""
        return adapter is None or adapter.digest in self._placed or bool(self._free) or self._idle() is not None

    def claimed(self, blocked: Collection[str]) -> str | None:
        """The digest of the adapter whose place is waited for; those ``blocked`` are waited for already."""
        return next((digest for digest in self._placed if digest not in blocked), None)

    def begin(self, adapter: Adapter) -> int:
        """The place of ``adapter``, which one more sequence holds."""
        digest = adapter.digest
        if digest not in self._placed:
            if not self._free:
                idle = self._idle()
                assert idle is not None, "every place is held"
                self._free.append(self._placed.pop(idle))
            self._placed[digest] = self._free.pop(0)
            self._loads.append((self._placed[digest], adapter))
        self._placed.move_to_end(digest)
        self._users[digest] += 1
        return self._placed[digest]

    def end(self, adapter: Adapter) -> None:
        """A sequence holds the place no longer; what is in it stays until another needs it."""
        self._users[adapter.digest] -= 1
        if not self._users[adapter.digest]:
            del self._users[adapter.digest]

    def take_loads(self) -> Loads:
        """What has to be put into its place now."""
        loads, self._loads = self._loads, []
        return loads

    def lose(self, loads: Loads) -> None:
        """These may not be in their places: what is held is put there again before the next step, other places are
        free.
        """
        for place, adapter in loads:
            if self._placed.get(adapter.digest) != place:
                continue
            if adapter.digest in self._users:
                self._loads.insert(0, (place, adapter))
            else:
                self._free.append(self._placed.pop(adapter.digest))

    def forget(self) -> None:
        """Every place is free, as something else was put into it. No sequence may hold one."""
        assert not self._users, "a running sequence would lose its adapter"
        self._free, self._loads = list(range(self.count)), []
        self._placed.clear()

    @property
    def held(self) -> Counter[str]:
        """How many sequences hold a place, by digest."""
        return self._users

    def _idle(self) -> str | None:
        return next((digest for digest in self._placed if digest not in self._users), None)
