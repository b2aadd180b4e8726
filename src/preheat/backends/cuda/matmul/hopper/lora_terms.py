"""The terms of adapters in a layer's kernel for many rows on Hopper: behind its sums, before its activation.

Rows shrink in a launch ahead; the layer's kernel begins beside it. Each number is computed as by
:mod:`preheat.backends.cuda.matmul.lora.expand` in a launch of its own: the layer's output is rounded, its shrunk row is
rounded and expanded, and the sum is rounded once more.

A group of warps goes through the adapters of its rows. For one adapter, the rows of others are zeros, and zeros leave a
sum as it is. Sums of the matrix unit lie in registers as sums of ``mma.sync`` do, and each thread loads the operands of
``mma.sync`` where it needs them. So nothing goes through shared memory: the ring fills it.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from preheat.backends.cuda.matmul.lora.blocks import STRETCH
from preheat.backends.cuda.matmul.lora.shrink import SLOT_STRIDE
from preheat.ops.values import TILE

LISTED = gl.constexpr(STRETCH)
RANKS = gl.constexpr(TILE)
SUMS = gl.constexpr(gl.NVMMADistributedLayout(version=[2, 0], warps_per_cta=[4, 1], instr_shape=[16, 8]))
"""The layout of sums [rows, outputs]."""

ROWS_OF = gl.constexpr(gl.SliceLayout(1, gl.DotOperandLayout(0, SUMS.value, 2)))
"""The layout of numbers by row, beside the layout of shrunk rows."""


@gluon.jit
def _part_of(first, bounds, PARTS: gl.constexpr):
    """Return the part of the output ``first``."""
    part = 0
    for each in gl.static_range(1, PARTS):
        part += (first >= gl.load(bounds + each)).to(gl.int32)
    return part


@gluon.jit
def _expanding(first, adapter_slot, tile, adapters, height, OUTPUTS: gl.constexpr, TILES: gl.constexpr):
    """Return a tile of ranks of the second matrix in ``adapter_slot``, [ranks, outputs], from output ``first`` on."""
    right: gl.constexpr = gl.DotOperandLayout(1, SUMS, 2)
    out = gl.arange(0, OUTPUTS, gl.SliceLayout(0, right))[None, :]
    at = adapters.b + ((adapter_slot * TILES + tile).to(gl.int64) * height + first) * RANKS
    return gl.load(at + out * RANKS + gl.arange(0, RANKS, gl.SliceLayout(1, right))[:, None])


@gluon.jit
def _shrunk(whose, slot, tile, part, adapters, slots, TILES: gl.constexpr, WORLD: gl.constexpr, PARTS: gl.constexpr):
    """Return the shrunk rows for a tile of ranks, [rows, ranks], rounded."""
    ranks = gl.arange(0, RANKS, gl.SliceLayout(0, gl.DotOperandLayout(0, SUMS, 2)))
    own = (tile % WORLD * PARTS + part) * ((TILES + WORLD - 1) // WORLD) + tile // WORLD
    at = adapters.shrunk + ((own * slots + slot) * RANKS)[:, None] + ranks[None, :]
    return gl.load(at, mask=(whose >= 0)[:, None], other=0.0).to(adapters.b.dtype.element_ty)


@gluon.jit
def _added(
    result, shrunk, ws, whose, slot, first, adapter_slot, part, adapters, slots, height, TILES: gl.constexpr,
    WORLD: gl.constexpr, PARTS: gl.constexpr,
):  # fmt: skip
    """Return ``result`` with the term of the adapter in ``adapter_slot`` for its rows.

    ``shrunk`` and ``ws`` are of the first ranks.
    """
    count = gl.load(adapters.tiles + adapter_slot * SLOT_STRIDE + part)
    mine = whose == adapter_slot
    acc = mma_v2(gl.where(mine[:, None], shrunk, 0.0), ws, gl.zeros(result.shape, gl.float32, SUMS))
    for tile in range(1, count if TILES > 1 else 1):
        more = _shrunk(whose, slot, tile, part, adapters, slots, TILES, WORLD, PARTS)
        ws = _expanding(first, adapter_slot, tile, adapters, height, result.shape[1], TILES)
        acc = mma_v2(gl.where(mine[:, None], more, 0.0), ws, acc)
    chosen = gl.convert_layout(mine & (count > 0), gl.SliceLayout(1, SUMS))
    # Not by `rounded`: behind its own instructions the compiler lets each product of the layer wait for the last one.
    wide = result.to(gl.float32)
    return gl.where(chosen[:, None], wide + acc, wide).to(result.dtype)


@gluon.jit
def adapters_of(
    row, rows, first, other, adapters, height, ROWS: gl.constexpr, OUTPUTS: gl.constexpr, TILES: gl.constexpr,
    PARTS: gl.constexpr,
):  # fmt: skip
    """Load operands of :func:`add_adapters` early: the tensors that no kernel writes.

    The rows are ``ROWS`` rows from ``row`` on, of ``rows`` in all. Return the adapter slot of each row, its index among
    shrunk rows, and the start and end of the list of adapters that the rows may have. Return also the parts of the
    outputs ``first`` and ``other``.
    """
    token = row + gl.arange(0, ROWS, ROWS_OF)
    whose = gl.load(adapters.whose + token, mask=token < rows, other=-1)
    slot = gl.load(adapters.slots + token, mask=token < rows, other=0)
    stretch = adapters.starts + gl.minimum(row, rows - 1) // LISTED
    start, stop = gl.load(stretch), gl.load(stretch + 1)
    one, two = _part_of(first, adapters.bounds, PARTS), _part_of(other, adapters.bounds, PARTS)
    return whose, slot, start, stop, one, two


@gluon.jit
def add_adapters(
    left, right, first, other, given, adapters, slots, height, TILES: gl.constexpr, WORLD: gl.constexpr,
    PARTS: gl.constexpr,
):  # fmt: skip
    """Return ``left`` and ``right`` [rows of x, outputs] of a layer with the terms of adapters.

    They begin at the outputs ``first`` and ``other``; each is of one part. ``given`` is the result of
    :func:`adapters_of`. ``height`` is the number of outputs of all parts.
    """
    OUTPUTS: gl.constexpr = left.shape[1]
    whose, slot, start, stop, one, two = given
    shrunk = _shrunk(whose, slot, 0, one, adapters, slots, TILES, WORLD, PARTS)
    shrunk_other = _shrunk(whose, slot, 0, two, adapters, slots, TILES, WORLD, PARTS)
    left, right = gl.convert_layout(left, SUMS), gl.convert_layout(right, SUMS)
    for at in range(start, stop):
        adapter_slot = gl.load(adapters.present + at)
        ws = _expanding(first, adapter_slot, 0, adapters, height, OUTPUTS, TILES)
        ws_other = _expanding(other, adapter_slot, 0, adapters, height, OUTPUTS, TILES)
        left = _added(
            left, shrunk, ws, whose, slot, first, adapter_slot, one, adapters, slots, height, TILES, WORLD, PARTS
        )
        right = _added(
            right, shrunk_other, ws_other, whose, slot, other, adapter_slot, two, adapters, slots, height, TILES, WORLD,
            PARTS,
        )  # fmt: skip
    return left, right
