"""Digests: one number for each row of logits.

Rows are compared by their digests without being kept.

Definition. The sum over a row's 32-bit words of word times key, mod 2**64. The j-th key is SplitMix64's output for
state ``(j + 1) * 0x9E3779B97F4A7C15``, made odd. A sum of integers has no order, so every device gives the same number.
Keys are odd, so one differing word always gives another number; several differing words give the same number about once
in 2**64 times. Sources: multilinear hashing; SplitMix64 of Steele, Lea and Flood.
"""

from __future__ import annotations

import functools

import numpy as np
import torch
from torch import Tensor

GOLDEN, FIRST, SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
"""The constants of SplitMix64."""


def row_digests(logits: Tensor) -> Tensor:
    """Return the digests int64 [rows] of ``logits``, fp32 [rows, vocab] on the host: the reference.

    Rows must be contiguous.
    """
    check_logits(logits)
    words = logits.numpy().view(np.uint32).astype(np.uint64)
    return torch.from_numpy((words @ keys(logits.shape[1])).view(np.int64))


def digests_in_place(logits: Tensor, own_keys: Tensor) -> Tensor:
    """Return the digests int64 [rows] of ``logits`` [rows, vocab], as fp32, on the device where they are.

    ``own_keys`` int64 [vocab] are the :func:`keys`, on that device. Nobody waits for the result.
    """
    words = logits.float().contiguous().view(torch.int32).to(torch.int64) & 0xFFFFFFFF
    return (words * own_keys).sum(1)


def check_logits(logits: Tensor) -> None:
    """Raise ValueError for anything but fp32 in contiguous rows."""
    if logits.dtype != torch.float32 or (logits.stride(1) != 1 and logits.shape[0]):
        raise ValueError(f"expected float32 logits in contiguous rows, got {logits.dtype}, strides {logits.stride()}")


@functools.lru_cache(maxsize=2)
def keys(count: int) -> np.ndarray:
    """Return the first ``count`` keys, uint64."""
    mixed = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(GOLDEN)
    for shift, factor in ((30, FIRST), (27, SECOND)):
        mixed = (mixed ^ (mixed >> np.uint64(shift))) * np.uint64(factor)
    found: np.ndarray = (mixed ^ (mixed >> np.uint64(31))) | np.uint64(1)
    return found
