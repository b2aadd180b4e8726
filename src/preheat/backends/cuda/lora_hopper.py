"""What adapters add, in the kernel of a layer for many rows on Hopper: behind its sums, before its activation.

Rows shrink in a launch ahead, beside which the layer's kernel begins. Each number is computed as
:mod:`preheat.backends.cuda.lora_expand` does it in a launch of its own: the layer's output is rounded, what its row
shrank to is rounded and expanded, and the sum is rounded once more.

A group of warps goes through the adapters of its rows. Rows of other adapters are zeros there, which leave a sum as it
is. Sums of the matrix unit lie in registers as those of ``mma.sync`` do, whose operands each thread loads where it
needs them: so nothing goes through shared memory, which the ring fills.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from preheat.backends.cuda.lora_blocks import STRETCH
from preheat.backends.cuda.lora_shrink import PLACE_IN_TABLE
from preheat.ops.values import TILE

LISTED = gl.constexpr(STRETCH)
RANKS = gl.constexpr(TILE)
SUMS = gl.constexpr(gl.NVMMADistributedLayout(version=[2, 0], warps_per_cta=[4, 1], instr_shape=[16, 8]))
"""Where sums [rows, outputs] lie."""

ROWS_OF = gl.constexpr(gl.SliceLayout(1, gl.DotOperandLayout(0, SUMS.value, 2)))
"""Where numbers of rows lie beside what those shrank to."""


@gluon.jit
def _part_of(first, bounds, PARTS: gl.constexpr):
    """Of the output ``first``."""
    part = 0
    for each in gl.static_range(1, PARTS):
        part += (first >= gl.load(bounds + each)).to(gl.int32)
    return part


@gluon.jit
def _expanding(first, place, tile, adapters, height, OUTPUTS: gl.constexpr, TILES: gl.constexpr):
    """[ranks, outputs]: a tile of ranks of the second matrix in ``place``, from output ``first`` on."""
    right: gl.constexpr = gl.DotOperandLayout(1, SUMS, 2)
    out = gl.arange(0, OUTPUTS, gl.SliceLayout(0, right))[None, :]
    at = adapters.b + ((place * TILES + tile).to(gl.int64) * height + first) * RANKS
    return gl.load(at + out * RANKS + gl.arange(0, RANKS, gl.SliceLayout(1, right))[:, None])


@gluon.jit
def _shrunk(whose, slot, tile, part, adapters, slots, TILES: gl.constexpr, WORLD: gl.constexpr, PARTS: gl.constexpr):
    """[rows, ranks]: what rows shrank to for a tile of ranks, rounded."""
    ranks = gl.arange(0, RANKS, gl.SliceLayout(0, gl.DotOperandLayout(0, SUMS, 2)))
    own = (tile % WORLD * PARTS + part) * ((TILES + WORLD - 1) // WORLD) + tile // WORLD
    at = adapters.shrunk + ((own * slots + slot) * RANKS)[:, None] + ranks[None, :]
    return gl.load(at, mask=(whose >= 0)[:, None], other=0.0).to(adapters.b.dtype.element_ty)


@gluon.jit
def _added(
    result, shrunk, ws, whose, slot, first, place, part, adapters, slots, height, TILES: gl.constexpr,
    WORLD: gl.constexpr, PARTS: gl.constexpr,
):  # fmt: skip
    """``result`` with what the adapter in ``place`` adds to its rows. ``shrunk`` and ``ws`` are of the first ranks."""
    count = gl.load(adapters.tiles + place * PLACE_IN_TABLE + part)
    mine = whose == place
    acc = mma_v2(gl.where(mine[:, None], shrunk, 0.0), ws, gl.zeros(result.shape, gl.float32, SUMS))
    for tile in range(1, count if TILES > 1 else 1):
        more = _shrunk(whose, slot, tile, part, adapters, slots, TILES, WORLD, PARTS)
        ws = _expanding(first, place, tile, adapters, height, result.shape[1], TILES)
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
    """What :func:`add_adapters` needs that no kernel writes, early: of ``ROWS`` rows from ``row`` on, of which there
    are ``rows`` in all, whose they are, where they are in what was shrunk, and from where to where the adapters that
    they may have are listed; the parts to which the outputs ``first`` and ``other`` belong; and what the first adapter
    of the list has for ``OUTPUTS`` from each of them on.
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
    """``left`` and ``right`` [rows of x, outputs] of a layer, from the outputs ``first`` and ``other`` on, each of one
    part, with what the adapters of their rows add, of which :func:`adapters_of` gave what there is. ``height`` are the
    outputs of all parts.
    """
    OUTPUTS: gl.constexpr = left.shape[1]
    whose, slot, start, stop, one, two = given
    shrunk = _shrunk(whose, slot, 0, one, adapters, slots, TILES, WORLD, PARTS)
    shrunk_other = _shrunk(whose, slot, 0, two, adapters, slots, TILES, WORLD, PARTS)
    left, right = gl.convert_layout(left, SUMS), gl.convert_layout(right, SUMS)
    for at in range(start, stop):
        place = gl.load(adapters.present + at)
        ws = _expanding(first, place, 0, adapters, height, OUTPUTS, TILES)
        ws_other = _expanding(other, place, 0, adapters, height, OUTPUTS, TILES)
        left = _added(left, shrunk, ws, whose, slot, first, place, one, adapters, slots, height, TILES, WORLD, PARTS)
        right = _added(
            right, shrunk_other, ws_other, whose, slot, other, place, two, adapters, slots, height, TILES, WORLD, PARTS
        )
    return left, right
