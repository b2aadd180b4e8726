"""K splits of row-parallel layers: 1, 2, 4 and 8 ranks give the same bits as long as the K splits are the same.

Ranks are slices of one matrix; their messages to each other are stacked.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from preheat.backends.base.layers import LayerContext
from preheat.backends.cuda.matmul.layer import Layer
from preheat.backends.cuda.matmul.moe.experts import ExpertsLayer
from preheat.backends.cuda.ranks.collective import RankSums, add_ranks
from preheat.ops.matmul import tree_sum
from preheat.ops.proof import noise
from preheat.ops.values import Routing
from tests import layers
from tests.kernels.backend import InterpretedCuda

DTYPES = [torch.float32, torch.bfloat16]


def made(weight: Tensor, splits: int, bias: Tensor | None = None) -> Layer:
    """Return a layer with its inputs cut into ``splits``."""
    order, context = layers.splits(splits), LayerContext(RankSums())
    layer = layers.linear(InterpretedCuda(), weight, bias, order=order, context=context)
    assert isinstance(layer, Layer)
    return layer


def on_ranks(world: int, x: Tensor, weight: Tensor, bias: Tensor | None, k_splits: int = 4) -> Tensor:
    """Return the layer's outputs on ``world`` ranks."""
    if world == 1:
        return made(weight, k_splits, bias)(x)
    parts = []
    for mine, part in zip(x.chunk(world, 1), weight.chunk(world, 1), strict=True):
        layer = made(part.contiguous(), k_splits // world)
        y = torch.empty(len(x), len(weight))
        parts.append(layer.partial(mine.contiguous(), y))
    return add_ranks(torch.stack(parts), bias, x.dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "outputs", "inputs"), [(1, 40, 64), (19, 96, 4 * 80), (70, 24, 4 * 128)])
@pytest.mark.parametrize("biased", [False, True])
def test_the_number_of_ranks_changes_no_bit(dtype, rows, outputs, inputs, biased):
    x, weight = noise(rows, inputs).to(dtype), noise(outputs, inputs, seed=1).to(dtype)
    bias = noise(outputs, seed=2).to(dtype) if biased else None
    one, two, four = (on_ranks(world, x, weight, bias) for world in (1, 2, 4))
    assert torch.equal(one, two) and torch.equal(one, four)
    exact = x.double() @ weight.double().T + (0 if bias is None else bias.double())
    torch.testing.assert_close(one.double(), exact, rtol=0, atol=1e-4 if dtype == torch.float32 else 0.5)


def test_k_splits_are_added_in_a_tree():
    """The numbers tell the tree from a sum in order, within one rank and among four and eight."""
    x = torch.tensor([[1e8, 1.0, -1e8, 1.0]]).repeat_interleave(16, 1)
    x[:, torch.arange(64) % 16 != 0] = 0
    weight = torch.ones(16, 64)
    for world in (1, 2, 4):
        assert on_ranks(world, x, weight, None)[0, 0] == 0.0  # in order it were 1
    parts = noise(8, 5, 24) * 1e4
    for world in (2, 4, 8):
        assert torch.equal(add_ranks(parts[:world].contiguous(), None, torch.float32), tree_sum(parts[:world].unbind()))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens", [1, 33])
def test_experts_on_ranks(dtype, tokens):
    """A rank has a range of each expert's inner numbers."""
    experts, hidden, inner, routing = 8, 32, 64, Routing(2, True, False)
    x, logits = noise(tokens, hidden).to(dtype), noise(tokens, experts, seed=1).to(dtype)
    gate_up = noise(experts, 2 * inner, hidden, seed=2).to(dtype)
    down = noise(experts, hidden, inner, seed=3).to(dtype)

    def partial(rank: int, world: int) -> Tensor:
        gates = gate_up.view(experts, 2, inner, hidden).chunk(world, 2)[rank].reshape(experts, -1, hidden)
        order, context = layers.splits(4 // world, rank), LayerContext(RankSums())
        part = down.chunk(world, 2)[rank].contiguous()
        mine = layers.experts(InterpretedCuda(), gates.contiguous(), part, routing, order=order, context=context)
        assert isinstance(mine, ExpertsLayer)
        return mine.local(mine.configs.experts(mine.shape, tokens), x, logits)

    whole = partial(0, 1)
    for world in (2, 4):
        parts = torch.stack([partial(rank, world) for rank in range(world)])
        assert torch.equal(add_ranks(parts, None, torch.float32), whole)
