"""Quantized layers on a CPU: the contract's bits, float64 of the dequantized map, and any row as alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from preheat.backends.cpu.backend import CpuBackend
from preheat.backends.cpu.quantized import coded_product, parts_of
from preheat.ops import quantization
from preheat.ops.fp4 import codes_of
from preheat.ops.kinds import ActivationScales, Scheme
from preheat.ops.proof import noise
from preheat.ops.quantization import (
    E4M3,
    QuantizedWeight,
    activation_scales,
    dequantize,
    empty_weight,
    quantize_channels,
    quantize_rows,
    scaled_product,
)
from preheat.ops.values import Routing
from tests import layers

CPU = CpuBackend()
FP8 = Scheme(code="fp8", scales="channel", activations="token")
KINDS: list[ActivationScales] = ["token", "block", "static"]
W8A8 = [
    replace(FP8, scales=scales, group=128 * (scales == "block"), activations=activations)
    for scales in ("channel", "block") for activations in KINDS
]  # fmt: skip
WHOLE = [
    Scheme(code="int4", scales="group", group=32),
    Scheme(code="int4", scales="group", group=32, zeros=True, indexed=True),
    Scheme(code="int8", scales="channel", zeros=True),
    replace(FP8, activations=None),
    Scheme(code="fp4", scales="group", group=16),
]


def random_weight(scheme: Scheme, *shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> QuantizedWeight:
    """Return codes and scales of all sizes."""
    random = torch.Generator().manual_seed(seed)
    weight = empty_weight(scheme, *shape, dtype=dtype, device=torch.device("cpu"))
    weight.scales.uniform_(0.5, 2, generator=random).mul_(shape[-1] ** -0.5 / 100)
    if scheme.powers:
        weight.scales.log2_().round_().exp2_()
    if scheme.code == "fp8":
        weight.codes.copy_(torch.randn(shape, generator=random).mul_(90).clamp_(-448, 448))
    else:
        half = 1 << scheme.bits - 1
        weight.codes.random_(-half, half, generator=random)
        if scheme.code == "fp4":
            weight.codes.copy_(codes_of(weight.codes + half))
    if weight.zeros is not None:
        weight.zeros.random_(-7, 9, generator=random)
    if weight.index is not None:
        groups = torch.arange(shape[-1]) // scheme.group
        weight.index.copy_(groups[torch.randperm(shape[-1], generator=random)])
    return replace(weight, static=None if weight.static is None else torch.tensor(0.02))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_codes_are_the_nearest_to_a_quotient(dtype: torch.dtype) -> None:
    """A search through all of e4m3fn, in float64, finds no code nearer to the quotient."""
    x = (noise(20, 160) * noise(20, 160, seed=1).exp()).to(dtype)
    x[3], x[4] = 0, x[4] * 1e-9
    codes, scales = quantize_rows(x, "token")
    table = torch.arange(256, dtype=torch.uint8).view(E4M3).double()
    table = table[table.isfinite()].unique()
    quotient = (x.float() / scales).clamp(-448, 448).double()
    distance = (quotient[..., None] - table).abs()
    assert torch.equal((quotient - codes.double()).abs(), distance.amin(-1))
    ties = distance.eq(distance.amin(-1, True)).sum(-1) > 1
    assert not (codes.view(torch.uint8)[ties] & 1).any()  # to even
    assert scales[3] == np.float32(1 / (448 * 512))
    assert codes[3].float().eq(0).all()
    assert codes.float().abs().amax(1)[5:].eq(448).all()


def test_a_quotient_is_no_product_with_a_reciprocal() -> None:
    x = noise(3000, 64).bfloat16()
    codes, scales = quantize_rows(x, "token")
    other = (x.float() * (1 / scales)).clamp(-448, 448).to(E4M3)
    assert not torch.equal(codes.view(torch.uint8), other.view(torch.uint8))


@pytest.mark.parametrize("scheme", W8A8, ids=lambda scheme: scheme.name)
def test_a_layer_is_the_contract_said_again(scheme: Scheme) -> None:
    """A layer equals the contract, written again in numpy one number after the other.

    300 inputs are two parts of 128 and one of 44.
    """
    weight, x, bias = random_weight(scheme, 7, 300), noise(3, 300, seed=2), noise(7, seed=3)
    codes, scales = quantize_rows(x, scheme.activations or "token", weight.static)
    a, w = codes.double().numpy(), weight.codes.double().numpy()
    sx, sw = scales.numpy(), weight.scales.numpy()
    grouped = sx.shape[1] > 1 or sw.shape[1] > 1
    right = np.zeros((3, 7), np.float32)
    for m in range(3):
        for n in range(7):
            total = np.float32(0)
            for part, k in enumerate(range(0, 300, 128)):
                exact = np.float32(sum(p * q for p, q in zip(a[m, k : k + 128], w[n, k : k + 128], strict=True)))
                if grouped:
                    exact = exact * sx[m, part if sx.shape[1] > 1 else 0] * sw[n, part if sw.shape[1] > 1 else 0]
                total += exact
            right[m, n] = (total if grouped else total * sx[m, 0] * sw[n, 0]) + bias.numpy()[n]
    assert np.array_equal(layers.linear(CPU, weight, bias)(x).numpy(), right)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("scheme", [*W8A8, *WHOLE], ids=lambda scheme: scheme.name)
def test_accuracy_of_the_dequantized_map(scheme: Scheme, dtype: torch.dtype) -> None:
    """A layer is near float64 of the dequantized weights and activations."""
    weight = random_weight(scheme, 40, 384, dtype=dtype)
    x = noise(9, 384, seed=4).to(dtype)
    meant = x.double()
    if scheme.activations:
        codes, scales = quantize_rows(x, scheme.activations, weight.static)
        meant = codes.double() * (scales.double().repeat_interleave(384 // scales.shape[1], 1))
    wide = dequantize(replace(weight, dtype=torch.float64))
    exact = meant @ wide.t()
    error = (layers.linear(CPU, weight)(x).double() - exact).abs().max() / exact.abs().max()
    assert error < (2e-6 if dtype == torch.float32 else 6e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("scheme", [*W8A8, *WHOLE], ids=lambda scheme: scheme.name)
def test_a_rows_bits_do_not_depend_on_other_rows(scheme: Scheme, dtype: torch.dtype) -> None:
    linear = layers.linear(CPU, random_weight(scheme, 96, 256, dtype=dtype), activation="silu_and_mul")
    x = noise(200, 256, seed=5).to(dtype) * noise(200, 1, seed=6).exp().to(dtype)
    whole = linear(x)
    for rows in (2, 3, 16, 65, 130):
        assert torch.equal(linear(x[-rows:].clone()), whole[-rows:])
    if scheme.activations:
        assert torch.equal(linear(x[-1:].clone()), whole[-1:])


@pytest.mark.parametrize("scheme", [FP8, W8A8[4]], ids=lambda scheme: scheme.name)
def test_a_tokens_experts_do_not_depend_on_other_tokens(scheme: Scheme) -> None:
    routing = Routing(2, True, False)
    experts = layers.experts(
        CPU, random_weight(scheme, 5, 2 * 144, 160), random_weight(scheme, 5, 160, 144, seed=1), routing
    )
    x, logits = noise(90, 160), noise(90, 5, seed=1)
    among = experts(x, logits)
    order = torch.randperm(90, generator=torch.Generator().manual_seed(1))
    assert torch.equal(experts(x[order], logits[order]), among[order])
    for rows in (1, 2, 7, 64):
        assert torch.equal(experts(x[-rows:], logits[-rows:]), among[-rows:])


def of_the_batch(right: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Plant a dynamic scale per tensor: the largest scale of all rows."""

    def scales(x: Tensor, kind: ActivationScales, static: Tensor | None = None) -> Tensor:
        found = right(x, kind, static)
        return found.amax(0, True).expand_as(found).contiguous()

    return scales


def test_a_scale_of_the_batch_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantization, "activation_scales", of_the_batch(activation_scales))
    linear, x = coded_product(random_weight(FP8, 96, 256)), noise(200, 256, seed=5)
    assert not torch.equal(linear(x[-2:].clone()), linear(x)[-2:])


def test_a_weight_that_is_quantized_while_loading() -> None:
    weight, out = noise(5, 96), empty_weight(FP8, 5, 96, dtype=torch.float32, device=torch.device("cpu"))
    quantize_channels(weight, out)
    assert torch.equal(out.scales, weight.abs().amax(1, True) / 448)
    assert (dequantize(out) - weight).abs().max() <= weight.abs().max() / 448 * 16


def test_sums_of_128_products_are_exact_in_float64() -> None:
    """Sums of 128 products are exact in float64: the largest, the smallest and opposite numbers, in any order."""
    random = torch.Generator().manual_seed(0)
    codes = torch.tensor([448.0, -448, 2**-9, -(2**-9), 416, 15 * 2**-9])
    x = codes[torch.randint(6, (8, 128), generator=random)].to(E4M3)
    w = codes[torch.randint(6, (8, 128), generator=random)].to(E4M3)
    order = torch.randperm(128, generator=random)
    ones = torch.ones(8, 1)
    one, other = (
        scaled_product(a, ones, parts_of(b), ones, None, torch.float32) for a, b in ((x, w), (x[:, order], w[:, order]))
    )
    assert torch.equal(one, other)
    whole = [
        [sum(round(float(p) * 512) * round(float(q) * 512) for p, q in zip(a, b, strict=True)) for b in w] for a in x
    ]
    assert torch.equal(one, torch.tensor([[n / 2**18 for n in row] for row in whole], dtype=torch.float64).float())
