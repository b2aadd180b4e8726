"""Quantized layers on CUDA.

Codes of activations are right to the bit, and weights have the bits of the dequantized layer. Float8 follows the
contract with sums in order, whatever the tiles.
"""

from dataclasses import replace

import pytest
import torch

from preheat.backends.cuda.matmul.config import Expanded, ExpertsConfig, LinearShape, Tile
from preheat.backends.cuda.matmul.linear import apply
from preheat.backends.cuda.matmul.moe.experts import experts_forward
from preheat.backends.cuda.matmul.moe.route import arrange
from preheat.backends.cuda.matmul.mxfp4 import RAISED, _e2m1, mixed
from preheat.backends.cuda.matmul.prove import random_weight as random_codes
from preheat.backends.cuda.matmul.prove import refill
from preheat.backends.cuda.matmul.weights import DeviceWeight, PlainWeight, can_be_shuffled, dequantized
from preheat.backends.cuda.pointwise.norm import CudaNorm, QuantizedInput
from preheat.backends.cuda.pointwise.quantize import quantize_rows
from preheat.model.layers import DenseMlp, MoeMlp, fused, normed
from preheat.ops import fp4, quantization
from preheat.ops.activation import silu_and_mul
from preheat.ops.kinds import Scheme
from preheat.ops.moe import route, routed
from preheat.ops.proof import noise
from preheat.ops.quantization import QuantizedRows
from preheat.ops.values import Routing
from tests import layers
from tests.cpu.test_quantized_layers import KINDS, W8A8, WHOLE, random_weight
from tests.kernels.backend import InterpretedCuda
from tests.kernels.test_linear import in_order

# rows that fill up an expert's block are leftovers in memory, and are divided too

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
TILES = [Tile(64, 16, 128, 4, 3), Tile(16, 32, 128, 4, 3)]
MXFP4 = Scheme(code="fp4", scales="group", group=32)
SCHEMES = [
    *WHOLE, Scheme(code="int4", scales="group", group=128), Scheme(code="int4", scales="channel", zeros=True), MXFP4,
]  # fmt: skip


def named(scheme):
    return scheme.name


@DTYPES
@pytest.mark.parametrize("kind", KINDS)
def test_codes_and_scales_of_rows(kind, dtype):
    """A row has several pieces; its last group is not whole."""
    x = (noise(4, 2500) * noise(4, 2500, seed=1).exp()).to(dtype)
    x[1] = 0
    static = torch.tensor(0.3) if kind == "static" else None
    rows = quantize_rows(x, kind, static)
    right, right_scales = quantization.quantize_rows(x, kind, static)
    assert torch.equal(rows.scales, right_scales)
    assert torch.equal(rows.codes.view(torch.uint8), right.view(torch.uint8))


@DTYPES
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("norm", "size"), [("rms", 300), ("rms_plus_one", 128), ("layer", 96)])
def test_a_norm_gives_the_codes_of_its_result(norm, size, kind, dtype):
    """A norm gives codes with the residual or without, alone or beside the result itself."""
    x, residual = noise(3, size).to(dtype), noise(3, size, seed=1).to(dtype)
    static = torch.tensor(0.02) if kind == "static" else None
    bias = noise(size, seed=3).to(dtype) if norm == "layer" else None
    layer, how = CudaNorm(noise(size, seed=2).to(dtype), 1e-5, norm, bias), QuantizedInput(kind, static)
    for before in (None, residual):
        given = [each if each is None else each.clone() for each in (before, before, before)]
        plain = layer(x) if before is None else layer.add(x, given[0])
        right, right_scales = quantization.quantize_rows(plain, kind, static)
        fused, beside = how.norm(layer, x, given[1]), how.beside_plain().norm(layer, x, given[2])
        for rows in (fused, beside):
            assert torch.equal(rows.scales, right_scales)
            assert torch.equal(rows.codes.view(torch.uint8), right.view(torch.uint8))
        assert fused.plain is None and torch.equal(beside.plain, plain)
        assert before is None or all(torch.equal(each, residual + x) for each in given)


@pytest.mark.parametrize("scheme", [W8A8[0], W8A8[4]], ids=named)
def test_a_model_quantizes_in_its_norms(scheme):
    """A dense block gets codes and nothing else; experts get codes beside the router's rows.

    The layer's result is the same as if it had quantized the rows itself.
    """
    cuda, x, residual = InterpretedCuda(), noise(3, 160), noise(3, 160, seed=1)
    norm = cuda.norm(noise(160, seed=2), 1e-5)
    gate_up, down = random_weight(scheme, 2 * 24, 160), random_weight(scheme, 160, 24, seed=1)
    dense = DenseMlp(layers.linear(cuda, gate_up, activation="silu_and_mul"), layers.linear(cuda, down))
    router, stack = (
        layers.linear(cuda, noise(2, 160, seed=4)),
        (random_weight(scheme, 2, 48, 160), random_weight(scheme, 2, 160, 24)),
    )
    experts = MoeMlp(router, layers.experts(cuda, *stack, Routing(1, True, False)))
    for block in (dense, experts):
        rows = normed(norm, x, residual.clone(), block.fused_input)
        assert isinstance(rows, QuantizedRows)
        assert (rows.plain is None) == (block is dense)
        assert torch.equal(block(rows), block(norm.add(x, residual.clone())))
    assert fused(dense.gate_up, router).plain and fused(router) is None
    other = layers.linear(cuda, random_weight(W8A8[4] if scheme is W8A8[0] else W8A8[0], 8, 160))
    assert fused(dense.gate_up, other) is None  # one result does not do for both


@DTYPES
@pytest.mark.parametrize("scheme", SCHEMES, ids=named)
def test_weights_equal_the_reference(scheme, dtype):
    weight = random_weight(scheme, 40, 256, dtype=dtype)
    codes = DeviceWeight.of(weight)
    assert torch.equal(dequantized(codes), quantization.dequantize(weight))
    if scheme.powers:  # a scale that leaves no room; an update of weights tells it by the dtype
        weight.scales[3, 1] = 2.0
        large = DeviceWeight.of(weight)
        assert large.scales.dtype != codes.scales.dtype
        assert torch.equal(dequantized(large), quantization.dequantize(weight))


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16])
def test_shuffled_weights_too(kind):
    scheme = replace(SCHEMES[0], group=128)
    weight = random_weight(scheme, 48, 320, dtype=torch.bfloat16)
    assert not can_be_shuffled(weight)
    weight.scales.copy_(weight.scales.to(kind))
    assert can_be_shuffled(weight)
    codes = DeviceWeight.of(weight, shuffled=True)
    assert codes.bf16_scales == (kind == torch.bfloat16)
    assert torch.equal(dequantized(codes), quantization.dequantize(weight))
    assert not torch.equal(codes.codes, DeviceWeight.of(weight).codes)


def _registers(assembly, given):
    """Return the registers after ``assembly`` over arrays of words ``given``; its few instructions, as PTX defines."""
    register = {f"${2 + at}": words for at, words in enumerate(given)}

    def number(name):
        return register[name] if name in register else torch.tensor(int(name, 0))

    def product(one, other):
        halves = [(number(one) >> at & 0xFFFF, number(other) >> at & 0xFFFF) for at in (0, 16)]
        parts = [[each.to(torch.int16).view(torch.bfloat16) for each in pair] for pair in halves]
        low, high = ((left * right).view(torch.int16).long() & 0xFFFF for left, right in parts)
        return low | high << 16

    for line in assembly.strip("{} ").split(";"):
        operation, *names = line.replace(",", " ").split() or ["."]
        if operation.startswith("shl"):
            register[names[0]] = number(names[1]) << number(names[2]) & 0xFFFFFFFF
        elif operation.startswith("shr"):
            register[names[0]] = number(names[1]) >> number(names[2])
        elif operation.startswith("and"):
            register[names[0]] = number(names[1]) & number(names[2])
        elif operation.startswith("mov"):
            register[names[0]] = number(names[1])
        elif operation.startswith("mul.lo"):
            register[names[0]] = number(names[1]) * number(names[2]) & 0xFFFFFFFF
        elif operation.startswith("fma"):
            assert names[3] == "none"  # less zero changes no product
            register[names[0]] = product(names[1], names[2])
        else:
            assert operation.startswith(".")
    return register["$0"], register["$1"]


@pytest.mark.parametrize("large", [False, True])
@pytest.mark.parametrize("high", [False, True])
def test_the_assembly_for_mxfp4_gives_the_weights(high, large):
    """All codes, at all scales: the least, the greatest, and with products that are not normal or not finite.

    Halves of a word have the codes of neighbors; the other three of a half are others.
    """
    nibbles, exponents = torch.arange(16).repeat(2, 1), torch.arange(255 if large else 129)
    codes = fp4.codes_of(nibbles)[0, :, None] * torch.ones(1, len(exponents))
    wanted = (codes.double() * fp4.powers(exponents.to(torch.uint8)).double()).float().bfloat16()
    scale = ((exponents << 7).clamp(min=0x40) if large else exponents + RAISED.value << 7).expand(16, -1)
    for place in range(4):
        halves = torch.stack([nibbles[0].roll(5 * at) for at in (1, 2)]).to(torch.uint8)
        halves = halves[:, :, None, None].expand(2, 16, 2, 2).clone()  # of the first half or the second; b; d
        halves[int(high), :, place // 2, place % 2] = nibbles[0].to(torch.uint8)
        low, other = (each.view(16, 1, 1, 2, 1, 2) for each in halves)
        packed = mixed(low, other).long()
        words = sum(packed[:, at] << 8 * at for at in range(4))[:, None].expand(scale.shape)
        found = _registers(_e2m1(high, large), (words, scale | scale << 16, scale | scale << 16))
        same = (found[place // 2] >> 16 * (place % 2) & 0xFFFF).to(torch.int16).view(torch.bfloat16)
        assert torch.equal(same.abs(), wanted.abs())
        assert torch.equal(same[1:8], wanted[1:8]) and torch.equal(same[9:], wanted[9:])  # zero's sign is not stored


@pytest.mark.parametrize("scheme", SCHEMES, ids=named)
def test_layers_have_the_bits_of_the_dequantized_model(scheme):
    """40 outputs, 5 rows and 288 inputs divide by no tile."""
    inputs = 384 if scheme.group == 128 else 288
    weight = random_weight(scheme, 40, inputs, dtype=torch.bfloat16)
    x, bias = noise(5, inputs).bfloat16(), noise(40).bfloat16()
    codes = DeviceWeight.of(weight)
    right = in_order(x, quantization.dequantize(weight), bias)
    for choice in (TILES[0], Expanded(Tile(32, 16, 64, 4, 3))):
        assert torch.equal(apply(choice, x, codes, bias, False), right)


@pytest.mark.parametrize(("scheme", "dtype"), [(SCHEMES[1], torch.bfloat16), (SCHEMES[3], torch.float32)], ids=str)
def test_gated_layers_too(scheme, dtype):
    weight = random_weight(scheme, 40, 160, dtype=dtype)
    x, bias, codes = noise(5, 160).to(dtype), noise(40).to(dtype), DeviceWeight.of(weight)
    right = apply(Tile(32, 16, 64, 4, 3), x, PlainWeight(quantization.dequantize(weight)), bias, True)
    assert torch.equal(apply(TILES[0], x, codes, bias, True), right)
    assert torch.equal(apply(TILES[0], x, codes, bias, False), in_order(x, quantization.dequantize(weight), bias))


def products(codes, x_scales, weight):
    """Return sums of 128 products in order, promoted one after the other, with all scales: fp32."""
    a, w, scales = codes.float(), weight.codes.float(), weight.scales
    grouped = x_scales.shape[1] > 1 or scales.shape[1] > 1
    total = torch.zeros(len(a), len(w))
    for place, start in enumerate(range(0, a.shape[1], 128)):
        part = torch.zeros_like(total)
        for k in range(start, min(start + 128, a.shape[1])):
            part += a[:, k, None] * w[:, k]
        if grouped:
            part *= x_scales[:, [place if x_scales.shape[1] > 1 else 0]]
            part *= scales[:, place if scales.shape[1] > 1 else 0]
        total += part
    return total if grouped else total * x_scales * scales[:, 0]


def by_the_contract(x, weight, bias=None):
    total = products(*quantization.quantize_rows(x, weight.scheme.activations, weight.static), weight)
    return (total if bias is None else total + bias.float()).to(x.dtype)


@pytest.mark.parametrize(("scheme", "dtype"), [*zip(W8A8, [torch.float32, torch.bfloat16] * 3, strict=True)], ids=str)
def test_float8_layers_are_the_contract(scheme, dtype):
    weight, x, bias = random_weight(scheme, 40, 300, dtype=dtype), noise(5, 300).to(dtype), noise(40).to(dtype)
    right = by_the_contract(x, weight, bias)
    assert torch.equal(apply(TILES[1], x, DeviceWeight.of(weight), bias, False), right)
    gated = apply(TILES[0], x, DeviceWeight.of(weight), bias, True)
    assert (gated.float() - silu_and_mul(right).float()).abs().max() <= 2**-7 * gated.float().abs().max()


def test_a_sum_that_is_not_promoted_is_another():
    weight, x = random_weight(W8A8[0], 40, 300), noise(5, 300)
    codes, scales = quantization.quantize_rows(x, "token")
    total = torch.zeros(5, 40)
    for k in range(300):
        total += codes.float()[:, k, None] * weight.codes.float()[:, k]
    assert not torch.equal(total * scales * weight.scales[:, 0], by_the_contract(x, weight))


def test_a_row_has_the_same_bits_in_any_batch_and_row():
    weight = DeviceWeight.of(random_weight(W8A8[4], 48, 256, dtype=torch.bfloat16))
    x = noise(20, 256).bfloat16()
    whole = apply(TILES[0], x, weight, None, False)
    for rows in (1, 17):
        assert torch.equal(apply(TILES[1], x[-rows:], weight, None, False), whole[-rows:])


def test_four_bits_are_half_a_byte():
    weight = DeviceWeight.of(random_weight(replace(SCHEMES[0], group=128), 40, 256))
    assert weight.codes.nbytes == 40 * 256 // 2


@pytest.mark.parametrize(("scheme", "block"), [(W8A8[0], 16), (W8A8[4], 1)], ids=str)
def test_experts_in_float8_are_layers_of_their_own(scheme, block):
    routing = Routing(2, True, False)
    gate_up, down = random_weight(scheme, 2, 2 * 24, 144), random_weight(scheme, 2, 144, 24, seed=1)
    x, logits, tile = noise(4, 144), noise(4, 2, seed=1), Tile(64, 16, 128, 4, 3)
    device = DeviceWeight.of(gate_up), DeviceWeight.of(down)
    counts = torch.zeros(2, dtype=torch.int32)
    found = experts_forward(ExpertsConfig(block, tile, tile), x, logits, *device, routing, counts)

    def expert(number, rows):
        one, other = (DeviceWeight.of(weight.part(number)) for weight in (gate_up, down))
        return apply(tile, apply(tile, rows.contiguous(), one, None, True), other, None, False)

    weights = arrange(logits, routing, 1, counts).weights  # the device's own: its exp differs
    assert torch.equal(found, routed(x, route(logits, routing)[0], weights, 2, expert))
    alone = experts_forward(ExpertsConfig(1, tile, tile), x[-2:], logits[-2:], *device, routing, counts)
    assert torch.equal(alone, found[-2:])


@pytest.mark.parametrize("depth", [128, 256])
@pytest.mark.parametrize("scheme", [SCHEMES[0], W8A8[0], W8A8[4]], ids=named)
def test_deeper_tiles_change_no_bits(scheme, depth):
    """Depths need not divide the inputs."""
    for inputs in (512, 384):
        weight, x = (
            DeviceWeight.of(random_weight(scheme, 40, inputs, dtype=torch.bfloat16)),
            noise(3, inputs).bfloat16(),
        )
        for gated in (False, True):
            right = apply(TILES[0], x, weight, None, gated)
            assert torch.equal(apply(Tile(64, 16, depth, 4, 3), x, weight, None, gated), right)


@pytest.mark.parametrize("block", [1, 16])
@pytest.mark.parametrize("scheme", [s for s in SCHEMES if not s.indexed], ids=named)
def test_experts_of_codes_are_the_dequantized_ones(scheme, block):
    routing, dtype = Routing(2, True, False), torch.bfloat16
    inner = 128 if scheme.group else 24
    weights = (
        random_weight(scheme, 3, 2 * inner, 256, dtype=dtype),
        random_weight(scheme, 3, 256, inner, dtype=dtype, seed=1),
    )
    x, logits, counts = noise(4, 256).to(dtype), noise(4, 3, seed=1).to(dtype), torch.zeros(3, dtype=torch.int32)
    plain = [PlainWeight(quantization.dequantize(weight)) for weight in weights]
    codes = [DeviceWeight.of(weight) for weight in weights]
    tile, usual = Tile(64, 16, 256, 4, 3), Tile(32, 16, 64, 4, 3)
    right = experts_forward(ExpertsConfig(16, usual, usual), x, logits, *plain, routing, counts)
    assert torch.equal(experts_forward(ExpertsConfig(block, tile, tile), x, logits, *codes, routing, counts), right)
    expanded = ExpertsConfig(16, Expanded(usual), Expanded(usual))
    assert torch.equal(experts_forward(expanded, x, logits, *codes, routing, counts), right)


def test_tiles_of_few_rows_of_an_expert_change_no_bits():
    """Of 33 rows a tile of 32 leaves one, which half a tile takes, as the 15 rows of another expert."""
    routing, dtype = Routing(1, True, False), torch.bfloat16
    weights = random_weight(MXFP4, 2, 64, 128, dtype=dtype), random_weight(MXFP4, 2, 64, 32, dtype=dtype, seed=1)
    codes, x = [DeviceWeight.of(weight) for weight in weights], noise(48, 128).to(dtype)
    logits, counts = torch.zeros(48, 2, dtype=dtype), torch.zeros(2, dtype=torch.int32)
    logits[1:46:3, 1] = 1

    def by(rows):
        config = ExpertsConfig(rows, *[Tile(32, rows, 128, 2, 3)] * 2)
        return experts_forward(config, x, logits, *codes, routing, counts)

    assert logits.argmax(1).sum() == 15
    assert torch.equal(by(32), by(16))


@pytest.mark.parametrize("scheme", [W8A8[0], W8A8[4], *SCHEMES[:3]], ids=named)
def test_the_exact_result_of_the_proof_at_boot_is_zero(scheme):
    """Sums that cancel leave nothing but the order of the additions."""
    shape = LinearShape(16, 256, dtype=torch.float32, scheme=scheme)
    x, weight = torch.empty(3, 256), random_codes(shape, torch.device("cpu"), 1)
    refill(shape, x, weight, 1)
    exact = x.double() @ dequantized(weight).double().t()
    assert dequantized(weight).abs().max() > 0
    assert exact.abs().max() < 1e-12 * dequantized(weight).abs().max()


def test_the_backend_makes_layers_and_experts_of_codes():
    cuda, x = InterpretedCuda(), noise(3, 160).bfloat16()
    weight = random_weight(WHOLE[1], 40, 160, dtype=torch.bfloat16)
    assert torch.equal(layers.linear(cuda, weight)(x), in_order(x, quantization.dequantize(weight)))
    assert layers.linear(cuda, weight, activation="silu_and_mul")(x).shape == (3, 20)
    assert layers.linear(cuda, weight, clip=0.125)(x).abs().max() == 0.125
