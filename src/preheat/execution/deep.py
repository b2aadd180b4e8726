"""Embeddings of images that are added behind the decoder's first layers.

Contract. Behind layer i, the embedding i of a token's cell is added to the token's residual stream: one addition,
rounded to the dtype. The stream of a token without an image keeps its bits. So every step may add, whatever its tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from preheat.model.decoder import Deep


class DeepEmbeddings:
    """Embeddings for the first ``layers`` layers; each is as large as ``like`` [rows, hidden]."""

    def __init__(self, layers: int, like: Tensor) -> None:
        self.kept = like.new_zeros(layers, *like.shape)

    def keep(self, rows: Tensor, embeddings: Sequence[Tensor]) -> None:
        """Keep an image's ``embeddings``, one [cells, hidden] for each layer, at ``rows`` [cells]."""
        for kept, each in zip(self.kept, embeddings, strict=True):
            kept.index_copy_(0, rows, each)

    def adder(self, tokens: Tensor) -> Deep:
        """Return the adder for a step's ``tokens``, int32 [tokens].

        A token -2 - row is the row of an image (:meth:`preheat.backends.base.backend.Operations.embed`).
        """
        rows = -2 - tokens
        seen, rows = (rows >= 0).unsqueeze(1), rows.clamp(min=0)

        def add(layer: int, residual: Tensor) -> bool:
            if layer >= len(self.kept):
                return False
            residual.copy_(torch.where(seen, residual + self.kept[layer].index_select(0, rows), residual))
            return True

        return add
