"""Norm, rotary embedding, activation and copies: the bits of the plain-torch reference, row by row."""

import pytest
import torch

from preheat.backends.cuda.activation import silu_and_mul
from preheat.backends.cuda.embedding import embed, take_rows
from preheat.backends.cuda.norm import add_rms_norm, rms_norm
from preheat.backends.cuda.rotary import rope_and_write
from preheat.model.rope import rope_table
from preheat.model.specs import RopeSpec
from preheat.ops import rotary
from preheat.ops.norm import RMSNorm
from tests.kernels.paged import relative_error

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
ROUNDING = {torch.float32: 1e-6, torch.bfloat16: 4e-3}


def random(*shape, dtype=torch.float32, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@DTYPES
@pytest.mark.parametrize("size", [96, 1024, 1500])
def test_norm(dtype, size):
    x, weight = random(5, size, dtype=dtype), random(size, dtype=dtype, seed=1)
    wide = x.double()
    exact = wide / (wide.square().mean(1, True) + 1e-5).sqrt() * weight.double()
    normed = rms_norm(x, weight, 1e-5)
    assert relative_error(normed, exact) < ROUNDING[dtype]
    for row in range(5):
        assert torch.equal(rms_norm(x[row : row + 1], weight, 1e-5)[0], normed[row])


@DTYPES
def test_norm_of_a_sum_is_the_norm_of_the_rounded_sum(dtype):
    x, residual, weight = random(3, 200, dtype=dtype), random(3, 200, dtype=dtype, seed=1), random(200, dtype=dtype)
    total = residual + x
    normed = add_rms_norm(x, residual, weight, 1e-5)
    assert torch.equal(residual, total)
    assert torch.equal(normed, rms_norm(total, weight, 1e-5))
    assert not torch.equal(normed, rms_norm(x, weight, 1e-5))


@DTYPES
@pytest.mark.parametrize(("heads", "kv_heads", "dim", "block_size"), [(4, 2, 64, 16), (6, 2, 96, 32)])
@pytest.mark.parametrize("with_norm", [False, True])
def test_rope_and_write(dtype, heads, kv_heads, dim, block_size, with_norm):
    tokens, turned = 3, heads + kv_heads
    qkv = random(tokens, heads + 2 * kv_heads, dim, dtype=dtype)
    weight = random(turned, dim, dtype=dtype, seed=1) if with_norm else None
    rope = rope_table(RopeSpec(kind="default", theta=10000.0), dim, 100, dtype)
    slots, positions = torch.tensor([1, 0, 2], dtype=torch.int32), torch.tensor([37, 99, 0], dtype=torch.int32)
    table = torch.zeros(3, 7, dtype=torch.int32)
    table[1, 37 // block_size], table[0, 99 // block_size] = 3, 2
    cache = torch.full((4, 2, kv_heads, block_size, dim), 7.0, dtype=dtype)

    expected, expected_cache = qkv.clone(), cache.clone()
    parts = expected[:, :turned]
    if weight is not None:
        parts.copy_(RMSNorm(weight, 1e-5)(parts))
    cos, sin = rope.index_select(0, positions.long()).unbind(1)
    rotary.apply_rope_(parts, cos, sin)
    for token, block in enumerate((3, 2, 0)):
        inside = int(positions[token]) % block_size
        expected_cache[block, :, :, inside] = expected[token, heads:].view(2, kv_heads, dim)

    given = qkv.clone()
    rope_and_write(given, rope, slots, positions, table, cache, heads, kv_heads, weight, 1e-5)
    assert torch.equal(given[:, heads:], qkv[:, heads:])
    if weight is None:
        assert torch.equal(given[:, :heads], expected[:, :heads])
        assert torch.equal(cache, expected_cache)
    else:  # the reference adds up the squares in another order
        assert relative_error(given[:, :heads], expected[:, :heads].double()) < ROUNDING[dtype]
        assert relative_error(cache, expected_cache.double()) < ROUNDING[dtype]
    again, alone = torch.full_like(cache, 7.0), qkv[1:2].clone()
    rope_and_write(alone, rope, slots[1:2], positions[1:2], table, again, heads, kv_heads, weight, 1e-5)
    assert torch.equal(alone[0, :heads], given[1, :heads])
    assert torch.equal(again[2], cache[2])
    assert not torch.equal(again[3], cache[3])


@DTYPES
def test_silu_and_mul(dtype):
    gate_up = random(3, 2 * 1100, dtype=dtype) * 4
    gate, up = gate_up.double().chunk(2, 1)
    found = silu_and_mul(gate_up)
    assert relative_error(found, gate / (1 + (-gate).exp()) * up) < ROUNDING[dtype]
    assert torch.equal(silu_and_mul(gate_up[1:2].contiguous())[0], found[1])


def test_embedding_takes_the_slot_s_last_token_where_it_is_told_so():
    table = random(50, 1100)
    tokens, slots = torch.tensor([7, -1, 0, -1], dtype=torch.int32), torch.tensor([0, 2, 1, 0], dtype=torch.int32)
    last = torch.tensor([11, 12, 13], dtype=torch.int32)
    rows = torch.empty(4, 1100)
    embed(tokens, slots, last, table, rows)
    assert torch.equal(rows, table[[7, 13, 0, 11]])


def test_rows_are_taken():
    hidden = random(6, 1100, dtype=torch.bfloat16)
    assert torch.equal(take_rows(hidden, torch.tensor([5, 0, 5], dtype=torch.int32)), hidden[[5, 0, 5]])
