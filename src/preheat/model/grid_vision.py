"""A vision tower for images of any size: a grid of patches becomes embeddings of a prompt.

Contract. An image pads to a rung of patches (:mod:`preheat.utils.rungs`), and is encoded alone. Every operation works
on single patches or cells, except attention (:mod:`preheat.ops.image_attention`), which gives no weight to padding. So
an image's bits depend on its own patches alone.

The embedding of a position is a sum of four rows of a table: fp32 products with their weights, added in order, rounded
to the dtype, then added to the patch. A head turns in fp32: x * cos + swap(x) * sin, three operations, rounded at the
end. The first half of its pairs turns by the row of the patch, the second half by its column.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from preheat.backends.base.layers import Linear, Norm
from preheat.model.grid_specs import GridVisionSpec
from preheat.model.layers import DenseMlp, Linears, below
from preheat.model.vision import VisionLayer
from preheat.ops.image_attention import attend_grid
from preheat.utils.angles import cos_sin, power


@dataclass(frozen=True, slots=True)
class Merger:
    """A map from patches to embeddings of the decoder.

    ``norm`` reads rows of ``normed`` numbers, ``mlp`` rows of ``size`` numbers, as many as a cell has.
    """

    norm: Norm
    mlp: DenseMlp
    normed: int
    size: int

    def __call__(self, x: Tensor) -> Tensor:
        """Return [cells, hidden of the decoder] for ``x`` [patches, hidden], the patches of a cell side by side."""
        return self.mlp(self.norm(x.view(-1, self.normed)).view(-1, self.size))

    def linears(self) -> Linears:
        yield from self.mlp.linears()


@dataclass(frozen=True, slots=True)
class GridVisionWeights:
    """Weights of a tower; ``positions`` [places of a square, hidden] are interpolated."""

    patches: Linear
    positions: Tensor
    layers: list[VisionLayer]
    merger: Merger
    deep: list[Merger]

    def layer_linears(self) -> Linears:
        """Yield the linear layers that see every patch, by path."""
        for index, layer in enumerate(self.layers):
            yield from below(f"layers.{index}", layer.linears())

    def merger_linears(self) -> Linears:
        """Yield the linear layers that see every cell, by path."""
        for index, merger in enumerate((self.merger, *self.deep)):
            yield from below(f"mergers.{index}", merger.linears())


class GridInput(NamedTuple):
    """An image, padded to a rung of ``n`` patches, on the tower's device.

    ``pixels`` fp32 [frames, n, channels * size * size] are in the order of cells; all frames of an image are equal, and
    frames of a video differ. ``places`` int64 [4, n] and ``shares`` fp32
    [4, n] are the rows of the table of positions for each patch, and their weights. ``at`` int64 [2, n] are rows and
    columns. ``number`` int64 [1] is the number of patches without padding.
    """

    pixels: Tensor
    places: Tensor
    shares: Tensor
    at: Tensor
    number: Tensor


class GridTower:
    """Runs ``weights`` according to ``spec``. Call it under inference mode."""

    name, dtype = "images", torch.float32  # the type of pixels

    def __init__(self, spec: GridVisionSpec, weights: GridVisionWeights) -> None:
        self.spec, self.weights, self.token = spec, weights, spec.image_token
        self.patch = spec.patches.channels * spec.patches.size**2
        device = weights.positions.device
        self._cos, self._sin = (each.to(device) for each in _angles(spec))

    def __call__(self, image: GridInput) -> list[Tensor]:
        """Return the embeddings of an image's cells, [cells, hidden of the decoder], and then the deep ones."""
        spec, weights = self.spec, self.weights
        residual, deep = self._embedded(image), list[Tensor]()
        cos, sin = (torch.cat((each[image.at[0]], each[image.at[1]]), 1) for each in (self._cos, self._sin))
        last, normed = len(weights.layers) - 1, weights.layers[0].input_norm(residual)
        for index, layer in enumerate(weights.layers):
            attended = self._attended(layer.qkv(normed), cos, sin, image.number)
            added = layer.mlp(layer.post_norm.add(layer.o(attended), residual))
            if index < last:
                normed = weights.layers[index + 1].input_norm.add(added, residual)
            else:
                residual.add_(added)
            if index in spec.deep_at:
                deep.append(weights.deep[spec.deep_at.index(index)](residual))
        return [weights.merger(residual), *deep]

    def _embedded(self, image: GridInput) -> Tensor:
        """Return the tower's input [patches, hidden]."""
        spec, weights = self.spec.patches, self.weights
        pixels = image.pixels.to(weights.positions.dtype).view(len(image.pixels), -1, spec.channels, spec.size**2)
        frames = pixels.permute(1, 2, 0, 3).reshape(-1, spec.inputs)
        table, total = weights.positions, None
        for places, shares in zip(image.places, image.shares, strict=True):
            part = table.index_select(0, places).float() * shares[:, None]
            total = part if total is None else total + part
        assert total is not None
        embedded: Tensor = weights.patches(frames) + total.to(table.dtype)
        return embedded

    def _attended(self, qkv: Tensor, cos: Tensor, sin: Tensor, number: Tensor) -> Tensor:
        """Return the attended values of all patches, [patches, hidden]."""
        spec = self.spec
        parts = qkv.view(len(qkv), 3, spec.num_heads, spec.head_dim)
        turned = parts[:, :2].float()
        first, second = turned.chunk(2, -1)
        by, across = cos[:, None, None], sin[:, None, None]
        heads = torch.cat((first * by - second * across, second * by + first * across), -1).to(qkv.dtype)
        queries, keys = heads.permute(1, 2, 0, 3).contiguous().unbind(0)
        values = parts[:, 2].transpose(0, 1).contiguous()
        return attend_grid(queries, keys, values, number, spec.scale)


def _angles(spec: GridVisionSpec) -> tuple[Tensor, Tensor]:
    """Return cosines and sines, fp32 [places, head_dim / 4], for each row or column of an image."""
    half = spec.head_dim // 2
    exponents = torch.arange(0, half, 2, dtype=torch.float32) / half
    frequencies = 1.0 / torch.from_numpy(power(spec.theta, exponents.tolist()))
    most = max(spec.num_positions // spec.merge, spec.merge)
    angles = torch.outer(torch.arange(most, dtype=torch.float32), frequencies)
    cos, sin = cos_sin(angles.numpy())
    return torch.from_numpy(np.array(cos)), torch.from_numpy(np.array(sin))


def patch_places(rows: int, columns: int, merge: int) -> np.ndarray:
    """Return the row and column of each patch of a grid of cells, int64 [2, patches].

    Cells go from left to right, then down, and so do the ``merge`` by ``merge`` patches of a cell.
    """
    at = np.indices((rows, columns, merge, merge), dtype=np.int64)
    return np.stack((at[0] * merge + at[2], at[1] * merge + at[3])).reshape(2, -1)


def interpolated(at: np.ndarray, size: tuple[int, int], side: int) -> tuple[np.ndarray, np.ndarray]:
    """Return rows of a square table of ``side``, int64 [4, patches], and their weights, fp32 [4, patches].

    ``at`` [2, patches] are places in an image of ``size`` patches. The corners of the image are the corners of the
    table; a place between four rows of the table has a part of each, by its distance in fp32.
    """
    taps, shares = [], []
    for place, count in zip(at, size, strict=True):
        source = place.astype(np.float32) * np.float32(side - 1) / np.float32(max(count - 1, 1))
        low = np.floor(source)
        part = source - low
        taps.append(np.minimum(np.stack((low, low + 1)).astype(np.int64), side - 1))
        shares.append(np.stack((1 - part, 1 - np.abs(part - 1))))
    places = (taps[0][:, None] * side + taps[1][None]).reshape(4, -1)
    weights = (shares[0][:, None] * shares[1][None]).reshape(4, -1)
    return places, weights.astype(np.float32)
