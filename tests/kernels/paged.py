"""Sequences of random keys and values in a paged cache, for tests of attention on CUDA or in the interpreter."""

from __future__ import annotations

import copy
import dataclasses

import numpy as np
import torch

from preheat.backends.cuda.attention.paged import (
    AttentionConfig,
    decode_attention,
    prefill_attention,
    prefill_config,
    query_tile,
    verify_queries,
)  # fmt: skip
from preheat.backends.cuda.attention.rotary import rope_and_write
from preheat.backends.cuda.attention.values import Pieces, Places, Rows, Scores, Workspace
from preheat.backends.cuda.attention.work import SPLIT, decode_work, prefill_tiles, query_tiles
from preheat.model.families.mpt import alibi_slopes
from preheat.ops.float8 import round_to


@dataclasses.dataclass
class Bucket:
    heads: int = 4
    kv_heads: int = 2
    dim: int = 64
    dtype: torch.dtype = torch.bfloat16
    window: int | None = None
    alibi: bool = False
    stored: torch.dtype | None = None  # dtype of the cache, if another one; keys and values then have scales
    scales: tuple[float, float] = (1.0, 1.0)
    sinks: bool = False
    sides: bool = False

    def lasts(self, device="cpu"):
        """Return a sink for each head, fp32 [heads], or None without sinks."""
        return torch.linspace(-2, 4, self.heads, device=device) if self.sinks else None

    def slopes(self, device="cpu"):
        """Return the slopes of ALiBi, fp32 [heads], or None without ALiBi."""
        return torch.tensor(alibi_slopes(self.heads, 8.0), device=device) if self.alibi else None


class Pages:
    """Sequences in a paged cache.

    Sequence i has ``lengths[i]`` tokens; its slot is i. ``by_block``: a block's layers lie one after another.
    """

    def __init__(self, shape: Bucket, lengths, block_size=64, seed=0, device="cpu", by_block=False):
        self.shape, self.lengths, self.device = shape, lengths, device
        generator = torch.Generator().manual_seed(seed)
        counts = [-(-n // block_size) for n in lengths]
        size = (sum(counts) + 1, 2, shape.kv_heads, block_size, shape.dim)
        # Blocks begin as NaN: numbers beyond a sequence must not reach a kernel's output.
        layers = torch.full((size[0], 3, *size[1:]) if by_block else (3, *size), torch.nan)
        layers = layers.to(shape.stored or shape.dtype)
        self.cache = (layers.transpose(0, 1) if by_block else layers)[1]
        order = torch.randperm(sum(counts), generator=torch.Generator().manual_seed(seed + block_size)) + 1
        table = torch.zeros(len(lengths) + 1, max(counts), dtype=torch.int32)
        self.qkv, at = [], 0
        for i, n in enumerate(lengths):
            table[i, : counts[i]] = order[at : at + counts[i]]
            at += counts[i]
            qkv = torch.randn(n, shape.heads + 2 * shape.kv_heads, shape.dim, generator=generator).to(shape.dtype)
            self.put(table[i], qkv)
            self.qkv.append(qkv.to(device))
        self.table, self.cache = table.to(device), self.cache.to(device)
        if by_block and device != "cpu":  # the copy above made it contiguous
            whole = torch.empty(size[0], 3, *size[1:], dtype=self.cache.dtype, device=device)
            whole[:, 1] = self.cache
            self.cache = whole[:, 1]
        self.lasts, self.slopes = (
            shape.lasts(device),
            shape.slopes(device),
        )  # kernels read these before earlier ones end
        self.workspace = None

    def stored(self, qkv):
        """Return the keys and values of ``qkv`` as the cache holds them, [tokens, 2, kv heads, dim]."""
        kv, scales = qkv[:, self.shape.heads :].unflatten(1, (2, -1)), torch.tensor(self.shape.scales)
        return round_to(kv, scales.view(2, 1, 1).to(kv.device), self.shape.stored) if self.shape.stored else kv

    def put(self, blocks, qkv):
        """Write the keys and values of a sequence into its ``blocks``."""
        position, size = torch.arange(len(qkv), device=qkv.device), self.cache.shape[3]
        bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[self.cache.element_size()]
        places = blocks[position // size].long(), position % size
        self.cache.view(bits)[places[0], :, :, places[1]] = self.stored(qkv).contiguous().view(bits)

    def fill(self, value):
        """Write ``value`` to all slots that hold no token."""
        self.cache.copy_(torch.full(self.cache.shape, value).to(self.cache.dtype))
        for i, qkv in enumerate(self.qkv):
            self.put(self.table[i], qkv)

    def overflow(self, i, position, *, stored=True):
        """Make a value of a token of sequence i NaN.

        ``stored``: write it as an engine does, else put it as it is.
        """
        shape = self.shape
        self.qkv[i][position, -1, 3] = torch.nan
        if not stored:
            self.put(self.table[i], self.qkv[i])
            return
        _, places, _ = self._step([(i, position, 1)])
        scales = shape.scales if shape.stored else None
        rope_and_write(self.qkv[i][position : position + 1].clone(), self.cache, places, scales=scales)

    def widened(self):
        """Return the same sequences with a cache of decoded numbers, in the queries' dtype."""
        other = copy.copy(self)
        other.cache = self.cache.to(self.shape.dtype)
        return other

    def _step(self, work):
        """Return the inputs of a step of (sequence, first position, number of tokens)."""
        qkv = torch.cat([self.qkv[i][p : p + n] for i, p, n in work])
        slots = torch.cat([torch.full((n,), i, dtype=torch.int32) for i, _, n in work]).to(self.device)
        positions = torch.cat([torch.arange(p, p + n, dtype=torch.int32) for _, p, n in work]).to(self.device)
        q = qkv[:, : self.shape.heads]
        out = torch.full((len(qkv), self.shape.heads * self.shape.dim), torch.nan, dtype=qkv.dtype, device=self.device)
        return q, Places(slots, positions, self.table), out

    def _pieces(self, pieces, spare):
        """Return ``pieces`` on the device, before ``spare`` rows of nonsense."""
        padded = np.concatenate([pieces, np.full((spare, 2), 1 << 20, np.int32)])
        count = torch.tensor([len(pieces)], dtype=torch.int32)
        return Pieces(torch.from_numpy(padded).to(self.device), count.to(self.device))

    def _scores(self, split):
        key, value = self.shape.scales
        return Scores(
            self.shape.dim**-0.5 * key, self.shape.window, split, self.slopes,
            value_scale=value if self.shape.stored else None, sinks=self.lasts,
        )  # fmt: skip

    def decode(self, work, split=SPLIT, config: AttentionConfig | None = None, spare=3):
        """Return the attention of single tokens: ``work`` is a list of (sequence, position)."""
        q, places, out = self._step([(i, p, 1) for i, p in work])
        pieces = decode_work(np.arange(len(work)), np.array([p for _, p in work]), split, self.shape.window)
        on_device = self._pieces(pieces, spare)
        workspace = Workspace(len(on_device.work), len(work), self.shape.heads, self.shape.dim, q.device)
        decode_attention(q, self.cache, out, places, on_device, workspace, self._scores(split), config=config)
        assert not workspace.arrived.any()
        return out

    def verify(self, work, width, split=SPLIT, room=None, spare=3):
        """Return the attention of rows of up to ``width`` tokens, in a program for drafts.

        ``work`` is a list of (sequence, first position, number of tokens). Pieces beyond ``room`` make each tile one
        piece.
        """
        shape = self.shape
        q, places, out = self._step(work)
        first, extends = (np.array(x) for x in list(zip(*work, strict=True))[1:])
        tile = verify_queries(shape.heads, shape.kv_heads, width, shape.dim, shape.dtype)
        starts, at, lengths = query_tiles(extends.cumsum(), extends, first, tile)
        pieces = decode_work(starts, at, split, shape.window, queries=lengths, room=room)
        on_device = self._pieces(pieces, spare)
        workspace = Workspace(len(on_device.work) * tile, len(q), shape.heads, shape.dim, q.device)
        rows = Rows(len(work), width)
        decode_attention(q, self.cache, out, places, on_device, workspace, self._scores(split), rows)
        assert not workspace.arrived.any()
        return out

    def prefill(self, work, split=SPLIT, config: AttentionConfig | None = None, spare=3):
        """Return the attention of runs: ``work`` is a list of (sequence, first position, number of tokens)."""
        q, places, out = self._step(work)
        extends = np.array([n for _, _, n in work])
        tile = query_tile(
            self.shape.heads, self.shape.kv_heads, config or prefill_config(self.shape.dim, self.shape.dtype)
        )  # fmt: skip
        first = np.array([p for _, p, _ in work])
        starts, sides = np.cumsum(extends) - extends, self.shape.sides
        tiles = self._pieces(prefill_tiles(starts, extends, first, tile, sides=sides), spare)
        prefill_attention(q, self.cache, out, places, tiles, self._scores(split), config=config, sides=sides)
        return out

    def exact(self, i):
        """Return the float64 attention of a whole sequence, [tokens, heads * dim].

        Keys and values are the decoded numbers of the cache.
        """
        shape, n = self.shape, self.lengths[i]
        group = shape.heads // shape.kv_heads
        scales = torch.tensor(shape.scales, dtype=torch.float64, device=self.device).view(2, 1, 1)
        q, (k, v) = self.qkv[i][:, : shape.heads].double(), (self.stored(self.qkv[i]).double() * scales).unbind(1)
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        position = torch.arange(n, device=self.device)
        seen = (position[None] <= position[:, None]) | shape.sides
        if shape.window:
            seen &= (position[None] - position[:, None]).abs() < shape.window
        scores = torch.einsum("qhd,khd->hqk", q, k) * shape.dim**-0.5
        if shape.alibi:
            scores += shape.slopes(self.device).double()[:, None, None] * (position[None] - position[:, None])
        scores = scores.masked_fill(~seen, -torch.inf)
        if shape.sinks:
            own = shape.lasts(self.device).double()[:, None, None].expand(-1, n, 1)
            scores = torch.cat((scores, own), -1)
        weights = scores.softmax(-1)[..., :n]
        return torch.einsum("hqk,khd->qhd", weights, v).reshape(n, -1)


def check_unused_slots(made, expected, split=SPLIT):
    """Assert that every kernel gives whole sequences the ``expected`` attention, for any value of unused slots.

    Assert also that a query behind the end of a sequence sees such a value, so that the check could fail.
    """
    last, n = len(made.lengths) - 1, made.lengths[-1]
    for value in (0.0, torch.inf, 3e38):  # they began as NaN
        made.fill(value)
        assert torch.equal(made.prefill([(i, 0, n) for i, n in enumerate(made.lengths)], split), torch.cat(expected))
        ends = torch.stack([out[-1] for out in expected])
        assert torch.equal(made.decode([(i, n - 1) for i, n in enumerate(made.lengths)], split), ends)
        assert torch.equal(made.verify([(last, n - 3, 3)], 3, split), expected[last][-3:])
    made.fill(torch.nan)
    made.qkv[last] = torch.cat((made.qkv[last], made.qkv[last][-1:]))
    assert made.decode([(last, n)], split).isnan().all()


def check_overflow(made, expected, at, split=SPLIT):
    """Assert that a value that is not finite reaches the queries that see it, and no others.

    It is a value of token ``at`` of the last sequence.
    """
    last, n, window = len(made.lengths) - 1, made.lengths[-1], made.shape.window or made.lengths[-1]
    group = made.shape.heads // made.shape.kv_heads
    made.overflow(last, at)
    places = sorted({0, at - 1, at, at + 1, min(at + window, n) - 1, n - 1})
    runs = made.prefill([(last, 0, n)], split), range(n)
    drafts = made.verify([(last, at - 1, 3)], 3, split), range(at - 1, at + 2)
    for found, positions in (runs, drafts, (made.decode([(last, p) for p in places], split), places)):
        for each, position in zip(found, positions, strict=True):
            out, right = (one.view(made.shape.heads, -1) for one in (each, expected[last][position]))
            sees = at <= position < at + window
            assert torch.equal(out[:-group], right[:-group])
            assert out[-group:].isnan().all() if sees else torch.equal(out[-group:], right[-group:])


def check_overflow_is_found(made, at):
    """Assert that the check above could fail: put as it is, the value reaches queries before it."""
    last, n = len(made.lengths) - 1, made.lengths[-1]
    made.overflow(last, at, stored=False)
    assert made.prefill([(last, 0, n)])[:at].isnan().any()
    assert made.verify([(last, at - 1, 3)], 3)[0].isnan().any()


def relative_error(found, exact):
    return float((found.double() - exact).norm() / exact.norm())
