"""Helpers that every kernel shares work in the interpreter."""

import torch
import triton
import triton.language as tl

from preheat.backends.cuda.device.launch import INTERPRETED, begin, options, overlap


@triton.jit
def _double(x, out, n, block: tl.constexpr, overlap: tl.constexpr):
    begin(overlap)
    at = tl.program_id(0) * block + tl.arange(0, block)
    tl.store(out + at, tl.load(x + at, at < n) * 2, at < n)


def test_a_kernel_runs_on_tensors_of_the_host():
    assert INTERPRETED and not overlap()
    x = torch.arange(100, dtype=torch.float32)
    out = torch.empty_like(x)
    _double[(2,)](x, out, 100, 64, **options(num_warps=1))
    assert torch.equal(out, x * 2)


@triton.jit
def _product(a, b, out, size: tl.constexpr):
    row, column = tl.arange(0, size)[:, None], tl.arange(0, size)[None]
    at = row * size + column
    tl.store(out + at, tl.dot(tl.load(a + at), tl.load(b + at)).to(tl.bfloat16))


def test_bfloat16_is_multiplied_and_rounded_as_on_a_device():
    a, b = torch.randn(2, 16, 16, generator=torch.Generator().manual_seed(0)).bfloat16()
    out = torch.empty_like(a)
    _product[(1,)](a, b, out, 16)
    exact = a.double() @ b.double()
    assert ((out.double() - exact).abs() <= exact.abs() * 2**-8 + 1e-6).all()
