"""Quantized linear layers on CUDA, see :mod:`preheat.ops.quantization`.

Without quantized activations a tile of codes becomes a tile of weights in registers, rounded to the model's dtype, and
is the first operand of the matrix unit, as the plain kernel's weights are (:mod:`preheat.backends.cuda.linear`): in the
same order, so with the bits of the dequantized model. Or the whole weight is dequantized into memory first, for many
rows, and what serves plain weights takes over.

With float8 activations the matrix unit multiplies codes, 128 inputs at a time, each time from zero; what it gives is
scaled and added to the accumulator in fp32. Its tiles have at least 64 outputs and four warps, because fewer would make
another instruction of it, which sums in another precision.

Of a layer whose inputs ranks share, both kernels compute a product for each leaf, with its scales, and add them in
registers in the order of the tree (:mod:`preheat.ops.matmul`). Other layers are one leaf.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from preheat.backends.cuda.elementwise import silu_mul
from preheat.backends.cuda.launch import begin, options, widened
from preheat.backends.cuda.linear_tile import corner, rounded
from preheat.backends.cuda.norm import QuantizedInput
from preheat.backends.cuda.quantize import quantize_rows
from preheat.backends.cuda.tuning import Tile, may_be_dealt, whole_groups
from preheat.ops.kinds import Scheme
from preheat.ops.quantization import QuantizedRows, QuantizedWeight

STEP: tl.constexpr = tl.constexpr(128)
"""Inputs of a step. Of these, a byte of four-bit codes holds one of the first half, in its low bits, and the one as
far into the second half."""


@dataclass(frozen=True)
class DeviceWeight:
    """A quantized weight as the kernels read it. ``codes`` are [outputs, inputs], of whole numbers of four bits uint8
    [outputs, whole steps * 64]; ``scales`` and ``zeros`` fp32 [groups, outputs]; experts come before, if there are any.
    Zero points of two bytes would be loaded where they are needed, and not ahead.

    ``dealt``: codes of four bits lie in the order of Hopper's matrix unit; their scales are numbers of float16, or of
    bfloat16 and stored as such. The weight is read by :mod:`preheat.backends.cuda.linear_hopper_few`, or dequantized.

    ``leaves``: so many parts of the inputs are products of their own, and codes of each part fill whole steps.
    """

    scheme: Scheme
    dtype: torch.dtype
    shape: torch.Size
    codes: Tensor
    scales: Tensor
    zeros: Tensor | None
    index: Tensor | None
    static: Tensor | None
    dealt: bool = False
    leaves: int = 1

    @classmethod
    def of(cls, weight: QuantizedWeight, *, dealt: bool = False, leaves: int = 1) -> DeviceWeight:
        """The scales are laid out so that those of neighbouring outputs are neighbours. Only what
        :func:`can_be_dealt` is to be ``dealt``.
        """
        codes, scales = weight.codes, weight.scales.transpose(-1, -2).contiguous()
        if weight.scheme.code == "int4":
            codes = _packed(codes, dealt, leaves)
        zeros = None if weight.zeros is None else weight.zeros.transpose(-1, -2).contiguous().float()
        if dealt and _same(scales, torch.bfloat16):
            scales = scales.bfloat16()
        return cls(
            weight.scheme, weight.dtype, weight.shape, codes, scales, zeros, weight.index, weight.static, dealt, leaves
        )

    @property
    def narrow(self) -> bool:
        """Whether scales are stored in bfloat16."""
        return self.scales.dtype == torch.bfloat16

    def __len__(self) -> int:
        return self.shape[0]

    @property
    def tensors(self) -> Iterator[Tensor]:
        """All of them."""
        return (
            tensor for tensor in (self.codes, self.scales, self.zeros, self.index, self.static) if tensor is not None
        )


def can_be_dealt(weight: QuantizedWeight) -> bool:
    """Whether a layer's ``weight`` may lie as Hopper's matrix unit takes it, which its scales have to allow."""
    if len(weight.shape) != 2 or not may_be_dealt(weight.scheme, *weight.shape, weight.dtype):
        return False
    return any(_same(weight.scales, dtype) for dtype in (torch.float16, torch.bfloat16))


def _same(scales: Tensor, dtype: torch.dtype) -> bool:
    """Whether all ``scales`` are numbers of ``dtype``."""
    return torch.equal(scales.to(dtype).float(), scales)


def _packed(codes: Tensor, dealt: bool, leaves: int) -> Tensor:
    """Two int8 codes between -8 and 7 a byte; inputs of each of the ``leaves`` are filled up with zeros to whole steps.
    Bytes of a step lie in order, or they are ``dealt`` so that a lane of the matrix unit finds its sixteen side by
    side: those of inputs 16 a + 8 b + 2 c + d in the order of c, a, d, b.
    """
    parts = codes.unflatten(-1, (leaves, -1))
    padded = torch.nn.functional.pad(parts, (0, -parts.shape[-1] % STEP.value)).view(torch.uint8) & 0xF
    low, high = padded.view(*codes.shape[:-1], -1, 2, STEP.value // 2).unbind(-2)
    both = low | high << 4
    if dealt:
        both = both.unflatten(-1, (4, 2, 4, 2)).movedim((-2, -4, -1, -3), (-4, -3, -2, -1)).flatten(-4)
    return both.flatten(-2)


@triton.jit
def _signed(nibbles):
    """Numbers of four bits between -8 and 7, as fp32: put behind the bits of 2**23, cheaper than to convert them."""
    return ((nibbles ^ 8).to(tl.int32) | 0x4B000000).to(tl.float32, bitcast=True) - 8388616.0


@triton.jit
def _group(
    scales, zeros, index, out, k, size, outputs, groups, GROUP: tl.constexpr, EVEN: tl.constexpr,
    INPUTS: tl.constexpr,
):  # fmt: skip
    """Scales and zero points of the weights of ``INPUTS`` of ``size`` inputs, from ``k`` on: [outputs, 1] if those are
    ``EVEN``, all of one group, else [outputs, INPUTS].
    """
    if GROUP == 0:
        at = out[:, None]
    elif EVEN:
        at = (k // GROUP) * outputs + out[:, None]
    else:
        columns = k + tl.arange(0, INPUTS)
        if index is not None:
            group = tl.load(index + columns, mask=columns < size, other=0)
        else:
            group = tl.minimum(columns // GROUP, groups - 1)
        at = group[None, :] * outputs + out[:, None]
    scale = tl.load(scales + at).to(tl.float32)
    zero = scale  # of no use
    if zeros is not None:
        zero = tl.load(zeros + at)
    return scale, zero


@triton.jit
def _weights(numbers, scale, zero, zeros, dtype: tl.constexpr):
    """Weights of codes as fp32 ``numbers``, which have a ``zero`` point if there are ``zeros``."""
    if zeros is not None:
        numbers -= zero
    return widened(numbers * scale, dtype)


@triton.jit
def _inputs(x, token, there, k, size, inputs, INPUTS: tl.constexpr):
    """[INPUTS, rows] of x, from input ``k`` on; zeros beyond ``size``, and for tokens that are not ``there``."""
    columns = k + tl.arange(0, INPUTS)
    at = x + token[None, :] * inputs + columns[:, None]
    return tl.load(at, mask=(columns < size)[:, None] & there[None, :], other=0.0)


@triton.jit
def _step(
    acc, codes, scales, zeros, index, xs, xs_high, out, k, size, outputs, groups, row_bytes, FOUR: tl.constexpr,
    GROUP: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """``acc`` [outputs, rows] and the products of a step's inputs, in order."""
    dtype: tl.constexpr = xs.dtype
    HALF: tl.constexpr = STEP // 2
    if FOUR:
        pair = tl.load(codes + out.to(tl.int64)[:, None] * row_bytes + (k // 2 + tl.arange(0, HALF))[None, :])
        scale, zero = _group(scales, zeros, index, out, k, size, outputs, groups, GROUP, EVEN, HALF)
        acc = tl.dot(_weights(_signed(pair & 0xF), scale, zero, zeros, dtype), xs, acc, input_precision="ieee")
        if not EVEN or GROUP // STEP * STEP != GROUP:
            scale, zero = _group(scales, zeros, index, out, k + HALF, size, outputs, groups, GROUP, EVEN, HALF)
        acc = tl.dot(_weights(_signed(pair >> 4), scale, zero, zeros, dtype), xs_high, acc, input_precision="ieee")
    else:  # what stands behind a return is compiled too
        columns = k + tl.arange(0, STEP)
        at = codes + out.to(tl.int64)[:, None] * row_bytes + columns[None, :]
        numbers = tl.load(at, mask=columns[None, :] < size, other=0.0).to(tl.float32)
        scale, zero = _group(scales, zeros, index, out, k, size, outputs, groups, GROUP, EVEN, STEP)
        acc = tl.dot(_weights(numbers, scale, zero, zeros, dtype), xs, acc, input_precision="ieee")
    return acc


@triton.jit
def _codes_step(
    acc, acc_up, x, codes, scales, zeros, index, token, there, out, k, size, inputs, outputs, groups, row_bytes,
    FOUR: tl.constexpr, GROUP: tl.constexpr, EVEN: tl.constexpr, gated: tl.constexpr,
):  # fmt: skip
    """Both accumulators and the products of a step's inputs; ``outputs`` are the columns of the result."""
    height = outputs * 2 if gated else outputs
    if FOUR:
        xs = _inputs(x, token, there, k, size, inputs, STEP // 2)
        high = _inputs(x, token, there, k + STEP // 2, size, inputs, STEP // 2)
    else:
        xs = _inputs(x, token, there, k, size, inputs, STEP)
        high = xs
    acc = _step(acc, codes, scales, zeros, index, xs, high, out, k, size, height, groups, row_bytes, FOUR, GROUP, EVEN)
    if gated:
        acc_up = _step(
            acc_up, codes, scales, zeros, index, xs, high, out + outputs, k, size, height, groups, row_bytes, FOUR,
            GROUP, EVEN,
        )  # fmt: skip
    return acc, acc_up


@triton.jit
def codes_leaf(
    x, codes, scales, zeros, index, token, there, out, leaf, size, inputs, outputs, groups, row_bytes, leaf_bytes,
    INPUTS: tl.constexpr, FOUR: tl.constexpr, GROUP: tl.constexpr, EVEN: tl.constexpr, gated: tl.constexpr,
):  # fmt: skip
    """Products [outputs, rows] over the ``size`` inputs of a ``leaf``, in order, and those of the ups of a gated layer,
    which is one leaf. A row of x has all ``inputs``, one of codes ``leaf_bytes`` for each leaf; ``groups`` are a
    leaf's, unless ``index`` says what group an input is in. ``outputs`` are the columns of the result.
    """
    x += leaf * size
    codes += leaf * leaf_bytes
    if index is not None:
        index += leaf * size
    elif GROUP > 0:
        scales += leaf * groups * outputs
        if zeros is not None:
            zeros += leaf * groups * outputs
    acc = tl.zeros([out.shape[0], token.shape[0]], tl.float32)
    acc_up = tl.zeros([out.shape[0], token.shape[0]], tl.float32)
    for start in range(0, size, INPUTS):
        for part in tl.static_range(INPUTS // STEP):
            k = tl.cast(start, tl.int32) + part * STEP
            acc, acc_up = _codes_step(
                acc, acc_up, x, codes, scales, zeros, index, token, there, out, k, size, inputs, outputs, groups,
                row_bytes, FOUR, GROUP, EVEN, gated,
            )  # fmt: skip
    return acc, acc_up


@triton.jit
def _added(left, pair, product, leaf):
    """The first pair of up to four leaves, the one that is being added up, and the ``product`` of another leaf."""
    pair = tl.where(leaf % 2 == 0, product, pair + product)
    return tl.where(leaf == 1, pair, left), pair


@triton.jit(do_not_specialize=["rows"])
def in_order_codes(
    x, codes, scales, zeros, index, bias, y, rows, outputs, inputs, size, groups, row_bytes, leaf_bytes,
    LEAVES: tl.constexpr, OUTPUTS: tl.constexpr, ROWS: tl.constexpr, INPUTS: tl.constexpr, FOUR: tl.constexpr,
    GROUP: tl.constexpr, EVEN: tl.constexpr, gated: tl.constexpr, overlap: tl.constexpr,
):  # fmt: skip
    """One tile [OUTPUTS, ROWS] of y a program, as :func:`preheat.backends.cuda.linear.in_order`, whose tiles are loaded
    as codes; or the sum of LEAVES leaves of ``size`` inputs. ``outputs`` are the columns of y.
    """
    begin(overlap)
    first, row = corner(rows, outputs, OUTPUTS, ROWS)
    out = tl.minimum(first + tl.arange(0, OUTPUTS), outputs - 1)
    token = (row + tl.arange(0, ROWS)).to(tl.int64)
    there = token < rows
    total = tl.zeros([OUTPUTS, ROWS], tl.float32)
    left, up = total, total
    for leaf in range(LEAVES):
        product, up = codes_leaf(
            x, codes, scales, zeros, index, token, there, out, leaf, size, inputs, outputs, groups, row_bytes,
            leaf_bytes, INPUTS, FOUR, GROUP, EVEN, gated,
        )  # fmt: skip
        left, total = _added(left, total, product, leaf)
    if LEAVES == 4:
        total = left + total
    dtype: tl.constexpr = y.dtype.element_ty
    result = rounded(total, bias, out, dtype)
    if gated:
        result = silu_mul(result, rounded(up, bias, out + outputs, dtype))
    _store(y, result, row, first, rows, outputs, OUTPUTS, ROWS)


@triton.jit
def _store(y, result, row, first, rows, outputs, OUTPUTS: tl.constexpr, ROWS: tl.constexpr):
    outs, tokens = tl.arange(0, OUTPUTS)[:, None], tl.arange(0, ROWS)[None, :]
    at = y + tl.cast(row, tl.int64) * outputs + first
    tl.store(at + tokens * outputs + outs, result, mask=(first + outs < outputs) & (row + tokens < rows))


@triton.jit
def _fp8_step(
    acc, x, codes, x_scales, scales, token, out, k, size, inputs, outputs, X_GROUPS, GROUPED: tl.constexpr,
    X_GROUPED: tl.constexpr, W_GROUPED: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """``acc`` [outputs, rows] and the sum of a step's products, scaled where scales are of groups. ``scales`` are
    [groups, outputs], ``out`` the rows of ``codes``. ``EVEN``: a step divides ``size``.
    """
    columns = k + tl.arange(0, STEP)
    x_at = x + token[None, :] * inputs + columns[:, None]
    w_at = codes + out.to(tl.int64)[:, None] * inputs + columns[None, :]
    if EVEN:
        xs, ws = tl.load(x_at), tl.load(w_at)
    else:
        inside = columns < size
        xs = tl.load(x_at, mask=inside[:, None], other=0.0)
        ws = tl.load(w_at, mask=inside[None, :], other=0.0)
    part = tl.dot(ws, xs, out_dtype=tl.float32)
    if GROUPED:
        part *= tl.load(x_scales + token * X_GROUPS + (k // STEP if X_GROUPED else 0))[None, :]
        part *= tl.load(scales + (k // STEP if W_GROUPED else 0) * outputs + out)[:, None]
    return acc + part


@triton.jit
def _fp8_scaled(acc, x_scales, scales, token, out, GROUPED: tl.constexpr):
    """Scaled where that is still to be done."""
    if not GROUPED:
        acc *= tl.load(x_scales + token)[None, :]
        acc *= tl.load(scales + out)[:, None]
    return acc


@triton.jit
def fp8_leaf(
    x, x_scales, codes, scales, token, out, leaf, size, inputs, outputs, X_GROUPS, INPUTS: tl.constexpr,
    GROUPED: tl.constexpr, X_GROUPED: tl.constexpr, W_GROUPED: tl.constexpr, EVEN: tl.constexpr, gated: tl.constexpr,
):  # fmt: skip
    """Products [outputs, rows] of float8 ``x`` and ``codes`` over the ``size`` inputs of a ``leaf``, with all scales,
    and those of the ups of a gated layer, which is one leaf. Rows have all ``inputs``; ``outputs`` are the columns of
    the result.
    """
    height = outputs * 2 if gated else outputs
    x += leaf * size
    codes += leaf * size
    if X_GROUPED:
        x_scales += leaf * size // STEP
    if W_GROUPED:
        scales += leaf * size // STEP * outputs
    acc = tl.zeros([out.shape[0], token.shape[0]], tl.float32)
    acc_up = tl.zeros([out.shape[0], token.shape[0]], tl.float32)
    for start in range(0, size, INPUTS):
        for part in tl.static_range(INPUTS // STEP):
            k = tl.cast(start, tl.int32) + part * STEP
            acc = _fp8_step(
                acc, x, codes, x_scales, scales, token, out, k, size, inputs, height, X_GROUPS, GROUPED, X_GROUPED,
                W_GROUPED, EVEN,
            )  # fmt: skip
            if gated:
                acc_up = _fp8_step(
                    acc_up, x, codes, x_scales, scales, token, out + outputs, k, size, inputs, height, X_GROUPS,
                    GROUPED, X_GROUPED, W_GROUPED, EVEN,
                )  # fmt: skip
    acc = _fp8_scaled(acc, x_scales, scales, token, out, GROUPED)
    if gated:
        acc_up = _fp8_scaled(acc_up, x_scales, scales, token, out + outputs, GROUPED)
    return acc, acc_up


@triton.jit(do_not_specialize=["rows"])
def in_order_fp8(
    x, x_scales, codes, scales, bias, y, rows, outputs, inputs, size, X_GROUPS, LEAVES: tl.constexpr,
    OUTPUTS: tl.constexpr, ROWS: tl.constexpr, INPUTS: tl.constexpr, GROUPED: tl.constexpr, X_GROUPED: tl.constexpr,
    W_GROUPED: tl.constexpr, EVEN: tl.constexpr, gated: tl.constexpr, overlap: tl.constexpr,
):  # fmt: skip
    """One tile [OUTPUTS, ROWS] of y a program, of float8 ``x`` and ``codes``, or the sum of LEAVES leaves of ``size``
    inputs. ``outputs`` are the columns of y.
    """
    begin(overlap)
    first, row = corner(rows, outputs, OUTPUTS, ROWS)
    out = tl.minimum(first + tl.arange(0, OUTPUTS), outputs - 1)
    token = tl.minimum(row + tl.arange(0, ROWS), rows - 1).to(tl.int64)
    total = tl.zeros([OUTPUTS, ROWS], tl.float32)
    left, up = total, total
    for leaf in range(LEAVES):
        product, up = fp8_leaf(
            x, x_scales, codes, scales, token, out, leaf, size, inputs, outputs, X_GROUPS, INPUTS, GROUPED, X_GROUPED,
            W_GROUPED, EVEN, gated,
        )  # fmt: skip
        left, total = _added(left, total, product, leaf)
    if LEAVES == 4:
        total = left + total
    dtype: tl.constexpr = y.dtype.element_ty
    result = rounded(total, bias, out, dtype)
    if gated:
        result = silu_mul(result, rounded(up, bias, out + outputs, dtype))
    _store(y, result, row, first, rows, outputs, OUTPUTS, ROWS)


@triton.jit
def _dequantize(
    codes, scales, zeros, index, weight, outputs, inputs, size, groups, row_bytes, leaf_bytes, FOUR: tl.constexpr,
    GROUP: tl.constexpr, EVEN: tl.constexpr, DEALT: tl.constexpr, OUTPUTS: tl.constexpr, overlap: tl.constexpr,
):  # fmt: skip
    """A step's inputs of some outputs, in one of the leaves."""
    begin(overlap)
    HALF: tl.constexpr = STEP // 2
    dtype: tl.constexpr = weight.dtype.element_ty
    rows = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    out, k, leaf = tl.minimum(rows, outputs - 1), tl.program_id(1) * STEP, tl.program_id(2)
    codes += leaf * leaf_bytes
    if index is not None:
        index += leaf * size
    elif GROUP > 0:
        scales += leaf * groups * outputs
        if zeros is not None:
            zeros += leaf * groups * outputs
    to = weight + out.to(tl.int64)[:, None] * inputs + leaf * size
    if FOUR:
        pair = tl.load(codes + out.to(tl.int64)[:, None] * row_bytes + (k // 2 + tl.arange(0, HALF))[None, :])
        if DEALT:
            pair = pair.reshape(OUTPUTS, 4, 4, 2, 2).permute(0, 2, 4, 1, 3).reshape(OUTPUTS, HALF)
        for half in tl.static_range(2):
            at = k + half * HALF
            scale, zero = _group(scales, zeros, index, out, at, size, outputs, groups, GROUP, EVEN, HALF)
            w = _weights(_signed((pair >> (4 * half)) & 0xF), scale, zero, zeros, dtype)
            columns = (at + tl.arange(0, HALF))[None, :]
            tl.store(to + columns, w, mask=(rows < outputs)[:, None] & (columns < size))
    else:
        columns = (k + tl.arange(0, STEP))[None, :]
        at = codes + out.to(tl.int64)[:, None] * row_bytes + columns
        numbers = tl.load(at, mask=columns < size, other=0.0).to(tl.float32)
        scale, zero = _group(scales, zeros, index, out, k, size, outputs, groups, GROUP, EVEN, STEP)
        w = _weights(numbers, scale, zero, zeros, dtype)
        tl.store(to + columns, w, mask=(rows < outputs)[:, None] & (columns < size))


def dequantized(weight: DeviceWeight) -> Tensor:
    """The weight [outputs, inputs] in the model's dtype, a new tensor."""
    outputs, inputs = weight.shape
    result = torch.empty((outputs, inputs), dtype=weight.dtype, device=weight.codes.device)
    steps = triton.cdiv(inputs // weight.leaves, STEP.value)
    _dequantize[(triton.cdiv(outputs, 32), steps, weight.leaves)](
        weight.codes, weight.scales, weight.zeros, weight.index, result, outputs, inputs, *layout(weight), OUTPUTS=32,
        DEALT=weight.dealt, **scheme_options(weight), **options(num_warps=4, num_stages=1),
    )  # fmt: skip
    return result


def layout(weight: DeviceWeight) -> tuple[int, int, int, int]:
    """Inputs and groups of a leaf, groups of all inputs if the checkpoint says which one an input is in; bytes of an
    output's codes, and of a leaf's part of them.
    """
    groups, row_bytes = weight.scales.shape[-2], weight.codes.shape[-1]
    of_leaf = groups if weight.index is not None else groups // weight.leaves
    return weight.shape[-1] // weight.leaves, of_leaf, row_bytes, row_bytes // weight.leaves


def scheme_options(weight: DeviceWeight) -> dict[str, Any]:
    """Keywords of a launch that say how codes become weights."""
    scheme = weight.scheme
    return {"FOUR": scheme.code == "int4", "GROUP": scheme.group, "EVEN": whole_groups(scheme)}


def by_codes(tile: Tile, x: Tensor, weight: DeviceWeight, bias: Tensor | None, gated: bool, y: Tensor) -> None:
    """``y`` [rows, columns] from ``x`` [rows, inputs] by the kernel that reads codes; all contiguous."""
    in_order_codes[_grid(tile, y)](
        x, weight.codes, weight.scales, weight.zeros, weight.index, bias, y, len(x), y.shape[1], x.shape[1],
        *layout(weight), LEAVES=weight.leaves, **scheme_options(weight),
        **tile_options(tile, x.shape[1] // weight.leaves, gated),
    )  # fmt: skip


def by_float8(
    tile: Tile, rows: QuantizedRows, weight: DeviceWeight, bias: Tensor | None, gated: bool, y: Tensor
) -> None:
    """The same of float8 ``rows``."""
    inputs, columns = weight.shape[1], y.shape[1]
    size = inputs // weight.leaves
    in_order_fp8[_grid(tile, y)](
        rows.codes, rows.scales, weight.codes, weight.scales, bias, y, len(rows), columns, inputs, size,
        rows.scales.shape[1], LEAVES=weight.leaves, **grouping(rows.scales, weight), EVEN=size % STEP.value == 0,
        enable_fp_fusion=False, **tile_options(tile, size, gated),
    )  # fmt: skip


def _grid(tile: Tile, y: Tensor) -> tuple[int]:
    return (triton.cdiv(y.shape[1], tile.outputs) * triton.cdiv(len(y), tile.rows),)


def tile_options(tile: Tile, inputs: int, gated: bool) -> dict[str, Any]:
    """Keywords of a launch. A tile is as deep as it says where that divides ``inputs``, else one step."""
    launch = options(num_warps=tile.warps, num_stages=tile.stages)
    depth = STEP.value if inputs % tile.inputs else tile.inputs
    return {"OUTPUTS": tile.outputs, "ROWS": tile.rows, "INPUTS": depth, "gated": gated, **launch}


def tensors_of(*weights: Tensor | DeviceWeight | None) -> Iterator[Tensor]:
    """The tensors of ``weights``, of which some may be missing."""
    for each in weights:
        if isinstance(each, DeviceWeight):
            yield from each.tensors
        elif each is not None:
            yield each


def codes_of(x: Tensor | QuantizedRows, weight: DeviceWeight) -> QuantizedRows:
    """``x`` as the layer of ``weight`` reads it."""
    if isinstance(x, QuantizedRows):
        return x
    assert weight.scheme.activations is not None
    return quantize_rows(x, weight.scheme.activations, weight.static)


def quantized_input(weight: Tensor | DeviceWeight) -> QuantizedInput | None:
    """How a layer of ``weight`` reads what the norm before it gives, if not as it is."""
    if not isinstance(weight, DeviceWeight) or weight.scheme.activations is None:
        return None
    return QuantizedInput(weight.scheme.activations, weight.static)


def grouping(x_scales: Tensor, weight: DeviceWeight) -> dict[str, bool]:
    """Whether scales are those of groups: at all, of activations, of the weight."""
    x_grouped, w_grouped = x_scales.shape[1] > 1, weight.scales.shape[-2] > 1
    return {"GROUPED": x_grouped or w_grouped, "X_GROUPED": x_grouped, "W_GROUPED": w_grouped}
