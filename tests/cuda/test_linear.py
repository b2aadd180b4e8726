"""Linear layers on a real device: every serving implementation gives the bits of the plain kernel."""

import itertools

import pytest
import torch

pytest.importorskip("triton")

from preheat.backends.base.layers import LayerWeights
from preheat.backends.cuda.backend import CudaBackend
from preheat.backends.cuda.device.detect import card_at
from preheat.backends.cuda.matmul.config import REFERENCE, Library, LinearShape, Tile, reference
from preheat.backends.cuda.matmul.hopper.large_m import fits
from preheat.backends.cuda.matmul.kernels import WIDE, KernelConfigs, candidates, kernel_configs, rule
from preheat.backends.cuda.matmul.layer import Layer
from preheat.backends.cuda.matmul.linear import apply
from preheat.backends.cuda.matmul.prove import compile_kernels, differing, fill, prove, settle
from preheat.backends.cuda.matmul.rules import tile_rule
from preheat.backends.cuda.matmul.tables import Entry, Table
from preheat.backends.cuda.matmul.weights import PlainWeight
from preheat.settings import Settings
from tests import layers

ROWS = [1, 2, 3, 8, 15, 16, 17, 24, 32, 33, 48, 64, 65, 96, 128, 129, 256, 384, 512, 1000, 1024, 2048, 4096, 8192]
DEEP = LinearShape(4096, 14336)
SHAPES = [
    LinearShape(6144, 4096),
    LinearShape(28672, 4096, gated=True),
    DEEP,
    LinearShape(1024, 3072),
    LinearShape(1152, 896, bias=True),
    LinearShape(9728, 896, gated=True),
    LinearShape(1000, 200, bias=True),
]
TILES = [
    Tile(outputs, rows, inputs, warps, stages, bulk)
    for (outputs, warps), rows, (inputs, stages), bulk in itertools.product(
        ((32, 1), (64, 4), (128, 8)), (16, 64), ((64, 3), (128, 2)), (False, True)
    )
]


@pytest.fixture(autouse=True, scope="module")
def _process():
    CudaBackend().prepare(Settings(), "eager", None)


def device_configs(invariant=True):
    return kernel_configs(torch.cuda.get_device_name(), torch.cuda.get_device_capability(), None, invariant=invariant)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_chosen_kernels_have_the_bits_of_the_plain_kernel(shape):
    """Eager and captured, with three seeds, in all rows and columns; rejected kernels are replaced."""
    found = device_configs()
    prove(found, [shape], ROWS)
    assert differing(shape, [(rows, found(shape, rows)) for rows in ROWS]) == set()


@pytest.mark.parametrize("shape", [LinearShape(1152, 896, bias=True), LinearShape(2048, 1000, gated=True)], ids=str)
def test_tiles_and_warps_change_no_bits(shape):
    compile_kernels((shape, tile) for tile in TILES)
    assert differing(shape, [(rows, tile) for rows in (1, 17, 200) for tile in TILES]) == set()


@pytest.fixture
def hopper():
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("needs a Hopper GPU")


@pytest.mark.parametrize("shape", [*SHAPES, LinearShape(2000, 200, gated=True), LinearShape(264, 8)], ids=str)
def test_the_kernel_for_many_rows_has_the_bits_of_the_plain_one(hopper, shape):
    """With all tiles, also for fewer rows and outputs than a tile has."""
    assert fits(shape)
    compile_kernels((shape, wide) for wide in WIDE)
    rows = [1, 127, 128, 129, 255, 1000, 2048, 2500]
    assert differing(shape, [(size, wide) for size in rows for wide in WIDE]) == set()


@pytest.mark.parametrize("wide", WIDE, ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("gated", [False, True])
def test_the_kernel_for_many_rows_adds_the_bias_and_writes_no_more_than_its_rows(hopper, wide, dtype, gated):
    shape = LinearShape(2000, 520, gated, dtype)
    x, weight, bias = operands(shape, 200)
    room = torch.full((201, shape.columns), 7.0, device="cuda", dtype=dtype)
    expected = apply(REFERENCE[torch.bfloat16], x, PlainWeight(weight), bias, gated)
    assert torch.equal(apply(wide, x, PlainWeight(weight), bias, gated, room[:200]), expected)
    assert room[200].eq(7).all()
    assert not torch.equal(apply(wide, x, PlainWeight(weight), None, gated), expected)


def test_the_kernel_for_many_rows_refuses_shapes_that_the_copy_engine_cannot_read(hopper):
    for shape in (
        LinearShape(512, 1004),
        LinearShape(1000, 512, gated=True),
        LinearShape(512, 512, dtype=torch.float32),
    ):
        assert not fits(shape)


def test_the_plain_kernel_serves_float32():
    shape = LinearShape(1000, 200, bias=True, dtype=torch.float32)
    rows = [1, 17, 300]
    assert differing(shape, [(size, rule(shape, size)) for size in rows]) == set()


def test_cutting_the_inputs_into_parts_is_seen():
    """Negative control: the tests above can fail."""
    parts = differing(DEEP, [(rows, Library(split=True)) for rows in (1, 16, 64, 128)])
    assert parts
    rows = min(size for size, _ in parts)
    found = KernelConfigs([Table("", (9, 0), [Entry.of(DEEP, rows, Library(split=True), 1.0)])])
    assert prove(found, [DEEP], [rows]) == {(DEEP, rows): False}
    assert found(DEEP, rows) == tile_rule(DEEP, rows)


def test_a_call_that_may_split_leaves_nothing_behind():
    x, weight = torch.ones(4, 64, device="cuda").bfloat16(), torch.ones(32, 64, device="cuda").bfloat16()
    before = torch._C._get_cublas_allow_bf16_reduced_precision_reduction()
    apply(Library(split=True), x, PlainWeight(weight), None, False)
    assert torch._C._get_cublas_allow_bf16_reduced_precision_reduction() == before


def exact_and_slack(x, weight, bias, gated):
    """Return the layer in float64, and how far its roundings to the dtype may move each number, to first order.

    A sum is rounded before its bias or behind it, or both, then silu and the product are rounded.
    """
    half = torch.finfo(x.dtype).eps / 2
    sums = x.double() @ weight.double().t()
    exact = sums + bias.double()
    slack = half * (sums.abs() + exact.abs())
    if not gated:
        return exact, slack
    (gate, up), (of_gate, of_up) = exact.chunk(2, 1), slack.chunk(2, 1)
    share, silu = gate.sigmoid(), torch.nn.functional.silu(gate)
    slope = share * (1 + gate * (1 - share))
    return silu * up, (slope * up).abs() * of_gate + silu.abs() * of_up + 2 * half * (silu * up).abs()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("gated", [False, True])
def test_accuracy(dtype, gated):
    x, weight, bias = operands(LinearShape(2048, 4096, gated, dtype), 65)
    exact, slack = exact_and_slack(x, weight, bias, gated)
    for choice in (REFERENCE[dtype], rule(LinearShape(2048, 4096, gated, dtype), 65), Library()):
        error = (apply(choice, x, PlainWeight(weight), bias, gated).double() - exact).abs()
        assert (error <= 1.05 * slack + 1e-5 * exact.abs().max()).all(), choice


@pytest.mark.parametrize("choice", [Tile(32, 16, 64, 2, 3), Library()], ids=str)
@pytest.mark.parametrize("bias", [False, True])
def test_the_result_is_written_into_the_given_tensor(choice, bias):
    x, weight, vector = operands(LinearShape(512, 256), 9)
    room = torch.full((10, 512), 7.0, device="cuda").bfloat16()
    y = apply(choice, x, PlainWeight(weight), vector if bias else None, False, room[:9])
    assert y.data_ptr() == room.data_ptr()
    assert torch.equal(y, apply(choice, x, PlainWeight(weight), vector if bias else None, False))
    assert room[9].eq(7).all()


def test_a_boot_settles_every_linear_layer_of_its_model():
    weight, head_weight = (torch.zeros(outputs, 1024, device="cuda").bfloat16() for outputs in (3072, 32000))
    shared = device_configs()
    layer, head = (Layer(layers.value_of(w), LayerWeights(w), shared, w.device) for w in (weight, head_weight))
    found = settle(shared, [(layer.shape, [1, 16, 2048]), (layer.shape, [1, 16]), (head.shape, [1, 16])])
    assert set(found) == {(layer.shape, rows) for rows in (1, 16, 2048)} | {(head.shape, 1), (head.shape, 16)}
    assert settle(device_configs(invariant=False), [(head.shape, [1])]) == {}
    CudaBackend().select_kernels([(layer, [1, 16]), (head, [1])])  # the same, from the layers


def operands(shape, rows):
    x = torch.empty(rows, shape.inputs, device="cuda", dtype=shape.dtype)
    weight = torch.empty(shape.outputs, shape.inputs, device="cuda", dtype=shape.dtype)
    fill(x, weight, 0)
    return x, weight.mul_(0.02), torch.randn(shape.outputs, device="cuda").to(shape.dtype)


@pytest.mark.parametrize("splits", [1, 2, 4])
def test_sums_of_splits_have_the_bits_of_their_reference(splits):
    """Every kernel of ours: one loop through all splits, a loop for each, and sums of two in Hopper's registers."""
    shape = LinearShape(1152, splits * 1024, splits=splits)
    tried = [
        (rows, choice)
        for rows in (1, 40, 200)
        for choice in candidates(shape, rows, card=card_at())
        if choice.kind != "library"
    ]
    compile_kernels([(shape, choice) for _, choice in tried] + [(shape, reference(shape))])
    assert differing(shape, tried) == set()
