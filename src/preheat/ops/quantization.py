"""Quantized linear layers: how numbers become codes, and what a layer computes from them.

Contract of weights. A weight is (code - zero point) * scale, in fp32: the difference is exact, the product is rounded.
Scales are converted to fp32, which is exact for every dtype that they are stored in. Scales of a tensor or of a block
of outputs are those of each of its outputs, so that parts that are stacked keep the scales of their own.

Contract without quantized activations (W8A16, W4A16). The weight is rounded once more, to the model's dtype, and then
the layer is the plain one with this weight: all bits are those of the dequantized model. ``g_idx`` says which scale an
input takes and does not change the order in which inputs are added.

Contract of float8 activations (W8A8). For each token, in fp32: the scale is the greatest magnitude in its row, or in
each 128 numbers of it, divided by 448, and at least 1 / (448 * 512), so that a row of zeros has one; a static scale is
the checkpoint's. A code is x divided by the scale (IEEE division, no product with a reciprocal), kept within -448 and
448, rounded to the nearest e4m3fn, ties to even. So a code depends on its row alone: a scale of the whole batch would
make it depend on whoever shares the step.

The product: over each 128 inputs, in order, the products of codes are summed by the matrix unit, in its own precision
(exactly, where there is none), giving an fp32 number, which is added to an fp32 accumulator ("promoted"). Where scales
are of groups, it is multiplied by the token's scale, then by the output's, before it is added; else the sum is, at the
end. Then the bias is added in fp32, and the result is rounded once to the dtype.

Where ranks share the inputs, a leaf (:mod:`preheat.ops.matmul`) is such a product of its inputs, with all scales,
before bias and rounding. The scale of a token is that of its whole row: ranks exchange their parts' greatest
magnitudes, and the greatest of these is the same in whatever order.
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
"""Inputs whose products are summed before they are promoted to the fp32 accumulator."""


@dataclass(frozen=True)
class QuantizedWeight:
    """A weight [outputs, inputs], or a stack of them [experts, outputs, inputs].

    ``codes`` [..., outputs, inputs] are e4m3fn or int8 (those of four bits between -8 and 7). ``scales`` fp32 and
    ``zeros`` int16 (for int4 and int8 with zero points) are [..., outputs, groups]. ``index`` int32 [inputs] says which
    group an input belongs to where ``scheme.indexed``; else every ``scheme.group`` follow each other. ``static`` fp32
    [] is the scale of activations where that is the checkpoint's. ``dtype`` is the model's.
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
        """The tensors that have a row for each output."""
        return (self.codes, self.scales) if self.zeros is None else (self.codes, self.scales, self.zeros)

    def part(self, *at: int | slice) -> QuantizedWeight:
        """A view of the experts and rows ``at``."""
        zeros = None if self.zeros is None else self.zeros[at]
        return replace(self, codes=self.codes[at], scales=self.scales[at], zeros=zeros)

    def cut(self, rows: Sequence[tuple[int, int]], columns: tuple[int, int] | None) -> QuantizedWeight:
        """The ranges of ``rows`` [from, to), in this order, and the inputs ``columns`` [from, to), all if None: new
        tensors. Inputs end where a group does, unless ``index`` says which group an input belongs to.
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
    """Activations of a linear layer: ``codes`` e4m3fn [rows, inputs] and ``scales`` fp32 [rows, groups] of
    :func:`quantize_rows`; ``plain`` [rows, inputs] in the model's dtype, where other layers read those.
    """

    codes: Tensor
    scales: Tensor
    plain: Tensor | None

    def __len__(self) -> int:
        return len(self.codes)


def plain_rows(x: Tensor | QuantizedRows) -> Tensor:
    """``x`` as it was before it was quantized, if it is."""
    if isinstance(x, Tensor):
        return x
    assert x.plain is not None
    return x.plain


def empty_weight(scheme: Scheme, *shape: int, dtype: torch.dtype, device: torch.device) -> QuantizedWeight:
    """Room for a weight of ``shape`` [..., outputs, inputs]. A static scale is 0, below any that is read; -1 stands for
    groups that are not known yet.
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
    """The numbers of ``weight``, rounded to the model's dtype: a new tensor of its shape."""
    wide, scales, zeros = weight.codes.float(), weight.scales, weight.zeros
    if scales.shape[-1] > 1:
        groups = _groups(weight)
        scales = scales.index_select(-1, groups)
        zeros = None if zeros is None else zeros.index_select(-1, groups)
    if zeros is not None:
        wide.sub_(zeros)
    return wide.mul_(scales).to(weight.dtype)


def plain(weight: Tensor | QuantizedWeight) -> Tensor:
    """``weight``, dequantized if it is not plain."""
    return dequantize(weight) if isinstance(weight, QuantizedWeight) else weight


def _groups(weight: QuantizedWeight) -> Tensor:
    """Each input's group."""
    if weight.index is not None:
        return weight.index
    return torch.arange(weight.shape[-1], device=weight.codes.device) // weight.scheme.group


def token_scales(greatest: Tensor) -> Tensor:
    """The scales of rows whose ``greatest`` magnitudes, fp32, are these."""
    return (greatest / E4M3_MAX).clamp_(min=LEAST_SCALE)


def activation_scales(x: Tensor, kind: ActivationScales, static: Tensor | None = None) -> Tensor:
    """The scales of ``x`` [tokens, inputs]: fp32 [tokens, groups], one group but for kind "block"."""
    if kind == "static":
        assert static is not None
        return static.expand(len(x), 1)
    size = PROMOTED if kind == "block" else max(x.shape[1], 1)
    groups = [part.abs().amax(1) for part in torch.split(x.float(), size, 1)]
    return token_scales(torch.stack(groups, 1))


def quantize(x: Tensor, scales: Tensor) -> Tensor:
    """Codes e4m3fn of ``x`` [rows, inputs] with ``scales`` [rows, 1], or one for each 128 inputs [rows, groups]."""
    if scales.shape[1] > 1:
        scales = scales.repeat_interleave(PROMOTED, 1)[:, : x.shape[1]]
    return (x.float() / scales).clamp_(-E4M3_MAX, E4M3_MAX).to(E4M3)


def quantize_rows(x: Tensor, kind: ActivationScales, static: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Codes [tokens, inputs] and scales [tokens, groups] of the activations ``x``."""
    scales = activation_scales(x, kind, static)
    return quantize(x, scales), scales


def quantize_channels(weight: Tensor, out: QuantizedWeight) -> None:
    """Codes and scales of ``weight`` [outputs, inputs], a scale for each output: those of a token's row."""
    codes, scales = quantize_rows(weight, "token")
    out.codes.copy_(codes)
    out.scales.copy_(scales)


def scaled_product(  # noqa: PLR0917 - two operands and their scales
    x: Tensor, x_scales: Tensor, parts: list[Tensor], scales: Tensor, bias: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """The W8A8 contract with exact sums: ``x`` are codes [tokens, inputs] with scales [tokens, groups]; ``parts`` codes
    of the weight in float64, 128 inputs each, [inputs, outputs]; ``scales`` fp32 [outputs, groups].

    A product of two codes has 8 significant bits and lies between 2^-18 and 2^18, so that float64 sums any 128 of them
    exactly, in whatever order.
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
