"""The sampler's check at boot: from logits that are known, the draws of the contract and no others.

The contract is said here once more, for one row at a time, in plain Python and float64
(:mod:`preheat.ops.sampler`, :mod:`preheat.ops.philox`).
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import torch
from msgspec.structs import replace

from preheat.core import OWN_ID, Request, SamplingParams
from preheat.errors import CheckFailed
from preheat.execution.logit_stages import sampling_input
from preheat.plan.items import NothingToRun
from preheat.verify.check_runner import CheckRunner

LOGITS = (3.0, 2.5, 2.5, 1.0, 0.0, -0.5, 2.0, 1.5)
"""Of the tokens that can be drawn. Every dtype holds them."""

IMPOSSIBLE = -128.0
"""All other logits: further behind than noise ever reaches."""

CLEAR = 1e-3
"""Rows whose best two are closer than this are left out: rounding may decide."""

_MASK = 0xFFFFFFFF


class DrawRow(NamedTuple):
    """A row to draw for: its settings and key, and that it has generated ``position`` tokens. Its one prompt token,
    stops and the keys of a logit_bias are places in `LOGITS`.
    """

    params: SamplingParams
    position: int = 0
    choice: int = 0
    prompt: int = 4
    stops: tuple[int, ...] = ()

    @property
    def seed(self) -> int:
        return self.params.seed or 0


ROWS = (
    DrawRow(SamplingParams(temperature=0.0)),
    DrawRow(SamplingParams(seed=1)),
    DrawRow(SamplingParams(seed=1), position=5),
    DrawRow(SamplingParams(seed=1), position=5, choice=3),
    DrawRow(SamplingParams(seed=2**63 + 1, temperature=0.5), position=2),
    DrawRow(SamplingParams(seed=7, temperature=4.0), position=3),
    DrawRow(SamplingParams(seed=11, temperature=2.0, top_k=3), position=1),
    DrawRow(SamplingParams(seed=12, temperature=2.0, min_p=0.5), position=1),
    DrawRow(SamplingParams(seed=13, temperature=2.0, top_p=0.6), position=1),
    DrawRow(SamplingParams(temperature=0.0, repetition_penalty=2.0), prompt=0),
    DrawRow(SamplingParams(temperature=0.0, presence_penalty=2.0, frequency_penalty=0.25), position=4),
    DrawRow(SamplingParams(temperature=0.0, min_tokens=4), position=2, stops=(0, 1)),
    DrawRow(SamplingParams(temperature=0.0, logit_bias={4: 4.0})),
)


def check_draws(runner: CheckRunner) -> None:
    """Draw for `ROWS` through the sampler that serves. Raises CheckFailed for the first token that is not the
    contract's, NothingToRun if there are too few tokens.
    """
    ids, line = known_logits(runner)
    longest = runner.slots.max_model_len - 2
    rows = [row for row in ROWS if row.position < longest]
    size = max(min(runner.slots.num_free, len(rows)), 1)
    for first in range(0, len(rows), size):
        part = rows[first : first + size]
        for row, token in zip(part, _drawn(runner, part, ids, line), strict=True):
            right, clear = contract(row, ids)
            if clear and token != right:
                raise CheckFailed(
                    f"sampler: token {token} was drawn where the contract has {right}, at position {row.position}"
                    f" with seed {row.seed} and {row.params}"
                )


def known_logits(runner: CheckRunner) -> tuple[list[int], torch.Tensor]:
    """The ids of the tokens that can be drawn, in the order of `LOGITS`, and all logits, fp32 [vocab] on the device.
    Raises NothingToRun if there are too few tokens.
    """
    vocab = runner.vocab_size
    if vocab < 2 * len(LOGITS):
        raise NothingToRun(f"a vocabulary of {vocab} tokens is too small for it")
    ids = [1 + place * (vocab - 2) // len(LOGITS) for place in range(len(LOGITS))]
    line = torch.full((vocab,), IMPOSSIBLE)
    line[ids] = torch.tensor(LOGITS)
    return ids, line.to(runner.executor.backend.device)


def check_drafted_draws(runner: CheckRunner) -> None:
    """Draw for the `ROWS` that have generated tokens at all of their positions at once, as where those are drafts.
    Raises as :func:`check_draws`.
    """
    try:
        ids, line = known_logits(runner)
    except NothingToRun:
        return
    for row in ROWS:
        count = min(row.position, runner.plan.limits.num_speculative_tokens) + 1
        if row.position >= runner.slots.max_model_len - 2:
            continue
        positions = range(row.position + 1 - count, row.position + 1)
        for position, token in zip(positions, _drawn_at(runner, row, positions, ids, line), strict=True):
            right, clear = contract(row._replace(position=position), ids)
            if clear and token != right:
                raise CheckFailed(
                    f"drafts: token {token} was drawn where the contract has {right}, at position {position} of "
                    f"{row.position} that are drawn at once, with seed {row.seed} and {row.params}"
                )


def _drawn_at(runner: CheckRunner, row: DrawRow, positions: range, ids: list[int], line: torch.Tensor) -> list[int]:
    """The sampler's tokens of one sequence at several positions."""
    (slot,) = taken = taken_slots(runner, [row], ids, len(ROWS) + ROWS.index(row))
    try:
        slots = np.full(len(positions), slot)
        at = np.array(positions, np.int32) + runner.slots.prompt_len[slot]
        logits = line.expand(len(slots), -1).contiguous()
        tokens: list[int] = runner.executor.draw(logits, sampling_input(runner.slots, slots, at), slots).tolist()
        return tokens
    finally:
        for each in taken:
            runner.slots.give_back(each)


def taken_slots(runner: CheckRunner, rows: list[DrawRow], ids: list[int], number: int) -> list[int]:
    """A slot for each of ``rows``, which the caller gives back; none is left taken after an error. Their requests count
    from ``number``: the sampler would take an equal one for the same sequence.
    """
    taken: list[int] = []
    try:
        for place, row in enumerate(rows, number):
            known = [ids[row.prompt], *_output(row, ids)]
            request = Request(
                OWN_ID - place, known[:1], _named(row.params, ids), row.seed, 1, choice=row.choice,
                stop_ids=[ids[place] for place in row.stops],
            )  # fmt: skip
            taken.append(runner.take(request, np.array(known, np.int32)))
    except BaseException:
        for slot in taken:
            runner.slots.give_back(slot)
        raise
    return taken


def _drawn(runner: CheckRunner, rows: list[DrawRow], ids: list[int], line: torch.Tensor) -> list[int]:
    """The sampler's tokens, all rows in one step."""
    taken = taken_slots(runner, rows, ids, ROWS.index(rows[0]))
    try:
        slots = np.array(taken, np.int64)
        logits = line.expand(len(rows), -1).contiguous()
        tokens: list[int] = runner.executor.draw(logits, sampling_input(runner.slots, slots), slots).tolist()
        return tokens
    finally:
        for slot in taken:
            runner.slots.give_back(slot)


def _output(row: DrawRow, ids: list[int]) -> list[int]:
    """What the row has generated: the best token first, then the second one again and again."""
    return [ids[min(number, 1)] for number in range(row.position)]


def _named(params: SamplingParams, ids: list[int]) -> SamplingParams:
    """``params`` with token ids for places."""
    bias = params.logit_bias
    return replace(params, logit_bias={ids[place]: change for place, change in bias.items()}) if bias else params


def contract(row: DrawRow, ids: list[int]) -> tuple[int, bool]:
    """The token that the contract has for a row, and whether nothing comes close to it."""
    params, logits = row.params, _edited(row, ids)
    order = sorted((place for place in range(len(ids)) if logits[place] > -math.inf), key=lambda i: (-logits[i], i))
    if params.temperature == 0:
        return ids[order[0]], True
    weight = {place: math.exp((logits[place] - logits[order[0]]) / params.temperature) for place in order}
    kept = [place for place in order if weight[place] >= params.min_p]
    kept = kept[: params.top_k] if params.top_k > 0 else kept
    total, before, nucleus = math.fsum(weight[place] for place in kept), 0.0, list[int]()
    for place in kept:
        if not nucleus or before < params.top_p * total:
            nucleus.append(place)
        before += weight[place]
    score = {
        place: logits[place] / params.temperature + gumbel(row.seed, row.position, row.choice, ids[place])
        for place in nucleus
    }
    first, *others = sorted(nucleus, key=lambda place: (-score[place], place))
    return ids[first], not others or score[first] - score[others[0]] > CLEAR


def _edited(row: DrawRow, ids: list[int]) -> list[float]:
    """The logits of the tokens that can be drawn after penalties, bias and bans."""
    params, logits, output = row.params, list(LOGITS), _output(row, ids)
    for place, token in enumerate(ids):
        if token in (ids[row.prompt], *output):
            value = logits[place]
            logits[place] = value / params.repetition_penalty if value > 0 else value * params.repetition_penalty
        if token in output:
            logits[place] -= params.frequency_penalty * output.count(token) + params.presence_penalty
        logits[place] += (params.logit_bias or {}).get(place, 0.0)
        if place in row.stops and row.position < params.min_tokens:
            logits[place] = -math.inf
    return logits


def gumbel(seed: int, position: int, choice: int, token: int) -> float:
    """The noise of one token: Philox4x32-10 on Python integers, then Gumbel's distribution."""
    c0, c1, c2, c3 = token // 4, position, choice, 0
    k0, k1 = seed & _MASK, seed >> 32
    for _ in range(10):
        p0, p1 = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        c0, c1, c2, c3 = (p1 >> 32) ^ c1 ^ k0, p1 & _MASK, (p0 >> 32) ^ c3 ^ k1, p0 & _MASK
        k0, k1 = (k0 + 0x9E3779B9) & _MASK, (k1 + 0xBB67AE85) & _MASK
    bits = (c0, c1, c2, c3)[token % 4]
    return -math.log(-math.log(((bits >> 9) + 0.5) * 2.0**-23))
