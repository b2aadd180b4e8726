"""Paged attention: right against float64, and the same bits however a sequence is cut, batched and placed."""

import dataclasses

import pytest
import torch

from preheat.backends.cuda.attention import hopper as attention_hopper
from preheat.backends.cuda.attention.paged import AttentionConfig, prefill_config
from tests.kernels.paged import (
    Bucket,
    Pages,
    check_overflow,
    check_overflow_is_found,
    check_unused_slots,
    relative_error,
)

SPLIT = 128  # more splits in short sequences
ROUNDING = {torch.float32: 1e-6, torch.bfloat16: 4e-3}
SHAPES = [
    Bucket(),
    Bucket(heads=3, kv_heads=1, dim=96, window=70, sinks=True),
    Bucket(heads=2, kv_heads=2, dim=64, dtype=torch.float32, sinks=True),
    Bucket(heads=3, kv_heads=3, dim=64, alibi=True),
    Bucket(heads=6, kv_heads=2, dim=32, dtype=torch.float32, window=70, alibi=True),
    Bucket(heads=48, kv_heads=1, dim=16),
    Bucket(stored=torch.float8_e4m3fn, scales=(0.0123, 0.25)),
    Bucket(heads=2, kv_heads=2, dim=32, dtype=torch.float32, window=70, stored=torch.float8_e5m2, scales=(3.0, 0.1)),
]


def pages(shape, **more):
    return Pages(shape, [1, 65, 200], **more)


@pytest.fixture(scope="module", params=SHAPES, ids=str)
def whole(request):
    """A shape, its pages, and the attention of whole sequences in one step of runs."""
    made = pages(request.param)
    return request.param, made, made.prefill([(i, 0, n) for i, n in enumerate(made.lengths)], SPLIT).split(made.lengths)


def test_close_to_float64(whole):
    shape, made, outputs = whole
    for i, out in enumerate(outputs):
        assert relative_error(out, made.exact(i)) < ROUNDING[shape.dtype]


def test_a_token_has_the_same_bits_as_a_single_query_whatever_is_beside_it(whole):
    _, made, outputs = whole
    work = [(2, 199), (1, 64), (2, 128), (0, 0), (2, 63)]
    for some in (work, work[::-1][:2]):
        assert torch.equal(made.decode(some, SPLIT), torch.stack([outputs[i][p] for i, p in some]))


@pytest.mark.parametrize("width", [2, 5, 20])
def test_rows_with_drafts_have_the_same_bits(whole, width):
    """Rows have one token or more, on both sides of an edge of splits, and of a window."""
    _, made, outputs = whole
    work = [(2, 200 - width, width), (1, 64, 1), (2, 126, min(3, width)), (0, 0, 1), (1, 0, width)]
    expected = torch.cat([outputs[i][p : p + n] for i, p, n in work])
    assert torch.equal(made.verify(work, width, SPLIT), expected)
    assert torch.equal(made.verify(work[:1], width, SPLIT, spare=0), expected[:width])
    assert torch.equal(made.verify(work, width, SPLIT, room=3), expected)  # each tile walks its context alone


TWO_SIDES = [
    Bucket(sides=True),
    Bucket(heads=2, kv_heads=2, dim=32, dtype=torch.float32, window=70, sides=True),
    Bucket(heads=3, kv_heads=1, dim=24, dtype=torch.float32, window=9, sides=True),
]


@pytest.mark.parametrize("shape", TWO_SIDES, ids=str)
def test_both_sides_of_whole_texts(shape):
    """Right against float64, at each edge of a window; texts beside it, tiles and warps change no bit."""
    made = pages(shape)
    texts = [(i, 0, n) for i, n in enumerate(made.lengths)]
    outputs = made.prefill(texts, SPLIT).split(made.lengths)
    for i, out in enumerate(outputs):
        assert relative_error(out, made.exact(i)) < ROUNDING[shape.dtype]
    turned = made.prefill(texts[::-1], SPLIT, AttentionConfig(rows=32, warps=8, stages=2)).split(made.lengths[::-1])
    assert all(torch.equal(one, other) for one, other in zip(outputs, turned[::-1], strict=True))
    alone = made.prefill(texts[2:], SPLIT, AttentionConfig(rows=16, warps=4, stages=2), spare=0)
    assert torch.equal(alone, outputs[2])
    made.shape = dataclasses.replace(shape, sides=False)  # the comparisons see queries without the keys behind them
    assert relative_error(outputs[2], made.exact(2)) > 0.01
    assert not torch.equal(made.prefill(texts[2:], SPLIT), outputs[2])


def test_chunks_tiles_and_programs_change_no_bits(whole):
    _, made, outputs = whole
    chunks = [made.prefill([(2, 100, 30), (1, 0, 1)], SPLIT, AttentionConfig(rows=32, warps=8, stages=2))[:30]]
    chunks.append(made.prefill([(2, 130, 70)], SPLIT, AttentionConfig(rows=16, warps=4, stages=2), spare=0))
    assert torch.equal(torch.cat(chunks), outputs[2][100:])
    single = made.decode([(2, 199)], SPLIT, AttentionConfig(rows=16, warps=2, stages=3, programs=0))
    assert torch.equal(single[0], outputs[2][199])


def test_blocks_change_no_bits(whole):
    shape, _, outputs = whole
    other = pages(shape, block_size=16, by_block=True)
    assert torch.equal(other.prefill([(1, 0, 65)], SPLIT), outputs[1])
    assert torch.equal(other.decode([(2, 199)], SPLIT)[0], outputs[2][199])


def test_numbers_in_unused_slots_reach_no_output(whole):
    shape, _, outputs = whole
    check_unused_slots(pages(shape), outputs, SPLIT)


@pytest.mark.parametrize("at", [100, 140])
def test_a_value_that_is_not_finite_reaches_only_queries_that_see_it(whole, at):
    """The value is on either side of an edge of splits."""
    shape, _, outputs = whole
    check_overflow(pages(shape), outputs, at, SPLIT)


def test_a_value_stored_without_a_bound_reaches_earlier_queries():
    check_overflow_is_found(pages(Bucket()), 100)


def test_slopes_are_not_ignored():
    with_slopes, without = pages(SHAPES[3]), pages(dataclasses.replace(SHAPES[3], alibi=False))
    assert relative_error(without.prefill([(2, 0, 200)], SPLIT), with_slopes.exact(2)) > 0.1
    assert relative_error(without.decode([(2, 199)], SPLIT), with_slopes.exact(2)[199:]) > 0.1


def test_sinks_are_not_ignored():
    with_sinks, without = pages(SHAPES[2]), pages(dataclasses.replace(SHAPES[2], sinks=False))
    assert relative_error(without.prefill([(2, 0, 200)], SPLIT), with_sinks.exact(2)) > 0.01
    assert relative_error(without.decode([(2, 199)], SPLIT), with_sinks.exact(2)[199:]) > 0.01


def test_another_split_gives_other_bits():
    """Negative control of the tests above."""
    made = pages(Bucket())
    assert not torch.equal(made.decode([(2, 199)], 64), made.decode([(2, 199)], SPLIT))
    assert not torch.equal(made.verify([(2, 196, 4)], 4, 64), made.verify([(2, 196, 4)], 4, SPLIT))


@pytest.mark.parametrize("dim", [64, 128])
def test_both_kernels_for_prompts_take_the_same_tiles(dim):
    """The packer cuts prompts for one kernel; where the other fits, it gets the same tiles."""
    assert prefill_config(dim, torch.bfloat16).rows == 2 * attention_hopper.ROWS.value
