"""Attention of all layers on a CPU.

The host cuts a step into tiles and KV splits; torch's kernels do the rest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from preheat.backends.base.attention import Attend, AttentionLayer, AttentionWork, BlockTables, StepInputs, StepRows
from preheat.backends.cpu.decode_attention import DecodeAttention, Heads
from preheat.backends.cpu.paged_attention import PagedAttention, by_rows, max_keys, widest_tile
from preheat.backends.cpu.tiles import SPLIT, Rows, plan_tiles
from preheat.ops.float8 import round_to
from preheat.ops.rotary import apply_rope_


@dataclass(slots=True)
class CpuWork(AttentionWork):
    """Work of a step by kind of layer.

    ``decode`` are the rows that decode, if any, and ``prompts`` are groups of tiles. ``first_rows`` int64 [T,
    rows], by cache group, the rows of an entry and the rows between blocks, are rows of the cache: the first rows of
    each token's block, for every head's keys, then for every head's values.
    """

    decode: dict[Heads, DecodeAttention]
    prompts: dict[Heads, PagedAttention]
    first_rows: dict[tuple[int, int, int], Tensor]


class CpuAttention:
    """Attention over work that the host cuts for each step.

    Decoding rows keep their work for as long as it holds. With ``contiguous``, blocks of a whole KV split are read
    where they lie. A cache of eight bits is widened as it is read. The output is rounded to the dtype, multiplied by
    the values' scale, and rounded again.
    """

    def __init__(self, layers: Sequence[AttentionLayer], contiguous: bool) -> None:
        self._layers, self._in_place = layers, contiguous and layers[0].cache.shape[-2] == SPLIT
        self._dtype = layers[0].dtype
        self._kinds = [
            Heads(each.window, each.num_heads, each.num_kv_heads, each.head_dim, each.causal, each.cache.shape[1],
                  group=each.group, own=each.own, apart=each.cache.stride(0) // (each.cache.shape[-2] * each.head_dim))
            for each in layers
        ]  # fmt: skip
        self._stores = [_Store(each) for each in layers]
        self._block_size = layers[0].cache.shape[-2]
        self._widest = {
            kind: (max_keys(kind.kv_heads, kind.dim, self._dtype, kind.sides),
                   widest_tile(kind.heads // kind.kv_heads, kind.dim, self._dtype))
            for kind in dict.fromkeys(self._kinds)
        }  # fmt: skip
        self._entries = sorted({(kind.group, kind.rows, kind.step) for kind in self._kinds if kind.own})
        self._work: CpuWork | None = None
        self._turns: dict[int, tuple[Tensor, Tensor]] = {}
        self._new_rows: dict[tuple[int, int, int], Tensor] = {}

    def list_sizes(self, tokens: int, rows: int, *, width: int) -> tuple[int, ...]:
        """Return no sizes: the work is not read from the step's buffers."""
        return ()

    def plan(self, step: StepRows, tables: BlockTables) -> CpuWork:
        """Plan work that holds until a row's block is full.

        Work with prompts holds for this step only. Padding does not attend.
        """
        decode, count = step.num_decode, int(step.ends[-1])
        row = np.repeat(np.arange(len(step.slots)), step.extend)
        first = step.first.astype(np.int64)
        position = first[row] + np.arange(count) - (step.ends - step.extend)[row]
        blocks = np.zeros((step.tokens, tables.tables.shape[1]), np.int64)
        blocks[:count] = tables.tables[step.slots[row], :, position // tables.block_size]
        first_rows = {
            each: _first_rows(blocks[:, each[0]], each[1], each[2], tables.block_size) for each in self._entries
        }
        only = decode == len(step.slots)
        rows = {
            kind: DecodeAttention(
                first[:decode],
                step.slots[:decode],
                tables.tables[:, kind.group],
                kind,
                self._dtype,
                block_size=tables.block_size,
                tokens=step.tokens if only else decode,
                max_keys=most,
                in_place=self._in_place,
            )
            for kind, (most, _) in self._widest.items()
            if decode
        }
        prompts = {} if only else {kind: self._tiles(kind, step, tables) for kind in self._widest}
        steady = min(each.steady for each in rows.values()) if only else -1
        return CpuWork([], steady, tables.table_writes, rows, prompts, first_rows)

    def _tiles(self, kind: Heads, step: StepRows, tables: BlockTables) -> PagedAttention:
        """Return the tiles of the rows that do not decode."""
        rows, (most, widest) = slice(step.num_decode, None), self._widest[kind]
        begin, extend = step.first[rows].astype(np.int64), step.extend[rows]
        blocks = -(-int((begin + extend).max()) // tables.block_size)
        cut = Rows((step.ends - step.extend)[rows], begin, extend, tables.tables[step.slots[rows], kind.group, :blocks])
        tiles = plan_tiles(cut, tables.block_size, kind.window, most, widest=widest, causal=kind.causal)
        return PagedAttention(
            tiles, kind.heads, kind.kv_heads, kind.dim, self._dtype, sides=kind.sides, apart=kind.step
        )

    def write(self, turn: int, tables: BlockTables) -> None:
        """Do nothing: the work holds the blocks already."""

    def send(self, turn: int, work: AttentionWork, inputs: StepInputs) -> None:
        """Let programs run on ``work``, at the positions of ``inputs``.

        Each token's rotation, and the places of its keys and values, are looked up once for all layers.
        """
        assert isinstance(work, CpuWork)
        self._work = work
        for rope, by_token in {
            id(layer.rope): (layer.rope, layer.by_token) for layer in self._layers if layer.rope is not None
        }.values():
            rows = rope[: len(inputs.positions)] if by_token else rope.index_select(0, inputs.positions)
            self._turns[id(rope)] = rows[:, 0], rows[:, 1]
        offset = inputs.positions.bitwise_and(self._block_size - 1).unsqueeze(1)
        self._new_rows = {entry: (first + offset).view(-1) for entry, first in work.first_rows.items()}
        for each in work.decode.values():
            each.move(inputs.positions)

    def attend(self, inputs: StepInputs, out: Tensor) -> Attend:
        work = self._work
        assert work is not None, "no step was sent"
        room = {out.shape[1]: out}

        def attend(index: int, qkv: Tensor) -> Tensor:
            layer, kind = self._layers[index], self._kinds[index]
            heads, dim = kind.heads, kind.dim
            turned = qkv[:, : heads + kind.kv_heads * kind.own]
            if layer.qk_norm is not None:
                turned.copy_(layer.qk_norm(turned))
            if layer.rope is not None:
                apply_rope_(turned[..., layer.still :], *self._turns[id(layer.rope)])
            if layer.growth is not None:
                qkv[:, :heads].mul_(layer.growth.index_select(0, inputs.positions)[:, None, None])
            store = self._stores[index]
            if kind.own:
                store.write(self._new_rows[kind.group, kind.rows, kind.step], qkv[:, heads:])
            decode = work.decode.get(kind)
            if decode is not None:
                bias = layer.alibi if layer.distances is None else layer.distances
                found = decode(qkv, index, layer.cache, store.scale, bias, sinks=layer.sinks)
                if not work.prompts:
                    return store.scaled(found)
            if (own := room.get(heads * dim)) is None:
                own = room[heads * dim] = out.new_empty(len(out), heads * dim)
            own.zero_()
            if decode is not None:
                own[: len(found)] = found
            prompts = work.prompts[kind]
            bias = layer.alibi if layer.distances is None else layer.distances
            found = prompts(qkv[:, :heads], layer.cache, store.scale, bias, layer.sinks)
            own.view(-1, heads, dim).index_copy_(0, prompts.targets, found)
            return store.scaled(own)

        return attend

    def clear(self) -> None:
        """Do nothing: no block table is kept."""


class _Store:
    """The cache of one layer, as rows of a head.

    ``scale`` is the scale of scores with stored keys.
    """

    def __init__(self, layer: AttentionLayer) -> None:
        key, value = layer.kv_scales
        sides = (key, value)[: layer.cache.shape[1]]
        value = sides[-1]
        self._dtype = None if layer.cache.dtype == layer.dtype else layer.cache.dtype
        self._rows = by_rows(layer.cache, layer.head_dim)
        self._scales = torch.tensor(sides).repeat_interleave(layer.num_kv_heads).unsqueeze(1)
        self._value = value
        self.scale = layer.scale * key

    def write(self, rows: Tensor, kv: Tensor) -> None:
        """Store ``kv`` [tokens, sides * kv heads, dim] in these ``rows``."""
        if self._dtype is None:
            self._rows.index_copy_(0, rows, kv.reshape(-1, kv.shape[-1]))
            return
        rounded = round_to(kv, self._scales, self._dtype).view(-1, kv.shape[-1])
        self._rows.view(torch.uint8).index_copy_(0, rows, rounded.view(torch.uint8))

    def scaled(self, out: Tensor) -> Tensor:
        """Multiply ``out``, computed with stored values, by the values' scale in place."""
        return out if self._value == 1.0 else out.mul_(self._value)


def _first_rows(block: np.ndarray, entry: int, step: int, block_size: int) -> Tensor:
    """Return the first rows of each head in each ``block``; a block has ``step`` rows of slots.

    They are int64 [blocks, entry]: each head's keys, then each head's values.
    """
    return torch.from_numpy((block[:, None] * step + np.arange(entry)) * block_size)
