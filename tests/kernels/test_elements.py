"""Norm, rotary embedding, activation and copies: the bits of the plain-torch reference, row by row."""

import pytest
import torch

from preheat.backends.cuda.attention.rotary import rope_and_write
from preheat.backends.cuda.attention.values import Places
from preheat.backends.cuda.matmul.moe.shared import add_shared
from preheat.backends.cuda.pointwise.activation import activate, cap, clip, scaled, silu_and_mul
from preheat.backends.cuda.pointwise.embedding import embed, sum_rows, take_rows
from preheat.backends.cuda.pointwise.norm import CudaNorm
from preheat.model.attention_specs import QueryGrowth, RopeSpec
from preheat.model.rope import query_factors, rope_table
from preheat.ops import activation, embedding, moe, pooling, rotary
from preheat.ops.finite import finite_values
from preheat.ops.float8 import round_to
from preheat.ops.norm import RMSNorm, make_norm
from preheat.ops.proof import noise
from preheat.schedule.pooled import Pooled
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
    normed = CudaNorm(weight, 1e-5)(x)
    assert relative_error(normed, exact) < ROUNDING[dtype]
    for row in range(5):
        assert torch.equal(CudaNorm(weight, 1e-5)(x[row : row + 1])[0], normed[row])


@DTYPES
def test_norm_of_a_sum_is_the_norm_of_the_rounded_sum(dtype):
    x, residual, weight = random(3, 200, dtype=dtype), random(3, 200, dtype=dtype, seed=1), random(200, dtype=dtype)
    total = residual + x
    normed = CudaNorm(weight, 1e-5).add(x, residual)
    assert torch.equal(residual, total)
    assert torch.equal(normed, CudaNorm(weight, 1e-5)(total))
    assert not torch.equal(normed, CudaNorm(weight, 1e-5)(x))


@DTYPES
@pytest.mark.parametrize(
    ("kind", "biased"), [("layer", True), ("layer", False), ("rms_plus_one", False), ("identity", False)]
)
@pytest.mark.parametrize("size", [96, 1500])
def test_other_norms(dtype, kind, biased, size):
    x, residual, weight = (random(4, size, dtype=dtype, seed=seed) for seed in range(3))
    bias = random(size, dtype=dtype, seed=3) if biased else None
    norm, reference = (make(weight[0], 1e-5, kind, bias) for make in (CudaNorm, make_norm))
    assert norm.kind == reference.kind == kind
    exact = reference(x).double()
    assert relative_error(norm(x), exact) < ROUNDING[dtype]
    assert relative_error(RMSNorm(weight[0], 1e-5)(x), exact) > 0.01  # another kind is another thing
    assert torch.equal(norm(x[1:2]), norm(x)[1:2])
    beside = torch.cat((residual, x), dim=1)[:, size:]
    assert torch.equal(norm(beside), norm(x)), "rows may lie in wider rows"
    total = x + residual
    assert torch.equal(norm.add(x, residual), norm(total))
    assert torch.equal(residual, total)


@DTYPES
def test_a_norm_that_is_rounded_once(dtype):
    x, weight = random(4, 96, dtype=dtype), random(96, dtype=dtype, seed=2)
    norm, reference = (make(weight, 1e-5, "rms_once") for make in (CudaNorm, make_norm))
    assert relative_error(norm(x), reference(x).double()) < ROUNDING[dtype]
    assert torch.equal(norm(x[1:2]), norm(x)[1:2])
    if dtype == torch.bfloat16:
        assert not torch.equal(norm(x), CudaNorm(weight, 1e-5)(x)), "one rounding more is seen"


@DTYPES
def test_numbers_are_bent_by_tanh(dtype):
    x = random(3, 1100, dtype=dtype) * 40
    x[0, :4] = torch.tensor([-500.0, 500.0, 0.0, torch.nan])
    found, right = cap(x, 30.0), activation.capped(x, 30.0)
    assert torch.allclose(found.float(), right.float(), rtol=ROUNDING[dtype], atol=1e-5, equal_nan=True)
    assert torch.equal(cap(x[1:2].contiguous(), 30.0), found[1:2])
    assert not torch.allclose(cap(x, 29.0)[1:].float(), right[1:].float(), rtol=ROUNDING[dtype], atol=1e-5)


@DTYPES
@pytest.mark.parametrize("kind", sorted(activation.ACTIVATIONS))
def test_activations(dtype, kind):
    x = random(3, 2 * 1100, dtype=dtype) * 4
    x[0, :4] = torch.tensor([-60.0, 60.0, 0.0, -8.0])
    found, expected = activate(x, kind), activation.ACTIVATIONS[kind](x)
    assert found.shape == expected.shape
    assert relative_error(found, expected.double()) < ROUNDING[dtype]
    assert torch.equal(activate(x[1:2].contiguous(), kind)[0], found[1])


@DTYPES
def test_clip(dtype):
    x = random(3, 1100, dtype=dtype) * 4
    assert torch.equal(clip(x, 1.7), activation.clip(x, 1.7))
    assert not torch.equal(clip(x, 1.7), x)


@DTYPES
def test_a_factor_is_rounded_once(dtype):
    x = random(3, 1100, dtype=dtype) * 4
    assert torch.equal(scaled(x, 0.37), activation.scaled(x, 0.37))
    assert scaled(x, 0.37, x) is x


@DTYPES
def test_the_shared_expert_is_added_by_its_gate(dtype):
    routed, x, shared, gate = (random(3, 200, dtype=dtype, seed=seed) for seed in range(4))
    found = add_shared(routed, x, gate[:1] / 8, shared)
    assert relative_error(found, moe.add_shared(routed, x, gate[:1] / 8, shared).double()) < ROUNDING[dtype]
    assert torch.equal(add_shared(routed[1:2], x[1:2], gate[:1] / 8, shared[1:2])[0], found[1])
    assert relative_error(found, (routed + shared).double()) > 0.01


@DTYPES
@pytest.mark.parametrize("stored", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_a_cache_of_eight_bits_is_rounded_like_the_reference(dtype, stored):
    """Numbers beyond the range, a NaN and ties are among the values."""
    heads, kv_heads, dim, scales = 2, 1, 64, (0.37, 1e-4)
    qkv = random(2, heads + 2 * kv_heads, dim, dtype=dtype)
    qkv[0, -1, :3], qkv[1, 2, :3] = torch.tensor([1e9, -1e9, torch.nan]), torch.tensor([17 * 0.37, 19 * 0.37, 1e9])
    slots, positions = torch.arange(2, dtype=torch.int32), torch.tensor([3, 0], dtype=torch.int32)
    cache = torch.zeros(2, 2, kv_heads, 16, dim).to(stored)
    rope_and_write(qkv, cache, Places(slots, positions, slots.view(2, 1)), scales=scales)
    finite = finite_values(qkv[:, heads:], bounded=True)
    expected = round_to(finite, torch.tensor(scales).view(2, 1), stored)
    found = torch.stack([cache[0, :, 0, 3].view(torch.uint8), cache[1, :, 0, 0].view(torch.uint8)])
    assert expected[0, 0].float().isnan().all()
    assert expected[:, 1].float().isfinite().all()
    assert torch.equal(found, expected.view(torch.uint8))


@DTYPES
def test_no_value_is_stored_that_is_not_finite(dtype):
    """Keys and values of a token are the work of several programs."""
    heads, kv_heads, dim = 6, 3, 64
    qkv = random(4, heads + 2 * kv_heads, dim, dtype=dtype)
    qkv[0, -1, 5], qkv[1, -2, 40], qkv[2, -3, 63], qkv[3, heads, 7] = torch.inf, -torch.inf, torch.nan, torch.inf
    slots, positions = torch.zeros(4, dtype=torch.int32), torch.arange(4, dtype=torch.int32)
    cache = torch.zeros(1, 2, kv_heads, 16, dim, dtype=dtype)
    rope_and_write(qkv, cache, Places(slots, positions, torch.zeros(1, 1, dtype=torch.int32)))
    found = cache[0, :, :, :4].permute(2, 0, 1, 3).flatten(1, 2)
    expected = finite_values(qkv[:, heads:], bounded=False)
    assert torch.equal(found.nan_to_num(7.0), expected.nan_to_num(7.0))
    assert found[:, kv_heads:].isfinite().all()
    assert [each.isnan().all(1).tolist() for each in found[:3, :kv_heads]] == torch.eye(3).bool().flip(0).tolist()
    assert torch.equal(found[3], qkv[3, heads:]), "a key is stored as it is"


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
    norm = None if weight is None else RMSNorm(weight, 1e-5)
    rope_and_write(given, cache, Places(slots, positions, table), rope, norm)
    assert torch.equal(given[:, heads:], qkv[:, heads:])
    if weight is None:
        assert torch.equal(given[:, :heads], expected[:, :heads])
        assert torch.equal(cache, expected_cache)
    else:  # the reference adds up the squares in another order
        assert relative_error(given[:, :heads], expected[:, :heads].double()) < ROUNDING[dtype]
        assert relative_error(cache, expected_cache.double()) < ROUNDING[dtype]
    again, alone = torch.full_like(cache, 7.0), qkv[1:2].clone()
    rope_and_write(alone, again, Places(slots[1:2], positions[1:2], table), rope, norm)
    assert torch.equal(alone[0, :heads], given[1, :heads])
    assert torch.equal(again[2], cache[2])
    assert not torch.equal(again[3], cache[3])
    turned_by, own = rope.index_select(0, positions.long()), torch.full_like(cache, 7.0)
    by_token = qkv.clone()
    rope_and_write(by_token, own, Places(slots, positions, table), turned_by, norm, by_token=True)
    assert torch.equal(by_token, given) and torch.equal(own, cache), "a row for each token, at the same places"


@DTYPES
def test_silu_and_mul(dtype):
    gate_up = random(3, 2 * 1100, dtype=dtype) * 4
    gate, up = gate_up.double().chunk(2, 1)
    found = silu_and_mul(gate_up)
    assert relative_error(found, gate / (1 + (-gate).exp()) * up) < ROUNDING[dtype]
    assert torch.equal(silu_and_mul(gate_up[1:2].contiguous())[0], found[1])


def test_embedding_reads_the_last_token_of_the_slot_for_token_minus_one():
    table = random(50, 1100)
    tokens, slots = torch.tensor([7, -1, 0, -1], dtype=torch.int32), torch.tensor([0, 2, 1, 0], dtype=torch.int32)
    last = torch.tensor([11, 12, 13], dtype=torch.int32)
    rows = torch.empty(4, 1100)
    embed(tokens, slots, last, table, rows)
    assert torch.equal(rows, table[[7, 13, 0, 11]])


@DTYPES
@pytest.mark.parametrize("scale", [None, 7.3])
def test_embeddings_may_be_scaled_and_know_their_position(dtype, scale):
    table, learned = random(50, 1100, dtype=dtype), random(9, 1100, dtype=dtype, seed=1)
    tokens, at = torch.tensor([7, 0, 3], dtype=torch.int32), torch.tensor([8, 0, 5], dtype=torch.int32)
    rows, nothing = torch.empty(3, 1100, dtype=dtype), torch.zeros(3, dtype=torch.int32)
    for positions in (None, learned):
        embed(tokens, nothing, nothing, table, rows, scale=scale, positions=positions, at=at)
        assert torch.equal(rows, embedding.embed(tokens, table, scale=scale, positions=positions, at=at))
    assert not torch.equal(rows, table[tokens])


@DTYPES
def test_embeddings_know_their_type_and_position(dtype):
    """The row of the type is added before the row of the position: another order rounds in another way."""
    table, types, learned = (random(size, 1100, dtype=dtype, seed=size) for size in (50, 3, 9))
    tokens, at = torch.tensor([7, 50, 149], dtype=torch.int32), torch.tensor([8, 0, 5], dtype=torch.int32)
    rows, nothing = torch.empty(3, 1100, dtype=dtype), torch.zeros(3, dtype=torch.int32)
    for positions in (None, learned):
        embed(tokens, nothing, nothing, table, rows, positions=positions, at=at, types=types)
        assert torch.equal(rows, embedding.embed(tokens, table, positions=positions, at=at, types=types))
    assert not torch.equal(rows, (table[tokens % 50] + learned[at]) + types[tokens // 50])


@DTYPES
@pytest.mark.parametrize("scale", [None, 7.3])
def test_embeddings_of_images_are_taken_where_ids_say_so(dtype, scale):
    table, images = random(50, 1100, dtype=dtype), random(6, 1100, dtype=dtype, seed=1)
    tokens, slots = torch.tensor([7, -4, -1, -2, -7], dtype=torch.int32), torch.ones(5, dtype=torch.int32)
    last, rows = torch.tensor([11, 12], dtype=torch.int32), torch.empty(5, 1100, dtype=dtype)
    embed(tokens, slots, last, table, rows, scale=scale, images=images)
    assert torch.equal(rows[[1, 3, 4]], images[[2, 0, 5]])
    known = torch.where(tokens == -1, 12, tokens)
    assert torch.equal(rows, embedding.embed(known, table, scale=scale, images=images))
    assert torch.equal(rows[[0, 2]], embedding.embed(known[[0, 2]], table, scale=scale))


@pytest.mark.parametrize("kind", ["rms", "rms_plus_one", "rms_once"])
def test_heads_that_do_not_turn(kind):
    qkv, weight = random(2, 5, 64), random(4, 64, seed=1)
    slots, positions = torch.zeros(2, dtype=torch.int32), torch.tensor([0, 5], dtype=torch.int32)
    for norm in (None, make_norm(weight, 1e-5, kind)):
        given, cache = qkv.clone(), torch.zeros(1, 2, 1, 16, 64)
        rope_and_write(given, cache, Places(slots, positions, slots.view(2, 1)), norm=norm)
        expected = qkv[:, :4] if norm is None else norm(qkv[:, :4])
        assert relative_error(given[:, :3], expected[:, :3].double()) < 1e-6
        assert relative_error(cache[0, 0, 0, [0, 5]], expected[:, 3].double()) < 1e-6
        assert torch.equal(cache[0, 1, 0, [0, 5]], qkv[:, 4])
        alone, before = qkv[:, :3].contiguous(), cache.clone()  # of a layer that reads another layer's keys
        rope_and_write(alone, cache, Places(slots, positions, slots.view(2, 1)), norm=norm, own=False)
        assert torch.equal(alone, given[:, :3]) and torch.equal(cache, before)


@DTYPES
def test_queries_grow_behind_their_rotation(dtype):
    qkv, rope = random(2, 5, 64, dtype=dtype), rope_table(RopeSpec(kind="default", theta=10000.0), 64, 100, dtype)
    slots, positions = torch.zeros(2, dtype=torch.int32), torch.tensor([3, 15], dtype=torch.int32)
    growth, table = query_factors(QueryGrowth(0.3, 4), 16, dtype), slots.view(2, 1)
    plain, grown = qkv.clone(), qkv.clone()
    caches = [torch.zeros(1, 2, 1, 16, 64, dtype=dtype) for _ in range(2)]
    rope_and_write(plain, caches[0], Places(slots, positions, table), rope)
    rope_and_write(grown, caches[1], Places(slots, positions, table), rope, growth=growth)
    assert torch.equal(*caches)
    assert torch.equal(grown[:, :3], plain[:, :3] * growth[positions][:, None, None])
    assert torch.equal(grown[0], plain[0]) and not torch.equal(grown[1], plain[1])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_texts_are_added_up_row_by_row(dtype):
    """Sums have the bits of pools that take states one after the other; rows may lie in wider rows."""
    states = (random(60, 2, 300, dtype=dtype) * torch.logspace(-6, 3, 60)[:, None, None]).to(dtype)[:, 1]
    states[3] = -0.0
    bounds = torch.tensor([0, 1, 3, 4, 21, 60], dtype=torch.int32)
    found, right = (torch.full((5, 300), torch.nan) for _ in range(2))
    sum_rows(states, bounds, found)
    pooling.sum_rows(states, bounds, right)
    assert found.numpy().tobytes() == right.numpy().tobytes()
    pool, summed = Pooled(right[4].numpy()), Pooled(right[4].numpy())
    for part in states[21:60].float().numpy()[:, None]:
        pool.add(part)
    summed.take(found[4].numpy(), 39)
    assert pool.result() == summed.result()
    pooling.sum_rows(states.flip(0), torch.tensor([0, 39], dtype=torch.int32), right[:1])
    assert not torch.equal(right[0], found[4]), "the order shows"


def test_rows_are_taken():
    hidden = random(6, 1100, dtype=torch.bfloat16)
    assert torch.equal(take_rows(hidden, torch.tensor([5, 0, 5], dtype=torch.int32)), hidden[[5, 0, 5]])
    parts, index = hidden.view(len(hidden), 2, -1), torch.tensor([5, 0, 5], dtype=torch.int32)
    assert torch.equal(take_rows(parts[:, 1], index), parts[[5, 0, 5], 1]), "rows may lie in wider rows"


@pytest.mark.parametrize("repeats", [False, True])
@pytest.mark.parametrize("dim", [16, 24])
def test_values_are_normed_where_they_lie(dim, repeats):
    """They have the bits of the norm of each head; other heads stay as they are. A wrong number of heads is seen."""
    norm, heads = CudaNorm(noise(dim, seed=4).bfloat16(), 1e-6, "rms_once"), 2
    qkv = noise(3, 7 * dim).bfloat16()
    normed = norm(qkv[:, -heads * dim :].reshape(-1, dim)).view(3, -1)
    right = torch.cat((qkv if repeats else qkv[:, : -heads * dim], normed), 1)
    assert not torch.equal(norm.of_values(qkv.clone(), heads - 1, repeats=repeats)[:, -dim * heads :], normed)
    found = norm.of_values(qkv, heads, repeats=repeats)
    assert torch.equal(found, right) and found.is_contiguous()
    assert (found.data_ptr() == qkv.data_ptr()) == (not repeats)
