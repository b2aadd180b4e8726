"""The engine's operations with gradients.

Forward they are the engine's own, bit for bit, backward plain formulas. The engine's operations cut sums, pad rows and
write in place; autograd cannot follow them. So each operation is one function to autograd. Its value is the engine's.
Its gradient is the gradient of a plain formula for the same operation, computed again from the inputs in the backward
pass, as gradient checkpointing does. A gradient is as exact as autograd's of the formula, but its bits are no contract.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from preheat.backends.base.backend import Backend
from preheat.backends.base.layers import ALONE, ExpertsWeights, LayerContext, LayerWeights, Linear, Norm
from preheat.ops.activation import CLAMP
from preheat.ops.kinds import Activation, NormKind
from preheat.ops.moe import route, routed
from preheat.ops.values import Experts, Matmul

Operation = Callable[..., Tensor]


class _Exact(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, engine: Operation, plain: Operation, *inputs: Tensor | None) -> Tensor:
        ctx.plain = plain
        ctx.save_for_backward(*inputs)
        return engine(*inputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        wanted = ctx.needs_input_grad[2:]
        inputs = [
            None if each is None else each.detach().requires_grad_(need)
            for each, need in zip(ctx.saved_tensors, wanted, strict=True)
        ]
        with torch.enable_grad():
            out = ctx.plain(*inputs)
        needed = [each for each in inputs if each is not None and each.requires_grad]
        found = iter(torch.autograd.grad(out, needed, gradient.to(out.dtype)))
        return None, None, *(next(found) if need else None for need in wanted)


def exact(engine: Operation, plain: Operation, *inputs: Tensor | None) -> Tensor:
    """Return ``engine(*inputs)`` with the gradient of ``plain(*inputs)``.

    Both return a new tensor of the same shape and do not change their inputs.
    """
    return cast(Tensor, _Exact.apply(engine, plain, *inputs))  # type: ignore[no-untyped-call]


def _gated(activation: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    def multiply(x: Tensor) -> Tensor:
        gate, up = x.chunk(2, dim=-1)
        return activation(gate) * up

    return multiply


def _gelu_tanh(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


def _clamped(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    gate = gate.clamp(max=CLAMP)
    return gate * torch.sigmoid(1.702 * gate) * (up.clamp(-CLAMP, CLAMP) + 1)


ACTIVATIONS: Mapping[Activation, Callable[[Tensor], Tensor]] = {
    "silu_and_mul": _gated(F.silu),
    "clamped_silu_and_mul": _clamped,
    "gelu_tanh_and_mul": _gated(_gelu_tanh),
    "gelu_and_mul": _gated(F.gelu),
    "gelu": F.gelu,
    "gelu_tanh": _gelu_tanh,
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
    "relu2": lambda x: F.relu(x).square(),
}
"""Plain formulas of :data:`preheat.ops.activation.ACTIVATIONS`."""


class DifferentiableNorm:
    """A :class:`~preheat.backends.base.layers.Norm` with gradients for input, weight and bias."""

    def __init__(self, engine: Norm, weight: Tensor, bias: Tensor | None, eps: float, kind: NormKind) -> None:
        self.weight, self.eps, self.kind = weight, eps, kind
        self._bias, self._engine = bias, engine

    def __call__(self, x: Tensor) -> Tensor:
        return exact(lambda x, *_: self._engine(x), self.plain, x.clone(), self.weight, self._bias)

    def add(self, x: Tensor, residual: Tensor) -> Tensor:
        """Add ``x`` to ``residual`` in place; return the norm of the sum.

        The sum is rounded.
        """
        return self(residual.add_(x))

    def plain(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """Return the norm of the rows of ``x``, by formula."""
        if self.kind == "identity":
            return x
        wide, scale = x.float(), weight.float()
        if self.kind == "layer":
            wide = wide - wide.mean(-1, keepdim=True)
        if self.kind == "rms_plus_one":
            scale = scale + 1
        normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps) * scale
        return (normed if bias is None else normed + bias.float()).to(x.dtype)


class DifferentiableOperations:
    """Operations for :class:`~preheat.model.weight_loader.WeightLoader`, on the device of ``backend``.

    The given weights have gradients.
    """

    def __init__(self, backend: Backend) -> None:
        self._backend, self.device = backend, backend.device

    def layer(self, value: Matmul, weights: LayerWeights, context: LayerContext = ALONE) -> Linear:
        weight, bias, (activation, clip, factor) = weights.weight, weights.bias, value.finish[1:4]
        assert isinstance(weight, Tensor)
        engine = self._backend.layer(value, LayerWeights(weight.detach(), _detached(bias)), context)

        def plain(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
            y = F.linear(x, weight, bias)
            if activation is not None:
                return ACTIVATIONS[activation](y)
            y = y if clip is None else y.clamp(-clip, clip)
            return y if factor is None else y * factor

        def call(x: Tensor, out: Tensor | None = None) -> Tensor:
            return exact(lambda x, *_: engine(x), plain, x, weight, bias)

        return call

    def experts(
        self, value: Experts, weights: ExpertsWeights, context: LayerContext = ALONE
    ) -> Callable[[Tensor, Tensor], Tensor]:
        gate_up, down, *biases = weights[:4]
        assert isinstance(gate_up, Tensor) and isinstance(down, Tensor)
        given = ExpertsWeights(gate_up.detach(), down.detach(), *map(_detached, biases))
        engine, activate = self._backend.experts(value, given, context), value.gate_up.finish.activation
        assert activate is not None

        def plain(x: Tensor, logits: Tensor, gate_up: Tensor, down: Tensor, *biases: Tensor | None) -> Tensor:
            def expert(number: int, rows: Tensor) -> Tensor:
                first, last = (None if bias is None else bias[number] for bias in biases)
                return F.linear(ACTIVATIONS[activate](F.linear(rows, gate_up[number], first)), down[number], last)

            return routed(x, *route(logits, value.routing), len(down), expert)

        def call(x: Tensor, logits: Tensor) -> Tensor:
            return exact(lambda x, logits, *_: engine(x, logits), plain, x, logits, gate_up, down, *biases)

        return call

    def norm(
        self, weight: Tensor, eps: float, kind: NormKind = "rms", bias: Tensor | None = None
    ) -> DifferentiableNorm:
        engine = self._backend.norm(weight.detach(), eps, kind, _detached(bias))
        return DifferentiableNorm(engine, weight, bias, eps, kind)

    def add_shared(self, routed: Tensor, x: Tensor, gate: Tensor, shared: Tensor) -> Tensor:
        def plain(routed: Tensor, x: Tensor, gate: Tensor, shared: Tensor) -> Tensor:
            return routed + torch.sigmoid(F.linear(x, gate)) * shared

        return exact(self._backend.add_shared, plain, routed, x, gate, shared)


def _detached(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.detach()
