"""Tensors from a trainer on all ranks: each rank joins the trainer's group, and receives for itself.

Rank 0 numbers each joining and receiving, and tells the others. All of them work in a thread, beside their steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from torch import Tensor

from preheat.backends.base.backend import Backend
from preheat.configs.weight_transfer import Announced, TransferGroup
from preheat.errors import PreheatError, WireError
from preheat.execution.weight_transfer import Transfers
from preheat.model.loader import LoadedModel
from preheat.parallel.ranks import Ranks
from preheat.parallel.reports import outcome_of
from preheat.settings import Settings


class SharedTransfers(Transfers):
    """Rank 0's transfers; the other ``ranks`` carry out the same."""

    def __init__(self, ranks: Ranks, settings: Settings, backend: Backend, model: LoadedModel) -> None:
        super().__init__(settings, backend, model, world=ranks.world)
        self._ranks = ranks

    def join(self, group: TransferGroup, backend: str) -> None:
        self._on_all(lambda: Transfers.join(self, group, backend), "join", group, backend)

    def receive(self, tensors: Sequence[Announced]) -> None:
        self._on_all(lambda: Transfers.receive(self, tensors), "receive", list(tensors))

    def leave(self) -> None:
        super().leave()
        self._ranks.tell("transfer", next(self._ranks.numbers), "leave")

    def _on_all(self, own: Callable[[], None], name: str, *args: Any) -> None:
        """Carry out a transfer on all ranks. If one fails, all leave the group, and its error is raised."""
        number = next(self._ranks.numbers)
        self._ranks.tell("transfer", number, name, *args)
        mine = outcome_of(own)
        theirs = [self._ranks.outcome(number, rank) for rank in range(1, self._ranks.world)]
        for failed in (mine, *theirs):
            if isinstance(failed, PreheatError):
                self.leave()
                raise failed


class RankTransfers:
    """Transfers of another rank; ``report`` tells rank 0 the outcome of each by its number."""

    def __init__(self, transfers: Transfers, report: Callable[[int, object], None]) -> None:
        self._transfers, self._report = transfers, report
        self._threads = ThreadPoolExecutor(1, "weights")
        self._held: dict[str, Tensor] = {}

    def begin(self, number: int, name: str, *args: Any) -> None:
        """Begin to join or leave a group, or to receive."""
        self._threads.submit(self._run, number, name, *args)

    def take(self, names: Iterable[str]) -> dict[str, Tensor]:
        """Return the tensors ``names`` that have arrived, and forget all."""
        held, self._held = self._held, {}
        return {name: held[name] for name in names}

    def _run(self, number: int, name: str, *args: Any) -> None:
        found = outcome_of(lambda: getattr(self._transfers, name)(*args))
        if name == "receive" and found is None:
            self._held |= self._transfers.received() or {}
        if name != "leave":
            self._report(number, WireError.of(found) if found is not None else True)
