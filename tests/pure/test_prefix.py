"""Prefix caching finds exactly the longest published prefix of full blocks."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from preheat.schedule.blocks import BlockPool
from preheat.schedule.prefix import PrefixCache, chain_root
from preheat.schedule.sequence import Sequence
from tests.pure.paper import request

SIZE = 3
TOKENS = st.lists(st.integers(0, 1), min_size=1, max_size=14)


def publish(cache: PrefixCache, tokens: list[int], **params) -> list[int]:
    """Compute ``tokens`` in blocks of their own and publish the full ones."""
    sequence = Sequence(request(0, tokens, **params))
    full = len(tokens) // SIZE
    table = cache.pool.allocate(full)
    cache.publish(sequence, sequence.tokens, np.array([table], np.int32), 0, full)
    return table


def common(a: list[int], b: list[int]) -> int:
    return next((at for at, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


@given(computed=st.lists(TOKENS, max_size=5), wanted=TOKENS)
def test_the_longest_published_prefix_is_found(computed, wanted) -> None:
    cache = PrefixCache(BlockPool(64, SIZE))
    content = {}
    for tokens in computed:
        for at, block in enumerate(publish(cache, tokens)):
            content[block] = tokens[: (at + 1) * SIZE]
    (found,) = cache.lookup(Sequence(request(1, wanted))).blocks
    longest = max((common(tokens, wanted) // SIZE for tokens in computed), default=0)
    assert len(found) == min(longest, (len(wanted) - 1) // SIZE)
    assert [content[block] for block in found] == [wanted[: (at + 1) * SIZE] for at in range(len(found))]


def test_salt_is_part_of_every_block() -> None:
    cache = PrefixCache(BlockPool(64, SIZE))
    publish(cache, [1] * 7, salt="a")
    assert cache.lookup(Sequence(request(1, [1] * 7, salt="a"))).columns == 2
    assert cache.lookup(Sequence(request(1, [1] * 7))).columns == 0
    assert chain_root(request(0, [1])) == chain_root(request(1, [2, 3]))


@pytest.mark.parametrize(("length", "blocks"), [(5, 1), (6, 1), (7, 2)])
def test_the_last_token_is_never_read(length, blocks) -> None:
    cache = PrefixCache(BlockPool(64, SIZE))
    publish(cache, [1] * 9)
    assert cache.lookup(Sequence(request(1, [1] * length))).columns == blocks


def test_prompt_logprobs_read_nothing() -> None:
    cache = PrefixCache(BlockPool(64, SIZE))
    publish(cache, [1] * 9, prompt_logprobs=0)
    assert cache.lookup(Sequence(request(1, [1] * 9, prompt_logprobs=0))).columns == 0
    assert cache.lookup(Sequence(request(1, [1] * 9))).columns == 2


def test_a_request_reads_nothing_where_it_wants_that() -> None:
    """A request that asks for it reads no blocks.

    Other requests still read its blocks.
    """
    cache = PrefixCache(BlockPool(64, SIZE))
    publish(cache, [1] * 9, skip_reading_prefix_cache=True)
    assert cache.lookup(Sequence(request(1, [1] * 9, skip_reading_prefix_cache=True))).columns == 0
    for reads in (None, False):
        assert cache.lookup(Sequence(request(1, [1] * 9, skip_reading_prefix_cache=reads))).columns == 2


def test_when_off_nothing_is_published_or_found() -> None:
    pool = BlockPool(64, SIZE)
    publish(PrefixCache(pool, enabled=False), [1] * 9)
    assert PrefixCache(pool).lookup(Sequence(request(1, [1] * 9))).columns == 0
    publish(PrefixCache(pool), [1] * 9)
    assert PrefixCache(pool, enabled=False).lookup(Sequence(request(1, [1] * 9))).columns == 0


def test_a_cached_block_taken_for_other_use_is_forgotten() -> None:
    cache = PrefixCache(BlockPool(4, SIZE))
    table = publish(cache, [1] * 9)
    cache.pool.release(table)
    cache.pool.allocate(1)
    assert cache.lookup(Sequence(request(1, [1] * 10))).blocks == [table[:2]], "the tail went first"
