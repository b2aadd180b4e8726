"""Token embedding.

A table is [vocab, hidden], or a view [.., hidden] of a weight, with rows in the row-major order of the other sizes.
Rows behind the vocabulary are zeros.

Contract. A copy of rows. With a scale: times the scale, rounded to the dtype first; the product is rounded. With
types: token id + type * vocab stands for a token of a type; plus the row of the type; the sum is rounded. With learned
positions: plus the row of each token's position; the sum is rounded. An image's embedding is copied without any
of these steps.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor


@functools.cache
def rounded(scale: float, dtype: torch.dtype) -> float:
    """Return ``scale`` rounded to ``dtype``."""
    return float(torch.tensor(scale, dtype=dtype))


def rows_of(table: Tensor, tokens: Tensor, out: Tensor | None = None) -> Tensor:
    """Return the rows of ``table`` for ``tokens`` int [tokens]. Raises IndexError for an id outside the table."""
    if table.dim() == 2:
        return torch.index_select(table, 0, tokens, out=out)
    if len(tokens) and int(tokens.min()) < 0:
        raise IndexError(f"token {int(tokens.min())} is outside the table")
    places, rest = list[Tensor](), tokens
    for size in reversed(table.shape[1:-1]):
        places.insert(0, rest % size)
        rest = rest // size
    found = table[(rest, *places)]
    return found if out is None else out.copy_(found)


def embed(
    tokens: Tensor,
    table: Tensor,
    *,
    scale: float | None = None,
    positions: Tensor | None = None,
    at: Tensor | None = None,
    images: Tensor | None = None,
    types: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Return rows of ``table`` for ``tokens`` int [tokens].

    ``positions`` [positions, hidden] are learned; ``at`` int [tokens] names the position of each token. With ``images``
    [rows, hidden], the token -2 - row takes that row of ``images``. With ``types`` [types, hidden], the id of a token
    is below types * vocab. Raises IndexError for an id outside the table.
    """
    if images is not None:
        rows = embed(tokens.clamp(min=0), table, scale=scale, positions=positions, at=at, out=out)
        seen = images.index_select(0, (-2 - tokens).clamp(min=0))  # for every token: shapes in a graph are static
        return rows.copy_(torch.where((tokens < -1)[:, None], seen, rows))
    rows = rows_of(table, tokens if types is None else tokens % len(table), out)
    if scale is not None:
        rows.mul_(rounded(scale, rows.dtype))
    if types is not None:
        rows.add_(types.index_select(0, tokens // len(table)))
    if positions is not None:
        assert at is not None
        rows.add_(positions.index_select(0, at))
    return rows
