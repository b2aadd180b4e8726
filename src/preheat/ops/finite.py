"""What the KV cache holds of numbers that are not finite: the reference, for devices that select hidden scores.

Contract. Attention gives hidden keys the score minus infinity, whatever their score was. Their values are multiplied by
a weight of zero, and zero times NaN is NaN. So no value is stored that is not finite: zero takes its place, and the key
of the same head and token becomes NaN. Who sees the key gets NaN, and nobody else notices: neither earlier tokens of
the same prompt nor the next owner of the block.
"""

from __future__ import annotations

import torch
from torch import Tensor


def finite_values(kv: Tensor, *, bounded: bool) -> Tensor:
    """``kv`` [tokens, 2 * kv heads, dim], keys then values, as they are stored; ``bounded``: infinity is stored as the
    greatest finite number, and NaN alone is not finite.
    """
    keys, values = kv.chunk(2, dim=1)
    odd = values.isnan() if bounded else ~values.isfinite()
    nan = (values - values).sum(-1, keepdim=True)  # where any is odd; a constant would be another one each time
    return torch.cat((torch.where(odd.any(-1, keepdim=True), nan, keys), values.masked_fill(odd, 0.0)), 1)
