"""Maps of :mod:`preheat.backends.cuda.matmul.gemm`: the tile of a program, and the rows that meet a matrix.

A map pairs rows with matrices: all rows with one, or the rows of an expert with its own. It returns the number of the
matrix, the tile's first output, the first row of all, the tile's first row behind it, how many rows there are, and the
rows of x.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

GROUP: tl.constexpr = tl.constexpr(8)
"""Tiles of weights that programs running together share, so that the rows of x that they read stay in L2."""


class Cut(NamedTuple):
    """Sizes of a tile, and the number of splits of the inputs."""

    outputs: int
    rows: int
    inputs: int
    splits: int


class Routed(NamedTuple):
    """Tensors of the rows of experts, see :class:`preheat.backends.cuda.matmul.moe.route.Arrangement`.

    A split of y has ``numbers`` numbers.
    """

    experts: Any
    starts: Any
    counts: Any
    tokens: Any
    numbers: int


class RoutedForm(NamedTuple):
    """Constants of experts.

    ``gathered``: rows of x are tokens, else they lie as the rows of y. ``arranged``: rows are arranged in blocks, else
    each slot is a block of one row. ``dealt``: the experts are those of a rank, ``first`` of all and on. Slots of other
    experts get no rows.
    """

    experts: int
    top_k: int
    gathered: bool
    arranged: bool
    dealt: bool = False
    first: int = 0


@triton.jit
def corner(rows, outputs, CUT: tl.constexpr):
    """Return the first output and the first row of a program's tile."""
    across = tl.cdiv(outputs, CUT.outputs)
    down = tl.cdiv(rows, CUT.rows)
    group = tl.program_id(0) // (GROUP * down)
    inside = tl.program_id(0) % (GROUP * down)
    size = tl.minimum(across - group * GROUP, GROUP)
    first = (group * GROUP + inside % size) * CUT.outputs
    row = inside // size * CUT.rows
    return first, row


@triton.jit
def all_rows(groups, rows, outputs, GROUPS: tl.constexpr, CUT: tl.constexpr):
    """Let all rows meet one matrix; rows beyond the last one are copies of it."""
    first, row = corner(rows, outputs, CUT)
    return 0, first, 0, row, rows, tl.minimum(row + tl.arange(0, CUT.rows), rows - 1)


@triton.jit
def all_rows_masked(groups, rows, outputs, GROUPS: tl.constexpr, CUT: tl.constexpr):
    """Let all rows meet one matrix; the product does not read rows beyond the last one."""
    first, row = corner(rows, outputs, CUT)
    return 0, first, 0, row, rows, row + tl.arange(0, CUT.rows)


@triton.jit
def by_expert(groups, rows, outputs, GROUPS: tl.constexpr, CUT: tl.constexpr):
    """Let the rows of each expert meet its matrix.

    Tiles of one expert follow each other, first the tiles with the same weights.
    """
    tile = tl.program_id(0)
    across = tl.cdiv(outputs, CUT.outputs)
    expert = tl.load(groups.experts + tile // across)
    if GROUPS.arranged:
        start, rows = tl.load(groups.starts + expert), tl.load(groups.counts + expert)
        blocks = tl.cdiv(rows, CUT.rows)
        inside = tile - start * across
        below = inside % blocks * CUT.rows
        first = inside // blocks * CUT.outputs
        start = start * CUT.rows
    else:
        start, rows, below = tile // across, 1, 0
        first = tile % across * CUT.outputs
        if GROUPS.dealt:
            expert -= GROUPS.first
    place = start + tl.minimum(below + tl.arange(0, CUT.rows), rows - 1)
    source = place
    if GROUPS.gathered:
        source = tl.load(groups.tokens + place) if GROUPS.arranged else place // GROUPS.top_k
    return expert, first, start, below, rows, source


@triton.jit
def programs(groups, outputs, GROUPS: tl.constexpr, CUT: tl.constexpr):
    """Return how many programs have a tile of an expert's rows."""
    if GROUPS.arranged:
        count = tl.load(groups.starts + GROUPS.experts) * tl.cdiv(outputs, CUT.outputs)
    elif GROUPS.dealt:
        expert = tl.load(groups.experts + tl.program_id(0) // tl.cdiv(outputs, CUT.outputs)) - GROUPS.first
        count = tl.where((expert >= 0) & (expert < GROUPS.experts), tl.num_programs(0), 0)
    else:
        count = tl.num_programs(0)
    return count
