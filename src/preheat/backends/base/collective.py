"""The protocols of ranks: how they meet, and what they exchange."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch import Tensor

    from preheat.backends.rendezvous import Rendezvous


class Collective(Protocol):
    """Exchanges between the ranks that share a model's layers; all ranks call them in the same order."""

    rank: int
    world: int

    def gather(self, x: Tensor) -> Tensor:
        """Return ``x`` of every rank: [world, *shape], the same on all ranks.

        All ``x`` have one shape and dtype. Bits are moved and nothing else: no conversion and no sum.
        """

    def abort(self) -> None:
        """End all waiting on the device after a rank has died.

        Results are then undefined. Any thread may call it; threads that wait on the host are told by ``check``.
        """

    def fault(self) -> str | None:
        """Return why an exchange on the device ended without another rank's numbers; None if none did.

        Results of all exchanges since are undefined. The device tells the host before a step's results arrive.
        """


class Link(Collective, Protocol):
    """A collective between the stages of a pipeline; a CPU's collective is one."""

    def broadcast(self, x: Tensor, source: int) -> Tensor:
        """Fill ``x``, contiguous, with ``x`` of rank ``source``, and return it.

        All ``x`` have one shape and dtype.
        """


class Sharing(Protocol):
    """Rendezvous of the ranks that share a model's layers."""

    def join(self, rendezvous: Rendezvous, check: Callable[[], None]) -> Collective:
        """Meet the other ranks; one rank alone needs nobody.

        ``check`` is called during the wait for the others, and raises if a rank has died.
        """
