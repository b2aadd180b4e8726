"""Attention among all positions of an image.

Contract. Scores are matrix products, rounded to the dtype, times the scale, rounded; their softmax is fp32, rounded; it
is multiplied with the values by a matrix product, rounded. Each image has its own calls, with the shapes of one image.
So its bits cannot depend on the number of images or on its index among them.

An image that pads to a rung of positions has scores of minus infinity for keys behind its last position, so their
weights are zero. Such a rung is cut into tiles of :data:`preheat.ops.kinds.QUERIES` queries, with a call each.
The shapes of all calls depend on the rung alone, and the rung depends on the image alone.
"""

from __future__ import annotations

import torch
from torch import Tensor

from preheat.ops.kinds import QUERIES


def attend_images(qkv: Tensor, num_heads: int, positions: int, scale: float) -> Tensor:
    """Return attended values [images * positions, heads * dim] of all images.

    ``qkv`` [images * positions, 3 * heads * dim] are queries, keys and values.
    """
    out = qkv.new_empty(len(qkv), qkv.shape[1] // 3)
    for first in range(0, len(qkv), positions):
        one, attended = qkv[first : first + positions], out[first : first + positions]
        heads = one.view(positions, 3, num_heads, -1).permute(1, 2, 0, 3).contiguous()
        queries, keys, values = heads.unbind(0)  # [heads, positions, dim]
        scores = torch.bmm(queries, keys.transpose(1, 2)).mul_(scale)
        weights = scores.softmax(-1, dtype=torch.float32).to(qkv.dtype)
        attended.view(positions, num_heads, -1).copy_(torch.bmm(weights, values).transpose(0, 1))
    return out


def attend_grid(queries: Tensor, keys: Tensor, values: Tensor, count: Tensor, scale: float) -> Tensor:
    """Return attended values [positions, heads * dim] of one image.

    ``queries``, ``keys`` and ``values`` are [heads, positions, dim], contiguous. The first ``count`` positions, int64
    [1], belong to the image; the results of the others are of no use.
    """
    heads, positions, dim = queries.shape
    out = queries.new_empty(positions, heads, dim)
    padding = torch.arange(positions, device=queries.device) >= count
    turned = keys.transpose(1, 2)
    for first in range(0, positions, QUERIES):
        tile = queries[:, first : first + QUERIES]
        scores = torch.bmm(tile, turned).mul_(scale).masked_fill_(padding, float("-inf"))
        weights = scores.softmax(-1, dtype=torch.float32).to(queries.dtype)
        out[first : first + QUERIES].copy_(torch.bmm(weights, values).transpose(0, 1))
    return out.view(positions, heads * dim)
