"""Quantized layers on a CPU, see :mod:`preheat.ops.quantization`.

Weights whose activations are not quantized are dequantized when they are loaded, and then are plain ones. With float8
activations a layer is computed to the letter of the contract, in float64, whose sums of 128 products are exact: a row's
bits cannot depend on the rows beside it, whatever the library does. The codes are kept in float64 for it, eight bytes
each: this is for small models, and for what a GPU does to be seen without one.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from preheat.backends.base import Collective, Linear
from preheat.ops.activation import silu_and_mul
from preheat.ops.kinds import ActivationScales
from preheat.ops.moe import route, routed
from preheat.ops.opaque import opaque
from preheat.ops.quantization import (
    PROMOTED,
    QuantizedWeight,
    activation_scales,
    quantize,
    quantize_rows,
    scaled_product,
    token_scales,
)
from preheat.ops.values import Routing


class Fp8Linear:
    """W8A8: ``weight`` [outputs, inputs] and ``bias`` [outputs]."""

    def __init__(self, weight: QuantizedWeight, bias: Tensor | None = None) -> None:
        assert weight.scheme.activations is not None
        self._parts, self._scales, self._static = parts_of(weight.codes), weight.scales, weight.static
        self._kind, self._bias = weight.scheme.activations, bias

    def __call__(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """``x`` [rows, inputs] -> [rows, outputs], a new tensor of its dtype."""
        return _fp8_linear(x, self._parts, self._scales, self._bias, self._static, self._kind)


class Fp8Leaves:
    """The products of ``weight`` [outputs, inputs of this rank], W8A8, in ``leaves`` of its inputs, each fp32. A row's
    scale is that of all its inputs: ranks exchange their greatest magnitudes.
    """

    def __init__(self, weight: QuantizedWeight, leaves: int, collective: Collective) -> None:
        assert weight.scheme.activations is not None
        self._kind, self._static, self._collective = weight.scheme.activations, weight.static, collective
        self.leaves = leaves
        self.parts: Sequence[Linear] = ()
        self._size = weight.shape[-1] // leaves
        cuts = [weight.cut(((0, weight.shape[0]),), (at * self._size, (at + 1) * self._size)) for at in range(leaves)]
        self._leaves = [(parts_of(cut.codes), cut.scales) for cut in cuts]

    def __call__(self, x: Tensor) -> list[Tensor]:
        """Of ``x`` [rows, inputs of this rank]: fp32 [rows, outputs] for each leaf."""
        scales = self._scales(x)
        codes = quantize(x, scales)
        groups = scales.shape[1] // self.leaves if scales.shape[1] > 1 else 0
        return [
            scaled_product(
                codes[:, at * self._size : (at + 1) * self._size],
                scales[:, at * groups : (at + 1) * groups] if groups else scales,
                *leaf,
                None,
                torch.float32,
            )
            for at, leaf in enumerate(self._leaves)
        ]

    def _scales(self, x: Tensor) -> Tensor:
        if self._kind == "token":
            mine = x.float().abs().amax(1, keepdim=True)
            return token_scales(self._collective.gather(mine).amax(0))
        return activation_scales(x, self._kind, self._static)


class Fp8Experts:
    """The experts of ``gate_up`` [experts, 2 * inner, hidden] and ``down`` [experts, hidden, inner], W8A8. A static
    scale of activations is one for all experts.
    """

    def __init__(self, gate_up: QuantizedWeight, down: QuantizedWeight, routing: Routing) -> None:
        assert gate_up.scheme.activations is not None
        self._kind, self.routing = gate_up.scheme.activations, routing
        self._gate_up, self._down = (
            ([part for codes in weight.codes for part in parts_of(codes)], weight.scales, weight.static)
            for weight in (gate_up, down)
        )

    def __call__(self, x: Tensor, logits: Tensor) -> Tensor:
        """``x`` [tokens, hidden], ``logits`` [tokens, experts] -> [tokens, hidden], a new tensor."""
        return _fp8_experts(x, logits, *self._gate_up, *self._down, self._kind, *self.routing)

    def gate_up(self, number: int, rows: Tensor) -> Tensor:
        """What expert ``number`` gives for ``rows`` [n, hidden] before its activation."""
        return _fp8_expert(rows, number, *self._gate_up, self._kind)

    def down(self, number: int, rows: Tensor) -> Tensor:
        """The same of its last product, for ``rows`` [n, inner]."""
        return _fp8_expert(rows, number, *self._down, self._kind)


@opaque(
    "(Tensor x, Tensor logits, Tensor[] gate_up, Tensor gate_up_scales, Tensor? gate_up_static, Tensor[] down, "
    "Tensor down_scales, Tensor? down_static, str kind, int top_k, bool renormalize, bool round_weights) -> Tensor",
    lambda x, *_: torch.empty_like(x),
)
def _fp8_experts(  # noqa: PLR0917 - arguments of torch's operations are told by their place
    x: Tensor, logits: Tensor, gate_up: list[Tensor], gate_up_scales: Tensor, gate_up_static: Tensor | None,
    down: list[Tensor], down_scales: Tensor, down_static: Tensor | None, kind: ActivationScales,
    top_k: int, renormalize: bool, round_weights: bool,
) -> Tensor:  # fmt: skip
    """``gate_up`` and ``down`` are the parts of all experts, one expert's after the other's."""

    def expert(number: int, rows: Tensor) -> Tensor:
        inner = silu_and_mul(_fp8_expert(rows, number, gate_up, gate_up_scales, gate_up_static, kind))
        return _fp8_expert(inner, number, down, down_scales, down_static, kind)

    return routed(x, *route(logits, Routing(top_k, renormalize, round_weights)), len(gate_up_scales), expert)


def _fp8_expert(  # noqa: PLR0917 - as those of the operations beside it
    rows: Tensor, number: int, parts: list[Tensor], scales: Tensor, static: Tensor | None, kind: ActivationScales
) -> Tensor:
    """A layer of one expert: ``parts`` and ``scales`` are those of all."""
    each = len(parts) // len(scales)
    return _fp8_linear(rows, parts[number * each : (number + 1) * each], scales[number], None, static, kind)


def parts_of(codes: Tensor) -> list[Tensor]:
    """``codes`` [outputs, inputs] in float64, 128 inputs a part: [inputs, outputs] each."""
    return [part.double().t() for part in torch.split(codes.float(), PROMOTED, 1)]


@opaque(
    "(Tensor x, Tensor[] parts, Tensor scales, Tensor? bias, Tensor? static, str kind) -> Tensor",
    lambda x, parts, scales, *_: x.new_empty(len(x), len(scales)),
)
def _fp8_linear(  # noqa: PLR0917 - arguments of torch's operations are told by their place
    x: Tensor, parts: list[Tensor], scales: Tensor, bias: Tensor | None, static: Tensor | None, kind: ActivationScales
) -> Tensor:
    codes, x_scales = quantize_rows(x, kind, static)
    return scaled_product(codes, x_scales, parts, scales, bias, x.dtype)
