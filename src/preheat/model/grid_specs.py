"""The spec of a vision tower for images of any size. No torch here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from preheat.model.mlp_specs import DenseSpec
from preheat.model.spec_tree import leaves
from preheat.model.tensor_specs import EmbeddingSpec, LinearSpec, NormSpec, PatchSpec
from preheat.model.vision_specs import VisionLayerSpec
from preheat.ops.kinds import QUERIES
from preheat.utils.rungs import rung_of


@dataclass(frozen=True, kw_only=True)
class MergerSpec:
    """A map from the patches of a cell to one embedding of the decoder: a norm, then ``mlp``.

    The norm has the size of one patch, or of all patches of a cell side by side.
    """

    norm: NormSpec
    mlp: DenseSpec


@dataclass(frozen=True, kw_only=True)
class GridVisionSpec:
    """An encoder of images of any size to embeddings of a prompt.

    An image is a grid of cells, and a cell is ``merge`` by ``merge`` patches. A cell takes one position of a prompt.
    ``positions`` is a square table of embeddings, interpolated to the grid of patches. Heads turn by a patch's row and
    column, with frequencies of base ``theta``. ``merger`` makes the embeddings of the decoder's input. ``deep`` make
    further embeddings from the outputs of the layers ``deep_at``: the first of them is added behind the decoder's first
    layer, and so on. An image is resized to ``min_pixels`` to ``max_pixels``. ``image_token`` stands for an image in a
    prompt, and for each of its positions.
    """

    num_heads: int
    patches: PatchSpec
    positions: EmbeddingSpec
    layers: tuple[VisionLayerSpec, ...]
    merger: MergerSpec
    deep: tuple[MergerSpec, ...]
    deep_at: tuple[int, ...]
    merge: int
    min_pixels: int
    max_pixels: int
    image_token: int
    theta: float = 10000.0

    any_size: ClassVar[bool] = True

    @property
    def projector(self) -> DenseSpec:
        """The map to the decoder's embeddings."""
        return self.merger.mlp

    @property
    def cell_patches(self) -> int:
        """Patches of a cell."""
        return self.merge**2

    @property
    def cell_pixels(self) -> int:
        """Pixels of a cell's side."""
        return self.merge * self.patches.size

    @property
    def tokens(self) -> int:
        """The most positions of the prompt, for an image."""
        return max(self.max_pixels // self.cell_pixels**2, 1)

    @property
    def num_positions(self) -> int:
        """The most patches of an image."""
        return self.tokens * self.cell_patches

    @property
    def side(self) -> int:
        """Rows, and columns, of the table of positions."""
        return int(self.positions.vocab_size**0.5)

    @property
    def head_dim(self) -> int:
        return self.patches.outputs // self.num_heads

    @property
    def scale(self) -> float:
        """Factor of the scores of attention."""
        return float(self.head_dim**-0.5)

    @property
    def step_params(self) -> int:
        """Weights that encoding reads."""
        return self.patches.params + sum(leaf.weights for _, leaf in leaves(self) if isinstance(leaf, LinearSpec))

    @property
    def patch_activations(self) -> int:
        """The most intermediate numbers of a patch, scores apart."""
        wide = max(self.layers[0].qkv.outputs, self.layers[0].mlp.activations, self.merger.mlp.activations)
        return 3 * self.patches.outputs + wide

    @property
    def activations(self) -> int:
        """The most intermediate numbers of an image, padding included, with the scores of one tile of queries."""
        padded = rung_of(self.tokens) * self.cell_patches
        scores = 3 * self.num_heads * min(QUERIES, padded)
        return padded * (self.patch_activations + scores)
