"""The Triton kernel of linear layers and routed experts: y = x W^T + b, and an activation of gates and ups behind it.

Contract. Every output is a sum of products over the inputs, in order, in one fp32 accumulator. Where the inputs are cut
into splits, each split has its own accumulator, and the splits are added in a tree (:mod:`preheat.ops.matmul`). The
bias is added in fp32. One rounding to the dtype follows. Gated: the first half of W's rows are gates, the second half
ups; both are rounded like any output, then combined by :func:`preheat.backends.cuda.pointwise.elementwise.combined`. So
the bits of a row depend neither on the number of rows nor on tiles or warps: tiles only assign outputs to programs.

Three functions are constants of the kernel. The map pairs rows with matrices: all rows with one, or the rows of an
expert with its own. The product multiplies a tile over one split, see :mod:`preheat.backends.cuda.matmul.products`. The
sum adds the splits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from preheat.backends.cuda.device.detect import card_at
from preheat.backends.cuda.device.launch import INTERPRETED, begin, options
from preheat.backends.cuda.matmul.ahead import ask, asked
from preheat.backends.cuda.matmul.config import Tile, whole_groups
from preheat.backends.cuda.matmul.maps import Cut, Routed, RoutedForm, all_rows, all_rows_masked, by_expert, programs
from preheat.backends.cuda.matmul.products import Codes, CodesForm, Float8, Float8Form, Plain, codes, float8, plain
from preheat.backends.cuda.matmul.weights import STEP, DeviceWeight, PlainWeight, Weight, layout
from preheat.backends.cuda.pointwise.elementwise import combined
from preheat.ops.kinds import Activation
from preheat.ops.quantization import QuantizedRows

if TYPE_CHECKING:
    from preheat.backends.cuda.matmul.moe.route import Arrangement

Gated = bool | Activation
"""Whether outputs are gates and ups: the activation that combines them, or True for silu(gate) * up."""

WHOLE_ROWS = 32
"""Rows of a tile from which a step of MXFP4 is one product on Hopper. A product of fewer is over at once."""

FEW = 16
"""Rows of a tile that may be mostly empty."""


@triton.jit
def unrolled(
    PRODUCT: tl.constexpr, x, w, tiles, group, at, size, inputs, outputs, FORM: tl.constexpr, CUT: tl.constexpr,
    gated: tl.constexpr,
):  # fmt: skip
    """Add the splits in their tree; the code of each split follows that of the one before."""
    total, up = PRODUCT(x, w, tiles, group, at, 0, size, inputs, outputs, FORM, CUT.inputs, gated)
    if CUT.splits >= 2:
        total += PRODUCT(x, w, tiles, group, at, 1, size, inputs, outputs, FORM, CUT.inputs, gated)[0]
    if CUT.splits == 4:
        right = PRODUCT(x, w, tiles, group, at, 2, size, inputs, outputs, FORM, CUT.inputs, gated)[0]
        right += PRODUCT(x, w, tiles, group, at, 3, size, inputs, outputs, FORM, CUT.inputs, gated)[0]
        total += right
    return total, up


@triton.jit
def looped(
    PRODUCT: tl.constexpr, x, w, tiles, group, at, size, inputs, outputs, FORM: tl.constexpr, CUT: tl.constexpr,
    gated: tl.constexpr,
):  # fmt: skip
    """Add the splits in their tree, in a loop: products with scales are long."""
    OUTPUTS: tl.constexpr = CUT.outputs
    ROWS: tl.constexpr = CUT.rows
    total = tl.zeros([OUTPUTS, ROWS], tl.float32)
    left, up = total, total
    for split in range(CUT.splits):
        product, up = PRODUCT(x, w, tiles, group, at, split, size, inputs, outputs, FORM, CUT.inputs, gated)
        total = tl.where(split % 2 == 0, product, total + product)
        left = tl.where(split == 1, total, left)
    if CUT.splits == 4:
        total = left + total
    return total, up


@triton.jit
def in_one(
    PRODUCT: tl.constexpr, x, w, tiles, group, at, size, inputs, outputs, FORM: tl.constexpr, CUT: tl.constexpr,
    gated: tl.constexpr,
):  # fmt: skip
    """Let the product add the splits in their tree."""
    return PRODUCT(x, w, tiles, group, at, 0, size, inputs, outputs, FORM, CUT.inputs, gated)


@triton.jit
def apart(
    PRODUCT: tl.constexpr, x, w, tiles, group, at, size, inputs, outputs, FORM: tl.constexpr, CUT: tl.constexpr,
    gated: tl.constexpr,
):  # fmt: skip
    """Leave the splits apart: each has its programs and its own y."""
    split = tl.program_id(1) if CUT.splits > 1 else 0
    return PRODUCT(x, w, tiles, group, at, split, size, inputs, outputs, FORM, CUT.inputs, gated)


@triton.jit
def _rounded(acc, bias, rows, dtype: tl.constexpr):
    """Round sums ``acc`` [outputs, rows of x] with the bias of the outputs ``rows`` to ``dtype``."""
    if bias is not None:
        acc += tl.load(bias + rows).to(tl.float32)[:, None]
    return acc.to(dtype)


@triton.jit
def _tile(
    x, w, groups, bias, y, tiles, where, out, token, sizes, PRODUCT: tl.constexpr, SUM: tl.constexpr,
    FORM: tl.constexpr, CUT: tl.constexpr, gated: tl.constexpr, ACTIVATION: tl.constexpr,
):  # fmt: skip
    """Compute the outputs ``out`` of the rows ``token``: a tile, or its lower half."""
    group, first, start, row, rows = where
    size, inputs, outputs = sizes
    at = first, row, out, token.to(tl.int64), row + tl.arange(0, CUT.rows) < rows
    total, up = SUM(PRODUCT, x, w, tiles, group, at, size, inputs, outputs, FORM, CUT, gated)
    dtype: tl.constexpr = y.dtype.element_ty
    result = _rounded(total, bias, out, dtype)
    if gated:
        result = combined(result, _rounded(up, bias, out + outputs, dtype), ACTIVATION)
    if groups is not None and CUT.splits > 1:
        y += tl.cast(tl.program_id(1), tl.int64) * groups.numbers
    outs, lanes = tl.arange(0, CUT.outputs)[:, None], tl.arange(0, CUT.rows)[None, :]
    to = y + tl.cast(start + row, tl.int64) * outputs + first
    tl.store(to + lanes * outputs + outs, result, mask=(first + outs < outputs) & (row + lanes < rows))


@triton.jit
def _lower(values):
    """Return the first half of ``values``."""
    return values.reshape(2, values.shape[0] // 2).permute(1, 0).split()[0]


def _name(specialization: Any) -> str:
    """Name the compiled kernel: profilers tell dense layers and experts apart."""
    return "gemm" if "groups" in specialization.constants else "gemm_experts"  # None is a constant


@triton.jit(do_not_specialize=["rows"], repr=_name)
def gemm(
    x, w, groups, bias, y, x_tiles, w_tiles, rows, outputs, inputs, size, MAP: tl.constexpr, PRODUCT: tl.constexpr,
    SUM: tl.constexpr, FORM: tl.constexpr, GROUPS: tl.constexpr, CUT: tl.constexpr, gated: tl.constexpr,
    ACTIVATION: tl.constexpr, ASKED: tl.constexpr, NARROW: tl.constexpr, overlap: tl.constexpr,
):  # fmt: skip
    """Compute one tile [CUT.outputs, CUT.rows] of y a program.

    ``outputs`` are the columns of y, ``inputs`` the numbers of a row of x, ``size`` the inputs of a split. Outputs
    beyond the last one are computed as copies of it; neither they nor rows beyond the last one are stored. ``x_tiles``
    and ``w_tiles`` are x and w for the copy engine, or None. ``ACTIVATION`` combines gates and ups;
    None: silu(gate) * up. So many bytes of an output's weights are ``ASKED`` for while the kernel ahead still runs. A
    tile with no more rows than ``NARROW`` has is computed by those sizes.
    """
    if ASKED == 0:
        begin(overlap)
    if groups is not None:  # noqa: SIM102 - one is known to the compiler
        if tl.program_id(0) >= programs(groups, outputs, GROUPS, CUT):
            if ASKED > 0:
                begin(overlap)
            return
    group, first, start, row, rows, token = MAP(groups, rows, outputs, GROUPS, CUT)
    out = tl.minimum(first + tl.arange(0, CUT.outputs), outputs - 1)
    if ASKED > 0:
        height = outputs * 2 if gated else outputs
        ask(PRODUCT, w, group, out, inputs, height, ASKED)
        if gated:
            ask(PRODUCT, w, group, out + outputs, inputs, height, ASKED)
        begin(overlap)
    if groups is not None and bias is not None:
        bias += group * (outputs * 2 if gated else outputs)
    where, sizes = (group, first, start, row, rows), (size, inputs, outputs)
    few = False
    if NARROW is not None:
        few = rows - row <= NARROW.rows
        if few:
            _tile(
                x, w, groups, bias, y, (x_tiles, w_tiles), where, out, _lower(token), sizes, PRODUCT, SUM, FORM,
                NARROW, gated, ACTIVATION,
            )  # fmt: skip
    if not few:
        _tile(
            x, w, groups, bias, y, (x_tiles, w_tiles), where, out, token, sizes, PRODUCT, SUM, FORM, CUT, gated,
            ACTIVATION,
        )  # fmt: skip


class _Operands(NamedTuple):
    """Arguments of a launch that depend on the form of rows and weight.

    ``depth`` inputs are loaded at once. ``masked``: rows behind the last one are not read, not even copies of the last
    row. ``powers``: scales are powers of two.
    """

    x: Tensor
    w: Any
    product: Any
    form: Any
    options: Mapping[str, Any]
    depth: int
    masked: bool = False
    powers: bool = False


def _plain(tile: Tile, x: Tensor, weight: PlainWeight, size: int) -> _Operands:
    """Return the operands of numbers, over splits of ``size`` inputs.

    Reading copies of the last row would take as much of the L2 cache's time as narrow tiles of weights do.
    """
    few, even = tile.rows <= FEW and weight.tensor.ndim == 2, size % tile.inputs == 0
    masked = few and not tile.bulk
    form = Plain(even, masked, weight.splits if few and even else 1)
    return _Operands(x, weight.tensor, plain, form, {}, tile.inputs, masked)


def _float8(tile: Tile, x: QuantizedRows, weight: DeviceWeight, size: int) -> _Operands:
    """Return the operands of codes that are multiplied as they are, over splits of ``size`` inputs."""
    x_groups, groups = x.scales.shape[1], weight.scales.shape[-2]
    w = Float8(weight.codes, weight.scales, x.scales, groups, x_groups)
    form = Float8Form(x_groups > 1 or groups > 1, x_groups > 1, groups > 1, size % STEP.value == 0)
    return _Operands(x.codes, w, float8, form, {"enable_fp_fusion": False}, _depth(tile, size))


def _codes(tile: Tile, x: Tensor, weight: DeviceWeight, size: int) -> _Operands:
    """Return the operands of codes that become numbers, over splits of ``size`` inputs."""
    scheme = weight.scheme
    each = weight.scales[0].numel() if weight.scales.ndim > 2 else 0
    w = Codes(weight.codes, weight.scales, weight.zeros, weight.index, *layout(weight)[1:], each)
    whole = scheme.powers and x.dtype == torch.bfloat16 and _by_warp_groups(tile)
    powers = scheme.powers, weight.large_scales, whole
    form = CodesForm(scheme.bits == 4, scheme.group, whole_groups(scheme), scheme.code == "fp4", *powers)
    return _Operands(x, w, codes, form, {}, _depth(tile, size), masked=True, powers=scheme.powers)


def _by_warp_groups(tile: Tile) -> bool:
    """Whether Hopper multiplies a ``tile`` of many rows by an instruction of four warps.

    Triton then makes numbers of the codes of one step while the matrix unit multiplies the numbers made before.
    """
    many = tile.rows >= WHOLE_ROWS and tile.outputs >= 64 and tile.warps % 4 == 0
    return many and not INTERPRETED and card_at().is_hopper


def _narrow(tile: Tile, given: _Operands, arrangement: Arrangement, splits: int) -> Cut | None:
    """Return the sizes of half a ``tile`` of experts, for the tiles whose rows fit; None: all tiles are whole.

    An expert's last rows are few, and the matrix unit takes as long for none. Where four warps share an instruction, it
    takes 16 rows or more: fewer would be multiplied by another one, in another order of inputs.
    """
    powers = given.powers and arrangement.block > 1
    least = WHOLE_ROWS if tile.outputs >= 64 and tile.warps % 4 == 0 else FEW
    return Cut(tile.outputs, tile.rows // 2, given.depth, splits) if powers and tile.rows >= least else None


def _depth(tile: Tile, size: int) -> int:
    """Return how deep a tile of codes is: as ``tile`` says if that divides a split, else one step."""
    return STEP.value if size % tile.inputs else tile.inputs


OPERANDS: Mapping[str, Callable[[Tile, Any, Any, int], _Operands]] = {
    "plain": _plain,
    "codes": _codes,
    "float8": _float8,
}
"""From the form of a weight to the operands of a launch, for a tile, rows, the weight and the inputs of a split."""


def gates(gated: Gated) -> dict[str, Any]:
    """Return the constants of a launch that is ``gated``."""
    return {"gated": bool(gated), "ACTIVATION": gated if isinstance(gated, str) else None}


def _sum_of(given: _Operands) -> Any:
    """Return the function of the kernel that adds splits of the inputs."""
    if given.product is not plain:
        return looped
    return unrolled if given.form.splits == 1 else in_one


def multiply(
    tile: Tile, x: Tensor | QuantizedRows, weight: Weight, bias: Tensor | None, gated: bool, y: Tensor
) -> None:
    """Write to ``y`` [rows, columns] the outputs of a linear layer for ``x`` [rows, inputs].

    ``weight`` is [outputs, inputs], ``bias`` [outputs]. All tensors are contiguous.
    """
    (rows, columns), inputs, splits = y.shape, weight.shape[1], weight.splits
    size, x_tiles, w_tiles = inputs // splits, None, None
    given = OPERANDS[weight.form](tile, x, weight, size)
    if tile.bulk and weight.form == "plain":
        x_tiles = TensorDescriptor.from_tensor(given.x, [tile.rows, tile.inputs])
        w_tiles = TensorDescriptor.from_tensor(given.w, [tile.outputs, tile.inputs])
    gemm[(-(-columns // tile.outputs) * -(-rows // tile.rows),)](
        given.x, given.w, None, bias, y, x_tiles, w_tiles, rows, columns, inputs, size,
        MAP=all_rows_masked if given.masked else all_rows, PRODUCT=given.product,
        SUM=_sum_of(given), FORM=given.form, GROUPS=None,
        CUT=Cut(tile.outputs, tile.rows, given.depth, splits), ASKED=asked(tile, weight, early=True), NARROW=None,
        **gates(gated), **given.options,
        **options(num_warps=tile.warps, num_stages=tile.stages),
    )  # fmt: skip


def multiply_experts(
    tile: Tile, x: Tensor | QuantizedRows, weight: Weight, arrangement: Arrangement, y: Tensor, *,
    gated: Gated, gathered: bool, splits: int = 1, bias: Tensor | None = None, early: bool = False,
) -> None:  # fmt: skip
    """Write to ``y`` [arranged rows, columns] the outputs of one layer of all experts.

    ``weight`` is [experts, outputs, inputs], ``bias`` [experts, outputs]. With ``splits`` > 1, ``y`` is [splits,
    arranged rows, columns] and gets the result of each split. ``x`` is [tokens, inputs] if ``gathered``, else [arranged
    rows, inputs]. All tensors are contiguous. ``tile.rows`` is the block size of the arrangement, unless its blocks
    have one row. ``early``: the arrangement was written at least two launches before.
    """
    (experts, _, inputs), columns, size = weight.shape, y.shape[-1], weight.shape[2] // splits
    given, w_tiles = OPERANDS[weight.form](tile, x, weight, size), None
    if tile.bulk and weight.form == "plain":
        w_tiles = TensorDescriptor.from_tensor(given.w.view(-1, inputs), [tile.outputs, tile.inputs])
    where = arrangement.experts, arrangement.starts, arrangement.rows_of_experts, arrangement.tokens
    first = arrangement.own[0] if arrangement.own else 0
    gemm[(len(arrangement.experts) * -(-columns // tile.outputs), splits)](
        given.x, given.w, Routed(*where, arrangement.rows * columns), bias, y, None, w_tiles, 0, columns, inputs, size,
        MAP=by_expert, PRODUCT=given.product, SUM=apart, FORM=given.form,
        GROUPS=RoutedForm(
            experts, arrangement.top_k, gathered, arrangement.block > 1, arrangement.own is not None, first
        ),
        CUT=Cut(tile.outputs, tile.rows, given.depth, splits), ASKED=asked(tile, weight, early=early),
        NARROW=_narrow(tile, given, arrangement, splits),
        **gates(gated), **given.options, **options(num_warps=tile.warps, num_stages=tile.stages),
    )  # fmt: skip


def experts_product(
    tile: Tile, x: Tensor | QuantizedRows, weight: Weight, arrangement: Arrangement, *, gated: Gated,
    gathered: bool | None = None, dtype: torch.dtype | None = None, bias: Tensor | None = None, early: bool = False,
) -> Tensor:  # fmt: skip
    """Return rows [arranged rows, columns] of one layer of all experts.

    See :func:`multiply_experts`. The result is in ``dtype``, by default the model's. Without ``gathered``, rows are
    gathered if they are ``gated``.
    """
    gathered = bool(gated) if gathered is None else gathered
    y = weight.room(arrangement.rows, weight.shape[1] // 2 if gated else weight.shape[1], dtype=dtype)
    multiply_experts(
        tile, weight.rows(x), weight, arrangement, y, gated=gated, gathered=gathered, bias=bias, early=early
    )  # fmt: skip
    return y


def experts_splits(tile: Tile, x: Tensor | QuantizedRows, weight: Weight, arrangement: Arrangement) -> Tensor:
    """Return the splits of ``weight``, with their scales: fp32 [splits, arranged rows, outputs]."""
    rows = weight.rows(x)
    y = weight.room(weight.splits, arrangement.rows, weight.shape[1], dtype=torch.float32)
    multiply_experts(tile, rows, weight, arrangement, y, gated=False, gathered=False, splits=weight.splits)
    return y
