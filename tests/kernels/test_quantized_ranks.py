"""Quantized layers that ranks share on CUDA: 1, 2 and 4 ranks give the bits of the contract."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from preheat.backends.base.layers import LayerContext
from preheat.backends.cpu.backend import CpuBackend
from preheat.backends.cuda.matmul.config import Expanded, reference
from preheat.backends.cuda.matmul.kernels import rule
from preheat.backends.cuda.matmul.layer import Layer
from preheat.backends.cuda.matmul.linear import apply
from preheat.backends.cuda.matmul.weights import DeviceWeight, dequantized
from preheat.backends.cuda.ranks.collective import RankSums
from preheat.ops import quantization
from preheat.ops.kinds import Scheme
from preheat.ops.matmul import tree_sum
from preheat.ops.proof import noise
from preheat.ops.quantization import QuantizedWeight
from preheat.ops.values import Routing, SumOrder
from tests import layers
from tests.cpu.test_quantized_layers import W8A8, WHOLE, random_weight
from tests.kernels.backend import InterpretedCuda
from tests.kernels.ranks import Heard, on_ranks
from tests.kernels.test_quantized import named, products

# rows that fill up an expert's block are leftovers in memory, and are divided too

CODES = [*WHOLE[:3], replace(WHOLE[0], group=128, zeros=True), Scheme(code="int4", scales="channel")]
SIZES = {"token": 144, "static": 144, "block": 128, 32: 96, 128: 128, 0: 72}
"""Inputs of a K split by the extent of a scale; steps of 128 fit where they have to."""
OUTPUTS = 40


def inputs_of(scheme: Scheme) -> int:
    return 4 * SIZES["block" if scheme.scales == "block" else scheme.activations or scheme.group]


def numbers(scheme: Scheme, rows: int, dtype: torch.dtype) -> tuple[Tensor, QuantizedWeight, Tensor]:
    inputs = inputs_of(scheme)
    x = (noise(rows, inputs) * noise(rows, inputs, seed=1).exp()).to(dtype)
    return x, random_weight(scheme, OUTPUTS, inputs, dtype=dtype), noise(OUTPUTS, seed=2).to(dtype)


def by_columns(
    world: int, x: Tensor, weight: QuantizedWeight, bias: Tensor, k_splits: int = 4, kind: type[Heard] = Heard
) -> list[Tensor]:
    """Return the layer's outputs on each of ``world`` ranks."""

    def layer(ranks: RankSums) -> Tensor:
        part = x.shape[1] // ranks.world
        mine = ranks.rank * part, (ranks.rank + 1) * part
        own = weight.cut(((0, OUTPUTS),), mine)
        order = layers.splits(k_splits // ranks.world, ranks.rank, k_splits)
        made = layers.linear(InterpretedCuda(), own, bias, order=order, context=LayerContext(ranks))
        return made(x[:, slice(*mine)].contiguous())

    return on_ranks(world, layer, 1 + (weight.scheme.activations == "token"), kind)


def test_layers_in_float8_have_the_bits_of_the_contract():
    """Scales of rows are static, or for 128 numbers of a row, or for a whole row.

    Scales of the weight are for an output or a block.
    """
    for at, scheme in enumerate(W8A8):
        x, weight, bias = numbers(scheme, 5, (torch.bfloat16, torch.float32)[at % 2])
        codes, scales = quantization.quantize_rows(x, scheme.activations, weight.static)
        size = x.shape[1] // 4
        right = bias.float() + tree_sum([
            products(
                codes[:, start : start + size],
                scales[:, start // 128 : (start + size) // 128] if scales.shape[1] > 1 else scales,
                weight.cut(((0, OUTPUTS),), (start, start + size)),
            )
            for start in range(0, x.shape[1], size)
        ])  # fmt: skip
        for world in (1, 2, 4):
            for found in by_columns(world, x, weight, bias):
                assert torch.equal(found, right.to(x.dtype)), (scheme.name, world)


@pytest.mark.parametrize("scheme", CODES, ids=named)
def test_weights_of_codes_have_the_bits_of_the_dequantized_layer(scheme):
    """K splits need not be whole steps."""
    x, weight, bias = numbers(scheme, 5, torch.bfloat16)
    plain = quantization.dequantize(weight)
    order, context = layers.splits(4), LayerContext(RankSums())
    right = layers.linear(InterpretedCuda(), plain, bias, order=order, context=context)(x)
    for world in (1, 2, 4):
        assert all(torch.equal(found, right) for found in by_columns(world, x, weight, bias))
    codes = DeviceWeight.of(weight, splits=4)
    assert torch.equal(dequantized(codes), plain)
    made = layers.linear(InterpretedCuda(), weight, bias, order=order, context=context)
    assert isinstance(made, Layer)
    shape = made.shape
    assert isinstance(rule(shape, 4096), Expanded) and isinstance(reference(shape), Expanded)
    assert torch.equal(apply(reference(shape), x, codes, bias, False, torch.empty_like(right)), right)


@pytest.mark.parametrize("scheme", [W8A8[0], W8A8[4], CODES[0]], ids=named)
def test_k_splits_that_follow_the_number_of_ranks_have_other_bits(scheme):
    x, weight, bias = numbers(scheme, 5, torch.float32)
    one, four = (by_columns(world, x, weight, bias, k_splits=world)[0] for world in (1, 4))
    assert not torch.equal(one, four)


class OwnMaxima(Heard):
    """A rank that takes the scales of its own inputs alone."""

    def gather(self, x: Tensor) -> Tensor:
        found = super().gather(x)
        return found[self.rank].expand_as(found).contiguous() if x.ndim == 1 else found


def test_scales_of_a_ranks_own_inputs_have_other_bits():
    x, weight, bias = numbers(W8A8[0], 5, torch.float32)
    (one,) = by_columns(1, x, weight, bias)
    for world in (2, 4):
        assert not torch.equal(by_columns(world, x, weight, bias, kind=OwnMaxima)[0], one)


@pytest.mark.parametrize("scheme", [W8A8[0], CODES[3]], ids=named)
def test_outputs_have_the_same_bits_beside_any_others(scheme):
    """Ranks share the rows of the layer's weight."""
    x, weight, bias = numbers(scheme, 3, torch.bfloat16)
    cuda, inputs = InterpretedCuda(), x.shape[1]
    whole = layers.linear(cuda, weight, bias, order=SumOrder(tiles=(OUTPUTS,)))(x)
    for rows in ((0, 20), (20, 40), (30, 40)):
        own = weight.cut((rows,), (0, inputs)), bias[slice(*rows)].clone()
        mine = layers.linear(cuda, *own, order=SumOrder(tiles=(10,) * ((rows[1] - rows[0]) // 10)))
        assert torch.equal(mine(x), whole[:, slice(*rows)])


def experts(
    world: int, scheme: Scheme, tokens: int, k_splits: int = 4, kind: type[Heard] = Heard, backend: Any = None
) -> list[Tensor]:
    """Return the results of eight experts on each of ``world`` ranks; ranks share the inner numbers."""
    inner, hidden, count = 512 if scheme.scales == "block" else 128, 48, 8
    gate_up, down = random_weight(scheme, count, 2 * inner, hidden), random_weight(scheme, count, hidden, inner, seed=1)
    x, logits = noise(tokens, hidden), noise(tokens, count, seed=1)

    def layer(ranks: RankSums) -> Tensor:
        part = inner // ranks.world
        first, last = ranks.rank * part, (ranks.rank + 1) * part
        own = gate_up.cut(((first, last), (inner + first, inner + last)), None), down.cut(((0, hidden),), (first, last))
        order, routing = layers.splits(k_splits // ranks.world, ranks.rank, k_splits), Routing(2, True, False)
        shared = backend or InterpretedCuda()
        return layers.experts(shared, *own, routing, order=order, context=LayerContext(ranks))(x, logits)

    return on_ranks(world, layer, 1 + (scheme.activations == "token"), kind)


@pytest.mark.parametrize("scheme", [W8A8[0], W8A8[4], CODES[0]], ids=named)
def test_experts_on_ranks(scheme):
    """A lone token has a block for each slot; rows of several tokens are arranged."""
    for tokens, world in ((1, 4), (4, 2)):
        one = experts(1, scheme, tokens)[0]
        assert all(torch.equal(found, one) for found in experts(world, scheme, tokens))
        right = experts(1, scheme, tokens, backend=CpuBackend())[0]
        error = (one - right).abs().max() / right.abs().max()
        assert error <= (2e-2 if scheme.activations else 1e-5)  # numbers rounded to float8 may differ by a code
    assert not torch.equal(experts(2, scheme, 4, k_splits=2)[0], one)
    if scheme.activations == "token":
        assert not torch.equal(experts(2, scheme, 4, kind=OwnMaxima)[0], one)
