"""Inner products of :mod:`preheat.backends.cuda.matmul.gemm`: one function for each way to store weights.

All functions take the same arguments. They return fp32 sums [outputs, rows] over the ``size`` inputs of one ``split``,
in order; a gated layer has a second tensor of sums for its ups. ``x`` are rows of ``inputs``. ``w`` is the weight, or a
tuple with its tensors; ``FORM`` are its constants. ``tiles`` are x and w for the copy engine, or None. ``group`` is the
number of the matrix. ``at`` is the tile: its ``first`` output and ``row``, its outputs ``out``, the rows of x
``token``, and a mask ``there`` of real rows. ``outputs`` are the columns of the result.

Plain weights are the first operand of the matrix unit: its other side may be as narrow as the rows are few.

A tile of codes becomes a tile of weights in registers, rounded to the model's dtype: the same product in the same order
as the dequantized model, so the same bits. Where scales are powers of two, numbers become bfloat16 two at a time: their
products by scales are exact, or rounded once, as in fp32.

With float8 activations the matrix unit multiplies codes, 128 inputs at a time, each time from zero. The sums are scaled
and added to the accumulator in fp32. Tiles have at least 64 outputs and four warps: the compiler takes another
instruction for smaller tiles, with sums of another precision.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from preheat.backends.cuda.device.launch import COMPILED
from preheat.backends.cuda.matmul.mxfp4 import lying, powers_decoded
from preheat.backends.cuda.matmul.weights import STEP, codes_at, decoded, nibbles, of_nibbles, scales_of


class Plain(NamedTuple):
    """Constants of plain weights.

    ``even``: a tile's depth divides the inputs of a split. ``masked``: rows of x beyond the last one are not read. The
    product adds so many ``splits`` itself, if it is ``even``.
    """

    even: bool
    masked: bool = False
    splits: int = 1


class Codes(NamedTuple):
    """Tensors and sizes of weights as codes.

    ``groups`` is the number of groups in a split, or in all inputs if ``index`` has the group of each input. An output
    has ``row_bytes`` of codes, and splits lie ``split_bytes`` apart; a matrix has ``scales_each`` scales.
    """

    codes: Any
    scales: Any
    zeros: Any
    index: Any
    groups: int
    row_bytes: int
    split_bytes: int
    scales_each: int


class CodesForm(NamedTuple):
    """Constants of weights as codes of ``four`` bits or eight.

    Each ``group`` inputs have a scale; with ``group`` 0 all inputs share one. ``even``: weights that are decoded at a
    time are of one group. ``e2m1``: four bits are a float. ``powers``: scales are powers of two, a word for each step;
    some of them are ``large``, see :class:`preheat.backends.cuda.matmul.weights.DeviceWeight`. ``whole``: a step is one
    product of 128 inputs, else two of 64, in the same order.
    """

    four: bool
    group: int
    even: bool
    e2m1: bool = False
    powers: bool = False
    large: bool = False
    whole: bool = False


class Float8(NamedTuple):
    """Tensors and sizes of float8 codes of weights and rows; scales of ``groups`` and ``x_groups`` for each."""

    codes: Any
    scales: Any
    x_scales: Any
    groups: int
    x_groups: int


class Float8Form(NamedTuple):
    """Constants of float8 codes.

    ``x_grouped`` and ``w_grouped``: rows or weights have a scale for each group; ``grouped``: either has. ``even``: a
    step divides the inputs of a split.
    """

    grouped: bool
    x_grouped: bool
    w_grouped: bool
    even: bool


@triton.jit
def _plain_weights(weight, tiles, rows, first, k, end, inputs, INPUTS: tl.constexpr, EVEN: tl.constexpr):
    """Load [outputs, INPUTS] of the weights from input ``k`` on; zeros from ``end`` on."""
    if tiles is not None:
        return tiles.load([first, k])
    at = weight + rows[:, None] * inputs + (k + tl.arange(0, INPUTS))[None, :]
    if EVEN:
        return tl.load(at)
    return tl.load(at, mask=(k + tl.arange(0, INPUTS))[None, :] < end, other=0.0)


@triton.jit
def _added(acc, total, left, split, ended, SPLITS: tl.constexpr):
    """Where a ``split`` has ``ended``, add its sum ``acc`` to the tree (:mod:`preheat.ops.matmul`); begin the next one.

    Return the sum of the next split, of the pair, and of the pair before.
    """
    total = tl.where(ended, tl.where(split % 2 == 0, acc, total + acc), total)
    if SPLITS == 4:
        left = tl.where(ended & (split == 1), total, left)
    return tl.where(ended, 0.0, acc), total, left


@triton.jit
def plain(
    x, w, tiles, group, at, split, size, inputs, outputs, FORM: tl.constexpr, INPUTS: tl.constexpr,
    gated: tl.constexpr,
):  # fmt: skip
    """Return the sums of plain weights; see the module.

    ``FORM.splits`` are added in one loop. Loads of the next split are on their way before a split has ended.
    """
    first, row, out, token, there = at
    x_tiles, w_tiles = tiles
    top, start = group * outputs * (2 if gated else 1), split * size
    rows = tl.cast(top, tl.int64) + out
    acc = tl.zeros([out.shape[0], token.shape[0]], tl.float32)
    acc_up = tl.zeros([out.shape[0], token.shape[0]], tl.float32)
    total, left = acc, acc
    for k in range(0, size * FORM.splits, INPUTS):
        here = start + k
        if x_tiles is not None:
            xs = x_tiles.load([row, here]).T
        else:
            inside = (k + tl.arange(0, INPUTS))[:, None] < size
            to = x + token[None, :] * inputs + (here + tl.arange(0, INPUTS))[:, None]
            if FORM.masked:
                real = there[None, :] & (inside | FORM.even)
                xs = tl.load(to, mask=real, other=0.0)
            elif FORM.even:
                xs = tl.load(to)
            else:
                xs = tl.load(to, mask=inside, other=0.0)
        ws = _plain_weights(w, w_tiles, rows, top + first, here, start + size, inputs, INPUTS, FORM.even)
        acc = tl.dot(ws, xs, acc, input_precision="ieee")
        if gated:
            ups = _plain_weights(
                w, w_tiles, rows + outputs, top + outputs + first, here, start + size, inputs, INPUTS, FORM.even
            )
            acc_up = tl.dot(ups, xs, acc_up, input_precision="ieee")
        if FORM.splits > 1:
            acc, total, left = _added(acc, total, left, k // size, (k + INPUTS) % size == 0, FORM.splits)
    if FORM.splits == 4:
        total = left + total
    return (acc if FORM.splits == 1 else total), acc_up


@triton.jit
def _inputs(x, token, there, k, size, inputs, INPUTS: tl.constexpr):
    """Load [INPUTS, rows] of x from input ``k`` on; zeros beyond ``size``, and for tokens that are not ``there``."""
    columns = k + tl.arange(0, INPUTS)
    at = x + token[None, :] * inputs + columns[:, None]
    return tl.load(at, mask=(columns < size)[:, None] & there[None, :], other=0.0)


@triton.jit
def _codes_sum(acc, w, xs, xs_high, out, k, size, outputs, FORM: tl.constexpr):
    """Add the products of a step's inputs to ``acc`` [outputs, rows], in order.

    ``xs`` are the inputs of the step's first half or, with ``FORM.whole``, all of them; ``xs_high`` are the others.
    """
    dtype: tl.constexpr = xs.dtype
    HALF: tl.constexpr = STEP // 2
    codes, scales, zeros, index, groups, row_bytes = w
    if FORM.powers and COMPILED and dtype == tl.bfloat16:
        rows = lying(out)
        pair = tl.load(codes_at(codes, rows, k, outputs, row_bytes, True))
        words = tl.load(scales + (k // STEP) * outputs + rows)
        low, high = powers_decoded(pair, words, False, FORM.large), powers_decoded(pair, words, True, FORM.large)
        if FORM.whole:
            both = tl.join(low, high).permute(0, 2, 1).reshape(out.shape[0], STEP)
            acc = tl.dot(both, xs, acc, input_precision="ieee")
        else:
            acc = tl.dot(low, xs, acc, input_precision="ieee")
            acc = tl.dot(high, xs_high, acc, input_precision="ieee")
    elif FORM.four:
        pair = tl.load(codes_at(codes, out, k, outputs, row_bytes, FORM.powers))
        low, high = nibbles(pair, False, FORM.powers), nibbles(pair, True, FORM.powers)
        scale, zero = scales_of(
            scales, zeros, index, out, k, size, outputs, groups, FORM.group, FORM.even, HALF, FORM.powers, FORM.large
        )
        acc = tl.dot(decoded(of_nibbles(low, FORM.e2m1), scale, zero, zeros, dtype), xs, acc, input_precision="ieee")
        if not FORM.even or FORM.group // STEP * STEP != FORM.group:
            scale, zero = scales_of(
                scales, zeros, index, out, k + HALF, size, outputs, groups, FORM.group, FORM.even, HALF,
                FORM.powers, FORM.large,
            )  # fmt: skip
        acc = tl.dot(
            decoded(of_nibbles(high, FORM.e2m1), scale, zero, zeros, dtype), xs_high, acc, input_precision="ieee"
        )
    else:  # code behind a return would be compiled, too
        columns = k + tl.arange(0, STEP)
        at = codes + out.to(tl.int64)[:, None] * row_bytes + columns[None, :]
        numbers = tl.load(at, mask=columns[None, :] < size, other=0.0).to(tl.float32)
        scale, zero = scales_of(scales, zeros, index, out, k, size, outputs, groups, FORM.group, FORM.even, STEP)
        acc = tl.dot(decoded(numbers, scale, zero, zeros, dtype), xs, acc, input_precision="ieee")
    return acc


@triton.jit
def codes(
    x, w, tiles, group, at, split, size, inputs, outputs, FORM: tl.constexpr, INPUTS: tl.constexpr,
    gated: tl.constexpr,
):  # fmt: skip
    """Return the sums of weights as codes and rows as they are; see the module. A gated layer is one split."""
    _, _, out, token, there = at
    height = outputs * 2 if gated else outputs
    x += split * size
    numbers = w.codes + tl.cast(group, tl.int64) * height * w.row_bytes + split * w.split_bytes
    scales, zeros, index = w.scales + tl.cast(group, tl.int64) * w.scales_each, w.zeros, w.index
    if zeros is not None:
        zeros += tl.cast(group, tl.int64) * w.scales_each
    if index is not None:
        index += split * size
    elif FORM.group > 0:
        scales += split * w.groups * outputs
        if zeros is not None:
            zeros += split * w.groups * outputs
    weight = numbers, scales, zeros, index, w.groups, w.row_bytes
    acc = tl.zeros([out.shape[0], token.shape[0]], tl.float32)
    acc_up = tl.zeros([out.shape[0], token.shape[0]], tl.float32)
    for start in range(0, size, INPUTS):
        for part in tl.static_range(INPUTS // STEP):
            k = tl.cast(start, tl.int32) + part * STEP
            if FORM.four and not FORM.whole:
                xs = _inputs(x, token, there, k, size, inputs, STEP // 2)
                high = _inputs(x, token, there, k + STEP // 2, size, inputs, STEP // 2)
            else:
                xs = _inputs(x, token, there, k, size, inputs, STEP)
                high = xs
            acc = _codes_sum(acc, weight, xs, high, out, k, size, height, FORM)
            if gated:
                acc_up = _codes_sum(acc_up, weight, xs, high, out + outputs, k, size, height, FORM)
    return acc, acc_up


@triton.jit
def _float8_sum(acc, x, w, token, out, k, size, inputs, outputs, FORM: tl.constexpr):
    """Add the sum of a step's products to ``acc`` [outputs, rows], scaled where scales are of groups."""
    codes, scales, x_scales, x_groups = w
    columns = k + tl.arange(0, STEP)
    x_at = x + token[None, :] * inputs + columns[:, None]
    w_at = codes + out.to(tl.int64)[:, None] * inputs + columns[None, :]
    if FORM.even:
        xs, ws = tl.load(x_at), tl.load(w_at)
    else:
        inside = columns < size
        xs = tl.load(x_at, mask=inside[:, None], other=0.0)
        ws = tl.load(w_at, mask=inside[None, :], other=0.0)
    part = tl.dot(ws, xs, out_dtype=tl.float32)
    if FORM.grouped:
        part *= tl.load(x_scales + token * x_groups + (k // STEP if FORM.x_grouped else 0))[None, :]
        part *= tl.load(scales + (k // STEP if FORM.w_grouped else 0) * outputs + out)[:, None]
    return acc + part


@triton.jit
def _float8_scaled(acc, x_scales, scales, token, out, FORM: tl.constexpr):
    """Scale sums of rows and weights with one scale each."""
    if not FORM.grouped:
        acc *= tl.load(x_scales + token)[None, :]
        acc *= tl.load(scales + out)[:, None]
    return acc


@triton.jit
def float8(
    x, w, tiles, group, at, split, size, inputs, outputs, FORM: tl.constexpr, INPUTS: tl.constexpr,
    gated: tl.constexpr,
):  # fmt: skip
    """Return the sums of float8 rows and weights, with all scales; see the module. A gated layer is one split."""
    _, _, out, token, _ = at
    height = outputs * 2 if gated else outputs
    x += split * size
    codes = w.codes + tl.cast(group, tl.int64) * height * inputs + split * size
    scales, x_scales = w.scales + tl.cast(group, tl.int64) * w.groups * height, w.x_scales
    if FORM.x_grouped:
        x_scales += split * size // STEP
    if FORM.w_grouped:
        scales += split * size // STEP * outputs
    weight = codes, scales, x_scales, w.x_groups
    acc = tl.zeros([out.shape[0], token.shape[0]], tl.float32)
    acc_up = tl.zeros([out.shape[0], token.shape[0]], tl.float32)
    for start in range(0, size, INPUTS):
        for part in tl.static_range(INPUTS // STEP):
            k = tl.cast(start, tl.int32) + part * STEP
            acc = _float8_sum(acc, x, weight, token, out, k, size, inputs, height, FORM)
            if gated:
                acc_up = _float8_sum(acc_up, x, weight, token, out + outputs, k, size, inputs, height, FORM)
    acc = _float8_scaled(acc, x_scales, scales, token, out, FORM)
    if gated:
        acc_up = _float8_scaled(acc_up, x_scales, scales, token, out + outputs, FORM)
    return acc, acc_up
