"""Paged attention on Gaudi, in operations of static shapes.

A program depends only on its bucket.

Contract. Keys lie in blocks. A tile of queries meets a block in one product of a fixed form, [tile * group, dim] by
[dim, block], in fp32. The scores are scaled, ALiBi's bias is added, and the score of a key that a query does not see
becomes minus infinity. The partial result of a row and a block is the row's maximum m, the sum l of exp(score - m), and
the product o of these weights with the values. Partial results are merged in the order of the blocks: M' = max(M, m); l
and o are scaled by exp(M - M') and exp(m - M') and added. At the end o is divided by l. Keys and values of eight bits
are widened as they are stored. The keys' scale is part of the scores' scale. The values' scale multiplies o / l before
it is rounded.

A block that a row does not see changes nothing, so padding of any kind changes no bits. The way in which a block is
found changes no bits either, nor do the contents of a slot that no query of a tile sees. :mod:`preheat.ops.finite` says
how numbers are stored. Every row is normalized by its own maximum, as in the softmax variants index_reduce and
scatter_reduce of vLLM on Gaudi. The other variants take a maximum over rows of other requests.

A step of decoding rows is a list of pairs of a row and a block. The list has the bucket's length: as many blocks as the
bucket says are read, whoever owns them. With ``contiguous`` the program has a second form, which reads the first blocks
of the cache as they lie. It serves a step if each of these blocks belongs to one row. Any other step is tiles of
queries against all blocks that a sequence may have.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from preheat.backends.base.attention import Attend, AttentionLayer, AttentionWork, BlockTables, StepInputs, StepRows
from preheat.backends.hpu.bridge import Bridge
from preheat.limits import Limits
from preheat.ops.finite import finite_values
from preheat.ops.float8 import round_to
from preheat.ops.rotary import apply_rope_

TILE_ROWS = 16
"""Rows of a product of queries and keys, of one head.

The head is a key/value head. Part of the contract.
"""

PAD_BLOCK = 0

FLOOR = -1e30
"""Maximum of a row that sees no key."""

GATHERED, IN_PLACE = "gathered", "in place"
IN_PROGRAM = (GATHERED,)


@dataclass(slots=True)
class HpuWork(AttentionWork):
    """A step's rows, for `HpuAttention.send` to fill the static tensors.

    ``blocks``, int64, are the blocks of the rows one after the other. ``row`` is the row of each block, and ``number``
    the block's index in its row.
    """

    step: StepRows
    blocks: np.ndarray
    row: np.ndarray
    number: np.ndarray


@dataclass(frozen=True, kw_only=True)
class HpuLayer(AttentionLayer):
    """A layer with its scales in tensors, so that layers share recipes.

    A number would be part of a recipe. ``score_scale`` [1] includes the keys' scale. For a cache of eight bits,
    ``stored`` [2 * kv heads, 1] divides keys and values before they are stored, and ``value_scale`` [1] multiplies the
    output.
    """

    score_scale: Tensor
    stored: Tensor | None
    value_scale: Tensor | None

    @classmethod
    def of(cls, layer: AttentionLayer, device: torch.device) -> HpuLayer:
        key, value = layer.kv_scales
        narrow = layer.cache.dtype != layer.dtype

        def tensor(*values: float) -> Tensor:
            return torch.tensor(values, dtype=torch.float32).to(device)

        return cls(
            **vars(layer),
            score_scale=tensor(layer.scale * key),
            stored=tensor(key, value).repeat_interleave(layer.num_kv_heads).unsqueeze(1) if narrow else None,
            value_scale=tensor(value) if narrow else None,
        )

    def store(self, rows: Tensor, kv: Tensor) -> None:
        """Write ``kv`` [tokens, 2 * kv heads, dim] to ``rows`` of the cache.

        Each head of a token has a row.
        """
        cache, kv = self.cache.view(-1, self.head_dim), finite_values(kv, bounded=self.stored is not None)
        if self.stored is None:
            cache.index_copy_(0, rows, kv.reshape(-1, self.head_dim))
        else:
            codes = round_to(kv, self.stored, cache.dtype).view(-1, self.head_dim)
            cache.view(torch.uint8).index_copy_(0, rows, codes.view(torch.uint8))

    def blocks(self, numbers: Tensor) -> Tensor:
        """Return the blocks of these ``numbers``."""
        if self.stored is None:
            return self.cache.index_select(0, numbers)
        return self.cache.view(torch.uint8).index_select(0, numbers).view(self.cache.dtype)

    def scaled(self, out: Tensor) -> Tensor:
        """Return ``out`` times the values' scale, in the model's dtype.

        ``out`` is fp32, computed with the values as stored.
        """
        return (out if self.value_scale is None else out * self.value_scale).to(self.dtype)


class HpuAttention:
    """Attention of all layers over static tensors.

    A step fills the tensors before its programs run.
    """

    def __init__(self, layers: Sequence[AttentionLayer], limits: Limits, bridge: Bridge, *, contiguous: bool) -> None:
        self._layers = [HpuLayer.of(layer, bridge.device) for layer in layers]
        self._bridge, self._contiguous = bridge, contiguous
        _, _, self._kv_heads, self._size, self._dim = layers[0].cache.shape
        self._blocks = len(layers[0].cache)
        self._group = layers[0].num_heads // self._kv_heads
        self._tile = max(TILE_ROWS // self._group, 1)  # queries
        self._rows, self._most = limits.max_num_seqs, limits.max_blocks_per_seq
        tokens = max(limits.max_num_batched_tokens, limits.max_num_seqs)
        pairs, tiles = self._rows * self._most, -(-tokens // self._tile) + self._rows
        device = bridge.device

        def static(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.int32, device=device)

        self._table = static(self._rows + 1, self._most)
        self._pairs = static(3, pairs)  # the block of each pair, its row, and the position of its first key
        self._places = static(self._rows * self._most)  # [row, number]: the index of the pair, or none
        self._tiles = static(tiles, 1 + self._tile)  # the slot of each tile, and its queries
        self._token_places = static(tokens)  # the query of the tiles that each token is
        self._table_now = np.zeros((self._rows + 1, self._most), np.int32)
        self._inputs: StepInputs | None = None
        self.variant: Hashable = GATHERED
        self._seen: set[tuple[int, int, int, int | None]] = set()

    def list_sizes(self, tokens: int, rows: int, *, width: int) -> tuple[int, ...]:
        """Return no sizes: attention has static tensors of its own.

        Their use depends on the whole bucket.
        """
        return ()

    def variants(self, key: Any) -> tuple[Hashable, ...]:
        bucket = key.program.size
        if bucket.phase != "decode" or not self._contiguous:
            return IN_PROGRAM
        return self._forms(self._length(bucket.rows, bucket.blocks, bucket.longest))

    def _forms(self, pairs: int) -> tuple[Hashable, ...]:
        return (GATHERED, IN_PLACE) if self._contiguous and pairs < self._blocks else IN_PROGRAM

    def _length(self, rows: int, blocks: int, longest: int) -> int:
        """Return the number of pairs of a decoding program."""
        return blocks or rows * (-(-longest // self._size) or self._most)

    def plan(self, step: StepRows, tables: BlockTables) -> HpuWork:
        """Plan for this step alone: visible keys change with every token."""
        counts = -(-(step.first + step.extend) // tables.block_size)
        row = np.repeat(np.arange(len(step.slots)), counts)
        ends = np.cumsum(counts)
        number = np.arange(len(row)) - np.repeat(ends - counts, counts)
        blocks = tables.block_table[step.slots[row], number].astype(np.int64)
        return HpuWork([], -1, tables.table_writes, step, blocks, row, number)

    def write(self, turn: int, tables: BlockTables) -> None:
        self._table_now[: len(tables.block_table)] = tables.block_table[:, : self._most]

    def send(self, turn: int, work: AttentionWork, inputs: StepInputs) -> None:
        """Fill the static tensors, and choose the form of the program."""
        assert isinstance(work, HpuWork)
        self._inputs = inputs
        self._table.copy_(torch.from_numpy(self._table_now))
        if inputs.decode:
            self._send_pairs(work, inputs)
        else:
            self.variant = GATHERED
            self._send_tiles(work, inputs)

    def _send_pairs(self, work: HpuWork, inputs: StepInputs) -> None:
        length = self._length(inputs.rows, inputs.blocks, inputs.longest)
        most = min(self._most, length)
        blocks, row, number = work.blocks, work.row, work.number
        alone = blocks.min() > PAD_BLOCK and blocks.max() <= length and len(np.unique(blocks)) == len(blocks)
        self.variant = IN_PLACE if alone and IN_PLACE in self._forms(length) else GATHERED
        at = blocks - PAD_BLOCK - 1 if self.variant == IN_PLACE else np.arange(len(blocks))
        pairs = np.zeros((3, length), np.int32)
        pairs[2] = self._most * self._size  # beyond every key that a row sees
        pairs[0, at], pairs[1, at], pairs[2, at] = blocks, row, number * self._size
        places = np.full((inputs.rows, most), length, np.int32)
        places[row, number] = at
        self._pairs[:, :length].copy_(torch.from_numpy(pairs))
        self._places[: places.size].copy_(torch.from_numpy(places.reshape(-1)))

    def _send_tiles(self, work: HpuWork, inputs: StepInputs) -> None:
        step, tile = work.step, self._tile
        tokens = len(inputs.tokens)
        per_row = -(-step.extend // tile)
        row = np.repeat(np.arange(len(step.slots)), per_row)
        first = (np.arange(len(row)) - np.repeat(np.cumsum(per_row) - per_row, per_row)) * tile
        begin = (step.ends - step.extend)[row] + first
        tiles = np.zeros((self._num_tiles(tokens, inputs.rows), 1 + tile), np.int32)
        tiles[:, 0] = self._rows
        tiles[: len(row), 0] = step.slots[row]
        query = begin[:, None] + np.arange(tile)
        real = first[:, None] + np.arange(tile) < step.extend[row][:, None]
        tiles[: len(row), 1:] = np.where(real, query, begin[:, None])
        places = np.zeros(tokens, np.int32)
        places[query[real]] = np.flatnonzero(real.reshape(-1))
        self._tiles[: len(tiles)].copy_(torch.from_numpy(tiles))
        self._token_places[:tokens].copy_(torch.from_numpy(places))

    def _num_tiles(self, tokens: int, rows: int) -> int:
        """Return the most tiles of a step."""
        return tokens // self._tile + min(rows, tokens)

    def attend(self, inputs: StepInputs, out: Tensor) -> Attend:
        find = self._decode if inputs.decode else self._prefill

        def attend(index: int, qkv: Tensor) -> Tensor:
            layer = self._layers[index]
            with self._bridge.unit():
                self._store(layer, qkv, inputs)
            for form in self._forms_to_run(inputs, layer.window):
                with self._bridge.unit():
                    out.copy_(find(layer, qkv, inputs, form))
            return out

        return attend

    def _forms_to_run(self, inputs: StepInputs, window: int | None) -> list[Hashable]:
        """Return the form of the step.

        The first time that a program runs piece by piece, return all of its forms, so that each one is compiled.
        """
        length = self._length(inputs.rows, inputs.blocks, inputs.longest)
        key = len(inputs.tokens), inputs.rows, length, window
        if self._bridge.inside or not inputs.decode or key in self._seen:
            return [self.variant]
        self._seen.add(key)
        return [*(form for form in self._forms(length) if form != self.variant), self.variant]

    def _store(self, layer: HpuLayer, qkv: Tensor, inputs: StepInputs) -> None:
        """Norm and rotate queries and keys, and store keys and values.

        Queries and keys change in place.
        """
        heads, kv_heads = layer.num_heads, layer.num_kv_heads
        turned = qkv[:, : heads + kv_heads]
        if layer.qk_norm is not None:
            turned.copy_(layer.qk_norm(turned))
        if layer.rope is not None:
            at = inputs.positions
            rows = layer.rope[: len(at)] if layer.by_token else layer.rope.index_select(0, at)
            apply_rope_(turned, *rows.unbind(1))
        if layer.growth is not None:
            turned[:, :heads].mul_(layer.growth.index_select(0, inputs.positions)[:, None, None])
        place = inputs.slots * self._most + inputs.positions.div(self._size, rounding_mode="floor")
        block = self._table.view(-1).index_select(0, place).long()
        head = torch.arange(2 * kv_heads, device=qkv.device)
        rows = (block[:, None] * (2 * kv_heads) + head) * self._size + inputs.positions[:, None] % self._size
        layer.store(rows.view(-1), qkv[:, heads:])

    def _decode(self, layer: HpuLayer, qkv: Tensor, inputs: StepInputs, form: Hashable) -> Tensor:
        """Return [tokens, heads * dim] of rows with one query each.

        All pairs are computed at once, then each row's are merged in order.
        """
        rows, length = inputs.rows, self._length(inputs.rows, inputs.blocks, inputs.longest)
        block, owner, start = self._pairs[:, :length].unbind()
        found = layer.cache[PAD_BLOCK + 1 :][:length] if form == IN_PLACE else layer.blocks(block)
        query = self._queries(layer, qkv[:rows].index_select(0, owner).unsqueeze(1).expand(-1, self._tile, -1, -1))
        at = inputs.positions[:rows].index_select(0, owner).unsqueeze(1).expand(-1, self._tile)
        parts = [
            torch.cat([part[:, :, : self._group], part.new_full((1, *part[0, :, : self._group].shape), empty)])
            for part, empty in zip(self._partial(layer, query, found, at, start), (FLOOR, 0.0, 0.0), strict=True)
        ]
        places = self._places[: rows * min(self._most, length)].view(rows, -1)
        merged = self._merge(
            tuple(part.index_select(0, places[:, number]) for part in parts) for number in range(places.shape[1])
        )
        return layer.scaled(merged.reshape(rows, -1))

    def _prefill(self, layer: HpuLayer, qkv: Tensor, inputs: StepInputs, form: Hashable) -> Tensor:
        """Return [tokens, heads * dim] of any step: tiles against one block after the other."""
        tokens = len(inputs.tokens)
        tiles = self._tiles[: self._num_tiles(tokens, inputs.rows)]
        slot, queries = tiles[:, 0], tiles[:, 1:]
        flat = queries.reshape(-1)
        query = self._queries(layer, qkv.index_select(0, flat).view(len(tiles), self._tile, *qkv.shape[1:]))
        at = inputs.positions.index_select(0, flat).view(len(tiles), self._tile)
        blocks = self._table.index_select(0, slot)

        def partial(number: int) -> tuple[Tensor, ...]:
            found = layer.blocks(blocks[:, number])
            return self._partial(layer, query, found, at, torch.full_like(slot, number * self._size))

        merged = self._merge(partial(number) for number in range(self._most))  # [tiles, kv heads, tile * group, dim]
        merged = merged.view(len(tiles), self._kv_heads, self._tile, self._group, self._dim).transpose(1, 2)
        places = self._token_places[:tokens]
        return layer.scaled(merged.reshape(len(tiles) * self._tile, -1).index_select(0, places))

    def _queries(self, layer: HpuLayer, qkv: Tensor) -> Tensor:
        """Return queries, fp32 [n, kv heads, tile * group, dim], of ``qkv`` [n, tile, all heads, dim]."""
        count, tile = qkv.shape[:2]
        query = qkv[:, :, : layer.num_heads].reshape(count, tile, self._kv_heads, self._group, self._dim)
        return query.transpose(1, 2).reshape(count, self._kv_heads, -1, self._dim).float()

    def _partial(
        self, layer: HpuLayer, query: Tensor, found: Tensor, at: Tensor, start: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the partial results of ``query`` against the blocks ``found`` [n, 2, kv heads, block, dim].

        They are maximum and sum, [n, kv heads, tile * group, 1], and the product with the values. The blocks' first
        keys are at ``start`` [n]; ``at`` [n, tile] are the queries' positions.
        """
        keys, values = found.float().unbind(1)
        distance = start[:, None, None] + torch.arange(self._size, device=at.device) - at[:, :, None]
        hidden = distance > 0
        if layer.window is not None:
            hidden = hidden | (distance <= -layer.window)
        values = torch.where(hidden.all(1)[:, None, :, None], 0.0, values)  # a slot that no query sees holds anything
        scores = torch.matmul(query, keys.mT) * layer.score_scale
        each = (len(at), 1, self._tile, 1, self._size)
        wide = scores.view(len(at), self._kv_heads, self._tile, self._group, self._size)
        if layer.alibi is not None:
            slopes = layer.alibi.view(1, self._kv_heads, 1, self._group, 1)
            wide = wide + slopes * distance.view(each).float()
        scores = torch.where(hidden.view(each), -torch.inf, wide).view(scores.shape)
        peak = scores.amax(-1, keepdim=True).clamp_min(FLOOR)
        weights = (scores - peak).exp()
        return peak, weights.sum(-1, keepdim=True), torch.matmul(weights, values)

    def _merge(self, parts: Iterator[tuple[Tensor, ...]]) -> Tensor:
        """Merge partial results in order."""
        peak, total, product = next(parts)
        for other_peak, other_total, other in parts:
            highest = torch.maximum(peak, other_peak)
            mine, theirs = (peak - highest).exp(), (other_peak - highest).exp()
            total = total * mine + other_total * theirs
            product = product * mine + other * theirs
            peak = highest
        merged: Tensor = product / total.clamp_min(torch.finfo(total.dtype).tiny)
        return merged

    def clear_inputs(self) -> None:
        """Zero attention's static tensors and the step's integers.

        The integers share one allocation for all programs.
        """
        self.clear()
        if self._inputs is not None:
            counts = self._inputs.counts
            counts.new_empty(0).set_(counts.untyped_storage()).zero_()

    def clear(self) -> None:
        """Make every block table on the device all pad block."""
        self._table.zero_()
        self._pairs.zero_()
        self._places.zero_()
        self._tiles.zero_()
        self._token_places.zero_()
