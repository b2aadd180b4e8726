"""Attention of all layers on CUDA.

The host cuts a step's attention into pieces of work, and kernels read the pieces from the step's buffers.

A row of one token is cut into the KV splits of its context; any block of the grid may take a split. A longer row is cut
into tiles of queries, and each tile walks its context alone. If all rows decode and some have drafts, a few consecutive
queries share the splits. The first lists hold the tiles, one list for each size of tiles in the model. One list of
splits follows for each kind of layer: its sliding window, and the sizes of its heads.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from torch import Tensor

from preheat.backends.base.attention import Attend, AttentionLayer, AttentionWork, BlockTables, StepInputs, StepRows
from preheat.backends.base.backend import Backend
from preheat.backends.base.device import HOST_COPIES
from preheat.backends.cuda.attention.block_table import DeviceTable
from preheat.backends.cuda.attention.paged import decode_attention, prefill_attention
from preheat.backends.cuda.attention.rotary import rope_and_write
from preheat.backends.cuda.attention.shape import Shape
from preheat.backends.cuda.attention.values import Pieces, Places, Rows, Scores, Workspace
from preheat.backends.cuda.attention.work import SPLIT, decode_work, prefill_tiles, query_tiles, steady_steps
from preheat.limits import Limits

if TYPE_CHECKING:
    from preheat.backends.cuda.attention.latent_layers import LatentLayers

_NO_WORK = np.empty((0, 2), np.int32)
_FILLING = 256
"""Queries with enough splits to fill a device at least twice.

A step with more queries may let each tile walk its context alone, and then needs no memory for partial results.
"""


class _Kind(NamedTuple):
    """A kind of layer with a list of splits of its own."""

    window: int | None
    shape: Shape


class _Step(NamedTuple):
    """The parts of a step that layers share.

    ``places`` have a block table for each cache group. ``pieces`` are all lists of work, ``rows`` the program's.
    """

    places: Sequence[Places]
    pieces: Sequence[Pieces]
    rows: Rows


class CudaAttention:
    """Attention of a model; windows, sizes of heads and cache groups may differ between layers.

    All layers are causal, or all see both sides; a row of the step is then a whole text.
    """

    def __init__(
        self,
        layers: Sequence[AttentionLayer],
        limits: Limits,
        backend: Backend,
        *,
        tile: int | None = None,
        split: int = SPLIT,
    ) -> None:
        self._layers, self._split, self._max_len = layers, split, limits.max_model_len
        self._scores = [_scores(layer, split) for layer in layers]
        self._of_layer = [_Kind(layer.window, Shape.of(layer)) for layer in layers]
        self._kinds = sorted(set(self._of_layer), key=lambda kind: (kind.window or 0, *kind.shape[:3]))
        shapes = {kind.shape for kind in self._kinds}
        self._tile_of = {shape: tile or shape.tile for shape in shapes}
        self._tiles = sorted(set(self._tile_of.values()))
        self._lists_of = [self._lists(kind) for kind in self._of_layer]
        self._sides = not layers[0].causal
        self._max_splits = -(-limits.max_model_len // split)
        groups = len(limits.groups)
        self.table = DeviceTable(limits.max_num_seqs, limits.max_blocks_per_seq, HOST_COPIES, backend, groups=groups)
        tokens, rows = max(limits.max_num_batched_tokens, limits.max_num_seqs), limits.max_num_seqs
        width = 1 + limits.num_speculative_tokens
        drafted = max(rows * -(-width // each.queries(width)) * each.queries(width) for each in shapes)
        self._room = max(rows, min(drafted, _FILLING)) * self._max_splits
        heads, dim = (
            max(sizes) for sizes in zip(*((each.heads, each.rank or each.dim) for each in shapes), strict=True)
        )
        self._latent, least, scores = None, 0, 0
        if latent := [each.heads for each in shapes if each.rank]:
            self._latent = _latent_layers(layers, split)
            least, scores = self._latent.room(latent, rows, self._max_splits, backend.device)
        self._workspace = Workspace(max(self._room, least), tokens, heads, dim, backend.device, scores=scores)

    def _lists(self, kind: _Kind) -> tuple[int, int]:
        """Return the numbers of the list of tiles, and of the list of splits, of a kind of layer."""
        return self._tiles.index(self._tile_of[kind.shape]), len(self._tiles) + self._kinds.index(kind)

    def list_sizes(self, tokens: int, rows: int, *, width: int) -> tuple[int, ...]:
        """Return the capacities of the lists: tiles (none for a decoding step), then splits for each kind."""
        tiles = (0 if width else tokens // tile + rows for tile in self._tiles)
        pieces = rows * self._max_splits
        return (*tiles, *(self._pieces(rows, width, kind) if width > 1 else pieces for kind in self._kinds))

    def _pieces(self, rows: int, width: int, kind: _Kind) -> int:
        """Return the largest number of pieces of a step with drafts.

        The pieces fit the workspace, or each tile is one piece.
        """
        queries = kind.shape.queries(width)
        tiles = rows * -(-width // queries)
        return max(min(tiles * self._max_splits, self._room // queries), tiles)

    def plan(self, step: StepRows, tables: BlockTables) -> AttentionWork:
        """Return the step's work; where all rows decode, it stays valid until a row begins a split."""
        if step.width > 1:
            return self._plan_drafts(step)
        extend = step.extend
        single = (extend == 1).nonzero()[0]
        token_index, positions = step.ends[single] - 1, step.first[single]
        tiles = [_NO_WORK] * len(self._tiles)
        if len(single) < len(extend):
            longer = (extend > 1).nonzero()[0]
            starts = step.ends[longer] - extend[longer]
            tiles = [
                prefill_tiles(starts, extend[longer], step.first[longer], tile, sides=self._sides)
                for tile in self._tiles
            ]
        windows = {kind.window for kind in self._kinds}
        found = {window: decode_work(token_index, positions, self._split, window) for window in windows}
        steady = min((steady_steps(positions, self._split, window) for window in windows), default=self._max_len)
        return AttentionWork([*tiles, *(found[kind.window] for kind in self._kinds)], steady, table_writes=-1)

    def _plan_drafts(self, step: StepRows) -> AttentionWork:
        """Return the work of a decoding step with drafts; it is never reused for the next step."""
        splits = []
        for window, shape in self._kinds:
            queries = shape.queries(step.width)
            starts, positions, lengths = query_tiles(step.ends, step.extend, step.first, queries)
            room = self._room // queries
            splits.append(decode_work(starts, positions, self._split, window, queries=lengths, room=room))
        return AttentionWork([*[_NO_WORK] * len(self._tiles), *splits], -1, table_writes=-1)

    def write(self, turn: int, tables: BlockTables) -> None:
        self.table.write(turn, tables)

    def send(self, turn: int, work: AttentionWork, inputs: StepInputs) -> None:
        self.table.send(turn)

    def attend(self, inputs: StepInputs, out: Tensor) -> Attend:
        room, step = {out.shape[1]: out}, self._step(inputs)

        def attend(index: int, qkv: Tensor) -> Tensor:
            layer = self._layers[index]
            width = layer.num_heads * layer.head_dim
            if (own := room.get(width)) is None:
                own = room[width] = out.new_empty(len(out), width)
            run = self._latents if layer.cache.shape[1] == 1 else self._heads
            run(index, qkv, step, own)
            return own

        return attend

    def _step(self, inputs: StepInputs) -> _Step:
        """Return the parts of ``inputs`` that layers share."""
        return _Step(
            [Places(inputs.slots, inputs.positions, table) for table in self.table.of_group],
            [Pieces(work, inputs.counts[at : at + 1]) for at, work in enumerate(inputs.lists)],
            Rows(inputs.rows if inputs.width else 0, max(inputs.width, 1)),
        )

    def _heads(self, index: int, qkv: Tensor, step: _Step, out: Tensor) -> None:
        """Run a layer with keys and values of heads."""
        layer, scores, (tiles, splits) = self._layers[index], self._scores[index], self._lists_of[index]
        cache, places = layer.cache, step.places[layer.group]
        scales = None if cache.dtype == layer.dtype else layer.kv_scales
        rope_and_write(
            qkv, cache, places, layer.rope, layer.qk_norm,
            scales=scales, growth=layer.growth, by_token=layer.by_token, own=layer.own,
        )  # fmt: skip
        query = qkv[:, : layer.num_heads]
        if len(step.pieces[tiles].work):
            prefill_attention(query, cache, out, places, step.pieces[tiles], scores, sides=self._sides)
        decode_attention(query, cache, out, places, step.pieces[splits], self._workspace, scores, step.rows)

    def _latents(self, index: int, made: Tensor, step: _Step, out: Tensor) -> None:
        """Run a layer with latent vectors."""
        assert self._latent is not None, "the model has latent vectors"
        places, (tiles, splits) = step.places[self._layers[index].group], self._lists_of[index]
        work = step.pieces[tiles], step.pieces[splits]
        self._latent.run(index, made, places, work, step.rows, self._workspace, out)

    def clear(self) -> None:
        self.table.clear()


def _latent_layers(layers: Sequence[AttentionLayer], split: int) -> LatentLayers:
    """Import the kernels for latent vectors, which most models lack."""
    from preheat.backends.cuda.attention.latent_layers import LatentLayers

    return LatentLayers(layers, split)


def _scores(layer: AttentionLayer, split: int) -> Scores:
    """Return how ``layer`` scores keys and weights values."""
    value_scale = None if layer.cache.dtype == layer.dtype else layer.kv_scales[1]
    return Scores(
        layer.scale * layer.kv_scales[0], layer.window, split, layer.alibi, value_scale=value_scale, sinks=layer.sinks
    )
