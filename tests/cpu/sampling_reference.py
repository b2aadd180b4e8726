"""Reference of the sampler: one row at a time, float64, plain Python.

It is slow and obvious; the tests compare with it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from preheat.core import Request, SamplingParams
from preheat.schedule.slots import Slots

MASK = 0xFFFFFFFF


def philox_words(counter: tuple[int, int, int, int], key: tuple[int, int]) -> tuple[int, int, int, int]:
    """Return Philox4x32-10 on Python integers."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        p0, p1 = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        c0, c1, c2, c3 = (p1 >> 32) ^ c1 ^ k0, p1 & MASK, (p0 >> 32) ^ c3 ^ k1, p0 & MASK
        k0, k1 = (k0 + 0x9E3779B9) & MASK, (k1 + 0xBB67AE85) & MASK
    return c0, c1, c2, c3


def gumbel(seed: int, position: int, choice: int, token: int) -> float:
    """Return the noise of one token, in float64."""
    bits = philox_words((token // 4, position, choice, 0), (seed & MASK, seed >> 32))[token % 4]
    return -math.log(-math.log(((bits >> 9) + 0.5) * 2.0**-23))


@dataclass
class Row:
    """One row to sample: a request, its output so far, and the model's logits."""

    logits: np.ndarray  # float32 [vocab]
    params: SamplingParams
    prompt: list[int] = field(default_factory=lambda: [0])
    output: list[int] = field(default_factory=list)
    stop_ids: list[int] = field(default_factory=list)
    seed: int = 0
    choice: int = 0

    def request(self, number: int) -> Request:
        return Request(number, self.prompt, self.params, self.seed, 64, choice=self.choice, stop_ids=self.stop_ids)


def fill(rows: list[Row], max_len: int = 128) -> Slots:
    """Return slots with the sequence of row i in slot i."""
    slots = Slots(len(rows), max_len, 16)
    for i, row in enumerate(rows):
        slots.take(row.request(i), np.array(row.prompt + row.output))
    return slots


@dataclass
class Answer:
    """Expected answer of a row.

    ``clear`` is false where rounding may decide; then no answer is wrong.
    """

    survivors: list[int]
    token: int
    clear: bool = True


def edited(row: Row) -> list[float]:
    """Return the logits after penalties, logit_bias and min_tokens."""
    params, logits = row.params, [float(x) for x in row.logits]
    repetition, frequency, presence = (
        float(np.float32(x)) for x in (params.repetition_penalty, params.frequency_penalty, params.presence_penalty)
    )
    for token in set(row.prompt + row.output):
        logits[token] = logits[token] / repetition if logits[token] > 0 else logits[token] * repetition
    for token in set(row.output):
        logits[token] -= frequency * row.output.count(token) + presence
    for token, bias in (params.logit_bias or {}).items():
        logits[token] += float(np.float32(bias))
    if len(row.output) < params.min_tokens:
        for token in row.stop_ids:
            logits[token] = -math.inf
    return logits


def weights(row: Row, logits: list[float]) -> dict[int, float]:
    """Return probabilities, up to a factor, with the best token at 1."""
    temperature, peak = float(np.float32(row.params.temperature)), max(logits)
    return {token: math.exp((x - peak) / temperature) for token, x in enumerate(logits)}


def answer(row: Row, duplicates: bool = False) -> Answer:
    """Return the survivors in order and the token, in the documented order of filters."""
    params, logits = row.params, edited(row)
    order = sorted((t for t in range(len(logits)) if logits[t] > -math.inf), key=lambda t: (-logits[t], t))
    gaps = (logits[a] - logits[b] for a, b in pairwise(order))
    clear = all(gap == 0 or gap > 1e-4 for gap in gaps)
    if np.float32(params.temperature) == 0:
        return Answer(order[:1], order[0], clear)
    weight = weights(row, logits)
    min_p, top_p = float(np.float32(params.min_p)), float(np.float32(params.top_p))
    clear &= all(not 0 < abs(weight[t] - min_p) < 1e-5 * min_p for t in order)
    kept = [t for t in order if weight[t] >= min_p]
    if 0 < params.top_k < len(kept):
        last = logits[kept[params.top_k - 1]]
        kept = [t for i, t in enumerate(kept) if i < params.top_k or (duplicates and logits[t] == last)]
    if top_p < 1:
        total, before, nucleus = math.fsum(weight[t] for t in kept), 0.0, []
        for token in kept:
            clear &= not nucleus or abs(before / total - top_p) > 1e-6
            if not nucleus or before < top_p * total:
                nucleus.append(token)
            before += weight[token]
        kept = nucleus
    temperature, position = float(np.float32(params.temperature)), len(row.output)
    score = {t: logits[t] / temperature + gumbel(row.seed, position, row.choice, t) for t in kept}
    ranked = sorted(kept, key=lambda t: (-score[t], t))
    close = 1e-5 * max(1.0, abs(score[ranked[0]]))
    clear &= len(ranked) < 2 or score[ranked[0]] - score[ranked[1]] > close
    return Answer(kept, ranked[0], clear)
