"""The check at boot of log-probabilities of told tokens (``logprob_token_ids``), from known logits.

They must be the distribution's, with the same bits whatever other rows of the step ask for.
"""

from __future__ import annotations

import math

import numpy as np
import torch

from preheat.core import SamplingParams, TokenLogprobs
from preheat.errors import CheckFailed
from preheat.execution.logit_stages import sampling_input
from preheat.verify.check_runner import CheckRunner
from preheat.verify.draws import IMPOSSIBLE, LOGITS, ROWS, DrawRow, known_logits, take_slots

TOLD: tuple[tuple[int, ...], ...] = ((3, 0, 7), (), (5,), (7, 6, 5, 4, 3, 2, 1, 0))
"""The tokens that each row asks for.

They are indices in `LOGITS`; token 0, which cannot be drawn, is added at the end. An empty row asks for its own token's
log-probability alone.
"""

CLOSE = 1e-4
"""The allowed distance between a log-probability in fp32 and in float64."""


def check_logprobs(runner: CheckRunner) -> int:
    """Draw for rows that ask for `TOLD`, together and each alone.

    Returns how many rows were compared. Raises CheckFailed for values that are not the distribution's or differ,
    NothingToRun if there are too few tokens.
    """
    ids, line = known_logits(runner)
    asked = [[*(ids[place] for place in told), 0] if told else [] for told in TOLD]
    asked = asked[: max(runner.slots.num_free, 1)]
    together = _reported(runner, ids, line, asked)
    for told, entry in zip(asked, together, strict=True):
        _compare(ids, told, entry)
    for place, told in enumerate(asked):
        if _reported(runner, ids, line, [told]) != [together[place]]:
            raise CheckFailed(
                f"logprobs: tokens {told} have other bits alone than beside rows that ask for other tokens"
            )
    return len(asked)


def _compare(ids: list[int], told: list[int], entry: TokenLogprobs) -> None:
    """Raise CheckFailed unless the log-probabilities are right.

    The drawn token must be the most likely one, and the told tokens in order.
    """
    value = dict(zip(ids, LOGITS, strict=True))
    total = math.log(math.fsum(map(math.exp, LOGITS)))  # the others add nothing that float64 could hold
    found = [(entry.token, entry.logprob), *entry.top]
    if [token for token, _ in found] != [ids[0], *told] or entry.rank != 1:
        raise CheckFailed(f"logprobs: {told} were asked for, and {[token for token, _ in entry.top]} are reported")
    for token, logprob in found:
        right = value.get(token, IMPOSSIBLE) - total
        if not abs(logprob - right) <= CLOSE:
            raise CheckFailed(f"logprobs: token {token} is reported with {logprob}, and the distribution has {right}")


def _reported(runner: CheckRunner, ids: list[int], line: torch.Tensor, asked: list[list[int]]) -> list[TokenLogprobs]:
    """Return the sampler's log-probabilities, all rows in one step."""
    rows = [DrawRow(SamplingParams(temperature=0.0, logprobs=0, logprob_token_ids=told)) for told in asked]
    taken = take_slots(runner, rows, ids, 2 * len(ROWS))
    try:
        slots, logits = np.array(taken, np.int64), line.expand(len(rows), -1).contiguous()
        sampling = sampling_input(runner.slots, slots)
        _, found = runner.executor.draw_with_logprobs(logits, sampling, slots, np.arange(len(rows)))
        return found
    finally:
        for slot in taken:
            runner.slots.give_back(slot)
