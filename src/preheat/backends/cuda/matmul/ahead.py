"""Weights asked for ahead: the L2 cache fetches the first weights of a tile while the kernel before still runs.

No kernel writes weights, so a program may ask for them before it waits for the kernel before. Asking changes no bits:
nothing is read. Only programs of few rows ask: the time of others is not the time of the first bytes.

Plain experts do not ask. Most of their programs begin after the kernel before has ended, and their weights would pass
the cache twice: measured on an H200, steps of Qwen3-30B-A3B and GLM-4.7-Flash would take longer.
"""

from __future__ import annotations

import triton
import triton.language as tl

from preheat.backends.cuda.device.launch import overlap
from preheat.backends.cuda.matmul.config import Tile
from preheat.backends.cuda.matmul.products import plain
from preheat.backends.cuda.matmul.weights import STEP, Weight

LINE: tl.constexpr = tl.constexpr(128)
"""Bytes of a line of the cache."""

PLAIN = 1024
"""Bytes of an output's plain weights that a program asks for."""

POWERS = 512
"""Bytes of an output's codes of MXFP4 that a program asks for."""

FEW = 16
"""The most rows of a tile that asks."""


def asked(tile: Tile, weight: Weight, early: bool) -> int:
    """Return the bytes of an output's weights that a program of ``tile`` asks for, or 0.

    ``early``: everything that says which weights these are was written at least two launches before.
    """
    if not early:
        return 0
    if weight.form == "plain":
        return 0 if len(weight.shape) == 3 else asked_plain(tile)
    few = weight.scheme.powers and weight.splits == 1 and tile.rows <= FEW
    return POWERS if few and overlap() else 0


def asked_plain(tile: Tile) -> int:
    """Return the bytes of an output's plain weights that a program of ``tile`` asks for, or 0."""
    return PLAIN if tile.rows <= FEW and overlap() else 0


@triton.jit
def ask(PRODUCT: tl.constexpr, w, group, out, inputs, height, BYTES: tl.constexpr):
    """Ask the cache for the first ``BYTES`` of the weights of the outputs ``out`` of matrix ``group``.

    A matrix has ``height`` outputs. Bytes behind an output's last one are not asked for.
    """
    if PRODUCT == plain:  # noqa: SIM300 - both are names of functions
        SIZE: tl.constexpr = w.dtype.element_ty.primitive_bitwidth // 8
        first = w + (tl.cast(group, tl.int64) * height + out.to(tl.int64)) * inputs
        at = first[:, None] + tl.minimum(tl.arange(0, BYTES // LINE) * (LINE // SIZE), inputs - 1)[None, :]
    else:
        STEP_BYTES: tl.constexpr = STEP // 2
        step = tl.minimum(tl.arange(0, BYTES // STEP_BYTES), w.row_bytes // STEP_BYTES - 1)
        first = w.codes + tl.cast(group, tl.int64) * height * w.row_bytes
        at = first + (step.to(tl.int64)[None, :] * height + out[:, None]) * STEP_BYTES
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [at.to(tl.int64)], dtype=tl.int32, is_pure=False, pack=1
    )
