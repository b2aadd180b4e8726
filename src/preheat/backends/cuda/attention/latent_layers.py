"""The layers of a model that attend to latent vectors, on CUDA."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from preheat.backends.base.attention import AttentionLayer
from preheat.backends.cuda.attention.latent import DECODE, PROMPT, VERIFY, latent_attention, least_work
from preheat.backends.cuda.attention.latent_few import FEW, few_rows_attention
from preheat.backends.cuda.attention.latent_rotary import turn_and_write
from preheat.backends.cuda.attention.values import Latents, Pieces, Places, Rows, Workspace


class LatentLayers:
    """The layers of a model with splits of ``split`` entries; some may have keys and values of heads instead."""

    def __init__(self, layers: Sequence[AttentionLayer], split: int) -> None:
        self._layers, self._split = layers, split
        self._latents = [Latents(layer.scale, layer.still, split) for layer in layers]

    def room(self, heads: Sequence[int], rows: int, splits: int, device: torch.device) -> tuple[int, int]:
        """Return the least pieces and scores of a workspace.

        Layers have so many ``heads``. A step has up to ``rows`` rows of up to ``splits`` splits each.
        """
        most = max(heads)
        return max(least_work(each, device) for each in heads), min(rows, FEW) * splits * self._split * most

    def run(
        self, index: int, made: Tensor, places: Places, work: tuple[Pieces, Pieces], rows: Rows, workspace: Workspace,
        out: Tensor,
    ) -> None:  # fmt: skip
        """Write the entries of layer ``index``, then attend; ``work`` has the tiles and the splits of the step."""
        layer, latents, (tiles, splits) = self._layers[index], self._latents[index], work
        cache, query = layer.cache, made[:, : layer.num_heads]
        assert layer.rope is not None, "a part of each entry turns"
        turn_and_write(made, layer.rope, *places, cache, layer.still)
        if len(tiles.work):
            latent_attention(query, cache, out, places, tiles, workspace, latents, mode=PROMPT)
        if rows.width == 1 and 0 < rows.most <= FEW:
            few_rows_attention(query, cache, out, places, splits, workspace, latents)
            return
        latent_attention(
            query, cache, out, places, splits, workspace, latents, rows, mode=VERIFY if rows.width > 1 else DECODE
        )
