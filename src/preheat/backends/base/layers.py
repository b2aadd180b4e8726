"""The protocols of layers and norms, and the numbers of a layer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, runtime_checkable

from preheat.backends.base.adapters import AdapterSlots
from preheat.backends.base.collective import Collective
from preheat.ops.kinds import NormKind

if TYPE_CHECKING:
    from torch import Tensor

    from preheat.ops.quantization import QuantizedRows, QuantizedWeight


class Linear(Protocol):
    """A linear layer [rows, inputs] -> [rows, outputs], its activation included.

    The result is returned; it may lie in ``out``.
    """

    def __call__(self, x: Tensor, out: Tensor | None = None) -> Tensor: ...


class LayerWeights(NamedTuple):
    """The numbers of a layer.

    ``weight`` [outputs, inputs] and ``bias`` [outputs] may be kept or packed anew. A layer that rounds its inputs has
    their scale ``rounding``, fp32 [1], and the greatest number ``most`` after rounding.
    """

    weight: Tensor | QuantizedWeight
    bias: Tensor | None = None
    rounding: Tensor | None = None
    most: float = 0.0


class ExpertsWeights(NamedTuple):
    """The numbers of routed experts.

    ``gate_up`` [experts, 2 * inner, hidden], gates first, and ``down`` [experts, hidden, inner]; both may be kept or
    packed anew. The biases are [experts, 2 * inner] and [experts, hidden], if there are any. ``correction`` fp32
    [experts] is added to the router's scores for the choice, if there is one. ``factors`` fp32 [experts] multiply the
    experts' weights, if there are any.
    """

    gate_up: Tensor | QuantizedWeight
    down: Tensor | QuantizedWeight
    gate_up_bias: Tensor | None = None
    down_bias: Tensor | None = None
    correction: Tensor | None = None
    factors: Tensor | None = None


class LayerContext(NamedTuple):
    """Objects that a layer shares with others.

    ``ranks`` hold the other parts of the layer. ``rows`` come from :meth:`AdapterOps.rows` and tell the adapter of each
    row.
    """

    ranks: Collective | None = None
    rows: Any = None


ALONE = LayerContext()


class HasWeights(Protocol):
    """A layer with tensors for updates, sleep and transfers."""

    def weights(self) -> Iterable[Tensor]:
        """Return the tensors replaced by an update and dropped by sleep, in an order set by the value."""

    def state(self) -> Iterable[Tensor]:
        """Return the tensors that are no weights: counters, flags, adapter slots.

        They are zeros in a new layer.
        """


class Layer(Linear, HasWeights, Protocol):
    """The layer of a :class:`preheat.ops.values.Matmul`.

    ``slots`` hold its adapters; None: its value has no terms. If ranks share the layer's inputs, or divide an adapter's
    first matrices, all ranks call the layer at the same time, and the result is the same on all ranks. ``fused_input``
    is the layer's own way to read its inputs, if any.
    """

    @property
    def slots(self) -> AdapterSlots | None: ...

    def stored(self) -> tuple[Tensor, Tensor | None]:
        """Return the weight [outputs, inputs] and the bias [outputs] of a layer of plain numbers, not sharded."""


@runtime_checkable
class TableLayer(Protocol):
    """A layer with a weight that may serve as the table of embeddings, where the two are tied."""

    def table(self) -> Tensor | None:
        """Return the weight as a table (:mod:`preheat.ops.embedding`), a view; None if a copy serves better."""


class ExpertsLayer(HasWeights, Protocol):
    """The layer of :class:`preheat.ops.values.Experts`; ``slots`` and ``fused_input`` are as in :class:`Layer`."""

    @property
    def slots(self) -> AdapterSlots | None: ...

    def __call__(self, x: Tensor, logits: Tensor) -> Tensor:
        """Return [tokens, hidden] for ``x`` [tokens, hidden] and the router's ``logits`` [tokens, experts]."""


class HeadLayers(HasWeights, Protocol):
    """A linear layer for each head, all of one :class:`preheat.ops.values.Matmul` with so many ``outputs``."""

    @property
    def outputs(self) -> int: ...

    def __call__(self, x: Tensor, out: Tensor) -> None:
        """Write to ``out`` [tokens, heads, outputs + n] the outputs of each head's numbers in ``x``.

        ``x`` is [tokens, heads, inputs + n]. The last ``n`` numbers of a head, 0 or more, are copied behind its
        outputs. Both have any strides but the last.
        """


AnyLayer = Linear | ExpertsLayer | HeadLayers
"""A layer that multiplies rows by weights."""

LayerRows = tuple[AnyLayer, Sequence[int]]
"""A layer and the numbers of rows that it gets."""


class Embedding(HasWeights, Protocol):
    """The layer of a value with a term looked up by token ids: adapters of a table of embeddings."""

    @property
    def slots(self) -> AdapterSlots | None: ...

    def add(self, tokens: Tensor, slots: Tensor, last_token: Tensor, out: Tensor) -> None:
        """Add to ``out`` [tokens, hidden] the adapters' embeddings of ``tokens`` int32 [tokens].

        -1 stands for ``last_token[slot]``; smaller numbers are no tokens and get nothing.
        """


class Norm(Protocol):
    """A norm of rows, see :mod:`preheat.ops.norm`."""

    weight: Tensor
    eps: float
    kind: NormKind

    def __call__(self, x: Tensor) -> Tensor:
        """Return the norm of ``x``, a new tensor."""

    def add(self, x: Tensor, residual: Tensor) -> Tensor:
        """Add ``x`` to ``residual`` in place; return the norm of the sum, a new tensor."""


@runtime_checkable
class InsertingNorm(Protocol):
    """A norm that writes into the rows of a larger tensor."""

    def insert(self, x: Tensor, out: Tensor) -> None:
        """Write to each row of ``out`` the norm of the first numbers of a row of ``x``, and then its other numbers.

        Both are [rows, n], with any stride of rows; the norm's weight has n numbers or fewer.
        """


@runtime_checkable
class ValuesNorm(Protocol):
    """A norm that norms heads where they lie among others."""

    def of_values(self, qkv: Tensor, heads: int, *, repeats: bool) -> Tensor:
        """Return ``qkv`` [tokens, n] with its last ``heads`` heads normed, the others as they are; in place perhaps.

        ``repeats``: the last heads are keys. They stay, and their norms follow behind them.
        """


class Closing(NamedTuple):
    """The last steps of a block, each for one row, and rounded to the dtype.

    The block's row goes through the norm ``first``. The row ``beside`` it, of [tokens, size], goes through
    ``beside_norm`` and is added. The sum goes through the norm ``last`` and is added to the residual stream, in place.
    The stream is multiplied by ``scalar`` [1]. The results are the ``norms`` of the stream, three at most. Missing
    steps are left out.
    """

    norms: tuple[Norm, ...]
    first: Norm | None = None
    beside: Tensor | None = None
    beside_norm: Norm | None = None
    last: Norm | None = None
    scalar: Tensor | None = None


Close = Callable[[Any, "Tensor", Closing], "tuple[Tensor, ...]"]
"""A norm's own way to take the last steps of a block in one launch, if its backend has one, as ``close``.

``close(rows, residual, steps)`` gives the bits of the steps one after the other. ``rows`` are [tokens, size], or the
rows of experts before their sum: a layer of experts has them as ``unsummed(x, logits)``, or None where it cannot.
"""


class FusedInput(Protocol):
    """A linear layer's own way to read its inputs, if the norm before it can write them so.

    Layers and experts have it as ``fused_input``.
    """

    def norm(self, norm: Norm, x: Tensor, residual: Tensor | None) -> QuantizedRows:
        """Return the ``norm`` of ``x``, in the form read by the layer.

        With ``residual``, x is added to it in place, and the norm of the sum is returned. All layers with this
        ``fused_input`` take the result in place of a tensor.
        """

    def same(self, other: FusedInput) -> bool:
        """Return whether one result serves both layers."""

    def beside_plain(self) -> FusedInput:
        """Return the fused input for a norm with a result that other layers read unquantized."""


Join = Callable[["Tensor", Norm, "Tensor", FusedInput | None], "Tensor | None"]
"""A layer's own way to add its output to the residual stream and to take the norm of the sum, if it has one.

``join(x, norm, residual, how)`` gives the bits of the layer, the addition in place, and the norm in the form ``how``,
one after the other. It returns None if it does not serve so many rows.
"""

Region = Callable[..., "Tensor"]
"""A part of a layer without state: a function of hidden states [tokens, ...], weights and more."""
