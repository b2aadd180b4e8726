"""Quantized linear layers on a real device: every serving implementation has its reference's bits.

The reference is the dequantized model, or the contract of float8 within the rounding of its accumulator.
"""

from dataclasses import fields, replace
from functools import partial

import pytest
import torch

from preheat.backends.base.layers import LayerContext
from tests import layers

pytest.importorskip("triton")

from preheat import LLM, SamplingParams
from preheat.backends.cuda.backend import CudaBackend
from preheat.backends.cuda.device.detect import card_at
from preheat.backends.cuda.matmul.config import (
    ExpertsConfig,
    ExpertsShape,
    LinearShape,
    Tile,
    experts_reference,
    fits_small_m,
    reference,
    small_m_tile,
    wide_float8,
)
from preheat.backends.cuda.matmul.kernels import KernelConfigs, candidates, rule
from preheat.backends.cuda.matmul.layer import Layer
from preheat.backends.cuda.matmul.linear import apply
from preheat.backends.cuda.matmul.moe.experts import Apart, ExpertsLayer, experts_forward, with_biases
from preheat.backends.cuda.matmul.prove import compile_kernels, differing, random_weight, settle
from preheat.backends.cuda.matmul.rules import large_tiles
from preheat.backends.cuda.matmul.weights import DeviceWeight, dequantized
from preheat.backends.cuda.pointwise.norm import CudaNorm, QuantizedInput
from preheat.backends.cuda.pointwise.quantize import quantize_rows
from preheat.ops import quantization
from preheat.ops.fp4 import nearest, powers
from preheat.ops.kinds import Scheme
from preheat.ops.proof import noise
from preheat.ops.values import Routing
from preheat.settings import Settings
from preheat.warmup.record import Record
from tests.cpu.test_quantized_layers import random_weight as random_layer
from tests.kernels.ranks import on_ranks

FP8 = Scheme(code="fp8", scales="channel", activations="token")
STATIC = Scheme(code="fp8", scales="tensor", activations="static")
BLOCKS = Scheme(code="fp8", scales="block", group=128, activations="block")
MXFP4 = Scheme(code="fp4", scales="group", group=32)
WHOLE = [
    Scheme(code="int4", scales="group", group=128, zeros=True),
    Scheme(code="int4", scales="group", group=32, zeros=True, indexed=True),
    Scheme(code="int8", scales="channel"),
    Scheme(code="fp8", scales="channel"),
    MXFP4,
]
ROWS = [1, 2, 8, 16, 17, 33, 64, 65, 128, 300, 512, 1000, 2048]
SIZES = [(1152, 896, False), (2048, 1024, True), (4096, 512, False), (1024, 2048, True)]


def named(scheme):
    return scheme.name


@pytest.fixture(autouse=True, scope="module")
def _process():
    CudaBackend().prepare(Settings(), "eager", None)


def shape_of(scheme, outputs=1152, inputs=896, gated=False):
    return LinearShape(outputs, inputs, gated, scheme=scheme)


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("scheme", [FP8, BLOCKS, *WHOLE], ids=named)
def test_chosen_kernels_have_the_bits_of_the_reference(scheme, size):
    shape, configs = shape_of(scheme, *size), KernelConfigs(card=card_at())
    chosen = [(rows, configs(shape, rows)) for rows in ROWS]
    compile_kernels([(shape, choice) for _, choice in chosen] + [(shape, reference(shape))])
    assert differing(shape, chosen) == set()


@pytest.mark.parametrize("scheme", [FP8, BLOCKS, WHOLE[0]], ids=named)
def test_all_that_the_tuner_tries_has_them_too(scheme):
    shape = shape_of(scheme)
    tried = [(rows, choice) for rows in (16, 200) for choice in candidates(shape, rows, card=card_at())]
    compile_kernels([(shape, choice) for _, choice in tried])
    assert differing(shape, tried) == set()


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("size", [*SIZES, (520, 1040, False), (1040, 144, True), (6144, 4096, False)], ids=str)
@pytest.mark.parametrize("scheme", [FP8, STATIC], ids=named)
def test_float8_of_many_rows_on_hopper_has_the_bits_of_the_tiles(scheme, size, bias):
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("needs a Hopper GPU")
    shape = shape_of(scheme, *size)._replace(bias=bias)
    assert wide_float8(shape)
    tried = [(rows, choice) for rows in ROWS for choice in large_tiles(shape)]
    compile_kernels([(shape, choice) for _, choice in tried] + [(shape, reference(shape))])
    assert differing(shape, tried) == set()


SHUFFLED, BF16_SCALES = {"shuffled": True}, {"shuffled": True, "bf16_scales": True}
FEW = [
    (FP8, {}), (STATIC, {}), (WHOLE[0], SHUFFLED), (WHOLE[0], BF16_SCALES),
    (replace(WHOLE[0], zeros=False), BF16_SCALES),
    (replace(WHOLE[0], group=512), SHUFFLED), (replace(WHOLE[0], group=0, scales="channel", zeros=False), SHUFFLED),
]  # fmt: skip


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("size", [(1152, 896, False), (528, 1280, False), (1040, 640, True)], ids=str)
@pytest.mark.parametrize(("scheme", "more"), FEW, ids=str)
def test_few_rows_on_hopper_have_the_bits_of_the_reference(scheme, more, size, bias):
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("needs a Hopper GPU")
    shape = shape_of(scheme, *size)._replace(bias=bias, **more)
    assert fits_small_m(shape)
    tried = [(rows, small_m_tile(shape, height, 3)) for rows in (1, 8, 17, 33, 64, 70) for height in (8, 16, 32, 64)]
    compile_kernels([(shape, choice) for _, choice in tried] + [(shape, reference(shape))])
    assert differing(shape, tried) == set()


@pytest.mark.parametrize("scheme", WHOLE, ids=named)
def test_weights_equal_the_reference_in_torch(scheme):
    weight = quantization.empty_weight(scheme, 40, 256, dtype=torch.bfloat16, device=torch.device("cuda"))
    numbers = noise(40, 256).mul_(3).round_().clamp_(-8, 7).cuda()
    weight.codes.copy_(nearest(numbers) if scheme.code == "fp4" else numbers)
    weight.scales.uniform_(0.5, 2)
    if scheme.powers:
        weight.scales.copy_(powers(torch.arange(80, dtype=torch.uint8).view(40, 2).repeat(1, 4) * 3))
    for each in (weight.zeros, weight.index):
        if each is not None:
            each.random_(0, 7)
    assert torch.equal(dequantized(DeviceWeight.of(weight)), quantization.dequantize(weight))


@pytest.mark.parametrize("kind", ["token", "block", "static"])
def test_activations_have_the_codes_of_the_reference_on_a_cpu(kind):
    x = (noise(200, 4000) * noise(200, 4000, seed=1).exp()).bfloat16()
    static = torch.tensor(0.3) if kind == "static" else None
    right, right_scales = quantization.quantize_rows(x, kind, static)
    rows = quantize_rows(x.cuda(), kind, None if static is None else static.cuda())
    assert torch.equal(rows.scales.cpu(), right_scales)
    assert torch.equal(rows.codes.cpu().view(torch.uint8), right.view(torch.uint8))


@pytest.mark.parametrize("size", [896, 4096, 5120])
@pytest.mark.parametrize("norm", ["rms", "layer"])
@pytest.mark.parametrize("kind", ["token", "block", "static"])
def test_a_norm_gives_the_codes_of_its_result(kind, norm, size):
    """The norm keeps its own order of a row's sum, because codes are stored as a matrix."""
    x, residual, weight = (noise(64, size, seed=seed).mul_(9).exp_().bfloat16().cuda() for seed in range(3))
    layer = CudaNorm(weight[0].contiguous(), 1e-5, norm)
    static = torch.tensor(0.02, device="cuda") if kind == "static" else None
    how = QuantizedInput(kind, static)
    plain = layer.add(x, residual.clone())
    right = quantize_rows(plain, kind, static)
    for rows in (how.norm(layer, x, residual.clone()), how.beside_plain().norm(layer, x, residual.clone())):
        assert torch.equal(rows.scales, right.scales)
        assert torch.equal(rows.codes.view(torch.uint8), right.codes.view(torch.uint8))
        assert rows.plain is None or torch.equal(rows.plain, plain)


@pytest.mark.parametrize("scheme", [FP8, BLOCKS], ids=named)
def test_float8_is_close_to_float64_of_its_codes(scheme):
    """The matrix unit keeps about 14 bits of a sum of 128 products."""
    shape = shape_of(scheme)
    weight, x = random_weight(shape, torch.device("cuda"), 0), torch.randn(64, 896, device="cuda").bfloat16()
    rows = quantize_rows(x, scheme.activations, None)
    codes, scales = rows.codes, rows.scales
    wide = codes.double() * scales.double().repeat_interleave(896 // scales.shape[1], 1)
    per_input = weight.scales.t().double().repeat_interleave(896 // len(weight.scales), 1)
    exact = wide @ (weight.codes.double() * per_input).t()
    found = apply(rule(shape, 64), x, weight, None, False).double()
    assert (found - exact).abs().max() < 1e-2 * exact.abs().max()


@pytest.mark.parametrize("shape", [(128, 2048, 768, 8), (8, 1024, 1792, 2)], ids=str)
@pytest.mark.parametrize("scheme", [FP8, BLOCKS, WHOLE[0], WHOLE[2]], ids=named)
def test_experts_have_the_bits_of_the_reference(scheme, shape):
    """For one token, for a few, and for so many that each expert has whole blocks.

    Weights held as codes give the bits of the dequantized experts.
    """
    num_experts, hidden, inner, top_k = shape
    gate_up, down = stacked(scheme, num_experts, 2 * inner, hidden), stacked(scheme, num_experts, hidden, inner)
    experts = layers.experts(CudaBackend(), gate_up, down, Routing(top_k, True, False))
    assert isinstance(experts, ExpertsLayer)
    x, logits = (
        torch.randn(700, hidden, device="cuda").bfloat16(),
        torch.randn(700, num_experts, device="cuda").bfloat16(),
    )
    right = experts.by(experts_reference(experts.shape), x, logits)
    assert right.isfinite().all()
    for tokens in (1, 2, 16, 65, 700):
        assert torch.equal(experts(x[:tokens], logits[:tokens]).view(torch.int16), right[:tokens].view(torch.int16))


STREAMED = [
    ExpertsConfig(rows, *(Tile(16 * warps * times, rows, 128, warps, stages, bulk=True) for times in (1, 2)))
    for rows, warps, stages in ((32, 4, 4), (64, 4, 3), (64, 8, 6), (128, 8, 3), (32, 4, 6), (64, 4, 4))
]


@pytest.mark.parametrize("large", [False, True])
@pytest.mark.parametrize("config", STREAMED, ids=str)
def test_streamed_experts_have_the_bits_of_the_reference(config, large):
    """For blocks that are full, half full and nearly empty, and outputs and inputs that end inside of a tile."""
    count, hidden, inner = 8, 320, 192
    gate_up, down = (streamed_weight(large, count, *size) for size in ((2 * inner, hidden), (hidden, inner)))
    assert gate_up.large_scales == down.large_scales == large
    draw = partial(torch.randn, device="cuda", dtype=torch.bfloat16)
    reference = experts_reference(ExpertsShape(count, hidden, inner, 2, torch.bfloat16, MXFP4))
    routing, counts = Routing(2, True, False), torch.zeros(count, dtype=torch.int32, device="cuda")
    x, logits = draw(1500, hidden), draw(1500, count)
    logits[:, 0] -= 3  # few rows
    for between in (None, Apart(draw(count, 2 * inner), draw(count, hidden), "clamped_silu_and_mul")):
        given = gate_up, down, routing, counts, None, between
        right = experts_forward(with_biases(reference), x, logits, *given)
        assert right.isfinite().all() and right.any()
        for tokens in (1, 40, 300, 1500):
            found = experts_forward(config, x[:tokens], logits[:tokens], *given)
            assert torch.equal(found.view(torch.int16), right[:tokens].view(torch.int16))


def streamed_weight(large, *size):
    weight = random_layer(MXFP4, *size, dtype=torch.bfloat16)
    if large:
        weight.scales[0, 0] = 4.0
    return DeviceWeight.of(replace(weight, codes=weight.codes.cuda(), scales=weight.scales.cuda()))


def stacked(scheme, count, outputs, inputs):
    weight = quantization.empty_weight(
        scheme, count, outputs, inputs, dtype=torch.bfloat16, device=torch.device("cuda")
    )
    if scheme.code == "fp8":
        weight.codes.copy_(torch.randn(weight.codes.shape, device="cuda").mul_(100).clamp_(-400, 400))
    else:
        weight.codes.random_(*((-8, 8) if scheme.code == "int4" else (-127, 128)))
    weight.scales.uniform_(0.5, 2).mul_(2.0**-10)
    if weight.zeros is not None:
        weight.zeros.random_(-7, 9)
    return weight


def parts(weight, rows, columns):
    """Return a part of a weight on the host, copied to the device."""
    cut = weight.cut(rows, columns)
    names = [field.name for field in fields(cut) if isinstance(getattr(cut, field.name), torch.Tensor)]
    return replace(cut, **{name: getattr(cut, name).cuda() for name in names})


K_SPLITS = [FP8, STATIC, BLOCKS, *WHOLE]


@pytest.mark.parametrize("splits", [2, 4])
@pytest.mark.parametrize("scheme", K_SPLITS, ids=named)
def test_k_splits_have_the_bits_of_their_reference(scheme, splits):
    """Nothing is rejected, so what was chosen first serves: of two K splits in float8, Hopper's kernels."""
    card = card_at()
    shape, configs = LinearShape(1152, splits * 512, scheme=scheme, splits=splits), KernelConfigs(card=card)
    assert all(settle(configs, [(shape, ROWS)]).values())
    assert [configs(shape, rows) for rows in ROWS] == [rule(shape, rows, card=card) for rows in ROWS]


@pytest.mark.parametrize("scheme", K_SPLITS, ids=named)
def test_the_sum_over_ranks_has_the_bits_of_one_rank(scheme):
    """Also for K splits of no whole number of K steps, where scales allow them."""
    outputs, inputs = 1152, 4 * (448 if scheme.scales != "block" and scheme.group < 128 else 512)
    whole, backend = random_layer(scheme, outputs, inputs, dtype=torch.bfloat16), CudaBackend()
    for rows in (1, 40, 600):
        x = torch.randn(rows, inputs, device="cuda").bfloat16()

        def layer(ranks, x=x):
            part = inputs // ranks.world
            mine = ranks.rank * part, (ranks.rank + 1) * part
            own, order = parts(whole, ((0, outputs),), mine), layers.splits(4 // ranks.world, ranks.rank)
            made = layers.linear(backend, own, order=order, context=LayerContext(ranks))
            return made(x[:, slice(*mine)].contiguous()).view(torch.int16)

        (one,) = on_ranks(1, layer)
        for world in (2, 4):
            assert all(torch.equal(each, one) for each in on_ranks(world, layer, exchanges=2))


@pytest.mark.parametrize("scheme", [FP8, BLOCKS, WHOLE[0], MXFP4], ids=named)
def test_the_sum_of_experts_over_ranks_has_the_bits_of_one_rank(scheme):
    hidden, inner, count, backend = 256, 512, 8, CudaBackend()
    gate_up = random_layer(scheme, count, 2 * inner, hidden, dtype=torch.bfloat16)
    down = random_layer(scheme, count, hidden, inner, dtype=torch.bfloat16, seed=1)
    for tokens in (1, 5, 200):
        x, logits = (torch.randn(tokens, size, device="cuda").bfloat16() for size in (hidden, count))

        def layer(ranks, x=x, logits=logits):
            part = inner // ranks.world
            first, last = ranks.rank * part, (ranks.rank + 1) * part
            given = parts(gate_up, ((first, last), (inner + first, inner + last)), None)
            taken = parts(down, ((0, hidden),), (first, last))
            order, routing = layers.splits(4 // ranks.world, ranks.rank), Routing(2, True, False)
            made = layers.experts(backend, given, taken, routing, order=order, context=LayerContext(ranks))
            return made(x, logits).view(torch.int16)

        (one,) = on_ranks(1, layer)
        for world in (2, 4):
            assert all(torch.equal(each, one) for each in on_ranks(world, layer, exchanges=2))


def test_k_splits_have_the_same_bits_in_graphs_eager_and_in_any_batch():
    options = {"quantization": "fp8", "tp_invariant": True, "max_num_seqs": 4, "max_model_len": 128}
    params = SamplingParams(temperature=0, max_tokens=8, logprobs=1)
    prompts, found = ["def add(a, b):", "class Stack:", "import os"], []
    for more in ({"skip_warmup": False}, {"enforce_eager": True}):
        llm = LLM(**options, **more, num_gpu_blocks_override=64)
        linears = [linear for _, linear in llm.loop.executor.decoder.weights.linears()]
        assert any(isinstance(linear, Layer) and linear.value.order.is_split for linear in linears)
        for asked in (prompts, *([prompt] for prompt in prompts)):
            outputs = [output.outputs[0] for output in llm.generate(asked, params, use_tqdm=False)]
            found.append([(output.token_ids, output.logprobs) for output in outputs])
        record = Record.from_json(llm.loop.listener.report())
        assert "enforce_eager" in more or not any(record.cold.values())
    assert found[0] == found[4] == [each for alone in found[1:4] for each in alone]
    assert found[1:4] == found[5:]


@pytest.mark.parametrize("batches", [1, 7])
def test_the_engine_gives_the_same_answers_alone_and_in_a_batch(batches):
    """The check at boot proves every path; a blocked boot raises."""
    llm = LLM(quantization="fp8", max_num_seqs=8, max_model_len=256, skip_warmup=False)
    params = SamplingParams(temperature=0, max_tokens=8, logprobs=1)
    prompts = ["def add(a, b):", "class Stack:", "import os"] * batches
    outputs = [output.outputs[0] for output in llm.generate(prompts, params, use_tqdm=False)]
    alone = [llm.generate([prompt], params, use_tqdm=False)[0].outputs[0] for prompt in prompts[:3]]
    assert [(one.token_ids, one.logprobs) for one in outputs[:3]] == [(one.token_ids, one.logprobs) for one in alone]
