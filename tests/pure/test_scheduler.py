"""The scheduler on a paper device: any batching, chunking, sharing and preemption gives the reference's tokens."""

from __future__ import annotations

import gc
import random
import sys
from collections import deque
from collections.abc import Callable

import msgspec
import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from msgspec.structs import replace

from preheat.cache_groups import WHOLE, cut
from preheat.core import Plain, ResetPrefixCache, Resume, Schedule, StepResult, in_background
from preheat.errors import InvalidRequest, SettingsError
from preheat.schedule import persistent_batch
from preheat.schedule import prefix as prefix_module
from preheat.schedule.blocks import BlockPool
from preheat.schedule.prefix import PrefixCache
from preheat.schedule.scheduler import Caching, Scheduler, unpadded
from preheat.schedule.sequence import Sequence
from preheat.schedule.states import NO_ENDS, Ends
from preheat.schedule.waiting import WaitingQueue
from tests.controls import fails
from tests.pure.paper import Harness, Scripted, WrongCache, limits, reference, request


def to_eights(rows: int, tokens: int, longest: int) -> int:
    return -(-tokens // 8) * 8


def rectangle(rows: int, tokens: int, longest: int) -> int:
    return rows * longest


PROMPTS = st.one_of(
    st.lists(st.integers(0, 1), min_size=1, max_size=24),
    st.integers(1, 24).map(lambda length: [index % 3 for index in range(length)]),
)


GROUPS = [WHOLE, WHOLE, cut([None, 5]), cut([3, None, 3, 9]), cut([4]), cut([7, 1])]


class Anything(RuleBasedStateMachine):
    """Random requests, cancels and failing steps under random, mostly cramped limits, with and without overlap."""

    @initialize(data=st.data())
    def build(self, data) -> None:
        size, length = data.draw(st.integers(1, 4)), data.draw(st.integers(26, 40))
        seqs = data.draw(st.integers(1, 5))
        padded = data.draw(st.sampled_from([unpadded, to_eights, rectangle]))
        chunked = data.draw(st.booleans())
        spare = data.draw(st.integers(0, 12)) if chunked else 24
        mixed = data.draw(st.booleans())
        most = data.draw(st.sampled_from([0, 0, 1, 4])) if mixed else 0
        groups = data.draw(st.sampled_from(GROUPS)) if chunked else WHOLE
        states = data.draw(st.sampled_from([0, 1, 2, 6])) if groups == WHOLE else 0
        need = sum(group.columns(length, size, 1) for group in groups)
        self.harness = Harness(
            limits(
                max_model_len=length,
                max_num_seqs=seqs,
                max_num_batched_tokens=padded(seqs, seqs, 1) + spare,
                max_num_prefill_seqs=data.draw(st.sampled_from([None, 1, 2])),
                block_size=size,
                num_blocks=1 + need + data.draw(st.integers(0, 12 * len(groups))),
                groups=groups,
                states=states,
            ),
            caching=Caching(
                kept=data.draw(st.sampled_from([NO_ENDS, Ends(size), Ends(2 * size), Ends(size, each=True)])),
                enabled=data.draw(st.booleans()),
            ),
            enable_chunked_prefill=chunked,
            mixed_steps=mixed,
            proposer=Scripted(most, right=0.7, seed=size),
            mixed_tokens=data.draw(st.sampled_from([None, 1, 6])),
            overlap=data.draw(st.booleans()),
            padded=padded,
            defrag_threshold=data.draw(st.sampled_from([None, 0, 2])),
        )
        self.next_id = 0

    @rule(
        prompt=PROMPTS,
        max_tokens=st.integers(1, 14),
        min_share=st.floats(0, 1),
        stop_ids=st.one_of(
            st.just([]), st.sets(st.integers(0, 6), max_size=1), st.sampled_from([[0, 3, 90, 91, 92, 93], [2, 2**31]])
        ),
        salt=st.sampled_from(["", "", "a"]),
        logprobs=st.sampled_from([None, None, 0]),
        prompt_logprobs=st.sampled_from([None, None, 0]),
        priority=st.sampled_from([0, 0, in_background(0)]),
    )
    def add(self, prompt, max_tokens, min_share, stop_ids, salt, logprobs, prompt_logprobs, priority) -> None:
        max_tokens = min(max_tokens, self.harness.scheduler.limits.max_model_len - len(prompt))
        params = {"logprobs": logprobs, "prompt_logprobs": prompt_logprobs, "min_tokens": int(max_tokens * min_share)}
        asked = request(self.next_id, prompt, max_tokens, stop_ids=stop_ids, salt=salt, **params)
        self.harness.add(msgspec.structs.replace(asked, priority=priority))
        self.next_id += 1

    @rule(steps=st.integers(1, 6))
    def run(self, steps) -> None:
        for _ in range(steps):
            self.harness.step()

    @rule(pick=st.floats(0, 1, exclude_max=True))
    def cancel(self, pick) -> None:
        if self.next_id:
            number = int(pick * self.next_id)
            was_here = self.harness.outcomes[number].finish is None and number not in self.harness.cancelled
            assert self.harness.cancel(number) == was_here

    @rule()
    def reset_prefix_cache(self) -> None:
        self.harness.reset_prefix_cache()

    @rule(at=st.sampled_from(["pack", "launch", "listener", "result"]))
    def fail(self, at) -> None:
        self.harness.step("out of paper", at)

    @invariant()
    def consistent(self) -> None:
        if hasattr(self, "harness"):
            self.harness.scheduler.check()

    def teardown(self) -> None:
        if hasattr(self, "harness"):
            self.harness.run()
            self.harness.verify()


TestAnything = Anything.TestCase
TestAnything.settings = settings(max_examples=120, stateful_step_count=40, deadline=None)


def crowded(preempting: bool = True, **options) -> Harness:
    """Run sequences that together outgrow the cache, so that some are preempted."""
    harness = Harness(limits(num_blocks=17 if preempting else 65, max_model_len=64), **options)
    harness.add(*(request(number, [number, 1, 2, 3, 4], 40) for number in range(4)))
    harness.run()
    return harness


@pytest.mark.parametrize("caching", [False, True])
def test_preemption_changes_no_token(caching) -> None:
    harness = crowded(caching=Caching(caching))
    harness.verify()
    assert harness.scheduler.stats().preemptions > 0
    assert crowded(preempting=False).scheduler.stats().preemptions == 0


def test_control_a_token_lost_in_preemption_is_noticed(monkeypatch) -> None:
    kept = Sequence.preempted
    monkeypatch.setattr(Sequence, "preempted", lambda self, tokens: kept(self, tokens[:-1]))
    with fails():
        crowded().verify()


def shared_prefix(second: list[int], salt: str = "") -> Harness:
    harness = Harness(limits())
    harness.add(request(0, [1, 2, 3, 4, 5, 6, 7, 8, 9]))
    harness.run()
    harness.add(request(1, second, salt=salt))
    harness.run()
    harness.verify()
    return harness


def test_a_cached_prefix_is_used_up_to_the_first_difference() -> None:
    assert shared_prefix([1, 2, 3, 4, 5, 6, 7, 8, 3]).outcomes[1].starts == [8]
    assert shared_prefix([1, 2, 3, 4, 9, 6, 7, 8, 9]).outcomes[1].starts == [4]
    assert shared_prefix([9, 2, 3, 4, 5, 6, 7, 8, 9]).outcomes[1].starts == [0]
    assert shared_prefix([1, 2, 3, 4, 5, 6, 7, 8, 9], salt="a").outcomes[1].starts == [0]


@pytest.mark.parametrize("overlap", [False, True])
def test_nothing_computed_before_a_reset_is_found(overlap) -> None:
    """Nothing computed before a reset is found, not even by a step in flight.

    A running sequence goes on with its blocks.
    """
    prompt = [1, 2, 3, 4, 5, 6, 7, 8, 9]
    harness = Harness(limits(), overlap=overlap)
    harness.add(request(0, prompt, 20))
    harness.step()
    harness.transport.send(ResetPrefixCache())
    harness.loop.take(0)
    for number in (1, 2):
        harness.add(request(number, prompt))
        harness.step()
        harness.step()
    harness.run()
    harness.verify()
    assert [harness.outcomes[number].starts for number in range(3)] == [[0], [0], [8]]


def test_control_a_salt_left_out_of_the_hash_is_noticed(monkeypatch) -> None:
    monkeypatch.setattr(prefix_module, "chain_root", lambda request: b"")
    with pytest.raises(WrongCache):
        shared_prefix([1, 2, 3, 4, 5, 6, 7, 8, 9], salt="a")


def test_control_a_block_hashed_without_its_parent_is_noticed(monkeypatch) -> None:
    def digest(self, sequence, tokens, index):
        return tokens[index * 4 : index * 4 + 4].tobytes()

    monkeypatch.setattr(PrefixCache, "_block_hash", digest)
    with pytest.raises(WrongCache):
        shared_prefix([5, 6, 7, 8, 5, 6, 7, 8, 9])


def test_control_a_block_shared_without_a_reference_is_noticed(monkeypatch) -> None:
    monkeypatch.setattr(BlockPool, "share", lambda self, blocks: None)
    with pytest.raises(RuntimeError, match=r"block pool: .*differ"):
        shared_prefix([1, 2, 3, 4, 5, 6, 7, 8, 3])


def test_control_blocks_kept_by_a_stopped_sequence_are_noticed(monkeypatch) -> None:
    monkeypatch.setattr(BlockPool, "release", lambda self, blocks: None)
    with pytest.raises(RuntimeError, match=r"block pool: .*differ"):
        crowded(preempting=False)


def test_a_full_hit_computes_the_last_token_again() -> None:
    harness = Harness(limits())
    harness.add(request(0, list(range(8))))
    harness.run()
    harness.add(request(1, list(range(8))))
    schedule = harness.schedule()
    assert schedule is not None
    assert schedule.extend.tolist() == [4], "seven tokens may be read, one block of four is full"
    assert schedule.started == {1: 4}


def test_prompt_logprobs_read_no_block_but_leave_blocks() -> None:
    harness = Harness(limits(max_num_batched_tokens=5))
    harness.add(request(0, list(range(10)), prompt_logprobs=0))
    harness.run()
    harness.add(request(1, list(range(10)), prompt_logprobs=0), request(2, list(range(10))))
    harness.run()
    harness.verify()
    assert [harness.outcomes[number].starts for number in range(3)] == [[0], [0], [8]]
    stats = harness.scheduler.stats()
    assert (stats.prefix_queries, stats.prefix_hits) == (10, 8)


def test_decoding_rows_come_first_and_prompts_take_the_rest() -> None:
    harness = Harness(limits(max_num_batched_tokens=8))
    harness.add(request(0, [1, 2]), request(1, list(range(20))))
    rows = [harness.step() for _ in range(4)]
    assert [row.extend.tolist() for row in rows if row] == [[2, 6], [1, 7], [1, 7], [1, 1]]
    assert [row.num_decode for row in rows if row] == [0, 1, 1, 2]


def test_without_chunks_a_prompt_is_computed_whole() -> None:
    harness = Harness(limits(max_num_batched_tokens=8), enable_chunked_prefill=False)
    harness.add(request(0, [1, 2]), request(1, list(range(8))), request(2, [1]))
    rows = [harness.step() for _ in range(9)]
    assert [row.extend.tolist() for row in rows if row] == [[2]] + [[1]] * 7 + [[8]]
    with pytest.raises(InvalidRequest, match="max_num_batched_tokens"):
        harness.add(request(3, list(range(9))))


def test_at_most_so_many_prompts_in_a_step() -> None:
    harness = Harness(limits(max_num_prefill_seqs=1))
    harness.add(*(request(number, [number, 1, 2]) for number in range(4)))
    rows = [harness.step() for _ in range(4)]
    assert [row.rows - row.num_decode for row in rows if row] == [1, 1, 1, 1]


@pytest.mark.parametrize(("mixed_tokens", "chunks"), [(None, [12]), (8, [7, 5]), (1, [2] * 6)])
def test_who_decodes_is_not_held_up_for_long(mixed_tokens, chunks) -> None:
    harness = Harness(limits(max_num_batched_tokens=16), mixed_tokens=mixed_tokens)
    harness.add(request(0, [1] * 12, 20))
    assert harness.step().extend.tolist() == [12], "no sequence decodes yet"
    harness.add(request(1, [2] * 12, 1))
    seen = [harness.step().extend.tolist() for _ in chunks]
    assert seen == [[1, chunk] for chunk in chunks]


def test_requests_that_resume_are_read_in_whole_steps() -> None:
    harness = Harness(limits(max_num_batched_tokens=16), mixed_tokens=8)
    harness.add(request(8, [1], 20))
    harness.step()
    moved = (replace(request(id, [2] * 8, 20), resume=Resume([3, 3])) for id in (1, 2))
    harness.add(*moved, request(9, [4] * 12, 1))
    seen = [harness.step().extend.tolist() for _ in range(4)]
    assert seen == [[1, 10, 5], [1, 1, 5, 1], [1, 1, 1, 5], [1, 1, 1, 5]], "the last ones are bounded again"


def test_a_bound_on_mixed_steps_starves_no_request() -> None:
    """Twice the decoding rows, and the padded first token of a prompt, may always run."""
    harness = Harness(limits(max_num_batched_tokens=64, max_num_seqs=8), mixed_tokens=2, padded=to_eights)
    harness.add(*(request(number, [number], 30) for number in range(6)))
    harness.step()
    harness.add(request(6, [7] * 30, 1))
    steps = [harness.step() for _ in range(20)]
    assert max(step.tokens for step in steps) == 8, "not 16, which is more than twice six"
    assert 6 in harness.outcomes
    assert harness.outcomes[6].finish is not None


def test_the_budget_counts_padded_tokens() -> None:
    harness = Harness(limits(max_num_batched_tokens=12), padded=rectangle)
    harness.add(request(0, [1] * 3), request(1, [2] * 4), request(2, [3] * 5))
    schedule = harness.step()
    assert schedule is not None
    assert schedule.extend.tolist() == [3, 4, 4], "a third row of five would make 3 x 5"


def test_a_long_prompt_advances_while_others_come_and_go() -> None:
    harness = Harness(limits(max_num_batched_tokens=4, num_blocks=200, max_model_len=64))
    harness.add(*(request(number, [number], 30) for number in range(3)), request(3, [5] * 40, 2))
    harness.step()
    for number in range(4, 30):
        harness.add(request(number, [1], 1))
        schedule = harness.step()
        assert schedule is not None
        assert harness.scheduler.running.slot_of(3) in schedule.slots
    harness.run()
    harness.verify()


def test_cancel_frees_at_once() -> None:
    harness = Harness(limits(max_num_seqs=1))
    harness.add(request(0, [1] * 9), request(1, [2] * 9))
    harness.step()
    assert harness.scheduler.pool.num_used == 3
    assert harness.cancel(1)
    assert harness.cancel(0)
    assert harness.scheduler.idle
    assert harness.scheduler.pool.num_used == 0
    assert not harness.cancel(0)
    harness.add(request(2, [3], 30), request(3, [4]))
    harness.step()
    harness.scheduler.cancel_all()
    assert harness.scheduler.idle
    harness.scheduler.check()


def test_a_failing_step_fails_its_requests_alone() -> None:
    harness = Harness(limits(max_num_seqs=2))
    harness.add(*(request(number, [number + 1, 2]) for number in range(3)))
    harness.step()
    harness.step(fail="boom")
    harness.run()
    harness.verify()
    finishes = [harness.outcomes[number].finish for number in range(3)]
    assert [finish.reason for finish in finishes if finish] == ["error", "error", "length"]
    assert finishes[0] is not None
    assert finishes[0].error.message == "RuntimeError: boom"


@pytest.mark.parametrize("more", [[], [90, 91, 92, 93, 94]])
def test_stop_ids_wait_for_min_tokens(more) -> None:
    said = reference(request(0, [1, 2, 3], 12)).tokens
    stop = said[0]
    again = said.index(stop, 1)
    harness = Harness(limits())
    harness.add(
        request(0, [1, 2, 3], 12, stop_ids=[stop, *more]),
        request(1, [1, 2, 3], 12, stop_ids=[stop, *more], min_tokens=1),
    )
    harness.run()
    harness.verify()
    assert [len(harness.outcomes[number].tokens) for number in range(2)] == [1, again + 1]
    finish = harness.outcomes[1].finish
    assert finish is not None
    assert (finish.reason, finish.stop_id) == ("stop", stop)


def test_results_are_processed_once_in_the_order_of_steps() -> None:
    scheduler = Scheduler(limits())
    scheduler.add(request(0, [1]))
    first, second = scheduler.schedule(), scheduler.schedule()
    assert first is not None and second is not None
    with pytest.raises(RuntimeError, match="not the oldest"):
        scheduler.process_results(second, StepResult(np.zeros(1, np.int32)))
    with pytest.raises(ValueError, match="tokens"):
        scheduler.process_results(first, StepResult(np.zeros(2, np.int32)))
    scheduler.fail(first, ValueError("wrong result"))
    with pytest.raises(RuntimeError, match="not the oldest"):
        scheduler.fail(first, ValueError("again"))
    assert not scheduler.idle
    assert scheduler.process_results(second, StepResult(np.zeros(1, np.int32))).tokens == []
    assert scheduler.idle
    scheduler.check()


def test_limits_that_exclude_allowed_requests_are_refused() -> None:
    with pytest.raises(SettingsError, match=r"max_model_len 64 needs 16 blocks.*num_gpu_blocks_override"):
        Scheduler(limits(num_blocks=16))
    with pytest.raises(SettingsError, match="max_num_seqs"):
        Scheduler(limits(max_num_batched_tokens=3))
    with pytest.raises(SettingsError, match="max_num_prefill_seqs"):
        Scheduler(limits(max_num_prefill_seqs=0))


@pytest.mark.parametrize(("prompt", "max_tokens"), [([], 4), ([1] * 60, 5), ([1], 0)])
def test_impossible_requests_are_not_queued(prompt, max_tokens) -> None:
    scheduler = Scheduler(limits())
    bad = request(0, prompt)
    bad.max_tokens = max_tokens
    with pytest.raises(InvalidRequest, match="max_model_len"):
        scheduler.add(bad)
    scheduler.add(request(1, [1]))
    with pytest.raises(InvalidRequest, match="already"):
        scheduler.add(request(1, [1]))


def test_stats_count_each_token_once_despite_preemption() -> None:
    harness = crowded()
    stats = harness.scheduler.stats()
    assert (stats.prompt_tokens, stats.generation_tokens) == (20, 160)
    assert (stats.running, stats.waiting, stats.blocks_used, stats.blocks_total) == (0, 0, 0, 16)
    assert stats.steps == harness.steps


def test_the_lowest_priority_goes_first_and_is_preempted_last() -> None:
    """Equal priorities run in order of arrival.

    A preempted sequence waits at its old place.
    """
    scheduler = Scheduler(limits(max_num_seqs=2))
    for number, priority in enumerate((5, 0, -3, 0), 1):
        scheduler.add(msgspec.structs.replace(request(number, [1] * 8, max_tokens=4), priority=priority))
    first = scheduler.schedule()
    assert first is not None
    assert sorted(first.ids.tolist()) == [2, 3]
    assert scheduler.running.ids[scheduler.running.order].tolist() == [3, 2]
    assert scheduler.waiting.first().request.id == 4
    scheduler.waiting.arrive(Sequence(msgspec.structs.replace(request(9, [1]), priority=-9)))
    assert scheduler.waiting.first().request.id == 9
    _, preempted = scheduler.running.preempt_last()
    scheduler.waiting.wait(preempted)
    order = []
    while scheduler.waiting:
        order.append(scheduler.waiting.first().request.id)
        scheduler.waiting.pop(order[-1])
    assert order == [9, 2, 4, 1]


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("lacking", ["slots", "blocks"])
def test_yielding_requests_make_way_and_go_on_later(lacking, overlap) -> None:
    """Yielding sequences make way only for a request that does not yield.

    No token changes.
    """
    room = {"slots": {"max_num_seqs": 2}, "blocks": {"num_blocks": 19, "max_num_seqs": 3}}[lacking]
    harness = Harness(limits(**room, max_model_len=48), overlap=overlap)

    def ask(number: int, length: int, priority: int) -> None:
        harness.add(msgspec.structs.replace(request(number, [number] * length, max_tokens=20), priority=priority))
        for _ in range(3):
            harness.step()

    ask(1, 24, in_background(1))
    ask(2, 24, in_background(2))
    assert len(harness.scheduler.running) == 2
    ask(3, 20, in_background(9))
    assert 3 in harness.scheduler.waiting and harness.scheduler.stats().preemptions == 0
    ask(4, 16, 7)
    assert harness.scheduler.running.slot_of(4) is not None
    assert harness.scheduler.running.slot_of(1) is not None and 2 in harness.scheduler.waiting
    harness.run()
    harness.verify()


def test_a_late_sequence_is_ordered_by_its_priority() -> None:
    scheduler = Scheduler(limits(max_num_seqs=3))
    for number, priority in ((1, 2), (2, 2), (3, 1)):
        scheduler.add(msgspec.structs.replace(request(number, [1] * 4, max_tokens=4), priority=priority))
        scheduler.schedule()
    assert scheduler.running.ids[scheduler.running.order].tolist() == [3, 1, 2]
    scheduler.check()


class ScannedQueue(WaitingQueue):
    """The obvious queue, which scans when a sequence leaves."""

    def __init__(self) -> None:
        super().__init__()
        self._line: deque[Sequence] = deque()

    def __setitem__(self, request_id, sequence) -> None:
        super().__setitem__(request_id, sequence)
        self._line.append(sequence)

    def pop(self, request_id, default=None):
        self._line.remove(self[request_id])
        return super().pop(request_id, default)


def comparisons(monkeypatch, queue: type[WaitingQueue], count: int) -> int:
    """Return how often two sequences are compared while ``count`` of them are queued and leave in random order."""
    seen = 0

    def equal(self, other) -> bool:
        nonlocal seen
        seen += 1
        return self is other

    monkeypatch.setattr(Sequence, "__eq__", equal)
    scheduler = Scheduler(limits())
    assert type(scheduler.waiting) is WaitingQueue
    scheduler.waiting = scheduler.composer.waiting = queue()
    for number in range(count):
        scheduler.add(request(number, [1]))
    ids = list(range(count))
    random.Random(0).shuffle(ids)
    assert all(scheduler.cancel(number) for number in ids)
    return seen


def test_leaving_the_queue_compares_no_sequences(monkeypatch) -> None:
    assert comparisons(monkeypatch, WaitingQueue, 20_000) == 0
    assert comparisons(monkeypatch, ScannedQueue, 300) > 300 * 20, "the control must scan"


def calls_of(action: Callable[[], object]) -> int:
    """Return the number of function calls of ``action``, built-in ones too, without garbage collections."""
    count = 0

    def counting(frame, event, argument) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    before = sys.getprofile()
    gc.disable()
    sys.setprofile(counting)
    try:
        action()
    finally:
        sys.setprofile(before)
        gc.enable()
    return count


def beat(scheduler: Scheduler) -> Schedule:
    """Schedule a step and settle it."""
    schedule = scheduler.schedule()
    assert schedule is not None
    scheduler.process_results(schedule, StepResult(np.zeros(np.count_nonzero(schedule.samples), np.int32)))
    return schedule


def waited_for(waiting: int) -> Scheduler:
    """Return a scheduler of ``waiting`` requests, with four of them in slots."""
    scheduler = Scheduler(limits())
    for number in range(waiting):
        scheduler.add(request(number, [1, 2, 3]))
    beat(scheduler)
    return scheduler


def decoding(rows: int) -> Scheduler:
    """Return a scheduler with ``rows`` rows in the middle of a block."""
    scheduler = Scheduler(
        limits(max_num_seqs=rows, max_num_batched_tokens=3 * rows, num_blocks=17 * rows, block_size=8)
    )
    for number in range(rows):
        scheduler.add(request(number, [1, 2, 3], stop_ids=[5, 6]))
    while beat(scheduler).num_decode < rows:
        pass
    return scheduler


def test_a_step_costs_the_same_whoever_waits() -> None:
    few, many = waited_for(20), waited_for(20_000)
    assert calls_of(lambda: beat(many)) == calls_of(lambda: beat(few))


def test_a_decoding_step_loops_over_no_rows() -> None:
    few, many = decoding(4), decoding(256)
    assert calls_of(lambda: beat(many)) == calls_of(lambda: beat(few))
    few, many = decoding(4), decoding(256)
    for scheduler in few, many:  # the control: a stop id that all of them draw ends each by itself
        scheduler.slots.stop_ids[:] = 0
        scheduler.running.changes += 1  # stop ids are read when rows come or go
    assert calls_of(lambda: beat(many)) > calls_of(lambda: beat(few)) + 250


def texts(stops: bool = True) -> list[bytes]:
    """Return the blocks that four sequences leave behind, after comparing their tokens with the reference's."""
    harness = Harness(limits())
    harness.add(*(request(number, [number, 1], 30, stop_ids=[5] if stops else []) for number in range(4)))
    harness.run()
    harness.verify()
    return harness.scheduler.pool.published_hashes()


def test_plain_steps_end_texts_and_fill_blocks_as_others_do(monkeypatch) -> None:
    scheduler = decoding(4)
    assert sum(beat(scheduler).plain is not None for _ in range(4)) > 1
    plain = texts()
    monkeypatch.setattr(persistent_batch, "_plain", lambda running, decode: None)
    assert texts() == plain


def test_control_a_plain_step_without_stop_ids_or_blocks_is_noticed(monkeypatch) -> None:
    whole = texts(stops=False)
    monkeypatch.setattr(persistent_batch, "_plain", lambda running, decode: Plain(running.changes, frozenset()))
    with fails():
        texts()
    monkeypatch.setattr(persistent_batch, "_filling", lambda lengths, block_size: 1_000)
    assert len(texts(stops=False)) < len(whole)


def test_the_check_sees_a_changed_block_table() -> None:
    harness = Harness(limits())
    harness.add(request(0, [1] * 9))
    harness.step()
    harness.scheduler.running.slots.set_blocks(0, 0, 7)
    with pytest.raises(RuntimeError, match="differ"):
        harness.scheduler.check()


@pytest.mark.parametrize("mixed", [True, False])
def test_a_step_has_one_phase_unless_it_may_be_mixed(mixed):
    harness = Harness(limits(), mixed_steps=mixed)
    harness.add(request(0, [1, 2, 3]))
    harness.step()
    harness.add(request(1, [4, 5, 6]))
    phases = []
    while (schedule := harness.step()) is not None:
        phases.append((schedule.num_decode, schedule.rows - schedule.num_decode))
    assert phases[0] == ((1, 1) if mixed else (0, 1))
    assert mixed or all(0 in phase for phase in phases)
    harness.verify()
