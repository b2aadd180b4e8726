"""Faults that other engines have had, each planted by replacing one operation of the real engine."""

from __future__ import annotations

import itertools

import torch

from preheat.backends.cpu.linear import OneDnnLinear
from preheat.ops import norm


def split_by_batch(monkeypatch, rows: int = 8) -> None:
    """A matrix product whose inputs are cut in two for more than so many rows, as a library's heuristics do."""
    right = OneDnnLinear.__call__

    def split(self: OneDnnLinear, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        if len(x) <= rows:
            return right(self, x)
        first = x.clone()
        first[:, x.shape[1] // 2 :] = 0
        return right(self, first) + right(self, x - first)

    monkeypatch.setattr(OneDnnLinear, "__call__", split)


def threshold(monkeypatch, rows: int = 256) -> None:
    """A norm that adds up a row in another order from so many rows on, as a kernel with another block size does."""
    right = norm._norm

    def two_blocks(x: torch.Tensor, weight: torch.Tensor, share: torch.Tensor, eps: torch.Tensor) -> torch.Tensor:
        if len(x) < rows or x.dim() > 2:
            return right(x, weight, share, eps)
        wide = x.float()
        squares = (wide * wide).cumsum(-1)[:, -1:].clone()
        return (wide * squares.mul_(share).add_(eps).rsqrt_()).type_as(x).mul_(weight)

    monkeypatch.setattr(norm, "_norm", two_blocks)


def first_run(monkeypatch) -> None:
    """A norm that is another one the first time, as a kernel that is chosen by measuring."""
    right, calls = norm._norm, itertools.count()

    def warming(x: torch.Tensor, weight: torch.Tensor, share: torch.Tensor, eps: torch.Tensor) -> torch.Tensor:
        found = right(x, weight, share, eps)
        return found if next(calls) else found * (1 + 2**-10)

    monkeypatch.setattr(norm, "_norm", warming)


PLANTS = {"split by batch": split_by_batch, "threshold": threshold}
