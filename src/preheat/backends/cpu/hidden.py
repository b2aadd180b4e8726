"""The kernel of attention on a CPU, made safe for hidden keys.

No hidden key or value reaches a result. The kernel adds minus infinity to the scores of hidden keys and multiplies
their values by zero. That is exact for ordinary numbers. But a slot behind a row's end may hold anything. NaN,
infinity, or a key with a score beyond float32 becomes NaN. So hidden slots show in the result only as NaN.

A call with NaN in its result is repeated with zeros in hidden places: first in places that are hidden from all queries
of a sequence. If NaN remains, a later token of the sequence itself is to blame, and each query gets zeros in the places
that are hidden from it. A NaN that still remains is the row's own.
"""

from __future__ import annotations

import torch
from torch import Tensor

kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default


def attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float) -> tuple[Tensor, Tensor]:
    """Return the output [pairs, heads, rows, dim] and log-sum-exp [pairs, heads, rows] of attention.

    ``query`` is [pairs, heads, rows, dim]; ``key`` and ``value`` are [pairs, heads, span, dim]. ``mask`` [pairs, 1 or
    heads, rows, span] is added to the scores: minus infinity hides a key, from all heads alike.
    """
    found: tuple[Tensor, Tensor] = kernel(query, key, value, 0.0, False, attn_mask=mask, scale=scale)
    if mask is None or not _has_nan(*found):
        return found
    hidden = mask[:, :1] == -torch.inf
    found = _without(hidden.all(2), (query, key, value, mask), scale)
    if not _has_nan(*found):
        return found
    out, lse = (each.clone() for each in found)
    masks = hidden[:, 0].transpose(0, 1).flatten(1)  # of each row
    kinds, kind_of_row, _ = torch.ops.aten.unique_dim.default(masks, 0, return_inverse=True)
    for kind, hides in enumerate(kinds.view(len(kinds), len(query), 1, -1)):
        rows = (kind_of_row == kind).nonzero()[:, 0]
        part, part_lse = _without(hides, (query, key, value, mask), scale)
        out[:, :, rows], lse[:, :, rows] = part[:, :, rows], part_lse[:, :, rows]
    return out, lse


def _has_nan(out: Tensor, lse: Tensor) -> bool:
    """Return whether there is a NaN, or infinities of both signs.

    The sum is the cheapest way to see it.
    """
    return bool((out.sum() + lse.sum()).isnan())


def _without(hidden: Tensor, inputs: tuple[Tensor, Tensor, Tensor, Tensor], scale: float) -> tuple[Tensor, Tensor]:
    """Return the kernel's answer with ``hidden`` keys and values zeroed.

    ``hidden`` is bool [pairs, 1, span].
    """
    query, key, value, mask = inputs
    key, value = (each.masked_fill(hidden.unsqueeze(-1), 0.0) for each in (key, value))
    found: tuple[Tensor, Tensor] = kernel(query, key, value, 0.0, False, attn_mask=mask, scale=scale)
    return found
