"""Reading of a checkpoint's tensors, as formats of linear layers need it. No torch here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from preheat.backends.base.layers import LayerWeights, Linear
from preheat.ops.kinds import Scheme

if TYPE_CHECKING:
    from torch import Tensor

    from preheat.backends.base.backend import Backend
    from preheat.model.tensor_specs import LinearSpec
    from preheat.ops.quantization import QuantizedWeight

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Piece:
    """A piece of a tensor of ``shape``.

    It has ``rows`` [from, to), and ``columns`` [from, to), None for all.
    """

    shape: Shape
    rows: tuple[int, int]
    columns: tuple[int, int] | None = None

    @property
    def index(self) -> tuple[slice, ...]:
        return (slice(*self.rows),) if self.columns is None else (slice(*self.rows), slice(*self.columns))


class TensorSource(Protocol):
    """Provides tensors by name."""

    def fill(self, name: str, out: Tensor, piece: Piece | None = None) -> None:
        """Write tensor ``name``, or a ``piece`` of it, into ``out``.

        Numbers are converted to the dtype of ``out``. ``out`` has the shape of the tensor or of the piece. Only the
        piece is read.
        """


class WeightReader(Protocol):
    """Reader of weights and maker of linear layers; it is :class:`preheat.model.weight_loader.WeightLoader`."""

    source: TensorSource
    backend: Backend

    def tensor(self, name: str, *shape: int) -> Tensor: ...

    def read(self, name: str, *shape: int) -> Tensor: ...

    def read_bytes(self, name: str, *shape: int) -> Tensor: ...

    def read_words(self, name: str, *shape: int) -> Tensor: ...

    def empty(self, *shape: int) -> Tensor: ...

    def empty_weight(self, scheme: Scheme, *shape: int) -> QuantizedWeight: ...

    def layer_of(self, spec: LinearSpec, weights: LayerWeights) -> Linear: ...
