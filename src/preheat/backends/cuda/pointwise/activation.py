"""The activation of the feed-forward block on CUDA, as a kernel of its own.

Contract. :func:`preheat.backends.cuda.pointwise.elementwise.silu_mul` of each element; other activations as
:mod:`preheat.ops.activation` says.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from preheat.backends.cuda.device.launch import begin, options
from preheat.backends.cuda.device.sizes import cdiv
from preheat.backends.cuda.pointwise.elementwise import (
    capped,
    clamped_silu_mul,
    gelu,
    gelu_tanh,
    quick_gelu,
    relu2,
    silu_mul,
)
from preheat.ops.kinds import Activation

COLUMNS = 1024
"""Elements of a program. Changes no bits."""


@triton.jit
def _silu_and_mul(gate_up, out, inner, COLUMNS: tl.constexpr, overlap: tl.constexpr):
    begin(overlap)
    token = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = at < inner
    gate = tl.load(gate_up + token * 2 * inner + at, mask=inside)
    up = tl.load(gate_up + token * 2 * inner + inner + at, mask=inside)
    tl.store(out + token * inner + at, silu_mul(gate, up), mask=inside)


def silu_and_mul(gate_up: Tensor, out: Tensor | None = None) -> Tensor:
    """Return silu(gate) * up for ``gate_up`` [tokens, 2 * inner], gate first.

    The result is ``out`` [tokens, inner] or a new tensor. All tensors are contiguous.
    """
    tokens, inner = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty(tokens, inner) if out is None else out
    programs = (tokens, cdiv(inner, COLUMNS))
    _silu_and_mul[programs](gate_up, out, inner, COLUMNS=COLUMNS, **options(num_warps=4, num_stages=1))
    return out


@triton.jit
def _activate(x, out, inner, number, KIND: tl.constexpr, COLUMNS: tl.constexpr, overlap: tl.constexpr):
    """Write a row of ``inner`` numbers to ``out``; a row of ``x`` is as long or, with a gate, twice as long.

    ``number`` is a limit or a factor.
    """
    begin(overlap)
    token = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = at < inner
    if KIND == "gelu_tanh_and_mul" or KIND == "gelu_and_mul" or KIND == "clamped_silu_and_mul":
        gate = tl.load(x + token * 2 * inner + at, mask=inside, other=0.0)
        up = tl.load(x + token * 2 * inner + inner + at, mask=inside, other=0.0)
        if KIND == "clamped_silu_and_mul":
            result = clamped_silu_mul(gate, up)
        else:
            gated = gelu(gate) if KIND == "gelu_and_mul" else gelu_tanh(gate)
            result = (gated.to(tl.float32) * up.to(tl.float32)).to(gate.dtype)
    else:
        value = tl.load(x + token * inner + at, mask=inside, other=0.0)
        if KIND == "gelu":
            result = gelu(value)
        elif KIND == "gelu_tanh":
            result = gelu_tanh(value)
        elif KIND == "quick_gelu":
            result = quick_gelu(value)
        elif KIND == "relu2":
            result = relu2(value)
        elif KIND == "capped":
            result = capped(value, number)
        elif KIND == "scaled":
            result = (value.to(tl.float32) * number).to(value.dtype)
        else:
            wide = value.to(tl.float32)
            wide = tl.where(wide > number, number, tl.where(wide < -number, -number, wide))  # NaN stays
            result = wide.to(value.dtype)
    tl.store(out + token * inner + at, result, mask=inside)


def activate(x: Tensor, activation: Activation) -> Tensor:
    """Return ``activation`` of ``x`` [tokens, outputs], contiguous, as a new tensor."""
    if activation == "silu_and_mul":
        return silu_and_mul(x)
    return _launch(x, x.shape[1] // 2 if activation.endswith("_and_mul") else x.shape[1], 0.0, activation)


def clip(x: Tensor, limit: float) -> Tensor:
    """Return ``x`` [tokens, outputs], contiguous, kept between -``limit`` and ``limit``, as a new tensor."""
    return _launch(x, x.shape[1], limit, "clip")


def cap(x: Tensor, limit: float, out: Tensor | None = None) -> Tensor:
    """Return ``x`` [tokens, outputs], contiguous, bent below ``limit`` by tanh, as a new tensor or in ``out``."""
    return _launch(x, x.shape[1], limit, "capped", out)


def scaled(x: Tensor, factor: float, out: Tensor | None = None) -> Tensor:
    """Return ``x`` [tokens, outputs], contiguous, times ``factor``, as a new tensor or in ``out``."""
    return _launch(x, x.shape[1], factor, "scaled", out)


def _launch(x: Tensor, inner: int, number: float, kind: str, out: Tensor | None = None) -> Tensor:
    out = x.new_empty(len(x), inner) if out is None else out
    programs = (len(x), cdiv(inner, COLUMNS))
    more = options(num_warps=4, num_stages=1)
    _activate[programs](x, out, inner, number, KIND=kind, COLUMNS=COLUMNS, enable_fp_fusion=False, **more)
    return out
