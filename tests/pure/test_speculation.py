"""Rows with draft tokens, right or wrong, have the tokens of plain decoding."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as effort
from hypothesis import strategies as st

from preheat.core import Schedule
from preheat.errors import SettingsError
from preheat.schedule import results as results_module
from preheat.schedule.draft_length import MeasuredLength
from preheat.schedule.drafting import Drafting
from preheat.schedule.scheduler import Scheduler
from preheat.schedule.slots import Slots
from tests.pure.paper import Harness, Scripted, WrongCache, limits, reference, request
from tests.pure.test_overlap import REQUESTS
from tests.pure.test_same_schedule import steps_of, workload


def drafted(asked, proposer, overlap: bool, spare: int = 4, every: int = 1, **options) -> Harness:
    """Run a request every ``every`` steps, in a small cache, with a proposer."""
    size = limits(max_model_len=36, num_blocks=10 + spare, max_num_batched_tokens=16)
    harness = Harness(size, overlap=overlap, proposer=proposer, **options)
    for number, (prompt, max_tokens, more) in enumerate(asked):
        harness.add(request(number, prompt, max_tokens, **more))
        for _ in range(every):
            harness.step()
    harness.run()
    harness.verify()
    return harness


@effort(deadline=None)
@given(
    REQUESTS, st.integers(1, 6), st.sampled_from([0.0, 0.6, 1.0]), st.booleans(), st.integers(0, 6), st.integers(0, 3),
    st.sampled_from([None, 0, 1]), st.integers(0, 99),
)  # fmt: skip
def test_any_drafts_give_the_tokens_of_plain_decoding(
    asked, most, right, overlap, spare, every, threshold, seed
) -> None:
    """Any drafts give plain decoding's tokens: preempted, compacted, shared, stopped, with logprobs.

    ``drafted`` compares them.
    """
    harness = drafted(asked, Scripted(most, right, seed), overlap, spare, every, defrag_threshold=threshold)
    assert harness.scheduler.idle
    assert harness.scheduler.stats().blocks_used == 0


MANY = [([number, 1, 2, 3, 4], 20, {}) for number in range(6)]


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("right", [0.0, 0.5, 1.0])
def test_drafts_are_counted(overlap, right) -> None:
    harness = drafted(MANY, Scripted(3, right), overlap, spare=60)
    stats = harness.scheduler.stats()
    assert stats.generation_tokens == 120
    assert stats.draft_tokens > 40
    if right == 1:
        assert stats.accepted_tokens == stats.draft_tokens
    assert (stats.accepted_tokens < stats.draft_tokens) == (right < 1)


def test_right_drafts_save_steps() -> None:
    steps = [drafted(MANY[:1], Scripted(most, 1.0), False, spare=60).steps for most in (1, 5)]
    plain = drafted(MANY[:1], Scripted(0, 1.0), False, spare=60).steps
    assert plain == 20
    assert steps[1] < steps[0] < plain


def test_several_tokens_of_a_step_are_reported_in_order() -> None:
    class All(Scripted):
        def _drafts(self, slots: Slots, slot: int) -> np.ndarray:
            known = slots.tokens[slot, : slots.device_len[slot]].tolist()
            truth = reference(request(0, [1, 2, 4], 12)).tokens
            return np.array(truth[len(known) - 3 :][:4], np.int32)

    said = reference(request(0, [1, 2, 4], 12)).tokens
    harness = Harness(limits(), proposer=All(4, 1.0))
    harness.add(request(0, [1, 2, 4], 12, logprobs=0))
    seen = []
    while harness.step() is not None:
        seen.append(len(harness.outcomes[0].tokens))
    assert seen == [1, 6, 11, 12]
    assert harness.outcomes[0].tokens == said
    harness.verify()


def test_the_sequence_ends_at_the_first_stop_id_among_its_tokens() -> None:
    said = reference(request(0, [1, 2, 4], 12)).tokens
    stop = said[3]
    assert stop not in said[:3]
    harness = Harness(limits(), proposer=Scripted(8, 1.0, seed=3))
    harness.add(request(0, [1, 2, 4], 12, stop_ids=[stop]), request(1, [1, 2, 4], 12, stop_ids=[stop], min_tokens=4))
    harness.run()
    harness.verify()
    assert len(harness.outcomes[0].tokens) == 4
    assert len(harness.outcomes[1].tokens) > 4


def test_a_row_with_drafts_in_flight_is_in_no_other_step(monkeypatch) -> None:
    harness = Harness(limits(), overlap=True, proposer=Scripted(4, 1.0))
    harness.add(request(0, [1, 2], 30))
    scheduler, right, together = harness.scheduler, harness.scheduler.schedule, list[int]()

    def schedule() -> Schedule | None:
        found = right()
        together.append(len(scheduler._in_flight))
        return found

    monkeypatch.setattr(scheduler, "schedule", schedule)
    harness.run()
    harness.verify()
    assert max(together) == 1 < len(together)


def test_drafts_take_only_the_rest_of_budget_blocks_and_length() -> None:
    """Drafts take neither budget nor blocks of other rows, nor more than the sequence's length."""
    harness = Harness(limits(max_num_batched_tokens=8), proposer=Scripted(6, 1.0, seed=1))
    harness.add(request(0, [1, 2], 30))
    harness.step()
    harness.add(request(1, list(range(20)), 1))
    seen = [harness.step().extend.tolist() for _ in range(2)]
    assert seen == [[1, 7], [1, 7]]
    harness.run()
    harness.verify()
    lonely = Harness(limits(num_blocks=17), proposer=Scripted(6, 1.0, seed=1))
    lonely.add(*(request(number, [number, 1], 60) for number in range(4)))
    lonely.run()
    lonely.verify()
    assert lonely.scheduler.stats().preemptions > 0


def test_rejected_drafts_are_never_published() -> None:
    """Rejected drafts are never published.

    The harness looks at every block that can be found after every step.
    """
    harness = drafted(MANY, Scripted(6, 0.5), False, spare=60)
    assert harness.scheduler.stats().accepted_tokens > 0
    harness.add(request(50, [0, 1, 2, 3, 4, *harness.outcomes[0].tokens[:12]], 4))
    harness.run()
    harness.verify()
    assert harness.outcomes[50].starts == [16]


def test_control_results_that_accept_everything_are_noticed(monkeypatch) -> None:
    monkeypatch.setattr(results_module, "_wrong_drafts", lambda slots, sampled: np.zeros(len(sampled.tokens), bool))
    with pytest.raises((AssertionError, WrongCache)):
        drafted(MANY, Scripted(3, 0.5), False, spare=60)


def test_control_drafts_that_are_not_rolled_back_are_noticed(monkeypatch) -> None:
    monkeypatch.setattr(results_module, "_roll_back", lambda slots, schedule, *_: schedule.ends)
    with pytest.raises((AssertionError, WrongCache)):
        drafted(MANY, Scripted(3, 0.5), False, spare=60)


def test_control_tokens_after_a_stop_id_are_noticed(monkeypatch) -> None:
    right: Callable = results_module._up_to_first
    monkeypatch.setattr(results_module, "_up_to_first", lambda last, rows: right(np.zeros_like(last), rows))
    said = reference(request(0, [0, 1, 2, 3, 4], 20)).tokens
    asked = [([0, 1, 2, 3, 4], 20, {"stop_ids": [stop]}) for stop in said[:4]]
    with pytest.raises((AssertionError, WrongCache)):
        drafted(asked, Scripted(6, 1.0), False, spare=60)


class Silent(Scripted):
    """Could draft, but never does."""

    def _drafts(self, slots: Slots, slot: int) -> np.ndarray:
        return np.empty(0, np.int32)


@pytest.mark.parametrize("seed", range(20))
def test_a_silent_proposer_does_not_change_the_schedule(seed) -> None:
    plain = steps_of(workload(seed, False, True))
    assert steps_of(workload(seed, False, True, proposer=Scripted(0, 1.0))) == plain
    silent = Silent(3, 1.0)
    assert steps_of(workload(seed, False, True, proposer=silent)) == plain
    assert silent.asked > 0


def test_a_proposer_of_no_tokens_is_not_asked() -> None:
    silent = Silent(0, 1.0)
    drafted(MANY, silent, True, spare=60)
    assert silent.asked == 0


def calls_of(scheduler: Scheduler) -> list[int]:
    """Return a list.

    Each further step adds its number of calls of Python and C functions.
    """
    right, counts = scheduler.schedule, list[int]()

    def seen(frame: object, event: str, what: object) -> None:
        counts[-1] += event in ("call", "c_call")

    def schedule() -> Schedule | None:
        counts.append(0)
        gc.disable()  # a collection calls others
        sys.setprofile(seen)
        try:
            return right()
        finally:
            sys.setprofile(None)
            gc.enable()

    scheduler.schedule = schedule  # type: ignore[method-assign]
    return counts


@pytest.mark.parametrize("overlap", [False, True])
def test_drafts_that_do_not_pay_cost_the_host_nothing(overlap) -> None:
    """If drafts do not pay, the proposer is hardly ever asked.

    Most steps then call as few functions as without it.
    """
    calls, wrong = [], Scripted(4, 0.0)
    for proposer in (None, wrong):
        harness = Harness(limits(max_model_len=256, num_blocks=200), overlap=overlap, proposer=proposer)
        if (drafting := harness.scheduler.drafting) is not None:
            drafting.length = MeasuredLength((2, 3, 5), lambda rows, count: 1.0 + 0.3 * count, waits=overlap)
        harness.add(*(request(number, [number, 1, 2], 200) for number in range(3)))
        counts = calls_of(harness.scheduler)
        harness.run()
        harness.verify()
        calls.append(sorted(counts[50:])[len(counts) // 2])
    assert 0 < wrong.asked < 3 * 0.2 * harness.steps
    assert calls[1] <= calls[0] + 8


def test_separate_phases_cannot_speculate() -> None:
    with pytest.raises(SettingsError, match="unified"):
        Scheduler(limits(), mixed_steps=False, drafting=Drafting(Scripted(1, 1.0)))


def test_rows_with_drafts_are_launched_before_the_frontend_hears_of_the_last_step(monkeypatch) -> None:
    harness = Harness(limits(), overlap=True, proposer=Scripted(2, 0.5))
    harness.add(request(0, [1, 2], 12))
    order = list[str]()

    def noted(owner: object, name: str) -> None:
        function = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *args: (order.append(name), function(*args))[1])

    for owner, name in ((harness.parts, "launch"), (harness.scheduler, "process_results"), (harness.transport, "put")):
        noted(owner, name)
    harness.run()
    harness.verify()
    assert " ".join(order).count("process_results launch put") > 3
