"""The adapter slots of the device: which adapters they hold, for which running sequences.

Running sequences hold the slot of their adapter. A slot that no sequence holds may be given to another adapter; the
adapter of the least recently begun sequence goes first.

Other sequences pass over a waiting sequence without an adapter slot. So that it does not wait for ever, it claims a
slot: sequences behind it with the slot's adapter do not begin until the slot's rows have ended.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Collection
from typing import Any, Protocol

BASE = ""
"""The digest of a sequence without an adapter."""


class Adapter(Protocol):
    """An adapter on the host.

    ``packed`` is its form in an adapter slot. Equal ``digest`` means equal numbers. ``source`` is the adapter's name
    for other ranks; None without other ranks.
    """

    @property
    def digest(self) -> str: ...
    @property
    def packed(self) -> Any: ...
    @property
    def source(self) -> Any: ...


Loads = list[tuple[int, Adapter]]
"""Adapters to load, each with its adapter slot."""


class AdapterSlotTable:
    """``count`` adapter slots.

    Pending ``loads`` must be copied to the device before the next step.
    """

    def __init__(self, count: int = 0) -> None:
        self.count = count
        self._free = list(range(count))
        self._slot_of: OrderedDict[str, int] = OrderedDict()  # by digest, the least recently begun first
        self._users: Counter[str] = Counter()
        self._loads: Loads = []

    def has_room_for(self, adapter: Adapter | None) -> bool:
        """Return whether a sequence with ``adapter`` may begin."""
        return adapter is None or adapter.digest in self._slot_of or bool(self._free) or self._idle() is not None

    def claimed(self, blocked: Collection[str]) -> str | None:
        """Return the digest of the adapter to wait for.

        The digests ``blocked`` are waited for already.
        """
        return next((digest for digest in self._slot_of if digest not in blocked), None)

    def begin(self, adapter: Adapter) -> int:
        """Return the slot of ``adapter``, which one more sequence now holds."""
        digest = adapter.digest
        if digest not in self._slot_of:
            if not self._free:
                idle = self._idle()
                assert idle is not None, "every adapter slot is held"
                self._free.append(self._slot_of.pop(idle))
            self._slot_of[digest] = self._free.pop(0)
            self._loads.append((self._slot_of[digest], adapter))
        self._slot_of.move_to_end(digest)
        self._users[digest] += 1
        return self._slot_of[digest]

    def end(self, adapter: Adapter) -> None:
        """Release the slot for one sequence.

        The adapter stays in it until another one needs it.
        """
        self._users[adapter.digest] -= 1
        if not self._users[adapter.digest]:
            del self._users[adapter.digest]

    def take_loads(self) -> Loads:
        """Return the pending loads and clear them."""
        loads, self._loads = self._loads, []
        return loads

    def lose(self, loads: Loads) -> None:
        """Handle ``loads`` that may not have reached the device.

        Slots in use are loaded again before the next step; other slots become free.
        """
        for slot, adapter in loads:
            if self._slot_of.get(adapter.digest) != slot:
                continue
            if adapter.digest in self._users:
                self._loads.insert(0, (slot, adapter))
            else:
                self._free.append(self._slot_of.pop(adapter.digest))

    def forget(self) -> None:
        """Free every slot, as something else was put into it.

        No sequence may hold one.
        """
        assert not self._users, "a running sequence would lose its adapter"
        self._free, self._loads = list(range(self.count)), []
        self._slot_of.clear()

    @property
    def held(self) -> Counter[str]:
        """Number of sequences that hold a slot, by digest."""
        return self._users

    def _idle(self) -> str | None:
        return next((digest for digest in self._slot_of if digest not in self._users), None)
