"""Quantized linear layers: the codes of numbers, and the products of codes.

Contract of weights. A weight is (code - zero point) * scale, in fp32: the difference is exact, the product is rounded.
Scales are converted to fp32, exactly for every dtype that checkpoints store. The scale of a tensor or of a block of
outputs is given to each of its outputs, so stacked parts keep their own scales.

Codes of four-bit floats are twice the number, and their scales are halved (:mod:`preheat.ops.fp4`).

Contract without quantized activations (W8A16, W4A16). The weight is rounded once more, to the model's dtype. Then the
layer is the plain one with this weight: all bits equal the bits of the dequantized model. ``g_idx`` names the scale of
each input and does not change the order of the sum.

Contract of compiled functions (execution mode llvm, W8A16, W4A16). No weight is rounded to the model's dtype: the codes
of a group are summed first, then scaled, as :mod:`preheat.backends.cpu.llvm.codes` says.

Contract of rounding while loading. int8: the scale of an output is its greatest magnitude divided by 127. int4: the
scale of a group is its number of the greatest magnitude, with its sign, divided by -8 and rounded to float16. All
divisions are IEEE's, in fp32. A scale of zero becomes 1. A code is the number divided by the scale, rounded to the
nearest integer, ties to even, and kept between -127 and 127, or between -8 and 7.

Contract of float8 activations (W8A8). For each token, in fp32: the scale is the greatest magnitude in its row, or in
each 128 numbers of it, divided by 448. It is at least 1 / (448 * 512), so that a row of zeros has one. A static scale
comes from the checkpoint. A code is x divided by the scale (IEEE division, no product with a reciprocal), kept within
-448 and 448, rounded to the nearest e4m3fn, ties to even. So a code depends on its row alone. A scale for the whole
batch would make a code depend on the other rows of the step.

The product: over each 128 inputs, in order, the products of codes are summed by the matrix unit, in its own precision
(exactly, where there is no matrix unit). The result is an fp32 number. It is added to an fp32 accumulator ("promoted").
Where scales belong to groups, the number is multiplied by the token's scale, then by the output's, before it is added;
else the final sum is multiplied by both. Then the bias is added in fp32, and the result is rounded once to the dtype.

Where ranks share the inputs, a K split (:mod:`preheat.ops.matmul`) is such a product over its inputs, with all scales,
before bias and rounding. The scale of a token is computed from its whole row: ranks exchange the greatest magnitudes of
their parts. The greatest of these is the same in every order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from preheat.ops.kinds import ActivationScales, Scheme

E4M3 = torch.float8_e4m3fn
E4M3_MAX = 448.0
LEAST_SCALE = 1.0 / (E4M3_MAX * 512.0)
PROMOTED = 128
"""Inputs of one sum before its promotion to the fp32 accumulator."""


@dataclass(frozen=True)
class QuantizedWeight:
    """A weight [outputs, inputs], or a stack of weights [experts, outputs, inputs].

    ``codes`` [..., outputs, inputs] are e4m3fn or int8: int4 lies between -8 and 7, fp4 is twice the number. ``scales``
    fp32 and ``zeros`` int16 (for int4 and int8 with zero points) are [..., outputs, groups]. ``index`` int32 [inputs]
    names the group of each input where ``scheme.indexed``; else every ``scheme.group`` consecutive inputs are a group.
    ``static`` fp32 [] is the checkpoint's scale of activations, if they are static. ``dtype`` is the model's.
    """

    scheme: Scheme
    dtype: torch.dtype
    codes: Tensor
    scales: Tensor
    zeros: Tensor | None = None
    index: Tensor | None = None
    static: Tensor | None = None

    @property
    def shape(self) -> torch.Size:
        return self.codes.shape

    @property
    def row_tensors(self) -> tuple[Tensor, ...]:
        """Tensors with a row for each output."""
        return (self.codes, self.scales) if self.zeros is None else (self.codes, self.scales, self.zeros)

    def part(self, *at: int | slice) -> QuantizedWeight:
        """Return a view of the experts and rows ``at``."""
        zeros = None if self.zeros is None else self.zeros[at]
        return replace(self, codes=self.codes[at], scales=self.scales[at], zeros=zeros)

    def cut(self, rows: Sequence[tuple[int, int]], columns: tuple[int, int] | None) -> QuantizedWeight:
        """Return some rows and inputs as a new weight.

        The rows are the ranges ``rows`` [from, to), in this order, the inputs ``columns`` [from, to). All tensors but
        ``static`` are new; None takes all inputs. A range of inputs must end where a group ends, unless ``index`` names
        the group of each input.
        """

        def taken(tensor: Tensor, inputs: slice) -> Tensor:
            return torch.cat([tensor[..., slice(*each), inputs] for each in rows], -2).contiguous()

        inputs = groups = slice(None)
        if columns is not None:
            inputs = slice(*columns)
            if self.scales.shape[-1] > 1 and self.index is None:
                groups = slice(columns[0] // self.scheme.group, -(-columns[1] // self.scheme.group))
        return replace(
            self,
            codes=taken(self.codes, inputs),
            scales=taken(self.scales, groups),
            zeros=None if self.zeros is None else taken(self.zeros, groups),
            index=None if self.index is None else self.index[inputs].contiguous(),
        )


@dataclass(frozen=True, slots=True)
class QuantizedRows:
    """Quantized activations of a linear layer, as :func:`quantize_rows` returns them.

    ``codes`` are e4m3fn [rows, inputs] and ``scales`` fp32 [rows, groups]. ``plain`` [rows, inputs] has the activations
    in the model's dtype, where other layers read them.
    """

    codes: Tensor
    scales: Tensor
    plain: Tensor | None

    def __len__(self) -> int:
        return len(self.codes)

    def __getitem__(self, rows: slice) -> QuantizedRows:
        """Return a view of some ``rows``."""
        return QuantizedRows(self.codes[rows], self.scales[rows], None if self.plain is None else self.plain[rows])


def plain_rows(x: Tensor | QuantizedRows) -> Tensor:
    """Return ``x`` as it was before it was quantized, if it is."""
    if isinstance(x, Tensor):
        return x
    assert x.plain is not None
    return x.plain


def empty_weight(scheme: Scheme, *shape: int, dtype: torch.dtype, device: torch.device) -> QuantizedWeight:
    """Return an uninitialized weight of ``shape`` [..., outputs, inputs].

    A static scale starts at 0, below any scale of a checkpoint; the group of each input starts at -1, unknown.
    """
    inputs = shape[-1]
    grouped = (*shape[:-1], scheme.groups(inputs))
    return QuantizedWeight(
        scheme,
        dtype,
        codes=torch.empty(shape, dtype=E4M3 if scheme.code == "fp8" else torch.int8, device=device),
        scales=torch.empty(grouped, dtype=torch.float32, device=device),
        zeros=torch.empty(grouped, dtype=torch.int16, device=device) if scheme.zeros else None,
        index=torch.full((inputs,), -1, dtype=torch.int32, device=device) if scheme.indexed else None,
        static=torch.zeros((), dtype=torch.float32, device=device) if scheme.activations == "static" else None,
    )


def dequantize(weight: QuantizedWeight) -> Tensor:
    """Return the numbers of ``weight``: a new tensor of its shape.

    They are rounded to the model's dtype.
    """
    wide, scales, zeros = weight.codes.float(), weight.scales, weight.zeros
    if scales.shape[-1] > 1:
        groups = _groups(weight)
        scales = scales.index_select(-1, groups)
        zeros = None if zeros is None else zeros.index_select(-1, groups)
    if zeros is not None:
        wide.sub_(zeros)
    return wide.mul_(scales).to(weight.dtype)


def plain(weight: Tensor | QuantizedWeight) -> Tensor:
    """Return ``weight``, dequantized if it is quantized."""
    return dequantize(weight) if isinstance(weight, QuantizedWeight) else weight


def _groups(weight: QuantizedWeight) -> Tensor:
    """Return the group of each input."""
    if weight.index is not None:
        return weight.index
    return torch.arange(weight.shape[-1], device=weight.codes.device) // weight.scheme.group


def token_scales(greatest: Tensor) -> Tensor:
    """Return the scales of rows with these ``greatest`` magnitudes, fp32."""
    return (greatest / E4M3_MAX).clamp_(min=LEAST_SCALE)


def activation_scales(x: Tensor, kind: ActivationScales, static: Tensor | None) -> Tensor:
    """Return the scales of ``x`` [tokens, inputs]: fp32 [tokens, groups]; one group except for kind "block"."""
    if kind == "static":
        assert static is not None
        return static.expand(len(x), 1)
    size = PROMOTED if kind == "block" else max(x.shape[1], 1)
    groups = [part.abs().amax(1) for part in torch.split(x.float(), size, 1)]
    return token_scales(torch.stack(groups, 1))


def quantize(x: Tensor, scales: Tensor) -> Tensor:
    """Return e4m3fn codes of ``x`` [rows, inputs].

    There is one scale for each row, or one for each 128 inputs of a row. ``scales`` are [rows, 1] or [rows, groups].
    """
    if scales.shape[1] > 1:
        scales = scales.repeat_interleave(PROMOTED, 1)[:, : x.shape[1]]
    return (x.float() / scales).clamp_(-E4M3_MAX, E4M3_MAX).to(E4M3)


def quantize_rows(x: Tensor, kind: ActivationScales, static: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return codes [tokens, inputs] and scales [tokens, groups] of the activations ``x``."""
    scales = activation_scales(x, kind, static)
    return quantize(x, scales), scales


def quantize_channels(weight: Tensor, out: QuantizedWeight) -> None:
    """Quantize ``weight`` [outputs, inputs] into ``out``.

    Each output has one scale, as a token's row has.
    """
    codes, scales = quantize_rows(weight, "token")
    out.codes.copy_(codes)
    out.scales.copy_(scales)


def round_to_nearest(weight: Tensor, out: QuantizedWeight) -> None:
    """Quantize ``weight`` [outputs, inputs] into ``out``, int8 for each output or int4 in groups, symmetric."""
    groups = weight.float().view(len(weight), out.scales.shape[1], -1)
    if out.scheme.code == "int4":
        extreme = groups.gather(-1, groups.abs().argmax(-1, keepdim=True))
        scales, low, high = (extreme / -8).to(torch.float16).float(), -8, 7
    else:
        scales, low, high = groups.abs().amax(-1, keepdim=True) / 127, -127, 127
    scales = scales.where(scales != 0, 1.0)
    out.codes.copy_((groups / scales).round_().clamp_(low, high).view(weight.shape))
    out.scales.copy_(scales.squeeze(-1))


def quantize_weight(weight: Tensor, out: QuantizedWeight) -> None:
    """Quantize ``weight`` [outputs, inputs] into ``out`` while loading, by the scheme of ``out``."""
    (quantize_channels if out.scheme.code == "fp8" else round_to_nearest)(weight, out)


def scaled_product(  # noqa: PLR0917 - two operands and their scales
    x: Tensor, x_scales: Tensor, parts: list[Tensor], scales: Tensor, bias: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """Return the product of the W8A8 contract with exact sums.

    ``x`` are codes [tokens, inputs] with scales [tokens, groups]; ``parts`` codes of the weight in float64, 128 inputs
    each, [inputs, outputs]; ``scales`` fp32 [outputs, groups].

    A product of two codes has 8 significant bits and lies between 2^-18 and 2^18. So float64 sums any 128 products
    exactly, in any order.
    """
    grouped = x_scales.shape[1] > 1 or scales.shape[1] > 1
    total = torch.zeros(len(x), len(scales), dtype=torch.float32, device=x.device)
    for place, (codes, part) in enumerate(zip(torch.split(x.double(), PROMOTED, 1), parts, strict=True)):
        partial = torch.mm(codes, part).float()
        if grouped:
            partial.mul_(_column(x_scales, place)).mul_(_column(scales, place).t())
        total.add_(partial)
    if not grouped:
        total.mul_(x_scales).mul_(scales.t())
    return (total if bias is None else total.add_(bias.float())).to(dtype)


def _column(scales: Tensor, place: int) -> Tensor:
    return scales[:, place, None] if scales.shape[1] > 1 else scales
