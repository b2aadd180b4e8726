"""Token embedding.

Contract. A copy of rows. With a scale: times the scale, rounded to the dtype first; the product is rounded. With
learned positions: plus the row of each token's position; the sum is rounded. An image's embedding is copied without any
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


def embed(
    tokens: Tensor,
    table: Tensor,
    *,
    scale: float | None = None,
    positions: Tensor | None = None,
    at: Tensor | None = None,
    images: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Return rows of ``table`` [vocab, hidden] for ``tokens`` int [tokens].

    ``positions`` [positions, hidden] are learned; ``at`` int [tokens] names the position of each token. With ``images``
    [rows, hidden], the token -2 - row takes that row of ``images``. Raises IndexError for an id outside the table.
    """
    if images is not None:
        rows = embed(tokens.clamp(min=0), table, scale=scale, positions=positions, at=at, out=out)
        seen = images.index_select(0, (-2 - tokens).clamp(min=0))  # for every token: shapes in a graph are static
        return rows.copy_(torch.where((tokens < -1)[:, None], seen, rows))
    rows = torch.index_select(table, 0, tokens, out=out)
    if scale is not None:
        rows.mul_(rounded(scale, rows.dtype))
    if positions is not None:
        assert at is not None
        rows.add_(positions.index_select(0, at))
    return rows
