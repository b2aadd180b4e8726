"""Faults that other engines have had, each planted by replacing one operation of the real engine."""

from __future__ import annotations

import itertools

import numpy as np
import torch

from preheat.backends.cpu import attention
from preheat.backends.cpu.attention import CpuAttention
from preheat.backends.cpu.decode_attention import DecodeAttention
from preheat.backends.cpu.linear import Product
from preheat.backends.cpu.paged_attention import PagedAttention
from preheat.ops import norm


def split_by_batch(monkeypatch, rows: int = 8) -> None:
    """Plant a matrix product that cuts inputs of many rows in two.

    Inputs of more than ``rows`` rows are cut, as a library's heuristics do.
    """
    right = Product.__call__

    def split(self: Product, x: torch.Tensor) -> torch.Tensor:
        if len(x) <= rows:
            return right(self, x)
        first = x.clone()
        first[:, x.shape[1] // 2 :] = 0
        return right(self, first) + right(self, x - first)

    monkeypatch.setattr(Product, "__call__", split)


def threshold(monkeypatch, rows: int = 256) -> None:
    """Plant a norm that adds up rows of large batches in another order.

    It does so from ``rows`` rows on, as with another block size.
    """
    right = norm._norm

    def two_blocks(x: torch.Tensor, weight: torch.Tensor, share: torch.Tensor, eps: torch.Tensor) -> torch.Tensor:
        if len(x) < rows or x.dim() > 2:
            return right(x, weight, share, eps)
        wide = x.float()
        squares = (wide * wide).cumsum(-1)[:, -1:].clone()
        return (wide * squares.mul_(share).add_(eps).rsqrt_()).type_as(x).mul_(weight)

    monkeypatch.setattr(norm, "_norm", two_blocks)


def first_run(monkeypatch) -> None:
    """Plant a norm that differs at its first run, as a kernel chosen by measuring does."""
    right, calls = norm._norm, itertools.count()

    def warming(x: torch.Tensor, weight: torch.Tensor, share: torch.Tensor, eps: torch.Tensor) -> torch.Tensor:
        found = right(x, weight, share, eps)
        return found if next(calls) else found * (1 + 2**-10)

    monkeypatch.setattr(norm, "_norm", warming)


PLANTS = {"split by batch": split_by_batch, "threshold": threshold}


def resumed(monkeypatch, part: str) -> None:
    """Plant a small error into rows that are recomputed with their output.

    The error is in ``part``: rope, or the norm of queries and keys.
    """
    right, found = CpuAttention.plan, {"rows": torch.empty(0, dtype=torch.int64)}

    def plan(self, step, tables):
        again = (step.extend > 1) & (step.first + step.extend > tables.prompt_len[step.slots])
        found["rows"] = torch.from_numpy(np.flatnonzero(np.repeat(again, step.extend)))
        return right(self, step, tables)

    def off(x: torch.Tensor) -> torch.Tensor:
        if x.dim() == 3:
            x[found["rows"]] *= 1 + 2**-7
        return x

    monkeypatch.setattr(CpuAttention, "plan", plan)
    if part == "rope":
        rope = attention.apply_rope_
        monkeypatch.setattr(attention, "apply_rope_", lambda x, cos, sin: off(rope(x, cos, sin)))
    else:
        normed = norm._norm
        monkeypatch.setattr(norm, "_norm", lambda x, *more: off(normed(x, *more)))


def merge_from_last(monkeypatch, splits: int = 3) -> None:
    """Plant a merge from the last KV split to the first.

    It is in decoding rows with at least ``splits`` KV splits.
    """
    right = DecodeAttention._merge

    def merge(
        self: DecodeAttention, part: torch.Tensor, lse: torch.Tensor, sinks: torch.Tensor | None = None
    ) -> torch.Tensor:
        unseen = self._unseen
        if unseen is None or len(unseen) < splits:
            return right(self, part, lse, sinks)
        self._unseen = unseen.flip(0)
        try:
            turned = part.view(len(unseen), -1, part.shape[-1]).flip(0).reshape(part.shape)
            return right(self, turned, lse.view(unseen.shape).flip(0).reshape(lse.shape), sinks)
        finally:
            self._unseen = unseen

    monkeypatch.setattr(DecodeAttention, "_merge", merge)


def unrounded_prefill(monkeypatch) -> None:
    """Plant prompts that attend to the unrounded keys and values of their own chunk.

    Decoding reads the eight-bit cache. An engine that hands the fresh keys and values to its prompt kernel has this
    fault.
    """
    write, attend, fresh = attention._Store.write, PagedAttention.__call__, {}

    def keeping(self, rows, kv):
        fresh[self._rows.data_ptr()] = rows, kv.float() / self._scales
        write(self, rows, kv)

    def prompts(self, q, cache, *more):
        rows, kv = fresh[cache.data_ptr()]
        unrounded = cache.to(q.dtype)
        unrounded.view(-1, cache.shape[-1]).index_copy_(0, rows, kv.reshape(-1, cache.shape[-1]).to(q.dtype))
        return attend(self, q, unrounded, *more)

    monkeypatch.setattr(attention._Store, "write", keeping)
    monkeypatch.setattr(PagedAttention, "__call__", prompts)


def scales_of_the_first_forward(monkeypatch) -> None:
    """Plant scales of the KV cache taken from the first forward, as vLLM's ``--calculate-kv-scales`` took them."""
    write = attention._Store.write

    def measuring(self, rows, kv):
        if not hasattr(self, "measured"):
            self.measured = True
            keys, values = kv.float().chunk(2, 1)
            scales = [max(float(each.abs().max()), 1e-3) / 448 for each in (keys, values)]
            self._scales = torch.tensor(scales).repeat_interleave(keys.shape[1]).unsqueeze(1)
            self.scale, self._value = self.scale * scales[0], scales[1]
        write(self, rows, kv)

    monkeypatch.setattr(attention._Store, "write", measuring)
