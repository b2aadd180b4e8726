"""A step in flight while the next is scheduled: the frontend gets the same results as without it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import settings as effort
from hypothesis import strategies as st

from preheat.core import Drain, ToEngine
from preheat.engine.launch_timer import LaunchTimer
from preheat.engine.loop import Loop
from preheat.schedule import results as results_module
from preheat.schedule.composer import Composer
from preheat.schedule.scheduler import Caching, Scheduler
from tests.pure.paper import JUNK, Harness, WrongCache, limits, reference, request

REQUESTS = st.lists(
    st.builds(
        lambda prompt, max_tokens, at_least, **more: (
            prompt,
            max_tokens,
            {"min_tokens": min(at_least, max_tokens), **more},
        ),
        st.lists(st.integers(0, 1), min_size=1, max_size=20),
        st.integers(1, 14),
        st.integers(0, 5),
        stop_ids=st.sets(st.integers(0, 6), max_size=2),
        logprobs=st.sampled_from([None, 0]),
        prompt_logprobs=st.sampled_from([None, None, 0]),
    ),
    min_size=1,
    max_size=8,
)


def heard(asked, every: int, spare: int, overlap: bool, **options) -> Harness:
    """Add a request every ``every`` steps, in a small cache.

    Most requests must share blocks or be preempted.
    """
    size = limits(max_model_len=36, num_blocks=10 + spare, max_num_batched_tokens=12)
    harness = Harness(size, overlap=overlap, **options)
    for number, (prompt, max_tokens, more) in enumerate(asked):
        harness.add(request(number, prompt, max_tokens, **more))
        for _ in range(every):
            harness.step()
    harness.run()
    harness.verify()
    return harness


@effort(deadline=None)
@given(REQUESTS, st.integers(0, 3), st.integers(0, 6), st.sampled_from([None, 0, 1]), st.booleans())
def test_both_forms_say_the_same(asked, every, spare, threshold, mixed) -> None:
    options = {"defrag_threshold": threshold, "mixed_steps": mixed}
    ahead, behind = (heard(asked, every, spare, overlap, **options) for overlap in (True, False))
    for number in ahead.requests:
        one, other = ahead.outcomes[number], behind.outcomes[number]
        assert (one.tokens, one.finish, one.logprobs) == (other.tokens, other.finish, other.logprobs)
        assert one.prompt_logprobs == other.prompt_logprobs
    stats = [harness.scheduler.stats() for harness in (ahead, behind)]
    assert stats[0].generation_tokens == stats[1].generation_tokens
    assert stats[0].prompt_tokens == stats[1].prompt_tokens


def busy(**options) -> Harness:
    """Run shared prefixes, preemption, compaction, stops and lengths, all with a step in flight."""
    harness = Harness(limits(num_blocks=17), overlap=True, defrag_threshold=0, **options)
    harness.add(
        *(
            request(number, [number % 2, 1, 2, 3, 4, 5, 6, 7], 20 + 3 * number, stop_ids=[] if number % 3 else [5])
            for number in range(8)
        )
    )
    harness.run()
    harness.verify()
    return harness


def test_everything_happens_with_a_step_in_flight() -> None:
    stats = busy().scheduler.stats()
    assert min(stats.preemptions, stats.prefix_hits, stats.blocks_moved) > 0


def stopping(stop: bool) -> Harness:
    """Run one request whose fourth token is its last: by a stop id, or by its length."""
    said = reference(request(0, [1, 2, 4], 12)).tokens
    assert said[3] not in said[:3]
    harness = Harness(limits(), overlap=True)
    harness.add(request(0, [1, 2, 4], 12 if stop else 4, stop_ids=[said[3]] if stop else []))
    harness.run()
    harness.verify()
    return harness


def test_a_row_that_stopped_runs_once_more_without_a_result() -> None:
    harness = stopping(stop=True)
    assert harness.device.rows_run == 5
    assert harness.scheduler.stats().generation_tokens == len(harness.outcomes[0].tokens) == 4


def test_a_length_is_known_ahead() -> None:
    assert stopping(stop=False).device.rows_run == 4


def test_control_a_row_that_is_not_dropped_is_noticed(monkeypatch) -> None:
    monkeypatch.setattr(results_module, "_live", lambda running, schedule: schedule.ids == schedule.ids)
    with pytest.raises((AssertionError, KeyError)):
        stopping(stop=True)


def test_the_next_step_is_launched_before_the_last_result_is_processed() -> None:
    for overlap in (True, False):
        harness = Harness(limits(), overlap=overlap)
        harness.add(request(0, [1, 2], 3))
        in_flight = []
        while harness.step() is not None:
            in_flight.append((len(harness.device.queue), len(harness.outcomes[0].tokens)))
        assert in_flight == ([(1, 0), (1, 1), (1, 2)] if overlap else [(0, 1), (0, 2), (0, 3)])
        assert harness.scheduler.idle


def published_when_scheduled(self):
    """Plant a scheduler that publishes blocks before their tokens are known."""
    schedule = scheduled(self)
    if schedule is None:
        return None
    size = self.slots.block_size
    for slot, first, end in zip(schedule.slots.tolist(), schedule.first // size, schedule.ends // size, strict=True):
        sequence = self.running.sequence(slot)
        self.prefix.publish(sequence, self.slots.tokens[slot], self.slots.tables[slot], int(first), int(end))
    return schedule


scheduled = Scheduler.schedule


def test_control_a_block_published_before_its_result_is_noticed(monkeypatch) -> None:
    monkeypatch.setattr(Scheduler, "schedule", published_when_scheduled)
    with pytest.raises(WrongCache):
        busy()


def test_control_a_digest_over_a_dropped_token_is_noticed(monkeypatch) -> None:
    """Control: a digest over a dropped token is noticed, even if the block itself holds its computed values."""
    monkeypatch.setattr(Scheduler, "schedule", published_when_scheduled)
    monkeypatch.setattr(Harness, "_check_published", lambda self: None)
    with pytest.raises(WrongCache):
        busy()


def test_preempting_waits_for_all_steps_in_flight(monkeypatch) -> None:
    harness = Harness(limits(num_blocks=17), overlap=True)
    harness.add(request(0, [1] * 30, 30), request(1, [2] * 30, 30))
    while harness.scheduler.pool.num_free:
        harness.step()
    asked = []
    while not harness.scheduler.stats().preemptions:
        asked.append(len(harness.scheduler._in_flight))
        harness.step()
    assert asked[-2:] == [1, 0]
    harness.run()
    harness.verify()


def test_control_preempting_with_a_step_in_flight_is_noticed(monkeypatch) -> None:
    """Control: preempting with a step in flight keeps an incomplete list of tokens."""
    right = Composer._make_room

    def hasty(self, step, slots):
        flying, self.in_flight = self.in_flight, []
        try:
            return right(self, step, slots)
        finally:
            self.in_flight = flying

    monkeypatch.setattr(Composer, "_make_room", hasty)
    with pytest.raises((AssertionError, RuntimeError)):
        busy()


def test_control_moving_with_a_step_in_flight_is_noticed(monkeypatch) -> None:
    monkeypatch.setattr(Scheduler, "_nothing_in_flight", lambda self: None)
    monkeypatch.setattr(Scheduler, "scattered", False)
    monkeypatch.setattr(Loop, "_compact", compact_at_once)
    with pytest.raises(WrongCache):
        busy()


def compact_at_once(self) -> None:
    if (swaps := self.scheduler.compact()) is not None:
        self.executor.swap(swaps)


def test_scattered_predicts_compact() -> None:
    harness = Harness(limits(max_num_batched_tokens=64), caching=Caching(False), defrag_threshold=5)
    assert not harness.scheduler.scattered
    harness.add(request(0, [1] * 24, 1), request(1, [2] * 9, 9))
    harness.step()
    assert harness.scheduler.scattered
    assert harness.compact() is not None
    assert not harness.scheduler.scattered


def decoding(prompts: int = 1, **options) -> Harness:
    """Return sequences that decode.

    Two tokens of each are known, and the step of the third is in flight.
    """
    harness = Harness(limits(), overlap=True, **options)
    harness.add(*(request(number, [number + 1, 2], 30) for number in range(prompts)))
    for _ in range(3):
        harness.step()
    assert len(harness.device.queue) == 1
    return harness


def test_a_slot_that_changes_hands_in_flight_takes_no_token_of_its_former_owner() -> None:
    harness = decoding()
    slot = harness.scheduler.running.slot_of(0)
    assert harness.cancel(0)
    assert harness.scheduler.pool.num_used == 0
    harness.add(request(1, [5, 5, 5], 4))
    harness.step()
    assert harness.scheduler.running.slot_of(1) == slot
    harness.run()
    harness.verify()
    assert len(harness.outcomes[0].tokens) == 2
    assert harness.scheduler.stats().generation_tokens == 2 + 4


def test_the_step_in_flight_is_processed_after_all_requests_left() -> None:
    harness = decoding(prompts=3)
    harness.scheduler.cancel_all()
    assert not harness.scheduler.idle
    harness.step()
    assert harness.scheduler.idle
    harness.scheduler.check()
    assert [len(harness.outcomes[number].tokens) for number in range(3)] == [2, 2, 2]


@pytest.mark.parametrize("at", ["pack", "launch", "listener", "result"])
def test_a_step_that_fails_with_another_in_flight(at) -> None:
    """A failed step ends the requests of both steps.

    No other request is harmed, and no made-up token is told.
    """
    harness = decoding(prompts=2)
    harness.step("boom", at)
    harness.add(request(7, [3], 5))
    harness.run()
    harness.verify()
    reasons = {number: outcome.finish and outcome.finish.reason for number, outcome in harness.outcomes.items()}
    assert reasons == {0: "error", 1: "error", 7: "length"}
    assert harness.outcomes[0].finish.error.message == "RuntimeError: boom"
    told = [token for outcome in harness.outcomes.values() for token in outcome.tokens]
    assert JUNK not in told
    assert harness.scheduler.stats().generation_tokens == len(told)


def test_a_failed_swap_ends_running_requests(monkeypatch) -> None:
    harness = Harness(limits(max_num_batched_tokens=64), overlap=True, defrag_threshold=0)
    harness.add(request(0, [1] * 24, 1), request(1, [2] * 9, 9))
    monkeypatch.setattr(harness.parts, "swap", lambda swaps: 1 / 0)
    harness.run()
    finish = harness.outcomes[1].finish
    assert finish is not None
    assert (finish.reason, finish.error.message) == ("error", "ZeroDivisionError: division by zero")


@pytest.mark.parametrize("part", ["pack", "launch", "step"])
def test_an_interrupt_leaves_a_loop_that_can_finish(part, monkeypatch) -> None:
    harness = decoding()

    def interrupted(*args) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(harness.parts, part, interrupted)
    with pytest.raises(KeyboardInterrupt):
        harness.step()
    monkeypatch.undo()
    harness.cancel(0)
    harness.loop.finish()
    harness.add(request(1, [5, 5, 5], 4))
    harness.run()
    harness.verify()


class Visitor:
    """Transport that brings one message per step, then asks to drain."""

    def __init__(self, harness: Harness, now: bool) -> None:
        self.harness = harness
        self.messages: list[ToEngine] = [request(0, [1, 2], 9), request(1, [2, 1], 6), Drain(now)]

    def take(self, timeout: float | None) -> list[ToEngine]:
        assert self.messages or timeout == 0, "no message will ever come"
        return [self.messages.pop(0)] if self.messages else []

    def put(self, message) -> None:
        self.harness._hear(message)


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("now", [True, False])
def test_the_loop_drains_requests_in_flight(overlap, now) -> None:
    harness = Harness(limits(), overlap=overlap)
    harness.loop.transport = Visitor(harness, now)
    harness.loop.launch_timer = LaunchTimer(lambda: 0.0)  # steps take no time, so the loop waits for no arrivals
    harness.loop.run()
    assert harness.scheduler.idle
    assert not harness.device.queue
    harness.scheduler.check()
    assert [len(harness.outcomes[number].tokens) for number in range(2)] == (
        [1 if overlap else 2, 0 if overlap else 1] if now else [9, 6]
    )
