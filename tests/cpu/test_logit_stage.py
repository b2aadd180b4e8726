"""A logit stage that bans one token, given to the packer.

It changes the draws of only the rows that need it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest

from preheat import LLM, SamplingParams
from preheat.core import Level, Request
from preheat.execution.input_batch import Packer
from preheat.execution.logit_stages import STAGES, Edit, LogitStage, sampling_input
from preheat.schedule.slots import Slots

PROMPTS = [[300], [301, 17], [302, 5, 9]]
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
OPTIONS: dict[str, Any] = {"dtype": "float32", "max_num_seqs": 4, "max_num_batched_tokens": 16, "max_model_len": 64}


class TokenBan:
    """Stage that never lets ``token`` be drawn for requests with this ``prompt``."""

    name = "token_ban"

    def __init__(self, prompt: list[int], token: int) -> None:
        self.prompt, self.token = prompt, token

    def needed(self, slots: Slots, rows: np.ndarray, position: np.ndarray) -> np.ndarray:
        requests = (slots.request[row] for row in rows.tolist())
        return np.array([request is not None and request.prompt == self.prompt for request in requests], bool)

    def edits(self, request: Request, length: int, min_length: int) -> Iterable[Edit]:
        return [(self.token, -np.inf)]


def drawn(*stages: LogitStage, params: SamplingParams = GREEDY) -> list[list[int]]:
    """Return the tokens of each prompt, all in one batch.

    The packer has ``stages`` besides its own.
    """
    engine = LLM(**OPTIONS)
    packer = engine.loop.packer
    assert isinstance(packer, Packer)
    engine.loop.packer = Packer(packer.slots, packer.plan, packer.buffers, (*STAGES, *stages))
    found = engine.generate(PROMPTS, params, use_tqdm=False)
    engine.loop.scheduler.check()
    return [output.outputs[0].token_ids for output in found]


@pytest.fixture(scope="module")
def free() -> list[list[int]]:
    return drawn()


def test_a_banned_token_is_not_drawn_and_other_rows_do_not_notice(free: list[list[int]]) -> None:
    banned = free[1][2]
    found = drawn(TokenBan(PROMPTS[1], banned))
    assert banned not in found[1]
    assert found[1][:2] == free[1][:2] or banned in free[1][:2]
    assert found[1] != free[1]
    assert [found[0], found[2]] == [free[0], free[2]]


class LateBan(TokenBan):
    """Stage with a ban that begins after ``wait`` tokens of output."""

    wait = 4

    def edits(self, request: Request, length: int, min_length: int) -> Iterable[Edit]:
        late = length >= len(request.prompt) + self.wait
        return super().edits(request, length, min_length) if late else ()


def test_edits_may_begin_while_the_same_rows_decode(free: list[list[int]]) -> None:
    banned = free[1][LateBan.wait]
    found = drawn(LateBan(PROMPTS[1], banned))
    assert found[1][: LateBan.wait] == free[1][: LateBan.wait]
    assert banned not in found[1][LateBan.wait :]


def test_a_banned_token_is_not_drawn_at_random_either() -> None:
    params = SamplingParams(temperature=1.0, seed=5, max_tokens=8, ignore_eos=True)
    banned = drawn(params=params)[2][4]
    found = drawn(TokenBan(PROMPTS[2], banned), params=params)
    assert banned not in found[2]
    assert len(found[2]) == 8


def test_a_stage_that_no_row_needs_changes_nothing(free: list[list[int]]) -> None:
    """Control: a ban changes no row but the row that it names."""
    assert drawn(TokenBan([9, 9, 9], free[1][2])) == free


def test_rows_that_need_no_stage_stay_at_their_level() -> None:
    slots = Slots(3, 64, 16)
    for number, prompt in enumerate(PROMPTS):
        slots.take(Request(number, prompt, GREEDY, 0, 8), np.array(prompt))
    stages = (*STAGES, TokenBan(PROMPTS[1], 7))
    assert sampling_input(slots, np.array([0, 2]), stages=stages).level is Level.GREEDY
    mixed = sampling_input(slots, np.arange(3), stages=stages)
    assert mixed.level is Level.FULL
    assert mixed.edits is not None
    assert (mixed.edits.rows.tolist(), mixed.edits.ids.tolist()) == ([1], [7])


def test_a_ban_beats_a_bias() -> None:
    """Edits of several stages on one token add up, so a ban stays a ban."""
    slots = Slots(1, 64, 16)
    params = SamplingParams(temperature=0, max_tokens=8, logit_bias={7: 50.0})
    slots.take(Request(0, PROMPTS[0], params, 0, 8), np.array(PROMPTS[0]))
    edits = sampling_input(slots, np.arange(1), stages=(TokenBan(PROMPTS[0], 7), *STAGES)).edits
    assert edits is not None
    assert (edits.ids.tolist(), edits.change.tolist()) == ([7], [-np.inf])
