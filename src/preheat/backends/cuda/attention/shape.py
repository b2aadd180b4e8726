"""The sizes of a layer's attention that decide how a step is cut for the layer's kernels."""

from __future__ import annotations

from typing import NamedTuple

import torch

from preheat.backends.base.attention import AttentionLayer
from preheat.backends.cuda.attention.paged import prefill_config, query_tile, verify_queries

TOKENS = 8
"""The most tokens of a tile over latent vectors. Eight times the heads of most models fill whole programs."""


def query_tokens(width: int) -> int:
    """Return the tokens of a tile over latent vectors, of rows of up to ``width`` tokens."""
    return min(width, TOKENS)


class Shape(NamedTuple):
    """Heads of ``dim`` numbers; ``rank`` numbers of an entry are its latent vector, 0 without one."""

    heads: int
    kv_heads: int
    dim: int
    dtype: torch.dtype
    rank: int = 0

    @classmethod
    def of(cls, layer: AttentionLayer) -> Shape:
        """Return the shape of ``layer``."""
        rank = layer.still if layer.cache.shape[1] == 1 else 0
        return cls(layer.num_heads, layer.num_kv_heads, layer.head_dim, layer.dtype, rank)

    @property
    def tile(self) -> int:
        """Tokens of a prompt's tile."""
        if self.rank:
            return TOKENS
        return query_tile(self.heads, self.kv_heads, prefill_config(self.dim, self.dtype))

    def queries(self, width: int) -> int:
        """Return the number of queries in a tile for decoding rows of up to ``width`` tokens."""
        if self.rank:
            return query_tokens(width)
        return verify_queries(self.heads, self.kv_heads, width, self.dim, self.dtype)
