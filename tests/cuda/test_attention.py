"""Paged attention on the device: close to float64, and one set of bits for every path of a token."""

import dataclasses
import itertools

import pytest
import torch

LENGTHS = [1, 64, 65, 511, 1300]
ROUNDING = {torch.float32: 1e-6, torch.bfloat16: 4e-3}
SHAPES = [
    (32, 8, 128, torch.bfloat16, None),
    (32, 8, 128, torch.bfloat16, 300),
    (6, 2, 96, torch.bfloat16, None),
    (14, 2, 64, torch.bfloat16, 100),
    (8, 1, 256, torch.bfloat16, None),
    (8, 2, 128, torch.float32, 200),
    (32, 8, 128, torch.bfloat16, None, False, torch.float8_e4m3fn, (0.0123, 0.25)),
    (8, 2, 64, torch.bfloat16, 300, False, torch.float8_e5m2, (1.0, 1.0)),
]


@pytest.fixture(scope="module")
def paged():
    """Import the tests' pages late: without a GPU, Triton's interpreter must be chosen before Triton's import."""
    from tests.kernels import paged

    return paged


@pytest.fixture(scope="module", params=SHAPES, ids=lambda shape: "-".join(map(str, shape)))
def whole(request, paged):
    shape = paged.Bucket(*request.param)
    made = paged.Pages(shape, LENGTHS, seed=int(torch.randint(1 << 30, ())), device="cuda")
    return made, made.prefill([(i, 0, n) for i, n in enumerate(LENGTHS)]).split(LENGTHS)


def test_close_to_float64(whole, paged):
    made, outputs = whole
    for i, out in enumerate(outputs):
        assert paged.relative_error(out, made.exact(i)) < ROUNDING[made.shape.dtype]


def test_single_queries(whole, paged):
    made, outputs = whole
    places = [0, 1, 62, 63, 64, 65, 255, 256, 257, 511, 512, 767, 768, 1023, 1024, 1299]
    work = [(4, p) for p in places] + [(i, n - 1) for i, n in enumerate(LENGTHS)]
    expected = torch.stack([outputs[i][p] for i, p in work])
    for warps, stages, programs in ((4, 2, 1), (8, 2, 0), (2, 2, 3)):
        config = paged.AttentionConfig(rows=16, warps=warps, stages=stages, programs=programs)
        assert torch.equal(made.decode(work, config=config), expected)
    order = torch.randperm(len(work)).tolist()
    assert torch.equal(made.decode([work[i] for i in order[:5]]), expected[order[:5]])
    for _ in range(50):  # another program finishes last each time
        assert torch.equal(made.decode(work * 8), expected.repeat(8, 1))


def test_bits_of_a_cache_that_was_widened_before(whole, paged):
    """With scales of one, a cache of eight bits gives the bits of its widened numbers."""
    made, _ = whole
    if made.shape.stored is None:
        pytest.skip("a cache of the model's dtype")
    narrow = paged.Pages(dataclasses.replace(made.shape, scales=(1.0, 1.0)), LENGTHS, device="cuda")
    wide, places = narrow.widened(), [(4, p) for p in range(0, 1300, 7)]
    assert torch.equal(narrow.decode(places), wide.decode(places))
    assert torch.equal(narrow.prefill([(4, 0, 1300)]), wide.prefill([(4, 0, 1300)]))
    work = [(4, p, 5) for p in (0, 255, 510, 1290)]
    assert torch.equal(narrow.verify(work, 5), wide.verify(work, 5))


@pytest.mark.parametrize("width", [2, 4, 5, 8, 20])
def test_rows_with_drafts(whole, width):
    """Rows of up to ``width`` consecutive queries, on both sides of the edges of splits."""
    made, outputs = whole
    firsts = [0, 1, 62, 255, 510, 511, 512, 766, 1023, 1024 - width, 1300 - width]
    work = [(4, p, width) for p in firsts] + [(i, n - 1, 1) for i, n in enumerate(LENGTHS)]
    expected = torch.cat([outputs[i][p : p + n] for i, p, n in work])
    assert torch.equal(made.verify(work, width), expected)
    assert torch.equal(made.verify(work[8:], width, room=2), expected[8 * width :])  # a tile walks its context alone
    for _ in range(20):  # another program finishes last each time
        assert torch.equal(made.verify(work * 4, width), expected.repeat(4, 1))


def test_chunks_and_tiles(whole, paged):
    made, outputs = whole
    cuts = [0, *sorted(torch.randint(1, 1299, (5,)).unique().tolist()), 1300]
    chunks = [made.prefill([(0, 0, 1), (4, a, b - a)])[1:] for a, b in itertools.pairwise(cuts)]
    assert torch.equal(torch.cat(chunks), outputs[4])
    wide = made.shape.dtype == torch.bfloat16 and made.shape.dim <= 128
    for rows, warps in ((128, 8), (64, 8)) if wide else ((32, 4),):
        assert torch.equal(made.prefill([(4, 0, 1300)], config=paged.AttentionConfig(rows, warps, 2)), outputs[4])


@pytest.mark.parametrize("block_size", [16, 32, 256])
def test_blocks(whole, paged, block_size):
    made, outputs = whole
    other = paged.Pages(made.shape, LENGTHS, block_size, device="cuda", by_block=True)
    for i, qkv in enumerate(made.qkv):  # the same numbers in other blocks
        other.put(other.table[i], qkv)
    other.qkv = made.qkv
    assert torch.equal(other.prefill([(4, 0, 1300)]), outputs[4])
    assert torch.equal(other.decode([(4, 1299), (3, 510)]), torch.stack([outputs[4][1299], outputs[3][510]]))


def test_numbers_in_unused_slots_reach_no_output(whole, paged):
    made, outputs = whole
    other = paged.Pages(made.shape, LENGTHS, 32, device="cuda")
    other.qkv = list(made.qkv)
    paged.check_unused_slots(other, outputs)


@pytest.mark.parametrize("at", [200, 511, 1000])
def test_a_value_that_is_not_finite_reaches_only_queries_that_see_it(whole, paged, at):
    made, outputs = whole
    other = paged.Pages(made.shape, LENGTHS, 128, device="cuda")
    other.qkv = [qkv.clone() for qkv in made.qkv]
    other.fill(torch.nan)
    paged.check_overflow(other, outputs, at)


def test_a_value_stored_without_a_bound_reaches_earlier_queries(paged):
    paged.check_overflow_is_found(paged.Pages(paged.Bucket(32, 8, 128), LENGTHS, device="cuda"), 1001)


def test_another_split_gives_other_bits(whole):
    """Negative control: the tests above can fail."""
    made, outputs = whole
    window = made.shape.window
    if window and window <= 128:
        pytest.skip("a window this short may lie in one split")
    assert not torch.equal(made.decode([(4, p) for p in range(900, 1300)], split=128), outputs[4][900:])


def test_a_captured_call_gives_the_bits_of_an_eager_one(paged):
    made = paged.Pages(paged.Bucket(32, 8, 128), LENGTHS, device="cuda")
    work = [(i, n - 1) for i, n in enumerate(LENGTHS)]
    expected = made.decode(work)
    q, places, out = made._step([(i, p, 1) for i, p in work])
    pieces = made._pieces(
        paged.decode_work(torch.arange(5).numpy(), places.positions.cpu().numpy(), paged.SPLIT, None), 9
    )
    workspace = paged.Workspace(len(pieces.work), 5, 32, 128, q.device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(3):
            paged.decode_attention(q, made.cache, out, places, pieces, workspace, made._scores(paged.SPLIT))
    out.fill_(torch.nan)
    graph.replay()
    assert torch.equal(out, expected)
