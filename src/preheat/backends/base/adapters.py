"""The protocols of adapters: their slots in a layer, and the adapter of each row."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Literal, Protocol

import numpy as np

if TYPE_CHECKING:
    from torch import Tensor

    from preheat.ops.matmul import LowRankPair

AdapterStep = Literal["tokens", "sampled"]
"""The rows of a linear layer: all tokens of a step, or the sampled ones."""


class AdapterRows(Protocol):
    """The adapter of each row of a step: its adapter slot, or a negative number for none."""

    def describe(self, turn: int, step: AdapterStep, slots: np.ndarray) -> None:
        """Send the ``slots``, int32 [rows], of a step's rows to the device; rows beyond are padding.

        ``turn`` is the host copy of the step.
        """

    def use(self, step: AdapterStep | None) -> None:
        """Set the kind of rows for the next calls of linear layers; None: no row has an adapter."""


class AdapterOps(Protocol):
    """Operations for adapters, besides layers with terms."""

    def rows(self, tokens: int, slots: int) -> AdapterRows:
        """Return the rows of steps of at most ``tokens`` tokens, with ``slots`` adapter slots."""


class AdapterSlots(Protocol):
    """The adapter matrices of a layer in all adapter slots, see :class:`preheat.ops.values.LowRank`.

    Matrices are given by the adapted part of the layer: gate, up and down of expert e are parts 3 * e and the next two.
    A rank gives the columns of its inputs, or the rows of its outputs.
    """

    @property
    def bytes(self) -> int:
        """Return the bytes of all adapter slots."""

    def pack(self, parts: Mapping[int, LowRankPair]) -> Any:
        """Return the content of an adapter slot for these matrices, by part.

        An adapter leaves parts without matrices alone. The result is on the host, in the layout and the dtype of a
        slot. Any thread may ask for it.
        """

    def write(self, slot: int, packed: Any) -> None:
        """Copy the result of :meth:`pack` into ``slot``.

        The copies are only launched, and steps launched before do not see them. This neither allocates on the device
        nor compiles.
        """

    def clear(self, slot: int) -> None:
        """Remove the adapter in ``slot`` from this layer."""


class ReadableSlots(AdapterSlots, Protocol):
    """Adapter slots in the host's memory, which an audit reads."""

    def tensors(self) -> Iterable[Tensor]:
        """Return the matrices of all adapter slots."""
