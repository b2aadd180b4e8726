"""The decoder's operations are right against float64.

A row has the same bits in any place, at 1 and 2 threads.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from preheat.backends.cpu import linear
from preheat.backends.cpu.linear import packed_product
from preheat.model.attention_specs import RopeSpec
from preheat.model.rope import rope_table
from preheat.ops.activation import ACTIVATIONS, clip, silu_and_mul
from preheat.ops.embedding import embed
from preheat.ops.moe import add_shared
from preheat.ops.norm import RMSNorm, make_norm
from preheat.ops.proof import cancelling_rows, cancelling_weight, noise, signed_pairs
from preheat.ops.rotary import apply_rope_

DTYPES = [torch.float32, torch.bfloat16]
ROUNDING = {torch.float32: 2.0**-23, torch.bfloat16: 2.0**-7}
ROWS = 70
STEP = 300
"""Tokens of a large step.

Linear layers have tests of their own for it.
"""
COUNTS = (1, 2, 3, 5, 16, 17, 33, 64)

Operation = Callable[[Tensor], Tensor]


@pytest.fixture(autouse=True)
def _inference() -> Iterator[None]:
    threads = torch.get_num_threads()
    with torch.inference_mode():
        yield
    torch.set_num_threads(threads)


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def variant_rows(run: Operation, x: Tensor) -> int:
    """Return how many ways give a row other bits than among all rows.

    A way is (threads, count, offset). All rows are ``x``.
    """
    differing = 0
    for threads in (1, 2):
        torch.set_num_threads(threads)
        whole = run(x.clone())
        for count in COUNTS:
            for start in (0, 3):
                part = run(x[start : start + count].clone())
                differing += not torch.equal(part, whole[start : start + count])
        shuffled = torch.randperm(len(x), generator=torch.Generator().manual_seed(threads))
        differing += not torch.equal(run(x[shuffled]), whole[shuffled])
    return differing


def rope(x: Tensor) -> Tensor:
    """Apply rope.

    ``x`` holds a token's position in its first element, so that a row carries its position along.
    """
    table = rope_table(RopeSpec(kind="default", theta=10000.0), x.shape[-1], 64, x.dtype)
    cos, sin = table[(x[:, 0, 0].float().abs() * 10).long() % 64].unbind(1)
    part = x[:, :5]  # a view, as in the decoder
    apply_rope_(part, cos, sin)
    return part


def operations(dtype: torch.dtype) -> dict[str, tuple[Operation, Tensor]]:
    """Return each operation with an input of rows.

    Some sizes are no multiple of a vector register.
    """
    found: dict[str, tuple[Operation, Tensor]] = {}
    for outputs, inputs in ((512, 256), (256, 1024), (131, 100), (96, 4096), (32, 8192)):
        weight = randn(outputs, inputs, seed=1, dtype=dtype) / inputs**0.5
        bias = randn(outputs, seed=2, dtype=dtype)
        x = randn(ROWS, inputs, seed=3, dtype=dtype)
        found[f"linear {outputs}x{inputs}"] = packed_product(weight, bias), x
    for size in (64, 100, 256, 4097):
        norm = RMSNorm(randn(size, seed=4, dtype=dtype), 1e-5)
        found[f"norm {size}"] = norm, randn(STEP, size, seed=5, dtype=dtype)
        found[f"add norm {size}"] = lambda x, norm=norm: norm.add(x.flip(-1), x.clone()), randn(STEP, size, dtype=dtype)
        heads = RMSNorm(randn(5, size, seed=4, dtype=dtype), 1e-5)
        found[f"head norm {size}"] = lambda x, norm=heads: norm(x[:, :5]), randn(STEP, 7, size, seed=6, dtype=dtype)
        for kind, activation in ACTIVATIONS.items():
            found[f"{kind} {size}"] = activation, 4 * randn(STEP, 2 * size, seed=7, dtype=dtype)
        weights = randn(4, size, seed=9, dtype=dtype)
        for kind, bias in (("layer", weights[1]), ("layer", None), ("rms_plus_one", None)):
            norm = make_norm(weights[0], 1e-5, kind, bias)
            found[f"{kind} {bias is None} {size}"] = norm, randn(STEP, size, seed=5, dtype=dtype)
            found[f"add {kind} {bias is None} {size}"] = (
                lambda x, norm=norm: norm.add(x.flip(-1), x.clone()), randn(STEP, size, dtype=dtype)
            )  # fmt: skip
        found[f"shared expert {size}"] = (
            lambda x, gate=weights[:1]: add_shared(x, x.flip(-1), gate, 2 * x), randn(STEP, size, seed=5, dtype=dtype)
        )  # fmt: skip
        found[f"clip {size}"] = lambda x: clip(x, 0.7), randn(STEP, size, dtype=dtype)
    for dim in (32, 64, 128, 90):
        found[f"rope {dim}"] = rope, randn(STEP, 7, dim, seed=8, dtype=dtype)
    return found


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_rows_bits_depend_on_nothing_but_the_row(dtype):
    varying = {name: variant_rows(*operation) for name, operation in operations(dtype).items()}
    assert {name: count for name, count in varying.items() if count} == {}


def test_the_invariance_check_can_fail():
    """Control: the check sees three faults of a careless implementation."""
    weight, x = randn(512, 256, seed=1) / 16, randn(ROWS, 256)
    assert variant_rows(lambda x: F.linear(x, weight), x) > 0  # other kernels for few rows
    assert variant_rows(F.silu, 4 * randn(ROWS, 101)) > 0  # vector body and scalar tail
    assert variant_rows(lambda x: x / x.square().mean().sqrt(), x) > 0  # looks at its neighbors


def relative_error(got: Tensor, exact: Tensor) -> float:
    return float((got.double() - exact).abs().max() / exact.abs().max())


def error_of_one_chain(x: Tensor, weight: Tensor) -> float:
    """Return the largest error of ``x`` W^T in the worst order.

    The worst of all orders adds fp32 products one after another.
    """
    products = x.float()[:, None] * weight.float()
    sums = torch.from_numpy(np.cumsum(products.numpy(), axis=-1, dtype=np.float32)[..., -1])
    return float((sums.double() - F.linear(x.double(), weight.double())).abs().max())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 2, 33])
@pytest.mark.parametrize("inputs", [640, 2048])
def test_linear_is_right(inputs, rows, dtype):
    weight, bias = randn(96, inputs, seed=1, dtype=dtype), randn(96, seed=2, dtype=dtype)
    x = randn(33, inputs, dtype=dtype)
    summing = 1.5 * error_of_one_chain(x, weight)
    x = x[:rows].contiguous()
    for with_bias in (None, bias):
        exact = F.linear(x.double(), weight.double(), None if with_bias is None else bias.double())
        got = packed_product(weight, with_bias)(x)
        assert got.shape == (rows, 96)
        assert got.dtype == dtype
        assert ((got.double() - exact).abs() <= summing + ROUNDING[dtype] * exact.abs()).all()


def test_packed_bfloat16_has_the_bits_of_torch():
    weight, x = randn(512, 256, seed=1, dtype=torch.bfloat16), randn(9, 256, dtype=torch.bfloat16)
    assert torch.equal(packed_product(weight, None)(x), F.linear(x, weight))


@pytest.mark.parametrize("dtype", DTYPES)
def test_norm_is_right_and_leaves_its_input_alone(dtype):
    x, weight = 30 * randn(9, 256, dtype=dtype), 1 + 0.1 * randn(256, seed=1, dtype=dtype)
    before, wide = x.clone(), x.double()
    exact = wide / (wide.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()
    assert relative_error(RMSNorm(weight, 1e-5)(x), exact) < 2 * ROUNDING[dtype]
    assert torch.equal(x, before)


@pytest.mark.parametrize("dtype", DTYPES)
def test_norm_is_that_of_the_reference_models(dtype):
    """Rows are normed in fp32, rounded, then weighted.

    A coarse dtype shows the rounding in between.
    """
    x, weight = randn(512, 256, dtype=dtype), 1 + 0.1 * randn(256, seed=1, dtype=dtype)
    wide = x.float()
    reference = weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)).to(dtype)
    got = RMSNorm(weight, 1e-5)(x)
    differing = (got != reference).float().mean().item()
    assert differing < {torch.float32: 0.2, torch.bfloat16: 1e-4}[dtype]  # the last bit of a sum may differ
    if dtype == torch.bfloat16:
        once = (weight.float() * wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)).to(dtype)
        assert (once != reference).float().mean() > 0.05


def test_norm_with_residual_adds_in_place():
    x, residual = randn(5, 64, dtype=torch.bfloat16), randn(5, 64, seed=1, dtype=torch.bfloat16)
    norm, total = RMSNorm(randn(64, seed=2, dtype=torch.bfloat16), 1e-6), x + residual
    assert torch.equal(norm.add(x, residual), norm(total))
    assert torch.equal(residual, total)


@pytest.mark.parametrize("dtype", DTYPES)
def test_silu_and_mul_is_right(dtype):
    x = 6 * randn(9, 200, dtype=dtype)
    x[0, :4] = torch.tensor([-200.0, 200.0, 0.0, -88.5])
    gate, up = x.double().chunk(2, dim=-1)
    assert relative_error(silu_and_mul(x), gate * torch.sigmoid(gate) * up) < 2 * ROUNDING[dtype]


@pytest.mark.parametrize("dtype", DTYPES)
def test_gelu_is_right(dtype):
    x = 4 * randn(9, 200, dtype=dtype)
    x[0, :4] = torch.tensor([-60.0, 60.0, 0.0, -8.5])
    for kind, approximate in (("gelu", "none"), ("gelu_tanh", "tanh")):
        exact = F.gelu(x.double(), approximate=approximate)
        assert relative_error(ACTIVATIONS[kind](x), exact) < 2 * ROUNDING[dtype]
    gate, up = x.double().chunk(2, dim=-1)
    for kind, approximate in (("gelu_and_mul", "none"), ("gelu_tanh_and_mul", "tanh")):
        exact = F.gelu(gate, approximate=approximate) * up
        assert relative_error(ACTIVATIONS[kind](x), exact) < 2 * ROUNDING[dtype]


def by_gpt_oss(gate, up):
    gate, up = gate.clamp(max=7), up.clamp(-7, 7)
    return gate * torch.sigmoid(1.702 * gate) * (up + 1)


@pytest.mark.parametrize("dtype", DTYPES)
def test_clamped_silu_and_mul_is_right(dtype):
    """Some numbers are beyond the bounds; without them another result is seen."""
    x = 6 * randn(9, 200, dtype=dtype)
    x[0, :4], x[0, 100:104] = torch.tensor([-200.0, 200.0, 7.0, 7.5]), torch.tensor([1.0, -1.0, -9.0, 9.0])
    gate, up = x.double().chunk(2, dim=-1)
    found, exact = ACTIVATIONS["clamped_silu_and_mul"](x), by_gpt_oss(gate, up)
    assert relative_error(found, exact) < ROUNDING[dtype]
    assert relative_error(found, gate * torch.sigmoid(1.702 * gate) * (up + 1)) > 0.1


@pytest.mark.parametrize("dtype", DTYPES)
def test_other_norms_are_right(dtype):
    x, weight, bias = 3 + randn(9, 256, dtype=dtype), randn(256, seed=1, dtype=dtype), randn(256, seed=2, dtype=dtype)
    for given in (None, bias):
        exact = F.layer_norm(x.double(), (256,), weight.double(), None if given is None else given.double(), 1e-5)
        assert relative_error(make_norm(weight, 1e-5, "layer", given)(x), exact) < 2 * ROUNDING[dtype]
    wide = x.double()
    exact = wide / (wide.square().mean(-1, keepdim=True) + 1e-5).sqrt() * (1 + weight.double())
    assert relative_error(make_norm(weight, 1e-5, "rms_plus_one")(x), exact) < 2 * ROUNDING[dtype]
    for kind in ("layer", "rms_plus_one"):
        norm, residual = make_norm(weight, 1e-5, kind), randn(9, 256, seed=3, dtype=dtype)
        total = x + residual
        assert torch.equal(norm.add(x, residual), norm(total))
        assert torch.equal(residual, total)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rope_is_right(dtype):
    spec, x = RopeSpec(kind="default", theta=500000.0), randn(50, 6, 64, dtype=dtype)
    angles = torch.outer(torch.arange(50).double(), 500000.0 ** (-torch.arange(0, 64, 2).double() / 64))[:, None]
    first, second = x.double().chunk(2, dim=-1)
    exact = torch.cat(
        (first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin()), dim=-1
    )
    cos, sin = rope_table(spec, 64, 50, dtype).unbind(1)
    apply_rope_(x, cos, sin)
    assert relative_error(x, exact) < {torch.float32: 1e-5, torch.bfloat16: 2.0**-7}[dtype]


def test_embedding_copies_rows():
    table = randn(30, 8)
    tokens = torch.tensor([3, 0, 29, 3])
    assert torch.equal(embed(tokens, table), table[tokens])
    with pytest.raises(IndexError):
        embed(torch.tensor([30]), table)


@pytest.mark.parametrize("rows", [601, 700, 1024, 1500])
def test_more_rows_than_a_linear_part_have_the_bits_of_few(rows, monkeypatch):
    """A step of many rows has the bits of few rows.

    It is computed at proven sizes, whole or in parts.
    """
    x, weight = randn(rows, 256), randn(192, 256, seed=1)
    apply = linear.packed_product(weight)
    expected = torch.cat([apply(part) for part in x.split(7)])
    sizes, product = set(), linear._product

    def noted(part: torch.Tensor, *more: object) -> torch.Tensor:
        sizes.add(len(part))
        return product(part, *more)

    monkeypatch.setattr(linear, "_product", noted)
    assert torch.equal(apply(x), expected)
    reference = linear._reference(192, 256, x.dtype, torch.get_num_threads())
    assert all(linear._agrees(size, reference, 192, 256, x.dtype) for size in sizes.copy())


def test_unproven_parts_of_a_linear_layer_are_found(monkeypatch):
    """A part of one row has other bits, since it takes another kernel where the processor has AVX-512."""
    x, weight = randn(601, 2048), randn(192, 2048, seed=1)
    apply = linear.packed_product(weight)
    expected = torch.cat([apply(part) for part in x.split(7)])
    if torch.equal(linear._in_parts(x, linear.pack(weight), None, 1), expected):
        pytest.skip("on this processor a row alone has the bits of many")
    monkeypatch.setattr(linear, "proven_size", lambda *_: 1)
    assert not torch.equal(apply(x), expected)


@pytest.mark.parametrize("columns", [2, 3, 8, 9, 205])
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_inputs_of_a_proof_show_the_place_of_the_last_column(columns, sign):
    """Their product is exactly zero, but a sum in which the last column comes first is another one."""
    rows, weight = (signed_pairs(noise(64, columns, seed=seed), side) for seed, side in ((1, sign), (2, -sign)))
    rows, weight = (each.bfloat16().float() for each in (rows, weight))
    assert rows.all() and weight.all() and not (rows.double() @ weight.double().T).any()
    terms = (rows[:, None] * weight).unbind(-1)
    if columns > 3:
        assert not torch.equal(functools.reduce(torch.add, terms), functools.reduce(torch.add, terms[-1:] + terms[:-1]))


def tail_apart(x: torch.Tensor, weight: torch.Tensor, bias: None = None) -> torch.Tensor:
    """Return products whose last inputs are added in another order if there are only two rows.

    Of 32 inputs those with even and with odd places are added apart, as AMX adds them. In two rows the last inputs are
    added one by one.
    """
    *parts, last = (x.float()[:, None] * weight.float()).split(32, -1)
    total = sum((part[..., ::2].sum(-1) + part[..., 1::2].sum(-1) for part in parts), torch.zeros(()))
    if len(x) > 2:
        return (total + last[..., ::2].sum(-1) + last[..., 1::2].sum(-1)).to(x.dtype)
    return functools.reduce(torch.add, last.unbind(-1), total).to(x.dtype)


def caught(outputs: int, inputs: int) -> bool:
    """Return whether the proof finds that two rows have other bits than 64."""
    linear._cancelling_rows.cache_clear()
    return not linear._agrees(2, 64, outputs, inputs, torch.bfloat16)


SMALL = [(outputs, inputs) for outputs in (1, 2, 8, 72) for inputs in (8, 72, 148, 205)]


def test_a_proof_of_a_small_product_finds_another_order(monkeypatch):
    """A head of latent attention has few inputs, a router few outputs, and a step may have two rows.

    A proof that compares one such product of normal numbers misses an order that a request shows once in a thousand
    tokens.
    """
    weights = lambda outputs, inputs, dtype: cancelling_weight(outputs, inputs).to(dtype)  # noqa: E731
    monkeypatch.setattr(linear, "_cancelling", weights)
    monkeypatch.setattr(linear, "_product", tail_apart)
    assert all(caught(*shape) for shape in SMALL)
    monkeypatch.setattr(linear, "rows_compared", lambda outputs, size: size)
    monkeypatch.setattr(linear, "cancelling_rows", lambda *shape: signed_pairs(noise(*shape, seed=1), -1.0))
    assert not all(caught(*shape) for shape in SMALL)
    linear._cancelling_rows.cache_clear()


def test_numbers_of_all_magnitudes_show_an_order_that_normal_numbers_hide():
    """With eight inputs, as latent attention has in small models."""
    shown, weight = [], cancelling_weight(64, 8).bfloat16()
    for rows in (cancelling_rows(64, 8), signed_pairs(noise(64, 8, seed=1), -1.0)):
        parts = torch.cat([tail_apart(part, weight) for part in rows.bfloat16().split(2)])
        shown.append(float((tail_apart(rows.bfloat16(), weight) != parts).float().mean()))
    assert shown[0] > 0.3 and shown[1] < 0.05
