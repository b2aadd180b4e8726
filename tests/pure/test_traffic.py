"""Bucket sizes solved from recorded traffic."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from preheat.errors import SettingsError
from preheat.plan.bucket_file import parse_bucket_file
from preheat.plan.bucket_sizes import bucket_sizes
from preheat.plan.traffic import Measured, best_sizes, bucket_file, paid

STEPS = st.dictionaries(st.integers(1, 40), st.integers(0, 50), max_size=7)
RUN, BOOT = Measured([1, 8, 40], [1.0, 2.0, 9.0]), Measured([1, 40], [3.0, 7.0])


def total(steps, sizes, run, boot):
    return (paid(steps, sizes, run)[0] if steps else 0.0) + sum(map(boot, sizes))


@given(STEPS, st.sampled_from([1, 8]))
def test_no_other_sizes_cost_less(steps, align):
    steps = {size: count for size, count in steps.items() if count}
    found = best_sizes(steps, RUN, BOOT, 40, align)
    assert found[-1] == 40 and list(found) == sorted(set(found))
    assert all(size % align == 0 for size in found)
    possible = sorted({-(-size // align) * align for size in steps} - {40})
    every = ((*some, 40) for count in range(len(possible) + 1) for some in itertools.combinations(possible, count))
    least = min(total(steps, sizes, RUN, BOOT) for sizes in every)
    assert total(steps, found, RUN, BOOT) == pytest.approx(least)


@given(st.dictionaries(st.integers(1, 40), st.integers(1, 10**6), min_size=1, max_size=40))
def test_never_worse_than_an_exponential_ladder(steps):
    usual = bucket_sizes("exponential", 1, 1, 40)
    found = best_sizes(steps, RUN, BOOT, 40)
    assert total(steps, found, RUN, BOOT) <= total(steps, usual, RUN, BOOT) * (1 + 1e-9)


def test_much_traffic_is_worth_its_own_bucket_and_little_is_not():
    assert best_sizes({7: 1000}, RUN, BOOT, 40) == (7, 40)
    assert best_sizes({7: 1}, RUN, lambda _: 20.0, 40) == (40,)


def test_seconds_between_measured_sizes_and_beyond_never_fall():
    measured = Measured([2, 4, 8], [1.0, 0.5, 3.0])
    assert [measured(size) for size in (1, 2, 4, 6, 8, 16)] == [1.0, 1.0, 1.0, 2.0, 3.0, 6.0]


def test_the_printed_text_is_a_bucket_file():
    measured = {"mixed": {8: (1.0, 1.0), 64: (8.0, 8.0)}, "decode": {1: (1.0, 1.0), 4: (1.1, 1.1)}}
    text = bucket_file({"mixed": {17: 100, 20: 3}}, measured, 4)
    assert parse_bucket_file(text) == [(4, 24), (4, 64), (1, 1), (4, 1)]
    assert "2 -> 2" in text and "274.5% -> 40.5%" in text
    with pytest.raises(SettingsError, match="no steps yet"):
        bucket_file({}, measured, 4)
