"""Adapters on all ranks.

Each rank reads an adapter's files itself and packs its own part, in a thread beside its steps. The leader numbers each
reading, and tells the others to read too. An adapter counts as read when all ranks have read it with the same digest.
The loading of an adapter slot is a message between two steps, in their order, with the number of the reading. Readings
that the leader has forgotten are forgotten by the others with the next message.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace

from preheat.errors import AdapterError, PreheatError, WireError
from preheat.lora.boot import PackedAdapter, adapter_reader
from preheat.lora.random import RandomSource, random_adapter
from preheat.model.adapters import ModelAdapterSlots
from preheat.model.loader import LoadedModel
from preheat.parallel.ranks import Ranks
from preheat.parallel.reports import outcome_of
from preheat.schedule.adapters import Adapter

Source = int | RandomSource
"""Name of an adapter among ranks.

It is the number of its reading, or the rule of a random one.
"""


class SharedReads:
    """Calls ``read`` on all of the ``ranks``."""

    def __init__(self, ranks: Ranks, read: Callable[[str, str], PackedAdapter]) -> None:
        self._ranks, self._read = ranks, read
        self._gone: list[int] = []

    def __call__(self, name: str, path: str) -> PackedAdapter:
        number, gone = next(self._ranks.numbers), list[int]()
        while self._gone:
            gone.append(self._gone.pop())
        self._ranks.tell("read_adapter", number, name, path, gone)
        mine = outcome_of(lambda: self._read(name, path))
        theirs = [self._ranks.outcome(number, rank) for rank in range(1, self._ranks.world)]
        try:
            return self._agreed(number, mine, theirs, f"adapter {name!r} in {path}")
        except PreheatError:
            self._gone.append(number)
            raise

    def _agreed(
        self, number: int, mine: PackedAdapter | PreheatError, theirs: list[str | PreheatError], what: str
    ) -> PackedAdapter:
        if isinstance(mine, PreheatError):
            raise mine
        for rank, digest in enumerate(theirs, 1):
            if isinstance(digest, PreheatError):
                raise AdapterError(f"rank {rank}: {digest}", param="lora_path")
            if digest != mine.digest:
                why = "it was written to while the ranks read it: load it again"
                raise AdapterError(f"{what}: {why}", param="lora_path")
        shared = replace(mine, source=number)
        weakref.finalize(shared, self._gone.append, number).atexit = False
        return shared


class RankAdapters:
    """Adapters read by a rank other than the leader, for its ``model``.

    ``report`` sends an answer with a reading's number.
    """

    def __init__(self, model: LoadedModel, report: Callable[[int, object], None]) -> None:
        assert model.adapters is not None, "there are no adapter slots"
        self._adapter_slots: ModelAdapterSlots = model.adapters
        self._read, self._report = adapter_reader(model), report
        self._threads = ThreadPoolExecutor(1, "adapters")
        self._known: dict[Source, Future[PackedAdapter | PreheatError]] = {}

    def read(self, number: int, name: str, path: str, gone: list[int]) -> None:
        """Begin to read; forget the readings in ``gone``."""
        for each in gone:
            del self._known[each]
        self._known[number] = self._threads.submit(self._answer, number, name, path)

    def adapter(self, source: Source) -> Adapter:
        """Return the adapter that the leader loads into an adapter slot."""
        if isinstance(source, RandomSource):
            return random_adapter(self._adapter_slots, source.number)
        found = self._known[source].result()
        assert not isinstance(found, PreheatError), "the leader takes what all ranks have read"
        return found

    def _answer(self, number: int, name: str, path: str) -> PackedAdapter | PreheatError:
        found = outcome_of(lambda: self._read(name, path))
        self._report(number, WireError.of(found) if isinstance(found, PreheatError) else found.digest)
        return found
