"""Roles of ranks.

A rank has a stage of the pipeline, a part of its layers, and links to other ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import cast

from torch import Tensor

from preheat.backends.base.collective import Collective, Link, Sharing
from preheat.backends.rendezvous import Rendezvous
from preheat.model.shard import sums_k_splits
from preheat.settings import Settings


@dataclass(frozen=True)
class Pipe:
    """A rank's links in a pipeline.

    ``before`` and ``after`` lead to the same rank of the neighboring stages, None without one. ``everyone`` leads to
    all ranks; rank ``source``, of the last stage, broadcasts the logits there.
    """

    before: Link | None
    after: Link | None
    everyone: Link
    source: int

    def receive(self, *tensors: Tensor) -> None:
        """Fill ``tensors`` with the output of the stage before."""
        assert self.before is not None
        for tensor in tensors:
            self.before.broadcast(tensor, 0)

    def send(self, *tensors: Tensor) -> None:
        """Send ``tensors`` to the stage after this one, unchanged."""
        assert self.after is not None
        for tensor in tensors:
            self.after.broadcast(tensor.contiguous(), 0)

    def logits(self, logits: Tensor) -> Tensor:
        """Replace ``logits`` on every rank by the last stage's, in place."""
        return self.everyone.broadcast(logits, self.source)


@dataclass(frozen=True)
class Groups:
    """Groups of a rank.

    ``stage`` is its stage, ``collective`` the ranks that share its layers. Without a ``collective`` the rank has whole
    layers, and sums are whole.
    """

    stage: int
    collective: Collective | None
    pipe: Pipe | None

    @classmethod
    def join(cls, settings: Settings, sharing: Sharing, rendezvous: Rendezvous, check: Callable[[], None]) -> Groups:
        """Join the groups of the rank that ``rendezvous`` connects with all others.

        See :meth:`preheat.backends.base.collective.Sharing.join`.
        """
        stages, size = settings.pipeline_parallel_size, settings.tensor_parallel_size
        if stages == 1:
            return cls(0, sharing.join(rendezvous, check), None)
        stage, place = divmod(rendezvous.rank, size)

        def meet(name: str, members: Sequence[int]) -> Link:
            return cast(Link, sharing.join(rendezvous.part(name, members), check))

        def link(behind: int) -> Link | None:
            """Return the link from stage ``behind`` to the next one."""
            sender = behind * size + place
            return meet(f"link-{sender}", [sender, sender + size]) if 0 <= behind < stages - 1 else None

        first = stage * size
        collective = meet(f"stage-{stage}", range(first, first + size)) if sums_k_splits(settings) else None
        everyone = meet("everyone", range(stages * size))
        pipe = Pipe(link(stage - 1), link(stage), everyone, (stages - 1) * size)
        return cls(stage, collective, pipe)

    @property
    def everyone(self) -> Collective | None:
        """The group of all ranks of the engine."""
        return self.collective if self.pipe is None else self.pipe.everyone

    def abort(self) -> None:
        """See :meth:`preheat.backends.base.collective.Collective.abort`."""
        for each in self._all():
            each.abort()

    def fault(self) -> str | None:
        """See :meth:`preheat.backends.base.collective.Collective.fault`."""
        return next(filter(None, (each.fault() for each in self._all())), None)

    def _all(self) -> Iterator[Collective]:
        """Yield each group once: two names may stand for one group."""
        pipe = () if self.pipe is None else (self.pipe.before, self.pipe.after, self.pipe.everyone)
        groups = {id(each): each for each in (self.collective, *pipe) if each is not None}
        return iter(groups.values())
