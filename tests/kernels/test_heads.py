"""Layers of heads on CUDA: in one launch, each head has the bits of a layer of its own, whatever is beside it."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from torch import Tensor

from preheat.backends.cuda.matmul import prove
from preheat.backends.cuda.matmul.config import REFERENCE, Tile
from preheat.backends.cuda.matmul.heads import HeadsLayer
from preheat.backends.cuda.matmul.kernels import KernelConfigs
from preheat.backends.heads import EachHead
from preheat.ops.proof import noise, signed_pairs
from tests import layers
from tests.kernels.backend import InterpretedCuda

TILES = [Tile(16, 16, 16, 1, 2), Tile(32, 16, 64, 2, 3), Tile(16, 32, 32, 4, 2)]
HEADS, INPUTS, OUTPUTS, REST = 3, 40, 24, 6


def made(rows: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return x [rows, heads, inputs + rest] with strides of its own, and the weights [heads, outputs, inputs]."""
    size = HEADS * (INPUTS + REST)
    x = signed_pairs(noise(rows, size + 10, seed=1) * noise(rows, size + 10, seed=2).exp(), 1.0).to(dtype)
    weight = signed_pairs(noise(HEADS * OUTPUTS, INPUTS) * noise(HEADS * OUTPUTS, INPUTS, seed=3).exp(), -1.0)
    return x[:, 4 : 4 + size].view(rows, HEADS, -1), weight.view(HEADS, OUTPUTS, INPUTS).to(dtype)


def room(rows: int, dtype: torch.dtype) -> Tensor:
    """Return NaN [rows, heads + 1, outputs + rest]: the last head is nobody's."""
    return torch.full((rows, HEADS + 1, OUTPUTS + REST), torch.nan, dtype=dtype)


def by_one(x: Tensor, weight: Tensor) -> Tensor:
    """Return the outputs of a layer for each head, with the rest copied."""
    out, value = room(len(x), x.dtype), layers.value_of(weight[0])
    EachHead(InterpretedCuda(), value, weight)(x, out[:, :HEADS])
    return out


def by_all(x: Tensor, weight: Tensor, tile: Tile) -> Tensor:
    out = room(len(x), x.dtype)
    HeadsLayer(layers.value_of(weight[0]), weight, KernelConfigs()).by(tile, x, out[:, :HEADS])
    return out


def same(found: Tensor, right: Tensor) -> bool:
    """Whether all bits are equal; NaN stands where nothing was written."""
    return torch.equal(found.isnan(), right.isnan()) and torch.equal(found.nan_to_num(), right.nan_to_num())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("tile", TILES, ids=str)
def test_each_head_has_the_bits_of_a_layer_of_its_own(tile: Tile, dtype: torch.dtype) -> None:
    x, weight = made(21, dtype)
    right = by_one(x, weight)
    assert right[:, HEADS].isnan().all() and not right[:, :HEADS].isnan().any()
    assert same(by_all(x, weight, tile), right)
    assert same(by_all(x[20:], weight, tile), right[20:])


@pytest.mark.parametrize("fault", ["order", "head"])
def test_another_order_and_another_head_are_seen(fault: str) -> None:
    """Control: the same numbers from the last to the first, and a head with its neighbor's matrix."""
    x, weight = made(5, torch.float32)
    right = by_one(x[:, :, :INPUTS], weight)
    x, other = (x[:, :, :INPUTS].flip(2), weight.flip(2).contiguous()) if fault == "order" else (
        x[:, :, :INPUTS], weight.roll(1, 0))  # fmt: skip
    found = by_all(x, other, TILES[0])
    assert not same(found, right)
    assert (fault == "order") == torch.allclose(found[:, :HEADS, :OUTPUTS], right[:, :HEADS, :OUTPUTS], atol=1e-3)


def test_a_layer_without_a_rest_writes_its_outputs_alone() -> None:
    x, weight = made(2, torch.bfloat16)
    out = room(2, torch.bfloat16)
    made_by = InterpretedCuda().heads(layers.value_of(weight[0]), weight)
    made_by(x[:, :, :INPUTS], out[:, :HEADS, :OUTPUTS])
    assert same(out[:, :HEADS, :OUTPUTS], by_one(x, weight)[:, :HEADS, :OUTPUTS])
    assert out[:, :, OUTPUTS:].isnan().all()


@pytest.mark.parametrize("kind", ["rms", "rms_plus_one"])
def test_an_inserted_norm_has_the_bits_of_a_norm(kind: str) -> None:
    norm, x = InterpretedCuda().norm(noise(20, 1)[:, 0], 1e-6, kind), noise(5, 40)[:, 3:33]
    right, out = norm(x[:, :20].contiguous()), torch.full((5, 50), torch.nan)
    norm.insert(x, out[:, 7:37])
    assert torch.equal(out[:, 7:27], right) and torch.equal(out[:, 27:37], x[:, 20:])
    assert out[:, :7].isnan().all() and out[:, 37:].isnan().all()
    norm.insert(x.flip(0), out[:, 7:37])
    assert not torch.equal(out[:, 7:27], right)


@pytest.mark.parametrize("fault", [False, True])
def test_a_tile_with_other_bits_is_replaced_before_it_serves(fault: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    _, weight = made(1, torch.float32)
    layer = HeadsLayer(layers.value_of(weight[0]), weight, KernelConfigs())
    right = HeadsLayer.by

    def by(self: HeadsLayer, tile: Tile, x: Tensor, out: Tensor) -> None:
        right(self, tile, x, out)
        if fault and len(x) == 2:
            out[1, 1, 3] = torch.nextafter(out[1, 1, 3], torch.tensor(torch.inf))

    monkeypatch.setattr(HeadsLayer, "by", by)
    monkeypatch.setattr(prove, "compiling", lambda threads: nullcontext())
    rejected: list[int] = []
    monkeypatch.setattr(KernelConfigs, "reject_heads", lambda self, shape, rows, heads: rejected.append(rows))
    monkeypatch.setattr(prove, "SEEDS", 2)
    prove.settle_heads([(layer, [1, 2])], invariant=True)
    assert rejected == [2] * fault
    monkeypatch.undo()
    layer.configs.reject_heads(layer.shape, 2, HEADS)
    assert layer.configs.heads(layer.shape, 2, HEADS) == REFERENCE[torch.float32]
