"""The weights of a whole model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from preheat.backends.base.layers import Linear, Norm
from preheat.model.grid_vision import GridVisionWeights
from preheat.model.layer_inputs import LayerInputs
from preheat.model.layers import DecoderLayer, GatheredHead, HeadElsewhere, HiddenStates, Linears, below
from preheat.model.pooled_head import HeadLayer, HeadNorm
from preheat.model.vision import VisionWeights


@dataclass(frozen=True, slots=True)
class Weights:
    """The weights of a whole model.

    ``embedding`` is a table (:mod:`preheat.ops.embedding`). ``positions`` [positions, hidden] exist where they are
    learned; ``vision`` is for models that see images. ``types`` [types, hidden] belong to the parts of a pair of texts,
    ``pooled_head`` to a classifier. ``distances`` [buckets, heads] are biases of attention. ``inputs`` make the inputs
    of each layer.
    """

    embedding: Tensor
    layers: list[DecoderLayer]
    final_norm: Norm
    head: Linear
    positions: Tensor | None = None
    vision: VisionWeights | GridVisionWeights | None = None
    types: Tensor | None = None
    pooled_head: Sequence[HeadLayer | HeadNorm] = ()
    distances: Tensor | None = None
    inputs: LayerInputs | None = None

    def linears(self) -> Linears:
        """All linear layers and experts of the decoder, by path.

        A head comes last, if any.
        """
        for index, layer in enumerate(self.layers):
            yield from below(f"layers.{index}", layer.linears())
        if self.inputs is not None:
            yield from below("inputs", self.inputs.linears())
        if not isinstance(self.head, HiddenStates | HeadElsewhere):
            yield "head", self.head.mine if isinstance(self.head, GatheredHead) else self.head
