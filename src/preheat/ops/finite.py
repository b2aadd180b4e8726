"""Values of the KV cache that are not finite: the reference.

It is for devices that select hidden scores.

Contract. Attention gives hidden keys the score minus infinity, whatever their score was. Their values are multiplied by
a weight of zero, and zero times NaN is NaN. So a value that is not finite is not stored: zero takes its place, and the
key of the same head and token becomes NaN. A query that sees the key gets NaN. No other query changes: neither earlier
tokens of the same prompt nor the next owner of the block.
"""

from __future__ import annotations

import torch
from torch import Tensor


def finite_values(kv: Tensor, *, bounded: bool) -> Tensor:
    """Return ``kv`` [tokens, 2 * kv heads, dim], keys then values, as the cache stores it.

    ``bounded``: infinity is stored as the greatest finite number, so only NaN is not finite.
    """
    keys, values = kv.chunk(2, dim=1)
    odd = values.isnan() if bounded else ~values.isfinite()
    nan = (values - values).sum(-1, keepdim=True)  # a constant would be a new tensor at each call
    return torch.cat((torch.where(odd.any(-1, keepdim=True), nan, keys), values.masked_fill(odd, 0.0)), 1)
