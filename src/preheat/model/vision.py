"""A vision tower and its projector: images become embeddings of a prompt.

Contract. Attention works on single images (:mod:`preheat.ops.image_attention`), every other operation on single
positions. So an image's bits do not depend on the other images encoded with it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from preheat.backends.base.layers import Linear, Norm
from preheat.model.layers import DenseMlp, Linears, below
from preheat.model.vision_specs import VisionSpec
from preheat.ops.image_attention import attend_images


@dataclass(frozen=True, slots=True)
class VisionLayer:
    """One layer of the tower."""

    input_norm: Norm
    qkv: Linear
    o: Linear
    post_norm: Norm
    mlp: DenseMlp

    def linears(self) -> Linears:
        yield "qkv", self.qkv
        yield "o", self.o
        yield from below("mlp", self.mlp.linears())


@dataclass(frozen=True, slots=True)
class VisionWeights:
    """Weights of a vision tower.

    ``cls`` [hidden] and ``positions`` [positions, hidden] are embeddings of the tower's input.
    """

    patches: Linear
    cls: Tensor
    positions: Tensor
    pre_norm: Norm
    layers: list[VisionLayer]
    projector: DenseMlp

    def layer_linears(self) -> Linears:
        """Yield the linear layers that see every position, by path."""
        for index, layer in enumerate(self.layers):
            yield from below(f"layers.{index}", layer.linears())


class VisionTower:
    """Runs ``weights`` according to ``spec``. Call it under inference mode."""

    name, dtype = "images", torch.float32  # the type of pixels

    def __init__(self, spec: VisionSpec, weights: VisionWeights) -> None:
        self.spec, self.weights = spec, weights
        self.shape, self.token = spec.pixel_shape, spec.image_token

    def __call__(self, pixels: Tensor) -> Tensor:
        """Encode ``pixels``, fp32 [images, channels, size, size]: [images * tokens, hidden of the decoder]."""
        spec, weights = self.spec, self.weights
        residual = self._embedded(pixels)
        last, normed = len(weights.layers) - 1, weights.layers[0].input_norm(residual)
        for index, layer in enumerate(weights.layers):
            attended = attend_images(layer.qkv(normed), spec.num_heads, spec.num_positions, spec.scale)
            added = layer.mlp(layer.post_norm.add(layer.o(attended), residual))
            if index < last:
                normed = weights.layers[index + 1].input_norm.add(added, residual)
            else:
                residual.add_(added)
        features = residual.view(len(pixels), spec.num_positions, -1)[:, spec.num_positions - spec.tokens :]
        return weights.projector(features.reshape(len(pixels) * spec.tokens, -1))

    def _embedded(self, pixels: Tensor) -> Tensor:
        """Return the tower's input [images * positions, hidden]."""
        spec, weights = self.spec, self.weights
        images, side, size = len(pixels), spec.image_size // spec.patches.size, spec.patches.size
        grid = pixels.to(weights.cls.dtype).view(images, spec.patches.channels, side, size, side, size)
        patches = weights.patches(grid.permute(0, 2, 4, 1, 3, 5).reshape(images * side**2, -1))
        embedded = patches.new_empty(images, spec.num_positions, patches.shape[1])
        embedded[:, 0] = weights.cls + weights.positions[0]
        torch.add(patches.view(images, side**2, -1), weights.positions[1:], out=embedded[:, 1:])
        return weights.pre_norm(embedded.view(images * spec.num_positions, -1))
