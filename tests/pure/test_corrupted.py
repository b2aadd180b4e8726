"""A row with numbers that are not finite ends alone with an error.

All else is as if it had left.
"""

from __future__ import annotations

import math

import numpy as np
import pytest

from preheat.core import Request, Schedule, StepResult, TokenLogprobs, marked, unmarked
from preheat.errors import NotFinite
from preheat.schedule.drafting import Drafting
from preheat.schedule.scheduler import Scheduler
from preheat.schedule.sequence import Sequence
from preheat.schedule.slots import Slots
from tests.pure.paper import limits, request


class Fives:
    """Drafts two fives for every row."""

    writes_cache = False
    num_speculative_tokens = 2

    def propose(self, slots: Slots, rows: np.ndarray, most: np.ndarray) -> list[np.ndarray]:
        return [np.full(min(2, count), 5, np.int32) for count in most.tolist()]

    def ended(self, slots: Slots, stopped: list[int]) -> None:
        """Keep nothing."""


def running(*requests: Request, proposer: Fives | None = None) -> tuple[Scheduler, Schedule]:
    """Return a scheduler and its first step, with all prompts."""
    scheduler = Scheduler(limits(), drafting=None if proposer is None else Drafting(proposer))
    for each in requests:
        scheduler.add(each)
    step = scheduler.schedule()
    assert step is not None
    return scheduler, step


def test_a_mark_is_taken_off_again() -> None:
    tokens, finite = np.array([0, 5, 0, 7]), np.array([True, True, False, False])
    assert marked(tokens, finite).tolist() == [0, 5, -1, -8]
    assert unmarked(marked(tokens, finite)).tolist() == tokens.tolist()


@pytest.mark.parametrize("wrong", [0, 1, 2])
def test_a_marked_token_ends_its_row_alone(wrong: int) -> None:
    scheduler, step = running(*(request(number, [1, 2, 3, 4, 5]) for number in range(3)))
    tokens = marked(np.array([4, 5, 6]), np.arange(3) != wrong)
    delta = scheduler.process_results(step, StepResult(tokens))
    assert delta.ids == [number for number in range(3) if number != wrong]
    assert delta.tokens == [4 + number for number in delta.ids]
    (finish,) = delta.finished.values()
    assert list(delta.finished) == [wrong]
    error = finish.error.restore() if finish.error else None
    assert isinstance(error, NotFinite)
    assert (error.status, error.code) == (500, "not_finite")
    assert "the model" in error.message
    scheduler.check()
    assert scheduler.stats().corrupted_requests == 1
    after = scheduler.schedule()
    assert after is not None
    assert sorted(after.ids.tolist()) == delta.ids


def test_nothing_ends_without_a_mark() -> None:
    scheduler, step = running(request(0, [1, 2, 3]), request(1, [1]))
    delta = scheduler.process_results(step, StepResult(np.array([0, 6])))
    assert (delta.ids, delta.finished, scheduler.stats().corrupted_requests) == ([0, 1], {}, 0)


def test_the_adapter_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler, step = running(request(0, [1, 2, 3]))
    sequence = scheduler.running.sequence(int(step.slots[0]))
    monkeypatch.setattr(sequence.request, "lora_name", "loud\n")
    finish = scheduler.process_results(step, StepResult(np.array([~3]))).finished[0]
    assert finish.error is not None
    assert "adapter 'loud\\n'" in finish.error.message


def test_infinite_logits_behind_a_rejected_draft_are_ignored() -> None:
    """A draft that is not accepted may have any numbers.

    An accepted draft may not.
    """
    for sampled, kept in (([5, 6, ~1], [5, 6]), ([~5, 1, 1], None), ([5, ~5, 1], None), ([6, ~5, ~5], [6])):
        scheduler, step = running(request(0, [1, 2, 3], max_tokens=20), proposer=Fives())
        scheduler.process_results(step, StepResult(np.array([4])))
        step = scheduler.schedule()
        assert step is not None
        assert step.num_sampled.tolist() == [3]
        delta = scheduler.process_results(step, StepResult(np.array(sampled)))
        assert (delta.tokens, list(delta.finished)) == ((kept, []) if kept else ([], [0]))
        scheduler.check()


def test_a_log_probability_of_a_prompt_that_is_not_a_number_ends_its_request() -> None:
    for logprob in (-1.0, math.nan):
        scheduler, step = running(request(0, [1, 2, 3], prompt_logprobs=0), request(1, [1, 2]))
        entries = {0: [TokenLogprobs(2, -1.0, 1, ()), TokenLogprobs(3, logprob, 1, ())]}
        delta = scheduler.process_results(step, StepResult(np.array([4, 4]), prompt_logprobs=entries))
        assert list(delta.finished) == ([0] if math.isnan(logprob) else [])
        assert list(delta.prompt_logprobs) == ([] if math.isnan(logprob) else [0])


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_hidden_state_that_is_not_finite_ends_its_request(bad: float) -> None:
    scheduler, step = running(request(0, [1, 2, 3], max_tokens=1), request(1, [1, 2], max_tokens=1))
    states = {row: [np.array([1.0, bad if row == 1 else 2.0], np.float32)] for row in range(2)}
    delta = scheduler.process_results(step, StepResult(np.zeros(2, np.int64), hidden=states))
    assert delta.finished[1].reason == "error"
    assert delta.finished[0].reason == "length"
    assert list(delta.pooled) == [0]
    scheduler.check()


def test_blocks_of_a_corrupted_row_are_not_published() -> None:
    """The blocks of a corrupted row are not published.

    They go back at once.
    """
    scheduler, step = running(request(0, [1] * 9), request(1, [2] * 9))
    before = scheduler.pool.num_free
    scheduler.process_results(step, StepResult(np.array([~4, 4])))
    assert scheduler.pool.num_free > before
    found = [scheduler.prefix.lookup(each) for each in map(Sequence, (request(2, [1] * 9), request(3, [2] * 9)))]
    assert [hit.columns for hit in found] == [0, 2]
