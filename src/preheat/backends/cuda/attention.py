"""Attention of all layers on CUDA.

The host cuts a step's attention into pieces of work, and kernels read the pieces from the step's buffers.

A row of one token is cut into the KV splits of its context; any block of the grid may take a split. A longer row is cut
into tiles of queries, and each tile walks its context alone. If all rows decode and some have drafts, a few consecutive
queries share the splits. List 0 holds the tiles; one list of splits follows for each sliding window of the model.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from preheat.backends.base import (
    HOST_COPIES,
    Attend,
    AttentionLayer,
    AttentionWork,
    Backend,
    BlockTables,
    StepInputs,
    StepRows,
)
from preheat.backends.cuda.block_table import DeviceTable
from preheat.backends.cuda.paged_attention import (
    Workspace,
    decode_attention,
    prefill_attention,
    prefill_config,
    query_tile,
    verify_queries,
)
from preheat.backends.cuda.rotary import rope_and_write
from preheat.backends.cuda.work import SPLIT, decode_work, prefill_tiles, query_tiles, steady_steps
from preheat.limits import Limits
from preheat.ops.kinds import NormKind

_NO_WORK = np.empty((0, 2), np.int32)
_FILLING = 256
"""Queries with enough splits to fill a device at least twice.

A step with more queries may let each tile walk its context alone, and then needs no memory for partial results.
"""


class CudaAttention:
    """Attention of a model with equal heads in all layers; windows may differ between layers.

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
        first = layers[0]
        self._layers, self._split, self._max_len = layers, split, limits.max_model_len
        config = prefill_config(first.head_dim, first.dtype)
        self._tile = tile or query_tile(first.num_heads, first.num_kv_heads, config)
        self._sides = not first.causal
        self._windows = sorted({layer.window for layer in layers}, key=lambda window: window or 0)
        self._max_splits = -(-limits.max_model_len // split)
        self.table = DeviceTable(limits.max_num_seqs, limits.max_blocks_per_seq, HOST_COPIES, backend)
        tokens, rows = max(limits.max_num_batched_tokens, limits.max_num_seqs), limits.max_num_seqs
        width = 1 + limits.num_speculative_tokens
        drafted = rows * -(-width // self._queries(width)) * self._queries(width)
        self._room = max(rows, min(drafted, _FILLING)) * self._max_splits
        self._workspace = Workspace(self._room, tokens, first.num_heads, first.head_dim, backend.device)

    def _queries(self, width: int) -> int:
        """Return the number of queries in a tile for decoding rows of up to ``width`` tokens."""
        first = self._layers[0]
        return verify_queries(first.num_heads, first.num_kv_heads, width, first.head_dim, first.dtype)

    def list_sizes(self, tokens: int, rows: int, *, width: int) -> tuple[int, ...]:
        """Return the capacities of the lists: tiles (none for a decoding step), then splits for each window."""
        tiles = 0 if width else tokens // self._tile + rows
        pieces = rows * self._max_splits
        if width > 1:
            pieces = self._pieces(rows, width)
        return (tiles, *(pieces,) * len(self._windows))

    def _pieces(self, rows: int, width: int) -> int:
        """Return the largest number of pieces of a step with drafts.

        The pieces fit the workspace, or each tile is one piece.
        """
        queries = self._queries(width)
        tiles = rows * -(-width // queries)
        return max(min(tiles * self._max_splits, self._room // queries), tiles)

    def plan(self, step: StepRows, tables: BlockTables) -> AttentionWork:
        """Return the step's work; where all rows decode, it stays valid until a row begins a split."""
        if step.width > 1:
            return self._plan_drafts(step)
        extend = step.extend
        single = (extend == 1).nonzero()[0]
        token_index, positions = step.ends[single] - 1, step.first[single]
        tiles = _NO_WORK
        if len(single) < len(extend):
            longer = (extend > 1).nonzero()[0]
            starts = step.ends[longer] - extend[longer]
            tiles = prefill_tiles(starts, extend[longer], step.first[longer], self._tile, sides=self._sides)
        splits = [decode_work(token_index, positions, self._split, window) for window in self._windows]
        steady = min((steady_steps(positions, self._split, window) for window in self._windows), default=self._max_len)
        return AttentionWork([tiles, *splits], steady, table_writes=-1)

    def _plan_drafts(self, step: StepRows) -> AttentionWork:
        """Return the work of a decoding step with drafts; it is never reused for the next step."""
        queries = self._queries(step.width)
        starts, positions, lengths = query_tiles(step.ends, step.extend, step.first, queries)
        room = self._room // queries
        splits = [
            decode_work(starts, positions, self._split, window, queries=lengths, room=room) for window in self._windows
        ]
        return AttentionWork([_NO_WORK, *splits], -1, table_writes=-1)

    def write(self, turn: int, tables: BlockTables) -> None:
        self.table.write(turn, tables)

    def send(self, turn: int, work: AttentionWork, inputs: StepInputs) -> None:
        self.table.send(turn)

    def attend(self, inputs: StepInputs, out: Tensor) -> Attend:
        slots, positions, table = inputs.slots, inputs.positions, self.table.rows
        tiles, workspace, counts = inputs.lists[0], self._workspace, inputs.counts

        def attend(index: int, qkv: Tensor) -> Tensor:
            layer = self._layers[index]
            heads, window, norm = layer.num_heads, layer.window, layer.qk_norm
            scale, value_scale = layer.scale * layer.kv_scales[0], None
            weight, eps = (None, 0.0) if norm is None else (norm.weight, norm.eps)
            kind: NormKind = "rms" if norm is None else norm.kind
            scales = None
            if layer.cache.dtype != layer.dtype:
                scales, value_scale = layer.kv_scales, layer.kv_scales[1]
            rope_and_write(
                qkv, layer.rope, slots, positions, table, layer.cache, heads, layer.num_kv_heads, weight, eps, kind,
                scales=scales, growth=layer.growth, by_token=layer.by_token,
            )  # fmt: skip
            query = qkv[:, :heads]
            if len(tiles):
                prefill_attention(
                    query, layer.cache, table, slots, positions, tiles, counts[0:1], out, scale, window,
                    split=self._split, alibi=layer.alibi, value_scale=value_scale, sinks=layer.sinks, sides=self._sides,
                )  # fmt: skip
            at = 1 + self._windows.index(window)
            decode_attention(
                query, layer.cache, table, slots, positions, inputs.lists[at], counts[at : at + 1], out, workspace,
                scale, window, split=self._split, rows=inputs.rows if inputs.width else 0, width=max(inputs.width, 1),
                alibi=layer.alibi, value_scale=value_scale, sinks=layer.sinks,
            )  # fmt: skip
            return out

        return attend

    def clear(self) -> None:
        self.table.clear()
