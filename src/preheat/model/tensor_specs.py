"""The specs of layers and vectors with tensors in the checkpoint. No torch here."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from preheat.ops.kinds import Activation, NormKind, Scheme


@dataclass(frozen=True, kw_only=True)
class LinearSpec:
    """A linear layer y = x W^T + b.

    ``parts`` are the checkpoint's modules (name, outputs), stacked from top to bottom. ``format`` is the storage of the
    modules (:mod:`preheat.model.formats`); ``scheme`` is their quantization, None without. The outputs go through
    ``activation``, or are kept between -``clip`` and ``clip``, or are multiplied by ``factor``, or are kept below
    ``cap`` by tanh. ``order`` lists ranges of the stacked rows [from, to) in the layer's order; empty: the stacked
    order.

    A shard (:mod:`preheat.model.shard`) has some of the rows, listed in ``order``, or some of the inputs: ``columns``
    [from, to) of the checkpoint's ``stored_inputs``. ``tiles`` are then the numbers of rows computed by one product
    each, and ``k_splits`` the number of K splits, each summed by itself (:mod:`preheat.ops.matmul`).
    """

    parts: tuple[tuple[str, int], ...]
    inputs: int
    bias: bool = False
    activation: Activation | None = None
    clip: float | None = None
    factor: float | None = None
    cap: float | None = None
    order: tuple[tuple[int, int], ...] = ()
    format: str = "plain"
    scheme: Scheme | None = None
    columns: tuple[int, int] | None = None
    stored_inputs: int = 0
    tiles: tuple[int, ...] = ()
    k_splits: int = 0

    @cached_property
    def outputs(self) -> int:
        """Rows of W."""
        return sum(end - start for start, end in self.order) if self.order else self.stored_outputs

    @property
    def stored_outputs(self) -> int:
        """Rows of the checkpoint's ``parts``."""
        return sum(outputs for _, outputs in self.parts)

    @property
    def sharded(self) -> bool:
        """Whether a rank reads only a part of the checkpoint's matrix."""
        return self.columns is not None or self.outputs != self.stored_outputs

    def pieces(self) -> Iterator[tuple[str, tuple[int, int]]]:
        """Yield the sources of the layer's rows, from top to bottom.

        A source is a module, and its rows [from, to).
        """
        for start, end in self.order or ((0, self.stored_outputs),):
            first = 0
            for name, outputs in self.parts:
                rows = max(start - first, 0), min(end - first, outputs)
                if rows[0] < rows[1]:
                    yield name, rows
                first += outputs

    @property
    def gated(self) -> bool:
        """Whether the layer ends with SwiGLU.

        Kernels may compute it with the product.
        """
        return self.activation == "silu_and_mul"

    @property
    def weights(self) -> int:
        """Numbers in W."""
        return self.outputs * self.inputs

    @property
    def params(self) -> int:
        """Numbers in W and b."""
        return self.weights + self.bias * self.outputs

    def weight_bytes(self, itemsize: int) -> int:
        """Return the bytes of W on a device.

        W is in the model's dtype unless it is quantized.
        """
        return self.scheme.bytes(self.outputs, self.inputs) if self.scheme else self.weights * itemsize


@dataclass(frozen=True)
class NormSpec:
    """A norm of rows of ``size`` numbers; ``name`` is the checkpoint's module.

    A norm of kind identity has no module. ``replaces``: the residual stream goes on from the norm, as in a layer that
    norms its outputs. ``order`` lists ranges of the stored numbers [from, to) in the layer's order; empty: the stored
    order.
    """

    name: str
    size: int
    eps: float
    kind: NormKind = "rms"
    bias: bool = False
    replaces: bool = False
    order: tuple[tuple[int, int], ...] = ()

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.size,)

    @property
    def params(self) -> int:
        return 0 if self.kind == "identity" else self.size * (1 + self.bias)


TIED_HEAD = "lm_head"
"""Module name of a tied output head, absent in a checkpoint."""


class TableSpec(ABC):
    """A tensor without a bias."""

    @property
    @abstractmethod
    def shape(self) -> tuple[int, ...]: ...

    @property
    def params(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class EmbeddingSpec(TableSpec):
    """A table of embeddings of tokens or of positions, [vocab_size, size].

    ``name`` is the checkpoint's module. A token's row is multiplied by ``scale``. The first ``unused`` rows stand for
    no position, and ``spare`` rows of zeros are put behind the last one.
    """

    name: str
    vocab_size: int
    size: int
    scale: float | None = None
    unused: int = 0
    spare: int = 0

    @property
    def shape(self) -> tuple[int, ...]:
        return self.vocab_size, self.size


@dataclass(frozen=True)
class GateSpec(TableSpec):
    """One row of ``size`` weights for a gate.

    Its product with a token says how far the gate opens. ``name`` is the checkpoint's module.
    """

    name: str
    size: int

    @property
    def shape(self) -> tuple[int, ...]:
        return 1, self.size


@dataclass(frozen=True)
class PatchSpec:
    """The map from patches of an image to ``outputs`` numbers each.

    Patches are squares of ``size`` pixels in ``channels`` colors and do not overlap. ``name`` is the checkpoint's
    module, a convolution. With ``frames`` a patch has as many pictures, which follow one another; 0: the module has no
    such axis.
    """

    name: str
    outputs: int
    channels: int
    size: int
    frames: int = 0
    bias: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        frames = (self.frames,) if self.frames else ()
        return self.outputs, self.channels, *frames, self.size, self.size

    @property
    def inputs(self) -> int:
        """Numbers in a patch."""
        return self.channels * max(self.frames, 1) * self.size**2

    @property
    def params(self) -> int:
        return self.outputs * (self.inputs + self.bias)


@dataclass(frozen=True)
class VectorSpec(TableSpec):
    """``size`` numbers; ``name`` is the checkpoint's module. A shard has the numbers ``kept`` [from, to) of them."""

    name: str
    size: int
    kept: tuple[int, int] | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.size,)


@dataclass(frozen=True)
class DistanceSpec(TableSpec):
    """Biases of attention by distance, [buckets, heads]; distances from ``most`` on are alike."""

    name: str
    buckets: int
    heads: int
    most: int

    @property
    def shape(self) -> tuple[int, ...]:
        return self.buckets, self.heads


HeadActivation = Literal["tanh", "relu", "gelu"]


@dataclass(frozen=True)
class HeadSpec:
    """A layer of the head behind a pooled state, [outputs, inputs]; ``name`` is the checkpoint's module.

    A module of a folder beside the model's files is written FOLDER/NAME. With ``rows`` the weight is these rows of a
    table of ``height`` rows, or for a single output of two rows the second less the first.
    """

    name: str
    outputs: int
    inputs: int
    activation: HeadActivation | None = None
    bias: bool = True
    rows: tuple[int, ...] = ()
    height: int = 0

    @property
    def shape(self) -> tuple[int, ...]:
        return self.height or self.outputs, self.inputs

    @property
    def params(self) -> int:
        return self.outputs * (self.inputs + self.bias)
