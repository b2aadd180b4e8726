"""When a server walks over all of its objects."""

from __future__ import annotations

import gc
import sys

from preheat.utils.gc import SHORT_WALK, WALK_SECONDS, WholeWalks


def test_walks_are_short_or_follow_a_doubling_of_the_memory():
    walks = WholeWalks()
    first = walks._first
    assert walks.due(first + SHORT_WALK - 1, 0.0)
    assert not walks.due(first + SHORT_WALK, 0.0)  # requests hold many objects
    assert not walks.due(2 * first, 0.0) and walks.due(2 * first + SHORT_WALK, 0.0)


def test_a_walk_collects_old_cycles_and_waits_for_the_next():
    walks = WholeWalks()
    cycle: list[object] = [sys]
    cycle.append(cycle)
    gc.collect(1)
    del cycle
    collected = gc.get_stats()[2]["collections"]
    walks.walk()
    assert gc.get_stats()[2]["collections"] == collected + 1
    gc.collect(1)
    walks.walk()
    assert gc.get_stats()[2]["collections"] == collected + 1
    assert walks._next > WALK_SECONDS / 2
