"""Noise that depends on its key alone, by Philox4x32-10.

Gumbel variates are made of its random bits.

Contract: the 32 random bits of a token are word ``token_id % 4`` of Philox4x32-10 with the request's 64-bit seed as key
(low word first) and ``(token_id // 4, output position, choice, 0)`` as counter. Nothing else enters, so the noise of
any subset of tokens can be drawn alone, in any order and shape. A uniform is ``((bits >> 9) + 0.5) * 2**-23``, exact in
float32 and never 0 or 1; its Gumbel variate is ``-log(-log(u))`` in float32, so noise lies in (-2.82, 16.64).

The arithmetic is numpy's on 64-bit lanes that hold 32-bit words: on the host it beats torch's int64 at every size.
Source of the generator: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (2011).
"""

from __future__ import annotations

import numpy as np

MAX_SPREAD = 19.5
"""More than the largest difference of two Gumbel variates.

A token this far behind the best one never wins.
"""

_ROUNDS = 10
_SHIFT, _LOW = np.uint64(32), np.uint64(0xFFFFFFFF)
_MULTIPLIERS = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
_KEY_STEPS = np.uint64(0x9E3779B9), np.uint64(0xBB67AE85)

Words = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]


def philox(counter: Words, key: tuple[np.ndarray, np.ndarray]) -> Words:
    """Return the four output words of each counter under its key.

    All arrays are uint64 with 32-bit values and broadcast together.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        p0, p1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = (p1 >> _SHIFT) ^ (c1 ^ k0), p1 & _LOW, (p0 >> _SHIFT) ^ (c3 ^ k1), p0 & _LOW
        k0, k1 = (k0 + _KEY_STEPS[0]) & _LOW, (k1 + _KEY_STEPS[1]) & _LOW
    return c0, c1, c2, c3


def gumbel_rows(seed: np.ndarray, position: np.ndarray, choice: np.ndarray, vocab: int) -> np.ndarray:
    """Return noise float32 [rows, vocab] of every token.

    ``seed`` is uint64, ``position`` and ``choice`` are integers, all [rows].
    """
    groups = -(-vocab // 4)
    ids = np.arange(groups, dtype=np.uint64)[None, :]
    words = _words(ids, seed[:, None], position[:, None], choice[:, None])
    bits = np.empty((len(seed), groups, 4), np.uint32)
    for i, word in enumerate(words):
        bits[..., i] = word
    return _gumbel(bits.reshape(len(seed), groups * 4)[:, :vocab])


def gumbel_at(seed: np.ndarray, position: np.ndarray, choice: np.ndarray, ids: np.ndarray) -> np.ndarray:
    """Return noise float32 [n] of token ``ids[i]`` under the i-th key.

    A key is seed, position and choice. The noise is the same as in a whole row.
    """
    words = _words(ids.astype(np.uint64) >> np.uint64(2), seed, position, choice)
    return _gumbel(np.choose(ids & 3, words).astype(np.uint32))


def _words(group: np.ndarray, seed: np.ndarray, position: np.ndarray, choice: np.ndarray) -> Words:
    counter = group, position.astype(np.uint64), choice.astype(np.uint64), np.zeros((1,) * group.ndim, np.uint64)
    return philox(counter, (seed & _LOW, seed >> _SHIFT))


def _gumbel(bits: np.ndarray) -> np.ndarray:
    u = (bits >> np.uint32(9)).astype(np.float32)  # 23 bits: this, the half and the product are all exact
    u += np.float32(0.5)
    u *= np.float32(2**-23)
    for _ in range(2):
        np.log(u, out=u)
        np.negative(u, out=u)
    return u
