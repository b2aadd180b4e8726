"""Both products of adapters on CUDA in one launch, for few rows, see :mod:`preheat.backends.cuda.lora`.

The first programs of a block of rows shrink a part of its inputs each. All of the block's wait for the sum, which is
multiplied before the layer's own outputs are there. So programs wait for others of their launch. Those follow one
another, and a device places programs in their order: it has room for ``MOST_ITEMS`` at once.
"""

from __future__ import annotations

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from preheat.backends.cuda.launch import INTERPRETED, begin, begin_early, options
from preheat.backends.cuda.lora_expand import WIDTH, Expansion, expand_tile, output_of
from preheat.backends.cuda.lora_shrink import Shrinking, ShrinkSizes, shrink_block
from preheat.backends.cuda.tuning import PROCESSORS

MOST_ITEMS = PROCESSORS
"""Products of a block that shrinks in a launch which also expands."""

READY = 1 << 20
"""What the counter of a block is when its rows have shrunk, see :mod:`preheat.backends.cuda.lora_shrink`."""


@triton.jit(do_not_specialize=["rows", "slots"])
def _adapt(
    y, z, given, adapters, rows, inputs, size, columns, slots,
    PARTS: tl.constexpr, TILES: tl.constexpr, LEAVES: tl.constexpr, SPLITS: tl.constexpr, WIDTH: tl.constexpr,
    CHUNK: tl.constexpr, RANKS: tl.constexpr, EVEN: tl.constexpr, ROWS: tl.constexpr, STAGES: tl.constexpr,
    COLUMNS: tl.constexpr, ACROSS: tl.constexpr, WHOLE: tl.constexpr, READY: tl.constexpr, gated: tl.constexpr,
    beside: tl.constexpr, shrinks: tl.constexpr, expands: tl.constexpr, overlap: tl.constexpr,
):  # fmt: skip
    """``ACROSS`` tiles of outputs lie side by side. ``beside``: the kernel before this one has waited for x, and writes
    nothing that is read here but y. ``shrinks``, ``expands``: both, but in Triton's interpreter, which runs one program
    after the other.
    """
    parts: tl.constexpr = 1 if gated else PARTS
    block, own = tl.program_id(0) // (ACROSS * parts), tl.program_id(0) % (ACROSS * parts)
    if beside:
        begin_early(overlap)
    else:
        begin(overlap)
    if shrinks:
        place = tl.load(adapters.places + block, mask=block * ROWS < slots, other=-1)
        if place >= 0:
            row = tl.load(adapters.members + block * ROWS + tl.arange(0, ROWS)[:, None])
            for item in range(own, LEAVES * SPLITS * PARTS, ACROSS * parts):
                shrink_block(
                    given, adapters.shrunk, block, item // PARTS, item % PARTS, place, row, rows, inputs, size, slots,
                    PARTS, 1, TILES, LEAVES, SPLITS, WIDTH, CHUNK, ROWS, RANKS, RANKS, EVEN, STAGES, READY, True,
                )  # fmt: skip
    if expands:
        expand_tile(
            y, z, adapters, given.arrived, own % ACROSS, block, own // ACROSS, rows, columns, slots, TILES, RANKS,
            COLUMNS, ROWS, 1, PARTS, WHOLE, READY, gated, False, beside, overlap,
        )  # fmt: skip


def adapt(
    y: Tensor,
    given: Shrinking,
    adapters: Expansion,
    bounds: Sequence[int],
    sizes: ShrinkSizes,
    *,
    beside: bool,
    gated: bool = False,
    out: Tensor | None = None,
) -> Tensor:
    """As :func:`preheat.backends.cuda.lora_shrink.shrink`, then :func:`preheat.backends.cuda.lora_expand.expand`."""
    z, (across, blocks, parts) = output_of(y, adapters, bounds, gated=gated, out=out)
    phases = [(True, False), (False, True)] if INTERPRETED else [(True, True)]
    for shrinks, expands in phases:
        _adapt[(across * parts * blocks,)](
            y, z, given, adapters, len(y), sizes.inputs, sizes.leaf, z.shape[1], adapters.shrunk.shape[3],
            **sizes.constants, ROWS=adapters.block, STAGES=2 if beside else 4, COLUMNS=WIDTH, ACROSS=across,
            WHOLE=all(bound % 16 == 0 for bound in bounds), READY=READY, gated=gated, beside=beside,
            shrinks=shrinks, expands=expands, enable_fp_fusion=False, **options(num_warps=4, num_stages=2),
        )  # fmt: skip
    return z
