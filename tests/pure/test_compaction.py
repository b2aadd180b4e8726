"""Compaction on a paper device: shared, preempted, resumed or finished, every block keeps its content.

The model of the cache is the device's: each place holds the identity of a whole prefix. After every rule it is compared
with the rows that read it, and with every promise of the prefix cache.
"""

from __future__ import annotations

import logging

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from preheat.core import Swaps
from preheat.errors import PreheatError
from preheat.schedule.blocks import BlockPool
from preheat.schedule.defrag import fragmentation
from preheat.schedule.running import RunningSequences
from preheat.schedule.scheduler import Caching
from tests.pure.paper import Harness, PaperDevice, WrongCache, identities, limits, request

SIZE = 2


def shuffle(harness: Harness, numbers: np.ndarray) -> None:
    """Swap blocks, used or free, by pairs of neighbors in ``numbers``: far worse than any compaction."""
    pairs = numbers[: len(numbers) // 2 * 2].reshape(-1, 2).astype(np.int32)
    harness.scheduler.running.swap(pairs)
    harness.device.swap(Swaps(pairs, len(pairs)))


class Moving(RuleBasedStateMachine):
    """Few tokens and a small cache, so that prefixes are shared, rows preempted and cached blocks evicted."""

    @initialize(
        spare=st.integers(0, 14), threshold=st.sampled_from([0, 0, 1, 3]), caching=st.sampled_from([True, True, False])
    )
    def build(self, spare, threshold, caching) -> None:
        shape = {"max_model_len": 24, "block_size": SIZE, "num_blocks": 13 + spare, "max_num_batched_tokens": 12}
        self.harness = Harness(limits(**shape), caching=Caching(caching), defrag_threshold=threshold)
        self.scheduler, self.pool = self.harness.scheduler, self.harness.scheduler.pool
        self.threshold = threshold
        self.promised: dict[bytes, list[int]] = {}
        self.next_id = 0

    @rule(prompt=st.lists(st.integers(0, 1), min_size=1, max_size=12), max_tokens=st.integers(1, 12))
    def add(self, prompt, max_tokens) -> None:
        self.harness.add(request(self.next_id, prompt, max_tokens))
        self.next_id += 1

    @rule(steps=st.integers(1, 5))
    def run(self, steps) -> None:
        for _ in range(steps):
            self.harness.step()

    @precondition(lambda self: self.next_id)
    @rule(pick=st.floats(0, 1, exclude_max=True))
    def cancel(self, pick) -> None:
        self.harness.cancel(int(pick * self.next_id))

    @rule(data=st.data())
    def scatter(self, data) -> None:
        numbers = data.draw(st.permutations(range(1, self.pool.num_blocks)))
        shuffle(self.harness, np.array(numbers[: data.draw(st.integers(2, len(numbers)))]))

    @rule()
    def compact(self) -> None:
        before, order = self.pool.refs > 0, list(self.pool._cached)
        swaps = self.harness.compact()
        after = self.pool.refs > 0
        assert (swaps is not None) == (fragmentation(before) > self.threshold)
        assert swaps is None or fragmentation(after) == 0
        assert after.sum() == before.sum()
        assert list(self.pool._cached) == order, "who is evicted next does not depend on where it lies"

    @rule()
    def lose(self) -> None:
        self.harness._hear(self.scheduler.lose_cache(PreheatError("out of paper")))
        assert self.pool.num_used == 0
        assert not self.pool._block_of
        self.harness.device.cache.clear()
        self.promised.clear()

    @invariant()
    def blocks_hold_what_the_books_say(self) -> None:
        if not hasattr(self, "harness"):
            return
        self.scheduler.check()
        for digest, block in self.pool._block_of.items():
            assert self.promised.setdefault(digest, self.content(block)) == self.content(block)
        self.promised = {digest: self.promised[digest] for digest in self.pool._block_of}
        slots = self.scheduler.slots
        for slot in self.scheduler.running.order.tolist():
            owner, cached = slots.request[slot], int(slots.cached_len[slot])
            known = [
                at for block in slots.block_table[slot, : -(-cached // SIZE)].tolist() for at in self.content(block)
            ]
            assert known[:cached] == identities(owner.cache_salt, slots.tokens[slot, :cached].tolist())

    def content(self, block: int) -> list[int]:
        return [self.harness.device.cache.get((block, at), 0) for at in range(SIZE)]

    def teardown(self) -> None:
        if hasattr(self, "harness"):
            self.harness.run()
            self.harness.verify()


TestMoving = Moving.TestCase
TestMoving.settings = settings(max_examples=80, stateful_step_count=30, deadline=None)


def busy(**options) -> Harness:
    """Run shared prefixes, preemption and resumption, with every block moved before every step."""
    options = {"defrag_threshold": 0, **options}
    harness = Harness(limits(num_blocks=17, max_model_len=64), **options)
    rng = np.random.default_rng(0)
    harness.add(*(request(number, [number % 2, 1, 2, 3, 4, 5, 6, 7], 36) for number in range(6)))
    while not harness.scheduler.idle:
        shuffle(harness, rng.permutation(np.arange(1, 17)))
        harness.step()
    harness.verify()
    return harness


def test_moving_everything_at_every_step_changes_no_token() -> None:
    stats = busy().scheduler.stats()
    assert stats.preemptions > 0
    assert stats.prefix_hits > 0
    assert stats.blocks_moved > stats.steps


def test_control_tables_left_behind_are_noticed(monkeypatch) -> None:
    def swap(self, pairs) -> None:
        moved = np.arange(self.pool.num_blocks)
        moved[pairs] = pairs[:, ::-1]
        self.pool.swap(pairs, moved)

    monkeypatch.setattr(RunningSequences, "swap", swap)
    with pytest.raises((WrongCache, RuntimeError)):
        busy()


def test_control_digests_left_behind_are_noticed(monkeypatch) -> None:
    right = BlockPool.swap

    def swap(self, pairs, moved) -> None:
        digests, blocks = list(self._hash_of), dict(self._block_of)
        right(self, pairs, moved)
        self._hash_of, self._block_of = digests, blocks

    monkeypatch.setattr(BlockPool, "swap", swap)
    with pytest.raises((WrongCache, RuntimeError, ValueError)):
        busy()


def test_control_a_copy_in_place_of_a_swap_is_noticed(monkeypatch) -> None:
    """Control: a copy in place of a swap is noticed.

    It keeps the used block, but destroys the cached block in its new place.
    """
    right = PaperDevice.swap

    def swap(self, swaps) -> None:
        kept = dict(self.cache)
        right(self, swaps)
        gone = set(swaps.pairs[:, 0].tolist())
        self.cache = {place: kept.get(place) if place[0] in gone else value for place, value in self.cache.items()}

    def run() -> None:
        harness = Harness(limits(num_blocks=40), defrag_threshold=0)
        harness.add(request(0, [1] * 24, 1), request(1, [2] * 9, 9))
        for _ in range(9):
            harness.step()
        harness.add(request(2, [1] * 24, 4))
        harness.run()
        harness.verify()
        assert harness.scheduler.stats().prefix_hits > 0
        assert harness.scheduler.stats().blocks_moved > 0

    run()
    monkeypatch.setattr(PaperDevice, "swap", swap)
    with pytest.raises(WrongCache):
        run()


def scattered(threshold: int | None) -> Harness:
    """Return a harness with six free blocks below three used ones, after the lower of two sequences ended."""
    harness = Harness(limits(max_num_batched_tokens=64), caching=Caching(False), defrag_threshold=threshold)
    harness.add(request(0, [1] * 24, 1), request(1, [2] * 9, 9))
    harness.step()
    assert np.flatnonzero(harness.scheduler.pool.refs).tolist() == [7, 8, 9]
    return harness


@pytest.mark.parametrize(("threshold", "moves"), [(None, 0), (6, 0), (5, 3), (0, 3)])
def test_it_starts_above_the_threshold_and_never_without_one(threshold, moves) -> None:
    harness = scattered(threshold)
    swaps = harness.compact()
    assert (0 if swaps is None else len(swaps.pairs)) == harness.scheduler.stats().blocks_moved == moves
    if swaps is not None:
        assert swaps.pairs.tolist() == [[9, 1], [8, 2], [7, 3]]
        assert swaps.size == 8
        assert harness.scheduler.slots.block_table[1, :3].tolist() == [3, 2, 1]
    harness.run()
    harness.verify()


def test_blocks_given_out_after_compaction_are_the_lowest() -> None:
    """Blocks given out after a compaction are the lowest: the pool knows its blocks by their new ids.

    So no second compaction follows.
    """
    harness = scattered(0)
    harness.compact()
    harness.add(request(2, [3] * 8, 1))
    harness.schedule()
    assert harness.scheduler.pool.refs[1:7].tolist() == [1, 1, 1, 1, 1, 0]


def test_only_between_steps() -> None:
    harness = scattered(0)
    harness.schedule()
    for forbidden in (harness.scheduler.compact, lambda: harness.scheduler.lose_cache(PreheatError(""))):
        with pytest.raises(RuntimeError, match="in flight"):
            forbidden()


def test_one_line_each_for_who_asks(caplog) -> None:
    with caplog.at_level(logging.INFO):
        scattered(0).compact()
    assert not caplog.records
    with caplog.at_level(logging.DEBUG, "preheat.schedule.defrag"):
        scattered(0).compact()
    (record,) = caplog.records
    assert record.getMessage() == (
        "Defragmentation: 3 blocks swapped with as many free ones (padded to 8), 3 in use, "
        "fragmentation 6 before, 0 after"
    )


def test_after_the_cache_is_lost_nothing_is_found_in_it() -> None:
    harness = Harness(limits(), defrag_threshold=0)
    harness.add(request(0, [1] * 9), request(1, [1] * 9, 20))
    for _ in range(10):
        harness.step()
    harness._hear(harness.scheduler.lose_cache(PreheatError("broken")))
    finish = harness.outcomes[1].finish
    assert finish is not None
    assert (finish.reason, finish.error.message) == ("error", "broken")
    harness.device.cache.clear()
    harness.add(request(2, [1] * 9))
    harness.run()
    harness.verify()
    assert harness.outcomes[2].starts == [0]
