"""The best tokens of each row, in a total order.

The greater logit comes first; ties go to the lowest id.

Contract: a row's answer depends on that row alone. Logit and id are packed into one integer key, so no two keys are
equal and every correct selection algorithm gives the same answer; none of the arithmetic rounds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

CHUNK = 1 << 16
"""Logits handled at once.

So temporaries stay in the processor's cache. Changes no bits.
"""

_FEW = 4

BestIds = Callable[[np.ndarray, int], np.ndarray]
"""A function with the results of :func:`best_ids`."""


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
    ids, values = np.empty((len(logits), width), np.int64), np.empty((len(logits), width), np.float32)
    for row, line in enumerate(logits):
        ids[row] = found = best_ids(line, width)
        values[row] = line[found]
    return values, ids


def best_ids(line: np.ndarray, width: int) -> np.ndarray:
    """Return the ids of a row's ``width`` best tokens, int64, best first.

    Only tokens at least as good as the last of them get a key.
    """
    ids = np.arange(len(line))
    if width < len(line):
        ids = (line >= np.partition(line, -width)[-width]).nonzero()[0]
    keys = _keys(line[ids], ids)
    if len(keys) > _FEW * width:  # many tokens are equal
        keys = np.partition(keys, width - 1)[:width]
    keys.sort()
    best: np.ndarray = keys[:width] & 0xFFFFFFFF
    return best


def _keys(logits: np.ndarray, ids: np.ndarray) -> np.ndarray:
    """Return int64 keys that ascend from the best token.

    The logit is in the high bits, the id in the low.
    """
    bits = (logits + np.float32(0)).view(np.int32)  # + 0 turns -0.0 into 0.0; the two are equal
    falling = bits ^ (~(bits >> 31) | np.int32(-(2**31)))  # a float's bits, mapped so that integers fall as it rises
    keys: np.ndarray = (falling.astype(np.int64) << 32) | ids
    return keys
