import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from preheat.errors import SettingsError
from preheat.plan.bucket_file import parse_bucket_file
from preheat.plan.bucket_sizes import STRATEGIES, bucket_sizes


@pytest.mark.parametrize(
    ("span", "values"),
    [
        ((2, 32, 64), (2, 4, 8, 16, 32, 64)),
        ((128, 128, 512), (128, 256, 384, 512)),
        ((1, 32, 4), (1, 2, 4)),
        ((1, 32, 40), (1, 2, 4, 8, 16, 32, 40)),
        ((3, 60, 228), (3, 6, 12, 24, 48, 60, 120, 180, 228)),
        ((5, 2, 5), (5,)),
        ((10, 4, 20), (10, 12, 16, 20)),
        ((0, 4, 8), (0, 4, 8)),
        ((0, 4, 0), (0,)),
        ((7, 7, 7), (7,)),
    ],
)
def test_linear_doubles_up_to_the_step_then_adds_it_and_ends_at_the_maximum(span, values):
    assert bucket_sizes("linear", *span) == values


@pytest.mark.parametrize(
    ("span", "count", "values"),
    [
        ((1, 2, 256), 9, (1, 2, 4, 8, 14, 24, 42, 78, 140, 256)),
        ((128, 128, 2048), 10, (128, 256, 384, 512, 640, 896, 1152, 1536, 2048)),
        ((1, 1, 256), 9, (1, 2, 4, 8, 16, 32, 64, 128, 256)),
        ((1, 1, 256), None, (1, 2, 4, 8, 16, 32, 64, 128, 256)),
        ((0, 1, 8), 4, (0, 1, 2, 4, 8)),
        ((1, 64, 100), 3, (1, 64, 100)),
        ((4, 4, 64), 1, (64,)),
        ((1, 1, 1), None, (1,)),
        ((0, 2, 0), 2, (0,)),
    ],
)
def test_exponential_rounds_points_of_equal_ratio_up_to_the_step(span, count, values):
    assert bucket_sizes("exponential", *span, count=count) == values


@pytest.mark.parametrize(
    ("span", "parts", "values"),
    [
        ((1, 2, 70), 4, (1, 2, 4, 6, 8, 10, 12, 14, 16, 20, 24, 28, 32, 40, 48, 56, 64, 70)),
        ((8, 8, 256), 8, (*range(8, 129, 8), *range(144, 257, 16))),
        ((12, 4, 100), 2, (12, 20, 24, 36, 48, 72, 96, 100)),
        ((5, 2, 5), 4, (5,)),
    ],
)
def test_exponential_may_cut_each_doubling_into_equal_parts(span, parts, values):
    assert bucket_sizes("exponential", *span, per_doubling=parts) == values


@pytest.mark.parametrize(
    ("span", "pad_max", "pad_percent", "values"),
    [
        ((0, 8, 64), 64, 0, (0, 1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64)),
        ((0, 8, 64), 64, 50, (0, 1, 2, 4, 8, 16, 32, 64)),
        ((0, 8, 64), 16, 50, (0, 1, 2, 4, 8, 16, 32, 48, 64)),
        ((16, 16, 128), 32, 25, (16, 32, 48, 64, 80, 96, 128)),
        ((0, 8, 64), 0, 50, (0, 1, 2, 4, 8, 16, 32, 64)),
    ],
)
def test_padding_aware_leaves_out_sizes_that_save_little_padding(span, pad_max, pad_percent, values):
    assert bucket_sizes("padding_aware", *span, pad_max=pad_max, pad_percent=pad_percent) == values


spans = st.tuples(st.integers(0, 300), st.integers(1, 300), st.integers(1, 5000)).filter(
    lambda span: span[0] <= span[2]
)


@given(st.sampled_from(STRATEGIES), spans)
def test_the_maximum_is_always_there_and_nothing_is_outside(strategy, span):
    low, step, high = span
    values = bucket_sizes(strategy, low, step, high)
    assert values[-1] == high
    assert all(low <= value <= high for value in values)
    assert list(values) == sorted(set(values))


@given(spans, st.integers(0, 50), st.integers(1, 5000))
def test_padding_aware_keeps_its_promise_above_the_step(span, percent, pad_max):
    low, step, high = span
    values = bucket_sizes("padding_aware", low, step, high, pad_max=pad_max, pad_percent=percent)
    for below, value in itertools.pairwise(values):
        if below > step and value - below > step:  # neighbors in the step have nothing between them to keep
            assert value - below - 1 <= max(pad_max, step)
            assert (value - below - 1) / value <= percent / 100 + 1e-9 or value - below <= step


@given(spans, st.integers(2, 60))
def test_exponential_has_at_most_the_points_asked_for_and_the_smallest(span, count):
    assert len(bucket_sizes("exponential", *span, count=count)) <= count + 1


@given(spans, st.integers(1, 12))
def test_a_doubling_in_parts_holds_the_doublings_and_pads_by_less_than_a_part(span, parts):
    low, step, high = span
    values = bucket_sizes("exponential", *span, per_doubling=parts)
    start = low if low > 1 else min(step, high)
    doublings = {start << number for number in range(high.bit_length()) if start << number < high}
    assert {-(-doubling // step) * step for doubling in doublings if -(-doubling // step) * step < high} <= set(values)
    for below, value in itertools.pairwise(value for value in values if value >= start):
        assert value - below <= below / parts + step


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("linear", 8, 1, 4), "min .8. must not exceed max .4."),
        (("linear", -1, 1, 4), "min must be at least 0"),
        (("linear", 1, 0, 4), "step must be at least 1"),
        (("cubic", 1, 1, 4), "strategy must be one of"),
        (("linear", 1, 1, 10**9), "raise step"),
    ],
)
def test_ranges_that_make_no_sense_are_refused(arguments, message):
    with pytest.raises(SettingsError, match=message):
        bucket_sizes(*arguments)


@pytest.mark.parametrize(
    ("strategy", "more", "message"),
    [
        ("linear", {"count": 3}, "count belongs to the exponential strategy"),
        ("exponential", {"pad_max": 3}, "belong to the padding_aware strategy"),
        ("exponential", {"count": 0}, "count must be at least 1"),
        ("padding_aware", {"pad_percent": 51}, "between 0 and 50"),
        ("padding_aware", {"pad_max": -1}, "pad_max must be at least 0"),
    ],
)
def test_arguments_of_another_strategy_are_refused_not_ignored(strategy, more, message):
    with pytest.raises(SettingsError, match=message):
        bucket_sizes(strategy, 1, 1, 8, **more)


def test_a_bucket_file_stands_for_products():
    text = "# prompts\n(1, 128)  # one\n\n(range(2, 5, 2), [256, 512], 0)\n(4, 1, range(8, 25, 8))\n(1, 128)\n"
    assert parse_bucket_file(text) == [
        (1, 128), (2, 256, 0), (2, 512, 0), (4, 256, 0), (4, 512, 0), (4, 1, 8), (4, 1, 16), (4, 1, 24)
    ]  # fmt: skip


@pytest.mark.parametrize(
    "line",
    [
        "(1,)",
        "5",
        "(1, 2, 3, 4)",
        "(1, x)",
        "(1, 2.5)",
        "(1, True)",
        "(1, [])",
        "(-1, 5)",
        "(1, range(5, 1))",
        "(1, range(0, 20000))",
        "(1, range(1, 9, 0))",
        "(1, range(1, 2, 3, 4))",
        "(range(9999), range(9999))",
        "(1, open('x'))",
        "(1, 128",
        "(1, 128) (2, 128)",
        "(" * 500,
    ],
)
def test_a_bad_line_of_a_bucket_file_is_skipped_and_named(line, caplog):
    assert parse_bucket_file(f"(1, 128)\n{line}\n(2, 128)\n", "buckets.txt") == [(1, 128), (2, 128)]
    (message,) = caplog.messages
    assert message.startswith("buckets.txt, line 2 is skipped: ")


@pytest.mark.parametrize("text", ["# nothing\n", "(1, x)\n"])
def test_a_bucket_file_without_buckets_is_refused(text):
    with pytest.raises(SettingsError, match="has no buckets"):
        parse_bucket_file(text)
