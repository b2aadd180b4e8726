"""Linear maps on CUDA: the bits of a product in order, whatever the tiles, against plain torch and float64."""

import pytest
import torch

from preheat.backends.cuda.matmul.config import Tile
from preheat.backends.cuda.matmul.linear import apply
from preheat.backends.cuda.matmul.weights import PlainWeight
from preheat.ops.activation import silu_and_mul
from preheat.ops.proof import noise, signed_pairs
from tests import layers
from tests.kernels.backend import InterpretedCuda

PLAIN = Tile(16, 16, 16, 1, 2)
TILES = [
    Tile(32, 16, 64, 2, 3),
    Tile(16, 32, 32, 4, 2),
    Tile(64, 16, 16, 4, 4),
    Tile(32, 16, 32, 2, 3, bulk=True),
    Tile(16, 16, 128, 1, 2, bulk=True),
]
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
ROUNDING = {torch.float32: 2e-6, torch.bfloat16: 4e-3}


def in_order(x, weight, bias=None):
    """One fp32 accumulator for each output, through the inputs in order, then the bias, rounded once."""
    total = torch.zeros(len(x), len(weight))
    for k in range(x.shape[1]):
        total += x[:, k : k + 1].float() * weight[:, k].float()
    return (total if bias is None else total + bias.float()).to(x.dtype)


def error(y, exact):
    return ((y.double() - exact).abs().max() / exact.abs().max()).item()


@DTYPES
@pytest.mark.parametrize("tile", [PLAIN, *TILES], ids=str)
def test_every_tile_gives_the_bits_of_a_sum_in_order(tile, dtype):
    """40 outputs, 5 rows and 72 inputs divide by none of these tiles."""
    x = signed_pairs(noise(5, 72, seed=1) * noise(5, 72, seed=2).exp(), 1.0).to(dtype)
    weight = signed_pairs(noise(40, 72) * noise(40, 72, seed=3).exp(), -1.0).to(dtype)
    bias = noise(40, seed=4).to(dtype)
    assert torch.equal(apply(tile, x, PlainWeight(weight), None, False), in_order(x, weight))
    assert torch.equal(apply(tile, x, PlainWeight(weight), bias, False), in_order(x, weight, bias))


def test_another_order_has_other_bits():
    """Negative control of the test above: the same numbers are added from the last to the first."""
    x, weight = signed_pairs(noise(5, 64, seed=1), 1.0), signed_pairs(noise(40, 64), -1.0)
    backwards = apply(PLAIN, x.flip(1).contiguous(), PlainWeight(weight.flip(1).contiguous()), None, False)
    assert not torch.equal(apply(PLAIN, x, PlainWeight(weight), None, False), backwards)


@pytest.mark.parametrize(("tile", "dtype"), [(TILES[0], torch.float32), (TILES[3], torch.bfloat16)], ids=str)
def test_gated_is_the_product_and_then_the_gate(tile, dtype):
    x, weight, bias = noise(3, 64, seed=1).to(dtype), noise(80, 64).to(dtype), noise(80, seed=2).to(dtype)
    gated = apply(tile, x, PlainWeight(weight), bias, True)
    wide = x.double() @ weight.double().t() + bias.double()
    exact = torch.nn.functional.silu(wide[:, :40]) * wide[:, 40:]
    assert gated.shape == (3, 40)
    assert error(gated, exact) < 2 * ROUNDING[dtype]
    apart = apply(tile, x, PlainWeight(weight), bias, False)
    assert error(gated, silu_and_mul(apart).double()) < ROUNDING[dtype]
    assert torch.equal(gated, apply(PLAIN, x, PlainWeight(weight), bias, True))


@DTYPES
def test_accuracy(dtype):
    x, weight = noise(4, 200, seed=1).to(dtype), noise(24, 200).to(dtype)
    assert (
        error(apply(TILES[0], x, PlainWeight(weight), None, False), x.double() @ weight.double().t()) < ROUNDING[dtype]
    )


def test_a_row_has_the_same_bits_in_any_batch_and_row():
    x, weight = noise(37, 64, seed=1).bfloat16(), noise(48, 64).bfloat16()
    whole = apply(TILES[0], x, PlainWeight(weight), None, False)
    for rows in (1, 15, 16, 17):
        assert torch.equal(apply(TILES[1], x[-rows:], PlainWeight(weight), None, False), whole[-rows:])


def test_a_layer_writes_into_the_given_tensor():
    weight, bias = noise(40, 64), noise(40)
    linear = layers.linear(InterpretedCuda(), weight, bias)
    x, room = noise(3, 64, seed=1), torch.full((4, 40), 7.0)
    y = linear(x, out=room[:3])
    assert y.data_ptr() == room.data_ptr()
    assert torch.equal(y, linear(x))
    assert torch.equal(y, in_order(x, weight, bias))
    assert room[3].eq(7).all()
