"""Sequences of random keys and values in a paged cache, for tests of attention on CUDA or in the interpreter."""

from __future__ import annotations

import dataclasses

import numpy as np
import torch

from preheat.backends.cuda.paged_attention import (
    AttentionConfig,
    Workspace,
    decode_attention,
    prefill_attention,
    prefill_config,
    query_tile,
)  # fmt: skip
from preheat.backends.cuda.work import SPLIT, decode_work, prefill_tiles


@dataclasses.dataclass
class Bucket:
    heads: int = 4
    kv_heads: int = 2
    dim: int = 64
    dtype: torch.dtype = torch.bfloat16
    window: int | None = None


class Pages:
    """Sequence i has ``lengths[i]`` tokens; its slot is i. ``by_block``: a block's layers lie one after another."""

    def __init__(self, shape: Bucket, lengths, block_size=64, seed=0, device="cpu", by_block=False):
        self.shape, self.lengths, self.device = shape, lengths, device
        generator = torch.Generator().manual_seed(seed)
        counts = [-(-n // block_size) for n in lengths]
        size = (sum(counts) + 1, 2, shape.kv_heads, block_size, shape.dim)
        # Blocks begin as NaN: what a kernel reads beyond a sequence must not reach its output.
        layers = torch.full((size[0], 3, *size[1:]) if by_block else (3, *size), torch.nan, dtype=shape.dtype)
        self.cache = (layers.transpose(0, 1) if by_block else layers)[1]
        order = torch.randperm(sum(counts), generator=torch.Generator().manual_seed(seed + block_size)) + 1
        table = torch.zeros(len(lengths) + 1, max(counts), dtype=torch.int32)
        self.qkv, at = [], 0
        for i, n in enumerate(lengths):
            table[i, : counts[i]] = order[at : at + counts[i]]
            at += counts[i]
            qkv = torch.randn(n, shape.heads + 2 * shape.kv_heads, shape.dim, generator=generator).to(shape.dtype)
            kv = qkv[:, shape.heads :].view(n, 2, shape.kv_heads, shape.dim)
            position = torch.arange(n)
            self.cache[table[i, position // block_size].long(), :, :, position % block_size] = kv
            self.qkv.append(qkv.to(device))
        self.table, self.cache = table.to(device), self.cache.to(device)
        if by_block and device != "cpu":  # the copy above made it contiguous
            whole = torch.empty(size[0], 3, *size[1:], dtype=shape.dtype, device=device)
            whole[:, 1] = self.cache
            self.cache = whole[:, 1]
        self.workspace = None

    def _step(self, work):
        """Inputs of a step of (sequence, first position, number of tokens)."""
        qkv = torch.cat([self.qkv[i][p : p + n] for i, p, n in work])
        slots = torch.cat([torch.full((n,), i, dtype=torch.int32) for i, _, n in work]).to(self.device)
        positions = torch.cat([torch.arange(p, p + n, dtype=torch.int32) for _, p, n in work]).to(self.device)
        q = qkv[:, : self.shape.heads]
        out = torch.full((len(qkv), self.shape.heads * self.shape.dim), torch.nan, dtype=qkv.dtype, device=self.device)
        return q, slots, positions, out

    def _pieces(self, pieces, spare):
        """On the device, with ``spare`` rows of nonsense behind those that count."""
        padded = np.concatenate([pieces, np.full((spare, 2), 1 << 20, np.int32)])
        count = torch.tensor([len(pieces)], dtype=torch.int32)
        return torch.from_numpy(padded).to(self.device), count.to(self.device)

    def decode(self, work, split=SPLIT, config: AttentionConfig | None = None, spare=3):
        """Attention of single tokens: ``work`` is a list of (sequence, position)."""
        q, slots, positions, out = self._step([(i, p, 1) for i, p in work])
        pieces = decode_work(np.arange(len(work)), np.array([p for _, p in work]), split, self.shape.window)
        on_device, count = self._pieces(pieces, spare)
        workspace = Workspace(len(on_device), len(work), self.shape.heads, self.shape.dim, q.device)
        decode_attention(
            q, self.cache, self.table, slots, positions, on_device, count, out, workspace, self.shape.dim**-0.5,
            self.shape.window, split=split, config=config,
        )  # fmt: skip
        assert not workspace.arrived.any()
        return out

    def prefill(self, work, split=SPLIT, config: AttentionConfig | None = None, spare=3):
        """Attention of runs: ``work`` is a list of (sequence, first position, number of tokens)."""
        q, slots, positions, out = self._step(work)
        extends = np.array([n for _, _, n in work])
        tile = query_tile(
            self.shape.heads, self.shape.kv_heads, config or prefill_config(self.shape.dim, self.shape.dtype)
        )  # fmt: skip
        first = np.array([p for _, p, _ in work])
        tiles, count = self._pieces(prefill_tiles(np.cumsum(extends) - extends, extends, first, tile), spare)
        prefill_attention(
            q, self.cache, self.table, slots, positions, tiles, count, out, self.shape.dim**-0.5,
            self.shape.window, split=split, config=config,
        )  # fmt: skip
        return out

    def exact(self, i):
        """float64 attention of a whole sequence, [tokens, heads * dim]."""
        shape, n = self.shape, self.lengths[i]
        group = shape.heads // shape.kv_heads
        q, k, v = self.qkv[i].double().split([shape.heads, shape.kv_heads, shape.kv_heads], 1)
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        position = torch.arange(n, device=self.device)
        seen = position[None] <= position[:, None]
        if shape.window:
            seen &= position[None] > position[:, None] - shape.window
        scores = torch.einsum("qhd,khd->hqk", q, k) * shape.dim**-0.5
        weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
        return torch.einsum("hqk,khd->qhd", weights, v).reshape(n, -1)


def relative_error(found, exact):
    return float((found.double() - exact).norm() / exact.norm())
