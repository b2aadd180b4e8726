"""Attention of all layers on a CPU: the step is cut into tiles and splits on the host, torch's kernels do the rest."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from preheat.backends.base import Attend, AttentionLayer, AttentionWork, BlockTables, StepInputs, StepRows
from preheat.backends.cpu.paged_attention import PagedAttention, max_keys, widest_tile
from preheat.backends.cpu.tiles import Rows, plan_tiles
from preheat.ops.rotary import apply_rope_


class _Kind(NamedTuple):
    """What decides how a layer's attention is cut into work."""

    window: int | None
    heads: int
    kv_heads: int
    dim: int


@dataclass(slots=True)
class CpuWork(AttentionWork):
    """``groups`` of tiles for each kind of layer, and where each token's keys and values go: ``kv_rows`` int64 [T * 2 *
    kv heads] rows of the cache, by kv heads.
    """

    groups: dict[_Kind, list[PagedAttention]]
    kv_rows: dict[int, Tensor]


class CpuAttention:
    """With ``contiguous`` reads, decoding rows read the cache in place, see :func:`plan_tiles`."""

    def __init__(self, layers: Sequence[AttentionLayer], contiguous: bool) -> None:
        self._layers, self._contiguous = layers, contiguous
        self._dtype = layers[0].cache.dtype
        self._kinds = [_Kind(each.window, each.num_heads, each.num_kv_heads, each.head_dim) for each in layers]
        self._rows = [each.cache.view(-1, each.head_dim) for each in layers]
        self._widest = {
            kind: (max_keys(kind.kv_heads, kind.dim, self._dtype),
                   widest_tile(kind.heads // kind.kv_heads, kind.dim, self._dtype))
            for kind in dict.fromkeys(self._kinds)
        }  # fmt: skip
        self._work: CpuWork | None = None
        self._turns: dict[int, tuple[Tensor, Tensor]] = {}

    def list_sizes(self, tokens: int, rows: int, *, decode: bool) -> tuple[int, ...]:
        """None: the work is not read from the step's buffers."""
        return ()

    def plan(self, step: StepRows, tables: BlockTables) -> CpuWork:
        """Padding of a step that only decodes counts as rows that read the pad block; elsewhere it does not attend."""
        size, count = step.tokens, int(step.ends[-1])
        starts = step.ends - step.extend
        row = np.repeat(np.arange(len(step.slots)), step.extend)
        position = np.zeros(size, np.int64)
        position[:count] = step.first.astype(np.int64)[row] + np.arange(count) - starts[row]
        block = np.zeros(size, np.int64)
        block[:count] = tables.block_table[step.slots[row], position[:count] // tables.block_size]
        kv_rows = {
            heads: torch.from_numpy(_kv_rows(block, position % tables.block_size, heads, tables.block_size))
            for heads in {kind.kv_heads for kind in self._kinds}
        }
        pad = size - count if step.num_decode == len(step.slots) else 0
        groups = {kind: self._groups(kind, step, starts, tables, pad) for kind in self._widest}
        return CpuWork([], -1, groups, kv_rows)

    def _groups(
        self, kind: _Kind, step: StepRows, starts: np.ndarray, tables: BlockTables, pad: int
    ) -> list[PagedAttention]:
        """The groups of tiles: decoding rows, with ``pad`` rows that read the pad block, and rows of several tokens."""
        decode, groups = step.num_decode, []
        most, widest = self._widest[kind]
        first = step.first.astype(np.int64)
        for part, more in ((slice(0, decode), pad), (slice(decode, None), 0)):
            rows = step.slots[part]
            if not len(rows) + more:
                continue
            extend, begin = step.extend[part], first[part]
            blocks = -(-int((begin + extend).max(initial=1)) // tables.block_size)
            cut = Rows(starts[part], begin, extend, tables.block_table[rows, :blocks])
            if more:
                cut = _padded(cut, more)
            tiles = plan_tiles(
                cut, tables.block_size, kind.window, most, widest=widest, contiguous=self._contiguous
            )  # fmt: skip
            groups.append(PagedAttention(tiles, kind.heads, kind.kv_heads, kind.dim, self._dtype))
        return groups

    def write(self, turn: int, tables: BlockTables) -> None:
        """The work holds the blocks already."""

    def send(self, turn: int, work: AttentionWork, inputs: StepInputs) -> None:
        """From now on programs run on ``work``; how far each token turns is looked up once for all layers."""
        assert isinstance(work, CpuWork)
        self._work = work
        for rope in {id(layer.rope): layer.rope for layer in self._layers}.values():
            cos, sin = rope.index_select(0, inputs.positions).unbind(1)
            self._turns[id(rope)] = cos, sin

    def attend(self, inputs: StepInputs, out: Tensor) -> Attend:
        work = self._work
        assert work is not None, "no step was sent"

        def attend(index: int, qkv: Tensor) -> Tensor:
            layer, kind = self._layers[index], self._kinds[index]
            heads, dim = kind.heads, kind.dim
            turned = qkv[:, : heads + kind.kv_heads]
            if layer.qk_norm is not None:
                turned.copy_(layer.qk_norm(turned))
            apply_rope_(turned, *self._turns[id(layer.rope)])
            self._rows[index].index_copy_(0, work.kv_rows[kind.kv_heads], qkv[:, heads:].reshape(-1, dim))
            groups = work.groups[kind]
            if len(groups) == 1 and len(groups[0].targets) == len(qkv):  # every token attends, in order
                return groups[0](qkv[:, :heads], layer.cache, layer.scale).reshape(len(qkv), heads * dim)
            found = out.view(-1, heads, dim).zero_()
            for group in groups:
                found.index_copy_(0, group.targets, group(qkv[:, :heads], layer.cache, layer.scale))
            return out

        return attend

    def clear(self) -> None:
        """Nothing of a block table is kept."""


def _kv_rows(block: np.ndarray, offset: np.ndarray, kv_heads: int, block_size: int) -> np.ndarray:
    """Each token's rows of the cache: for every head its key, then for every head its value."""
    heads = np.arange(2 * kv_heads)
    rows: np.ndarray = (block[:, None] * len(heads) + heads) * block_size + offset[:, None]
    return rows.reshape(-1)


def _padded(rows: Rows, count: int) -> Rows:
    """``count`` more rows of one token each, which are the next tokens of the step and read the pad block."""
    zeros = np.zeros(count, np.int64)
    return Rows(
        np.concatenate((rows.first_query, len(rows.first_query) + np.arange(count))),
        np.concatenate((rows.first_position, zeros)),
        np.concatenate((rows.extend, zeros + 1)),
        np.pad(rows.block_tables, ((0, count), (0, 0))),
    )
