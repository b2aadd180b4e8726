"""Launches of kernels, each overlapping with the kernel before it.

With programmatic dependent launch (PDL) a kernel's blocks are placed while the kernel before it still runs, so that
launches overlap. A kernel must wait before it touches anything written or read by an earlier kernel. So each kernel
begins with :func:`begin`. Its wait covers all earlier kernels, because each of them waited in turn. Programs that touch
nothing may end without a wait, if another program of the launch waits.
"""

from __future__ import annotations

import os
from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait, num_warps
from triton.language.target_info import current_target
from triton.runtime.jit import constexpr_function

from preheat.backends.cuda.device.detect import card_at
from preheat.backends.cuda.device.kernel_keys import order_keys
from preheat.backends.cuda.device.launchers import load_alone

load_alone()
order_keys()

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
"""Kernels run in Triton's interpreter, on tensors of the host."""


@cache
def overlap() -> bool:
    """Whether launches overlap: on cards with early launches (PDL)."""
    return not INTERPRETED and card_at().early_launch


COMPILED = tl.constexpr(not INTERPRETED)


@triton.jit
def begin(overlap: tl.constexpr):
    """Wait until all writes of earlier kernels are visible; let the next kernel launch."""
    if overlap:
        gdc_wait()
        gdc_launch_dependents()


@triton.jit
def begin_early(overlap: tl.constexpr):
    """Let the next kernel launch early (PDL); :func:`begin_late` must follow.

    The operands of the calling kernel must have been written at least two launches before, or by no kernel.
    """
    if overlap:
        gdc_launch_dependents()


@triton.jit
def begin_late(overlap: tl.constexpr):
    """Wait for the previous kernel, after :func:`begin_early`.

    The wait must come before any read of the previous kernel's output and before this kernel ends.
    """
    if overlap:
        gdc_wait()


@constexpr_function
def multiplied_by_tcgen05(outputs, warps):
    """Whether a product of ``outputs`` and a program of ``warps`` use the matrix unit of 10.0."""
    found = current_target()
    return found is not None and found.backend == "cuda" and found.arch // 10 == 10 and outputs >= 64 and warps >= 4


@constexpr_function
def multiplied_by_warp_groups(outputs, warps):
    """Whether a product of ``outputs`` and a program of ``warps`` use an instruction of four warps (wgmma, tcgen05)."""
    found = current_target()
    groups = found is not None and found.backend == "cuda" and found.arch // 10 in (9, 10)
    return groups and outputs >= 64 and warps % 4 == 0


@triton.jit
def widened(numbers, dtype: tl.constexpr, FIRST: tl.constexpr = False):
    """Return ``numbers`` of eight bits or fewer as ``dtype``, for a product in the matrix unit.

    Triton follows an operand back to its load. Where the loaded dtype is narrower, Triton deals out the inputs of
    ``mma.sync`` in another order, so that each thread loads whole words. Other instructions keep the order: sums would
    differ in the last bit. A move that the compiler cannot see through ends the search.

    ``FIRST``: numbers are the first operand, [outputs, inputs]. The matrix unit of 10.0 (tcgen05) reads it from memory,
    where its order is fixed, and the compiler of its loops takes no move with side effects.

    Numbers of float8 go through fp32, which is exact. Hopper then compiles without F2F, an instruction for each number
    between fp16 and bfloat16.
    """
    wide = (numbers.to(tl.float32) if numbers.dtype.is_fp8() else numbers).to(dtype)
    if COMPILED and wide.dtype.primitive_bitwidth == 16:
        PURE: tl.constexpr = FIRST and multiplied_by_tcgen05(wide.shape[0], num_warps())
        wide = tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [wide], dtype=wide.dtype, is_pure=PURE, pack=2)
    return wide


def options(*, alone: bool = False, **more: Any) -> dict[str, Any]:
    """Return keywords of a launch: num_warps and num_stages as given, and the overlap.

    ``alone``: no program begins before the kernel before has ended. Otherwise long programs gather on the
    multiprocessors that are free first.
    """
    early = {"launch_pdl": True} if overlap() and not alone else {}
    return {**more, "overlap": overlap(), **early}


def processors(device: torch.device) -> int:
    """Return the number of multiprocessors for persistent grids; 1 for Triton's interpreter."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
