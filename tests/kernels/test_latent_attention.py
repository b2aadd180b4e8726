"""Attention over latent vectors: right against float64, and the same bits however a sequence is cut and batched."""

from itertools import pairwise

import pytest
import torch

from preheat.backends.cuda.attention import latent as latent_attention
from preheat.backends.cuda.attention import latent_few
from preheat.backends.cuda.attention.latent_few import FewConfig
from preheat.backends.cuda.attention.paged import AttentionConfig
from tests.kernels.latents import DECODE, FEW, PROMPT, VERIFY, LatentPages, Sizes

SPLIT = 64  # more splits in short sequences
LENGTHS = [1, 33, 90]
ROUNDING = {torch.float32: 1e-6, torch.bfloat16: 4e-3}
SIZES = [Sizes(), Sizes(heads=3, rank=24, rope=8, dtype=torch.float32)]
SHARES = FewConfig(rows=16, keys=16, numbers=16, programs=1)
LAYOUTS = [AttentionConfig(rows=16, warps=4, stages=1), AttentionConfig(rows=32, warps=8, stages=2, programs=1)]


def wrong_by(found, right):
    return ((found - right).norm() / right.norm()).item()


@pytest.fixture(scope="module", params=SIZES, ids=str)
def whole(request):
    """Pages, and the attention of whole sequences in one step."""
    made = LatentPages(request.param, LENGTHS)
    work = [(i, 0, n) for i, n in enumerate(LENGTHS)]
    return made, made.run(work, PROMPT, SPLIT).split(LENGTHS)


def test_close_to_float64(whole):
    made, outputs = whole
    for i, out in enumerate(outputs):
        assert wrong_by(out, made.exact(i)) < ROUNDING[made.sizes.dtype]


def test_decoding_rows_have_the_bits_of_prompts_whatever_is_beside_them(whole):
    made, outputs = whole
    work = [(2, 89, 1), (1, 32, 1), (2, 64, 1), (0, 0, 1), (2, 31, 1)]
    for some in (work, work[::-1][:2]):
        right = torch.stack([outputs[i][p] for i, p, _ in some])
        assert torch.equal(made.run(some, DECODE, SPLIT), right)
        assert torch.equal(made.run(some, DECODE, SPLIT, config=LAYOUTS[len(some) % 2]), right)
        assert torch.equal(made.run(some, FEW, SPLIT, config=(None, SHARES)[len(some) % 2]), right)


@pytest.mark.parametrize("width", [2, 11])
def test_rows_with_drafts_have_the_bits_of_prompts(whole, width):
    made, outputs = whole
    work = [(2, 90 - width, width), (1, 32, 1), (2, 62, min(3, width)), (0, 0, 1)]
    right = torch.cat([outputs[i][p : p + n] for i, p, n in work])
    assert torch.equal(made.run(work, VERIFY, SPLIT), right)
    assert torch.equal(made.run(work, VERIFY, SPLIT, room=3), right)  # each tile walks its context alone


def test_chunks_blocks_and_layouts_change_no_bits(whole):
    made, outputs = whole
    for config, cuts in zip(LAYOUTS, ((0, 1, 70, 90), (0, 63, 64, 67, 90)), strict=True):
        other = LatentPages(made.sizes, LENGTHS, block_size=16)
        rows = [[(1, 3, 5), (2, first, last - first)] for first, last in pairwise(cuts)]
        found = [other.run(work, PROMPT, SPLIT, config=config)[5:] for work in rows]
        assert torch.equal(torch.cat(found), outputs[2])


@pytest.mark.parametrize(("at", "number"), [(40, 3), (70, -1)])
def test_a_number_that_is_not_finite_reaches_only_queries_that_see_it(whole, at, number):
    """The number is in the latent vector or behind it, and on either side of an edge of splits."""
    made, outputs = whole
    other = LatentPages(made.sizes, LENGTHS)
    other.made[2][at, -1, number] = torch.nan
    other.store(2, at, 1)
    found = other.run([(2, at - 3, 6)], PROMPT, SPLIT)
    assert torch.equal(found[:3], outputs[2][at - 3 : at])
    assert found[3:].isnan().all()
    assert torch.equal(other.run([(2, at - 1, 1)], DECODE, SPLIT)[0], outputs[2][at - 1])
    assert other.run([(2, at, 1)], DECODE, SPLIT).isnan().all()


def test_a_latent_vector_stored_without_a_bound_reaches_earlier_queries():
    made = LatentPages(Sizes(), LENGTHS)
    made.cache[int(made.table[2, 1]), 0, 0, 6, 3] = torch.nan  # position 70
    assert made.run([(2, 67, 6)], PROMPT, SPLIT)[:3].isnan().any()


def test_more_heads_than_a_program_has_rows():
    made = LatentPages(Sizes(heads=36, rank=16), [10])
    whole = made.run([(0, 0, 10)], PROMPT, SPLIT)
    assert wrong_by(whole, made.exact(0)) < ROUNDING[torch.bfloat16]
    assert torch.equal(made.run([(0, 9, 1)], DECODE, SPLIT)[0], whole[9])


def test_nothing_is_stored_in_the_pad_block():
    made = LatentPages(Sizes(), LENGTHS)
    made.table[1] = 0
    made.store(1, 0, 33)
    assert made.cache[0].isnan().all()


@pytest.mark.parametrize("fault", ["split", "tile", "turned"])
def test_other_orders_and_a_lost_part_are_seen(fault, monkeypatch):
    """Negative controls of the tests above."""
    made = LatentPages(Sizes(), LENGTHS)
    right = made.run([(2, 89, 1)], DECODE, SPLIT)
    if fault == "tile":
        for module in (latent_attention, latent_few):
            monkeypatch.setattr(module, "tile_keys", lambda dtype: 64)
    if fault == "turned":
        made.turned[2][..., made.sizes.rank :] = 0
    for mode in (DECODE, FEW):
        found = made.run([(2, 89, 1)], mode, 32 if fault == "split" else SPLIT)
        assert not torch.equal(found, right)
        assert (wrong_by(found[0], made.exact(2)[89]) > 0.01) == (fault == "turned")
