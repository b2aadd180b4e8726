"""The decoder's operations: right against float64, and the same bits wherever a row stands, at 1 and 2 threads."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from preheat.backends.cpu.linear import OneDnnLinear
from preheat.model.rope import rope_table
from preheat.model.specs import RopeSpec
from preheat.ops.activation import silu_and_mul
from preheat.ops.embedding import embed
from preheat.ops.norm import RMSNorm
from preheat.ops.rotary import apply_rope_

DTYPES = [torch.float32, torch.bfloat16]
ROUNDING = {torch.float32: 2.0**-23, torch.bfloat16: 2.0**-7}
ROWS = 70
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
    """How many (threads, count, offset) give a row other bits than it has among all the rows of ``x``."""
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
    """``x`` holds a token's position in its first element, so that a row carries its position along."""
    table = rope_table(RopeSpec(kind="default", theta=10000.0), x.shape[-1], 64, x.dtype)
    cos, sin = table[(x[:, 0, 0].float().abs() * 10).long() % 64].unbind(1)
    part = x[:, :5]  # a view, as in the decoder
    apply_rope_(part, cos, sin)
    return part


def operations(dtype: torch.dtype) -> dict[str, tuple[Operation, Tensor]]:
    """Each operation with an input of rows; sizes that are no multiple of a vector register are among them."""
    found: dict[str, tuple[Operation, Tensor]] = {}
    for outputs, inputs in ((512, 256), (256, 1024), (131, 100), (96, 4096), (32, 8192)):
        weight = randn(outputs, inputs, seed=1, dtype=dtype) / inputs**0.5
        bias = randn(outputs, seed=2, dtype=dtype)
        x = randn(ROWS, inputs, seed=3, dtype=dtype)
        found[f"linear {outputs}x{inputs}"] = OneDnnLinear(weight, bias), x
    for size in (64, 100, 256, 4097):
        norm = RMSNorm(randn(size, seed=4, dtype=dtype), 1e-5)
        found[f"norm {size}"] = norm, randn(ROWS, size, seed=5, dtype=dtype)
        found[f"add norm {size}"] = lambda x, norm=norm: norm.add(x.flip(-1), x.clone()), randn(ROWS, size, dtype=dtype)
        heads = RMSNorm(randn(5, size, seed=4, dtype=dtype), 1e-5)
        found[f"head norm {size}"] = lambda x, norm=heads: norm(x[:, :5]), randn(ROWS, 7, size, seed=6, dtype=dtype)
        found[f"silu {size}"] = silu_and_mul, 4 * randn(ROWS, 2 * size, seed=7, dtype=dtype)
    for dim in (32, 64, 128, 90):
        found[f"rope {dim}"] = rope, randn(ROWS, 7, dim, seed=8, dtype=dtype)
    return found


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_rows_bits_depend_on_nothing_but_the_row(dtype):
    varying = {name: variant_rows(*operation) for name, operation in operations(dtype).items()}
    assert {name: count for name, count in varying.items() if count} == {}


def test_the_invariance_check_can_fail():
    """Three ways that a careless implementation varies, each of them seen by the check."""
    weight, x = randn(512, 256, seed=1) / 16, randn(ROWS, 256)
    assert variant_rows(lambda x: F.linear(x, weight), x) > 0  # other kernels for few rows
    assert variant_rows(F.silu, 4 * randn(ROWS, 101)) > 0  # vector body and scalar tail
    assert variant_rows(lambda x: x / x.square().mean().sqrt(), x) > 0  # looks at its neighbours


def relative_error(got: Tensor, exact: Tensor) -> float:
    return float((got.double() - exact).abs().max() / exact.abs().max())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 2, 33])
@pytest.mark.parametrize("inputs", [640, 2048])
def test_linear_is_right(inputs, rows, dtype):
    weight, bias = randn(96, inputs, seed=1, dtype=dtype), randn(96, seed=2, dtype=dtype)
    x = randn(rows, inputs, dtype=dtype)
    for with_bias in (None, bias):
        exact = F.linear(x.double(), weight.double(), None if with_bias is None else bias.double())
        got = OneDnnLinear(weight, with_bias)(x)
        assert got.shape == (rows, 96)
        assert got.dtype == dtype
        assert relative_error(got, exact) < (inputs / 10) ** 0.5 * ROUNDING[dtype]  # errors of a sum grow like this


def test_packed_bfloat16_has_the_bits_of_torch():
    weight, x = randn(512, 256, seed=1, dtype=torch.bfloat16), randn(9, 256, dtype=torch.bfloat16)
    assert torch.equal(OneDnnLinear(weight, None)(x), F.linear(x, weight))


@pytest.mark.parametrize("dtype", DTYPES)
def test_norm_is_right_and_leaves_its_input_alone(dtype):
    x, weight = 30 * randn(9, 256, dtype=dtype), 1 + 0.1 * randn(256, seed=1, dtype=dtype)
    before, wide = x.clone(), x.double()
    exact = wide / (wide.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()
    assert relative_error(RMSNorm(weight, 1e-5)(x), exact) < 2 * ROUNDING[dtype]
    assert torch.equal(x, before)


@pytest.mark.parametrize("dtype", DTYPES)
def test_norm_is_that_of_the_reference_models(dtype):
    """Normed in fp32, rounded, then weighted: the rounding in between is seen where the dtype is coarse."""
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
