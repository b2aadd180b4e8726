"""The sampler's check at boot.

Known logits give exactly the draws of the contract (:mod:`preheat.verify.rule`).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from msgspec.structs import replace

from preheat.core import OWN_ID, Request, SamplingParams
from preheat.errors import CheckFailed
from preheat.execution.logit_stages import sampling_input
from preheat.plan.item import NothingToRun
from preheat.verify.check_runner import CheckRunner
from preheat.verify.rule import drawn

LOGITS = (3.0, 2.5, 2.5, 1.0, 0.0, -0.5, 2.0, 1.5)
"""The logits of the tokens that can be drawn. Every dtype holds them."""

IMPOSSIBLE = -128.0
"""All other logits: further behind than noise ever reaches."""


class DrawRow(NamedTuple):
    """A row to draw for.

    It has settings, a key, and a ``position``, the number of generated tokens. Its one prompt token, its stops and the
    keys of a logit_bias are indices in `LOGITS`.
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
    DrawRow(SamplingParams(seed=6089, temperature=4.0, top_k=3), position=1),
    DrawRow(SamplingParams(seed=357, temperature=4.0, min_p=0.7), position=1),
    DrawRow(SamplingParams(seed=357, temperature=4.0, top_p=0.6), position=1),
    DrawRow(SamplingParams(temperature=0.0, repetition_penalty=2.0), prompt=0),
    DrawRow(SamplingParams(temperature=0.0, presence_penalty=2.0, frequency_penalty=0.25), position=4),
    DrawRow(SamplingParams(temperature=0.0, min_tokens=4), position=2, stops=(0, 1)),
    DrawRow(SamplingParams(temperature=0.0, min_tokens=4), position=3, stops=(0, 1)),
    DrawRow(SamplingParams(temperature=0.0, min_tokens=4), position=4, stops=(0, 1)),
    DrawRow(SamplingParams(temperature=0.0, frequency_penalty=0.6, logit_bias={1: 1.5}), position=4),
    DrawRow(SamplingParams(seed=929, temperature=4.0, top_k=3), position=1),
    DrawRow(SamplingParams(temperature=0.0, logit_bias={4: 4.0})),
)
"""The rows to draw for.

Seeds of rows with top_k, top_p and min_p would draw the first token that is left out. The second row with top_k draws
the last token that is kept. Both hold for any size of the vocabulary.
"""


def check_draws(runner: CheckRunner) -> None:
    """Draw for `ROWS` through the sampler that serves.

    Raises CheckFailed for the first token that breaks the contract, NothingToRun if there are too few tokens.
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
    """Return the ids of tokens that can be drawn, and all logits.

    Ids are in the order of `LOGITS`; logits are fp32 [vocab] on the device. Raises NothingToRun if there are too few
    tokens.
    """
    vocab = runner.vocab_size
    if vocab < 2 * len(LOGITS):
        raise NothingToRun(f"a vocabulary of {vocab} tokens is too small for it")
    ids = [1 + place * (vocab - 2) // len(LOGITS) for place in range(len(LOGITS))]
    line = torch.full((vocab,), IMPOSSIBLE)
    line[ids] = torch.tensor(LOGITS)
    return ids, line.to(runner.executor.backend.device)


def check_drafted_draws(runner: CheckRunner) -> None:
    """Draw for `ROWS` at several positions at once.

    These are all positions of their generated tokens, as if the tokens were drafts. Raises as :func:`check_draws`.
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
    """Return the sampler's tokens of one sequence at several positions."""
    (slot,) = taken = take_slots(runner, [row], ids, len(ROWS) + ROWS.index(row))
    try:
        slots = np.full(len(positions), slot)
        at = np.array(positions, np.int32) + runner.slots.prompt_len[slot]
        logits = line.expand(len(slots), -1).contiguous()
        tokens: list[int] = runner.executor.draw(logits, sampling_input(runner.slots, slots, at), slots).tolist()
        return tokens
    finally:
        for each in taken:
            runner.slots.give_back(each)


def take_slots(runner: CheckRunner, rows: list[DrawRow], ids: list[int], number: int) -> list[int]:
    """Return a slot for each of ``rows``.

    The caller gives it back, and none is left taken after an error. Requests count from ``number``: the sampler would
    take an equal request for the same sequence.
    """
    taken: list[int] = []
    try:
        for place, row in enumerate(rows, number):
            request = _request(row, ids, OWN_ID - place)
            taken.append(runner.take(request, np.array([*request.prompt, *_output(row, ids)], np.int32)))
    except BaseException:
        for slot in taken:
            runner.slots.give_back(slot)
        raise
    return taken


def _drawn(runner: CheckRunner, rows: list[DrawRow], ids: list[int], line: torch.Tensor) -> list[int]:
    """Return the sampler's tokens, all rows in one step."""
    taken = take_slots(runner, rows, ids, ROWS.index(rows[0]))
    try:
        slots = np.array(taken, np.int64)
        logits = line.expand(len(rows), -1).contiguous()
        tokens: list[int] = runner.executor.draw(logits, sampling_input(runner.slots, slots), slots).tolist()
        return tokens
    finally:
        for slot in taken:
            runner.slots.give_back(slot)


def _request(row: DrawRow, ids: list[int], id: int = OWN_ID) -> Request:
    """Return the row's request, with token ids for indices."""
    bias = row.params.logit_bias
    named = {ids[place]: change for place, change in bias.items()} if bias else None
    return Request(
        id, [ids[row.prompt]], replace(row.params, logit_bias=named), row.seed, 1, choice=row.choice,
        stop_ids=[ids[place] for place in row.stops],
    )  # fmt: skip


def _output(row: DrawRow, ids: list[int]) -> list[int]:
    """Return the row's generated tokens.

    The best token comes first, then the second one again and again.
    """
    return [ids[min(number, 1)] for number in range(row.position)]


def contract(row: DrawRow, ids: list[int]) -> tuple[int, bool]:
    """Return the contract's token for a row, and whether nothing comes close to it."""
    return drawn(np.array(LOGITS), np.array(ids), _request(row, ids), _output(row, ids))
