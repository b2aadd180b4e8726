"""The rest of a warm-up's time, learned from the items that have run."""

from types import SimpleNamespace

import pytest

from preheat.plan.lines import progress, time_left
from preheat.warmup.time_left import TimeLeft


def items(kind, count, seconds):
    return [SimpleNamespace(kind=kind, estimate=SimpleNamespace(seconds=seconds)) for _ in range(count)]


def test_nothing_has_run_yet():
    assert TimeLeft(items("mixed", 10, 0.5)).seconds() == pytest.approx(5)


def test_kinds_are_off_by_factors_of_their_own():
    """On a first CPU boot, a step takes four times its estimate and a sampler item ten times."""
    steps, draws = items("mixed", 10, 0.1), items("sampler", 100, 0.01)
    left = TimeLeft([*steps, *draws])
    for step in steps:
        left.ran(step, 0.4)
    assert left.seconds() == pytest.approx(4)  # nothing is known of the sampler but that all took four times as long
    for draw in draws[:10]:
        left.ran(draw, 0.1)
    assert left.seconds() == pytest.approx(9)
    for draw in draws[10:]:
        left.ran(draw, 0.1)
    assert left.seconds() == pytest.approx(0)


def test_items_that_never_run_are_no_reason_for_a_negative_time():
    done, *_ = group = items("swap", 2, 0.0)
    left = TimeLeft(group)
    left.ran(done, 0.2)
    assert left.seconds() == 0


def test_items_that_are_left_out_take_no_time_and_teach_nothing():
    first, second, _ = group = items("sampler", 3, 1.0)
    left = TimeLeft(group)
    left.left_out(first)
    assert left.seconds() == pytest.approx(2)
    left.ran(second, 3.0)
    assert left.seconds() == pytest.approx(3)


def test_the_rest_is_at_least_one_second():
    assert time_left(0.0) == time_left(0.4) == "about 1 s left"
    assert progress(1200, 3400, "(decode, 8)", 12.4) == (
        "Warming up: 1,200 of 3,400 items, about 12 s left ((decode, 8))"
    )
