"""The best tokens of each row, in a total order.

The greater logit comes first; ties go to the lowest id.

Contract: a row's answer depends on that row alone. Logit and id are packed into one integer key, so no two keys are
equal and every correct selection algorithm gives the same answer; none of the arithmetic rounds.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

CHUNK = 1 << 16
"""Logits handled at once.

So temporaries stay in the processor's cache. Changes no bits.
"""


def row_chunks(rows: int, vocab: int) -> Iterator[slice]:
    """Cut ``rows`` rows into slices of about ``CHUNK`` logits.

    A slice has at least one row; a row has ``vocab`` logits.
    """
    step = max(1, CHUNK // vocab)
    return (slice(start, start + step) for start in range(0, rows, step))


def mend(logits: np.ndarray) -> np.ndarray:
    """Return a copy without NaN and +inf.

    NaN becomes -inf, and +inf the greatest finite number.
    """
    possible = np.where(np.isnan(logits), -np.inf, logits)
    return np.minimum(possible, np.finfo(np.float32).max, dtype=np.float32)


def finite_rows(logits: np.ndarray) -> np.ndarray:
    """Return bool [rows]: whether a row has usable logits.

    No logit is NaN or +inf, and some token is possible. ``logits`` are float32 [rows, vocab].
    """
    finite: np.ndarray = np.isfinite(logits.max(axis=-1))
    return finite


def best(logits: np.ndarray, width: int) -> tuple[np.ndarray, np.ndarray]:
    """Return each row's ``width`` best tokens, best first.

    Values float32 and ids int64 are both [rows, width]. ``logits`` is float32 [rows, vocab] without NaN and ``width``
    at most vocab.
    """
    rows, vocab = logits.shape
    ids = np.empty((rows, width), np.int64)
    for part in row_chunks(rows, vocab):
        keys = _keys(logits[part])
        if width < vocab:
            keys = np.partition(keys, width - 1, axis=-1)[:, :width]
        ids[part] = np.sort(keys, axis=-1) & 0xFFFFFFFF
    return np.take_along_axis(logits, ids, axis=-1), ids


def _keys(logits: np.ndarray) -> np.ndarray:
    """Return int64 keys that ascend from a row's best token.

    The logit is in the high bits, the id in the low.
    """
    bits = (logits + np.float32(0)).view(np.int32)  # + 0 turns -0.0 into 0.0; the two are equal
    falling = bits ^ (~(bits >> 31) | np.int32(-(2**31)))  # a float's bits, mapped so that integers fall as it rises
    return (falling.astype(np.int64) << 32) | np.arange(logits.shape[1])
