"""Hopper's attention of runs gives the bits of the kernel for every GPU, and of single queries."""

import itertools

import numpy as np
import pytest
import torch

LENGTHS = [1, 64, 65, 511, 1300]
WHOLE = [(i, 0, n) for i, n in enumerate(LENGTHS)]
SHAPES = [
    (32, 8, 128, torch.bfloat16, None),
    (32, 8, 128, torch.bfloat16, 300),
    (16, 8, 128, torch.bfloat16, 50),
    (4, 4, 128, torch.float16, None),
    (14, 2, 64, torch.bfloat16, 100, False, None, (1.0, 1.0), True),
    (8, 1, 64, torch.float16, None),
    (32, 8, 128, torch.bfloat16, None, False, torch.float8_e4m3fn, (0.0123, 0.25), True),
    (16, 8, 128, torch.bfloat16, 100, False, torch.float8_e5m2, (3.0, 0.1)),
    (14, 2, 64, torch.float16, None, False, torch.float8_e4m3fn, (1.0, 1.0)),
]


@pytest.fixture(scope="module")
def paged():
    """Import the tests' pages late: without a GPU, Triton's interpreter must be chosen before Triton's import."""
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("needs a Hopper GPU")
    from tests.kernels import paged

    return paged


@pytest.fixture(scope="module", params=zip(SHAPES, [128, 64, 256] * 3, strict=True), ids=str)
def made(request, paged):
    """A cache with NaN in its unused slots."""
    shape, block = request.param
    seed = int(torch.randint(1 << 30, ()))
    pages = paged.Pages(paged.Bucket(*shape), LENGTHS, block, seed, device="cuda", by_block=block == 64)
    from preheat.backends.cuda.attention import hopper as attention_hopper

    assert attention_hopper.fits(pages.qkv[0][:, : pages.shape.heads], pages.cache)
    return pages


def everywhere(paged, made, work):
    """Return the result of the kernel for every GPU."""
    return made.prefill(work, config=paged.prefill_config(made.shape.dim, made.shape.dtype))


def test_bits_of_the_kernel_for_every_gpu(paged, made):
    expected = everywhere(paged, made, WHOLE)
    assert not expected.isnan().any()
    for _ in range(10):
        assert torch.equal(made.prefill(WHOLE), expected)


def test_bits_of_single_queries(made):
    places = [0, 1, 62, 63, 64, 65, 255, 256, 257, 511, 512, 767, 768, 1023, 1024, 1299]
    assert torch.equal(made.prefill([(4, 0, 1300)])[places], made.decode([(4, p) for p in places]))


def test_chunks(paged, made):
    cuts = [0, *sorted(torch.randint(1, 1299, (5,)).unique().tolist()), 1300]
    chunks = [made.prefill([(3, 17, 40), (4, a, b - a), (0, 0, 1)])[40:-1] for a, b in itertools.pairwise(cuts)]
    assert torch.equal(torch.cat(chunks), everywhere(paged, made, [(4, 0, 1300)]))


@pytest.mark.parametrize("factor", [0.0, 1e-3, 30.0, 1e4])
def test_scores_of_all_sizes(paged, made, factor):
    """From equal weights of all keys to one key with all the weight, where sums fade to nothing and back."""
    heads = made.shape.heads
    before = made.qkv
    made.qkv = [torch.cat([x[:, :heads] * factor, x[:, heads:]], 1) for x in before]
    try:
        assert torch.equal(made.prefill(WHOLE), everywhere(paged, made, WHOLE))
    finally:
        made.qkv = before


def copied(paged, made):
    """Return the same sequences in another cache."""
    other = paged.Pages(made.shape, LENGTHS, made.cache.shape[3], device="cuda")
    other.qkv = [qkv.clone() for qkv in made.qkv]
    other.fill(torch.nan)
    return other


def test_numbers_in_unused_slots_reach_no_output(paged, made):
    paged.check_unused_slots(copied(paged, made), made.prefill(WHOLE).split(LENGTHS))


@pytest.mark.parametrize("at", [200, 511, 1000])
def test_a_value_that_is_not_finite_reaches_only_queries_that_see_it(paged, made, at):
    paged.check_overflow(copied(paged, made), made.prefill(WHOLE).split(LENGTHS), at)


def test_another_split_gives_other_bits(made):
    """Negative control: the tests above can fail."""
    if made.shape.window and made.shape.window <= 128:
        pytest.skip("a window this short may lie in one split")
    assert not torch.equal(made.prefill(WHOLE, split=128), made.prefill(WHOLE))


def test_a_captured_call_reads_its_number_of_tiles_again(paged):
    made = paged.Pages(paged.Bucket(32, 8, 128), LENGTHS, 128, device="cuda")
    expected = made.prefill(WHOLE)
    q, places, out = made._step(WHOLE)
    starts = [sum(LENGTHS[:i]) for i in range(len(LENGTHS))]
    tile = paged.query_tile(32, 8, paged.prefill_config(128, q.dtype))
    tiles = made._pieces(
        paged.prefill_tiles(np.array(starts), np.array(LENGTHS), np.zeros(len(LENGTHS), int), tile), 200
    )
    number = tiles.used.clone()

    def attend():
        paged.prefill_attention(q, made.cache, out, places, tiles, made._scores(paged.SPLIT))

    attend()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(3):
            attend()
    for tried in (torch.zeros_like(number), number):
        tiles.used.copy_(tried)
        out.fill_(torch.nan)
        graph.replay()
        assert out.isnan().all() if not tried else torch.equal(out, expected)


def test_shapes_that_do_not_fit_are_computed_too(paged):
    from preheat.backends.cuda.attention import hopper as attention_hopper

    for shape, block in (((8, 1, 256), 64), ((8, 2, 128, torch.float32), 64), ((8, 2, 128), 32)):
        made = paged.Pages(paged.Bucket(*shape), [70], block, device="cuda")
        assert not attention_hopper.fits(made.qkv[0][:, :8], made.cache)
        assert not made.prefill([(0, 0, 70)]).isnan().any()
