"""Hopper's attention of decoding rows over a cache of eight bits gives the bits of the kernel for every GPU."""

import numpy as np
import pytest
import torch

E4, E5, BF16, FP16 = torch.float8_e4m3fn, torch.float8_e5m2, torch.bfloat16, torch.float16
LENGTHS = [1, 64, 65, 511, 1300]
PLACES = [0, 1, 62, 63, 64, 65, 255, 256, 257, 511, 512, 767, 768, 1023, 1024, 1299]
STEP = [(i, n - 1) for i, n in enumerate(LENGTHS)] + [(4, place) for place in PLACES]
SHAPES = [
    ((32, 8, 128, BF16, None, False, E4, (0.0123, 0.25), True), 64),
    ((16, 8, 128, BF16, 100, False, E5, (3.0, 0.1)), 128),
    ((14, 2, 64, FP16, None, False, E4, (1.0, 1.0)), 256),
    ((16, 1, 64, BF16, 300, False, E4, (0.5, 2.0), True), 64),
    ((4, 4, 128, FP16, None, False, E5, (1.0, 0.5)), 64),
]


@pytest.fixture(scope="module")
def paged():
    """Import the tests' pages late: without a GPU, Triton's interpreter must be chosen before Triton's import."""
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("needs a Hopper GPU")
    from tests.kernels import paged

    return paged


@pytest.fixture(params=SHAPES, ids=str)
def made(request, paged):
    """A cache with NaN in its unused slots."""
    from preheat.backends.cuda.attention import hopper_decode as attention_hopper_decode

    shape, block = request.param
    pages = paged.Pages(paged.Bucket(*shape), LENGTHS, block, seed=7, device="cuda", by_block=block == 64)
    query = pages.qkv[0][:, : pages.shape.heads]
    assert attention_hopper_decode.fits(query, pages.cache, paged.Rows(5, 1), pages._scores(paged.SPLIT))
    return pages


def portable(made, work=STEP):
    """Return the result of the kernel for every GPU."""
    from preheat.backends.cuda.attention.paged import decode_config

    config = decode_config(len(work), made.shape.dim, made.shape.dtype, made.shape.stored)
    return made.decode(work, config=config)


@pytest.mark.parametrize("factor", [1.0, 0.0, 1e-3, 30.0, 1e4])
def test_bits_of_the_kernel_for_every_gpu(made, factor):
    """From equal weights of all keys to one key with all the weight, where sums fade to nothing and back."""
    heads = made.shape.heads
    made.qkv = [torch.cat([x[:, :heads] * factor, x[:, heads:]], 1) for x in made.qkv]
    expected = portable(made)
    assert not expected.isnan().any()
    for _ in range(3):
        assert torch.equal(made.decode(STEP), expected)


def test_bits_depend_neither_on_neighbors_nor_on_the_place_in_a_step(made):
    expected = made.decode(STEP)
    for each in np.random.default_rng(0).permutation(len(STEP))[:6]:
        assert torch.equal(made.decode([STEP[each]])[0], expected[each])
    assert torch.equal(made.decode(STEP[::-1] * 40)[: len(STEP)].flip(0), expected)


def test_numbers_in_unused_slots_reach_no_output(paged, made):
    paged.check_unused_slots(made, made.prefill([(i, 0, n) for i, n in enumerate(LENGTHS)]).split(LENGTHS))


@pytest.mark.parametrize("at", [200, 1000])
def test_a_value_that_is_not_finite_reaches_only_queries_that_see_it(paged, made, at):
    paged.check_overflow(made, made.prefill([(i, 0, n) for i, n in enumerate(LENGTHS)]).split(LENGTHS), at)


def test_another_split_gives_other_bits(made):
    """Negative control: the tests above can fail."""
    if made.shape.window and made.shape.window <= 128:
        pytest.skip("a window this short may lie in one split")
    assert not torch.equal(made.decode(STEP, split=128), made.decode(STEP))


def test_shapes_that_do_not_fit_are_computed_too(paged):
    from preheat.backends.cuda.attention import hopper_decode as attention_hopper_decode

    for shape, block in (((8, 1, 256, BF16), 64), ((32, 1, 128, BF16), 64), ((8, 2, 128, BF16), 32)):
        bucket = paged.Bucket(*shape, stored=E4)
        pages = paged.Pages(bucket, [70], block, device="cuda")
        query = pages.qkv[0][:, : bucket.heads]
        assert not attention_hopper_decode.fits(query, pages.cache, paged.Rows(1, 1), pages._scores(paged.SPLIT))
        assert not pages.decode([(0, 69)]).isnan().any()
