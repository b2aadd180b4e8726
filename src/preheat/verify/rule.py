"""The sampling contract, stated again.

It is computed one row at a time, in float64, over any tokens of a vocabulary. It shares only the contract with the
samplers (:mod:`preheat.ops.sampler`, :mod:`preheat.ops.philox`), and no code.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np

from preheat.core import Request

CLEAR = 1e-3
"""Two tokens that are closer than this are no clear case: rounding may decide."""

_MASK = 0xFFFFFFFF


def drawn(logits: np.ndarray, tokens: np.ndarray, request: Request, output: Sequence[int]) -> tuple[int, bool]:
    """Return the token that ``request`` draws behind ``output``.

    Also return whether nothing comes close to it. ``logits`` are the logits of ``tokens``, ascending ids; all other
    tokens are impossible.
    """
    params, found = request.params, _edited(logits, tokens, request, output)
    order = np.lexsort((tokens, -found))
    order = order[found[order] > -np.inf]
    best = found[order[0]]
    if params.temperature == 0:
        return int(tokens[order[0]]), _apart(found[order], 1)
    weight = np.exp((found[order] - best) / params.temperature)
    clear = params.min_p == 0 or bool((np.abs(weight - params.min_p) > CLEAR * params.min_p).all())
    kept = int(np.count_nonzero(weight >= params.min_p))
    if 0 < params.top_k < kept:
        clear = clear and _apart(found[order], params.top_k)
        kept = params.top_k
    order, weight = order[:kept], weight[:kept]
    if params.top_p < 1:
        before, most = weight.cumsum() - weight, params.top_p * weight.sum()
        clear = clear and bool((np.abs(before - most) > CLEAR * most).all())
        order = order[: max(np.count_nonzero(before < most), 1)]
    noise = gumbel(request.seed, len(output), request.choice, tokens[order])
    score = found[order] / params.temperature + noise
    first, *others = np.argsort(-score, kind="stable")[:2]
    return int(tokens[order[first]]), clear and all(bool(score[first] - score[each] > CLEAR) for each in others)


def _apart(falling: np.ndarray, count: int) -> bool:
    """Return whether the first ``count`` are clear.

    Equal numbers are clear: the lower id goes first.
    """
    return len(falling) <= count or not 0 < falling[count - 1] - falling[count] <= CLEAR


def _edited(logits: np.ndarray, tokens: np.ndarray, request: Request, output: Sequence[int]) -> np.ndarray:
    """Return the logits after penalties, bias and bans, float64."""
    params, found = request.params, logits.astype(np.float64)
    counts = Counter(output)
    count = np.array([counts[token] for token in tokens.tolist()], np.float64)
    seen = (count > 0) | np.isin(tokens, request.prompt)
    penalised = np.where(found > 0, found / params.repetition_penalty, found * params.repetition_penalty)
    found = np.where(seen, penalised, found)
    found -= params.frequency_penalty * count + params.presence_penalty * (count > 0)
    for token, change in (params.logit_bias or {}).items():
        found[tokens == token] += change
    if len(output) < params.min_tokens:
        found[np.isin(tokens, request.stop_ids)] = -np.inf
    return found


def gumbel(seed: int, position: int, choice: int, tokens: np.ndarray) -> np.ndarray:
    """Return the noise of each token, float64: Philox4x32-10, then Gumbel's distribution."""
    c1, c2, c3 = (np.full(len(tokens), word, np.uint64) for word in (position, choice, 0))
    c0: np.ndarray = tokens.astype(np.uint64) // np.uint64(4)
    k0, k1, low, shift = seed & _MASK, seed >> 32, np.uint64(_MASK), np.uint64(32)
    for _ in range(10):
        p0, p1 = c0 * np.uint64(0xD2511F53), c2 * np.uint64(0xCD9E8D57)
        c0, c1 = (p1 >> shift) ^ c1 ^ np.uint64(k0), p1 & low
        c2, c3 = (p0 >> shift) ^ c3 ^ np.uint64(k1), p0 & low
        k0, k1 = (k0 + 0x9E3779B9) & _MASK, (k1 + 0xBB67AE85) & _MASK
    bits = np.choose(tokens % 4, (c0, c1, c2, c3))
    uniform = ((bits >> np.uint64(9)).astype(np.float64) + 0.5) * 2.0**-23
    noise: np.ndarray = -np.log(-np.log(uniform))
    return noise
