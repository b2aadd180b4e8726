"""Rotary position embedding, in place.

Contract. x' = x * cos + swap(x) * sin, where swap exchanges the halves of the last dimension and the sines of the first
half carry the minus sign. Three operations, each rounded to the dtype of x: product, product, sum. No two are fused,
and every element depends on its own head and position alone, so no row's bits depend on another row.
"""

from __future__ import annotations

from torch import Tensor

from preheat.ops.opaque import opaque


@opaque("(Tensor(a!) x, Tensor cos, Tensor sin) -> ()", lambda *_: None)
def _rotate_(x: Tensor, cos: Tensor, sin: Tensor) -> None:
    swapped = x.roll(x.shape[-1] // 2, -1)
    x.mul_(cos)
    x.add_(swapped.mul_(sin))


def apply_rope_(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn ``x`` [tokens, heads, dim] by its positions' ``cos`` and ``sin`` [tokens, 1, dim], in place; return it."""
    _rotate_(x, cos, sin)
    return x
