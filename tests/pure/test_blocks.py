"""The block pool against a model that is slow and obvious."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from preheat.schedule.blocks import PAD_BLOCK, BlockPool


class Model(RuleBasedStateMachine):
    """Model with lists instead of heaps and links.

    ``blank`` are ids, ``cached`` ids in eviction order, ``owners`` block lists.
    """

    @initialize(num_blocks=st.integers(2, 12))
    def build(self, num_blocks) -> None:
        self.pool = BlockPool(num_blocks, 4)
        self.blank = list(range(1, num_blocks))
        self.cached: list[int] = []
        self.digest: dict[int, bytes] = {}
        self.owners: list[list[int]] = []

    @rule(count=st.integers(0, 6))
    def allocate(self, count) -> None:
        if count > len(self.blank) + len(self.cached):
            with pytest.raises(RuntimeError, match="check first"):
                self.pool.allocate(count)
            return
        want = []
        for _ in range(count):
            if self.blank:
                want.append(min(self.blank))
                self.blank.remove(want[-1])
            else:
                want.append(self.cached.pop(0))
                del self.digest[want[-1]]
        assert self.pool.allocate(count) == want
        self.owners.append(want)

    @precondition(lambda self: any(self.owners))
    @rule(data=st.data())
    def publish(self, data) -> None:
        block = data.draw(st.sampled_from([block for owner in self.owners for block in owner]))
        digest = data.draw(st.binary(min_size=1, max_size=1))
        self.pool.publish(block, digest)
        if digest not in self.digest.values() and block not in self.digest:
            self.digest[block] = digest

    @precondition(lambda self: self.digest)
    @rule(data=st.data())
    def share(self, data) -> None:
        blocks = data.draw(st.lists(st.sampled_from(sorted(self.digest)), unique=True))
        assert self.pool.count_cached(blocks) == len(set(blocks) & set(self.cached))
        self.pool.share([self.pool.find(self.digest[block]) for block in blocks])
        self.cached = [block for block in self.cached if block not in blocks]
        self.owners.append(blocks)

    @precondition(lambda self: self.owners)
    @rule(data=st.data())
    def release(self, data) -> None:
        blocks = self.owners.pop(data.draw(st.integers(0, len(self.owners) - 1)))
        self.pool.release(blocks)
        for block in reversed(blocks):
            if not any(block in owner for owner in self.owners):
                (self.cached if block in self.digest else self.blank).append(block)

    @invariant()
    def agree(self) -> None:
        if not hasattr(self, "pool"):
            return
        owned = [block for owner in self.owners for block in owner]
        self.pool.check(np.bincount(np.array(owned, int), minlength=self.pool.num_blocks))
        assert self.pool.num_used == len(set(owned))
        assert self.pool.num_free == len(self.blank) + len(self.cached)
        assert PAD_BLOCK not in owned
        for block, digest in self.digest.items():
            assert self.pool.find(digest) == block

    def teardown(self) -> None:
        if hasattr(self, "pool"):
            for owner in self.owners:
                self.pool.release(owner)
            self.pool.check(np.zeros(self.pool.num_blocks, int))


TestModel = Model.TestCase
TestModel.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)


def cached_pool() -> BlockPool:
    """Return a pool with blocks 1 to 3 cached, the tail first in line for eviction.

    Block 4 is blank.
    """
    pool = BlockPool(5, 4)
    blocks = pool.allocate(3)
    for block in blocks:
        pool.publish(block, bytes([block]))
    pool.release(blocks)
    return pool


def test_blank_blocks_go_first_then_tails_of_the_oldest_prefixes() -> None:
    pool = cached_pool()
    assert pool.allocate(4) == [4, 3, 2, 1]
    assert pool.find(bytes([1])) is None


def test_the_first_block_of_a_digest_stays_published() -> None:
    pool = BlockPool(4, 4)
    first, second, _ = pool.allocate(3)
    pool.publish(first, b"same")
    pool.publish(second, b"same")
    pool.release([first, second])
    assert pool.find(b"same") == first
    assert pool.allocate(2) == [second, first], "the twin is blank, and blank goes first"


def test_releasing_more_than_was_taken_is_refused() -> None:
    pool = BlockPool(4, 4)
    blocks = pool.allocate(1)
    pool.release(blocks)
    with pytest.raises(RuntimeError, match="more often"):
        pool.release(blocks)


@pytest.mark.parametrize("bad", [(1, 4), (4, 0)])
def test_a_pool_without_room_is_refused(bad) -> None:
    with pytest.raises(ValueError, match="at least"):
        BlockPool(*bad)


def leak(pool: BlockPool) -> None:
    pool._cached.popitem()


def hand_out_pad(pool: BlockPool) -> None:
    pool._blank.append(PAD_BLOCK)


def free_twice(pool: BlockPool) -> None:
    pool._blank.append(pool._blank[0])


def wrong_state(pool: BlockPool) -> None:
    digest, _ = pool._cached.popitem()
    pool._blank.append(pool._block_of[digest])


def wrong_digest(pool: BlockPool) -> None:
    pool._block_of[bytes([1])] = 2


def negative(pool: BlockPool) -> None:
    pool.refs[1] = -1


def still_used(pool: BlockPool) -> None:
    pool.allocate(1)


@pytest.mark.parametrize("plant", [leak, hand_out_pad, free_twice, wrong_state, wrong_digest, negative, still_used])
def test_control_check_notices(plant) -> None:
    pool = cached_pool()
    pool.check(np.zeros(5, int))
    plant(pool)
    with pytest.raises(RuntimeError, match="block pool"):
        pool.check(np.zeros(5, int))
