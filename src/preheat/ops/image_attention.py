"""Attention among all positions of an image.

Contract. Scores are matrix products, rounded to the dtype, times the scale, rounded; their softmax is fp32, rounded; it
is multiplied with the values by a matrix product, rounded. Each image has its own calls, with the shapes of one image.
So its bits cannot depend on the number of images or on its index among them.
"""

from __future__ import annotations

import torch
from torch import Tensor


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
