"""Token embedding.

Contract. A copy of rows; no arithmetic.
"""

from __future__ import annotations

import torch
from torch import Tensor


def embed(tokens: Tensor, table: Tensor) -> Tensor:
    """Rows of ``table`` [vocab, hidden] for ``tokens`` int64 [tokens]; IndexError for an id outside the table."""
    return torch.index_select(table, 0, tokens)
