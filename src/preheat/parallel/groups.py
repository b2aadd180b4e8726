"""Which rank does what: its stage of the pipeline, its part of the stage's layers, and whom it exchanges with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from torch import Tensor

from preheat.backends.base import Collective, Link, Sharing
from preheat.model.shard import sums_leaves
from preheat.settings import Settings


def world_size(settings: Settings) -> int:
    """How many ranks an engine has."""
    return settings.pipeline_parallel_size * settings.tensor_parallel_size


def has_groups(settings: Settings) -> bool:
    """Whether an engine is divided, or adds as if it was."""
    return sums_leaves(settings) or settings.pipeline_parallel_size > 1


@dataclass(frozen=True)
class Pipe:
    """A rank's ends: to the same rank of the stage ``before`` and ``after`` its own, if there is one, and to
    ``everyone``, to whom rank ``source``, of the last stage, gives the logits.
    """

    before: Link | None
    after: Link | None
    everyone: Link
    source: int

    def receive(self, *tensors: Tensor) -> None:
        """Fill ``tensors`` with what the stage before has sent."""
        assert self.before is not None
        for tensor in tensors:
            self.before.broadcast(tensor, 0)

    def send(self, *tensors: Tensor) -> None:
        """Hand ``tensors`` on to the stage after this one, as they are."""
        assert self.after is not None
        for tensor in tensors:
            self.after.broadcast(tensor.contiguous(), 0)

    def logits(self, logits: Tensor) -> Tensor:
        """Those of the last stage, in place, on every rank."""
        return self.everyone.broadcast(logits, self.source)


@dataclass(frozen=True)
class Groups:
    """``stage`` is the rank's; ``collective`` are those who share its layers. None: nobody does, and sums are whole."""

    stage: int
    collective: Collective | None
    pipe: Pipe | None

    @classmethod
    def join(cls, settings: Settings, sharing: Sharing, folder: Path, rank: int, check: Callable[[], None]) -> Groups:
        """Those of ``rank``, who meets the others in ``folder``; see :meth:`preheat.backends.base.Sharing.join`."""
        stages, size = settings.pipeline_parallel_size, settings.tensor_parallel_size
        if stages == 1:
            return cls(0, sharing.join(folder, rank, size, check), None)
        stage, place = divmod(rank, size)

        def meet(name: str, at: int, world: int) -> Link:
            (folder / name).mkdir(exist_ok=True)
            return cast(Link, sharing.join(folder / name, at, world, check))

        def link(behind: int, end: int) -> Link | None:
            """``end`` 0 sends, 1 receives; the sender is of stage ``behind``."""
            return meet(f"link-{behind}-{place}", end, 2) if 0 <= behind < stages - 1 else None

        collective = meet(f"stage-{stage}", place, size) if sums_leaves(settings) else None
        pipe = Pipe(link(stage - 1, 1), link(stage, 0), meet("everyone", rank, stages * size), (stages - 1) * size)
        return cls(stage, collective, pipe)

    def abort(self) -> None:
        """See :meth:`preheat.backends.base.Collective.abort`."""
        pipe = () if self.pipe is None else (self.pipe.before, self.pipe.after, self.pipe.everyone)
        for each in (self.collective, *pipe):
            if each is not None:
                each.abort()
