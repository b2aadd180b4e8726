"""The activations of the feed-forward block.

Contract of silu_and_mul, SwiGLU. silu(gate) is rounded to the dtype, then multiplied by up. In bfloat16 torch computes
silu in fp32 and rounds, the same for every element at every address. In fp32 torch computes the last few elements of a
run in another way than the rest. So there silu is composed of operations that treat all elements alike: gate / (1 +
exp(-gate)).

Contract of gelu: (1 + erf(x * sqrt(1/2))) * (x / 2). Contract of gelu_tanh: x / (1 + exp(-2 * sqrt(2 / pi) * (0.044715
* x * x * x + x))); it equals x / 2 * (1 + tanh(...)) without the cancellation. Both are computed in fp32, one operation
after the other, none fused, and rounded to the dtype. gelu_tanh_and_mul multiplies the rounded gelu_tanh(gate) by up,
and gelu_and_mul the rounded gelu(gate).
quick_gelu, CLIP's, is x / (1 + exp(-1.702 * x)), computed in the same way.

Contract of relu2: the square of max(x, 0), rounded once; NaN stays NaN. Contract of scaled: x times an fp32 factor,
rounded once.

Contract of capped: limit * tanh(x / limit) in fp32, one operation after the other, rounded once.

Contract of clamped_silu_and_mul, gpt-oss's. The gate is kept at 7 or less, up between -7 and 7, and up becomes up + 1.
quick_gelu(gate) * up follows. All of it is computed in fp32, one operation after the other, and rounded to the dtype
once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from preheat.ops.kinds import Activation
from preheat.ops.opaque import opaque


@opaque("(Tensor gate_up) -> Tensor", lambda x: x.new_empty(*x.shape[:-1], x.shape[-1] // 2))
def silu_and_mul(gate_up: Tensor) -> Tensor:
    """Return silu(gate) * up for ``gate_up`` [tokens, 2 * inner] (gate first): [tokens, inner]."""
    gate, up = gate_up.chunk(2, dim=-1)
    if gate.dtype == torch.bfloat16:
        return F.silu(gate).mul_(up)
    return (gate / gate.neg().exp_().add_(1.0)).mul_(up)


@opaque("(Tensor x) -> Tensor", torch.empty_like)
def gelu(x: Tensor) -> Tensor:
    """Return GELU by the error function, a new tensor like ``x``."""
    wide = x.float()
    return (wide * math.sqrt(0.5)).erf_().add_(1.0).mul_(wide * 0.5).to(x.dtype)


@opaque("(Tensor x) -> Tensor", torch.empty_like)
def gelu_tanh(x: Tensor) -> Tensor:
    """Return GELU approximated by tanh, a new tensor like ``x``."""
    wide = x.float()
    inner = (wide * wide).mul_(wide).mul_(0.044715).add_(wide).mul_(-2 * math.sqrt(2 / math.pi))
    return (wide / inner.exp_().add_(1.0)).to(x.dtype)


@opaque("(Tensor x) -> Tensor", torch.empty_like)
def quick_gelu(x: Tensor) -> Tensor:
    """Return x * sigmoid(1.702 * x), a new tensor like ``x``."""
    wide = x.float()
    return (wide / (wide * -1.702).exp_().add_(1.0)).to(x.dtype)


CLAMP = 7.0
"""The greatest gate, and the greatest magnitude of an up, of clamped_silu_and_mul."""


@opaque("(Tensor gate_up) -> Tensor", lambda x: x.new_empty(*x.shape[:-1], x.shape[-1] // 2))
def clamped_silu_and_mul(gate_up: Tensor) -> Tensor:
    """Return quick_gelu(gate) * (up + 1), both clamped, for ``gate_up`` [tokens, 2 * inner]: [tokens, inner]."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    gate, up = gate.clamp(max=CLAMP), up.clamp(-CLAMP, CLAMP).add_(1.0)
    return (gate / (gate * -1.702).exp_().add_(1.0)).mul_(up).to(gate_up.dtype)


@opaque("(Tensor gate_up) -> Tensor", lambda x: x.new_empty(*x.shape[:-1], x.shape[-1] // 2))
def gelu_tanh_and_mul(gate_up: Tensor) -> Tensor:
    """Return gelu_tanh(gate) * up for ``gate_up`` [tokens, 2 * inner] (gate first): [tokens, inner]."""
    gate, up = gate_up.chunk(2, dim=-1)
    return gelu_tanh(gate.contiguous()).mul_(up)


@opaque("(Tensor gate_up) -> Tensor", lambda x: x.new_empty(*x.shape[:-1], x.shape[-1] // 2))
def gelu_and_mul(gate_up: Tensor) -> Tensor:
    """Return gelu(gate) * up for ``gate_up`` [tokens, 2 * inner] (gate first): [tokens, inner]."""
    gate, up = gate_up.chunk(2, dim=-1)
    return gelu(gate.contiguous()).mul_(up)


@opaque("(Tensor x) -> Tensor", torch.empty_like)
def relu2(x: Tensor) -> Tensor:
    """Return the square of max(x, 0), a new tensor like ``x``."""
    positive = x.clamp(min=0)
    return positive.mul_(positive)


@opaque("(Tensor x, float factor) -> Tensor", lambda x, _: torch.empty_like(x))
def scaled(x: Tensor, factor: float) -> Tensor:
    """Return ``x`` times ``factor``, a new tensor like ``x``."""
    return (x.float() * factor).to(x.dtype)


@opaque("(Tensor x, float limit) -> Tensor", lambda x, _: torch.empty_like(x))
def capped(x: Tensor, limit: float) -> Tensor:
    """Return ``x`` bent between -``limit`` and ``limit`` by tanh, a new tensor like ``x``."""
    return (x.float() / limit).tanh_().mul_(limit).to(x.dtype)


@opaque("(Tensor x, float limit) -> Tensor", lambda x, _: torch.empty_like(x))
def clip(x: Tensor, limit: float) -> Tensor:
    """Return ``x`` kept between -``limit`` and ``limit``.

    The limit is rounded to the dtype.
    """
    return x.clamp(-limit, limit)


ACTIVATIONS: Mapping[Activation, Callable[[Tensor], Tensor]] = {
    "silu_and_mul": silu_and_mul,
    "clamped_silu_and_mul": clamped_silu_and_mul,
    "gelu_tanh_and_mul": gelu_tanh_and_mul,
    "gelu_and_mul": gelu_and_mul,
    "gelu": gelu,
    "gelu_tanh": gelu_tanh,
    "quick_gelu": quick_gelu,
    "relu2": relu2,
}
