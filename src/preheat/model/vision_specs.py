"""The spec of a vision tower for square images."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from preheat.model.mlp_specs import DenseSpec
from preheat.model.spec_tree import leaves
from preheat.model.tensor_specs import EmbeddingSpec, LinearSpec, NormSpec, PatchSpec, VectorSpec


@dataclass(frozen=True, kw_only=True)
class VisionLayerSpec:
    """A layer of a vision tower.

    It is like a decoder layer, but every position attends to every other.
    """

    input_norm: NormSpec
    qkv: LinearSpec
    o: LinearSpec
    post_norm: NormSpec
    mlp: DenseSpec


@dataclass(frozen=True, kw_only=True)
class VisionSpec:
    """An encoder of square images to embeddings of a prompt.

    An image has ``image_size`` pixels a side. The encoder has the needed ``layers`` of a vision tower, and a
    ``projector``. A tower's first position is ``cls``, the others are patches, from left to right, then down.
    ``keeps_cls``: the prompt has the ``cls`` position too. ``image_token`` stands for an image in a prompt, and for
    each of its positions.
    """

    image_size: int
    num_heads: int
    patches: PatchSpec
    cls: VectorSpec
    positions: EmbeddingSpec
    pre_norm: NormSpec
    layers: tuple[VisionLayerSpec, ...]
    projector: DenseSpec
    keeps_cls: bool
    image_token: int

    any_size: ClassVar[bool] = False

    @property
    def num_patches(self) -> int:
        return (self.image_size // self.patches.size) ** 2

    @property
    def num_positions(self) -> int:
        """Positions of the tower, for an image."""
        return self.positions.vocab_size

    @property
    def tokens(self) -> int:
        """Positions of the prompt, for an image."""
        return self.num_patches + self.keeps_cls

    @property
    def pixel_shape(self) -> tuple[int, int, int]:
        """Shape of an image's pixels; they are fp32."""
        return self.patches.channels, self.image_size, self.image_size

    @property
    def scale(self) -> float:
        """Factor of the scores of attention."""
        return float((self.patches.outputs // self.num_heads) ** -0.5)

    @property
    def step_params(self) -> int:
        """Weights that encoding reads."""
        return self.patches.params + sum(leaf.weights for _, leaf in leaves(self) if isinstance(leaf, LinearSpec))

    @property
    def activations(self) -> int:
        """The most intermediate numbers of an image.

        These are the states of its positions, and one layer's scores.
        """
        wide = max(self.layers[0].qkv.outputs, self.layers[0].mlp.activations, self.projector.activations)
        return self.num_positions * (2 * self.patches.outputs + wide + 2 * self.num_heads * self.num_positions)
