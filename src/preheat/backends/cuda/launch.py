"""What every kernel shares: how it is launched behind the one before it.

With programmatic dependent launch a kernel's blocks are placed while the kernel before it still runs, so that launches
overlap. A kernel then must wait before it touches anything that an earlier kernel writes or reads: each begins with
:func:`begin`, whose wait covers all earlier kernels, because each of them waited in turn. Programs that touch nothing
may end without it, if another one of the launch waits.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
from triton.runtime._async_compile import active_mode

from preheat.backends.cuda.triton_cache import keep_libraries

keep_libraries()

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
"""Kernels run in Triton's interpreter, on tensors of the host."""

OVERLAP = not INTERPRETED
"""Whether kernels are launched behind each other in this way."""

COMPILED = tl.constexpr(not INTERPRETED)


@triton.jit
def begin(overlap: tl.constexpr):
    """Wait until all that earlier kernels wrote can be seen; let the next one get in place."""
    if overlap:
        gdc_wait()
        gdc_launch_dependents()


@triton.jit
def begin_early(overlap: tl.constexpr):
    """Of a kernel whose operands no kernel writes that has not ended when the one before it begins: the next one may
    get in place. It has to call :func:`begin_late`, too.
    """
    if overlap:
        gdc_launch_dependents()


@triton.jit
def begin_late(overlap: tl.constexpr):
    """Behind :func:`begin_early`: wait for the kernel before, before what it wrote is read and before this one ends."""
    if overlap:
        gdc_wait()


@triton.jit
def widened(numbers, dtype: tl.constexpr):
    """``numbers`` of eight bits or fewer as ``dtype``, for a product in the matrix unit.

    Triton follows an operand back to where it was loaded, and where that was narrower it deals out the inputs of
    ``mma.sync`` in another order, so that each thread loads whole words. Other instructions keep the order: sums would
    differ in the last bit. A move that the compiler cannot see through ends its search.

    Numbers of float8 go through fp32, which is exact, and is compiled for Hopper without F2F, an instruction for each
    number between fp16 and bfloat16.
    """
    wide = (numbers.to(tl.float32) if numbers.dtype.is_fp8() else numbers).to(dtype)
    if COMPILED and wide.dtype.primitive_bitwidth == 16:
        wide = tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [wide], dtype=wide.dtype, is_pure=False, pack=2)
    return wide


def options(**more: Any) -> dict[str, Any]:
    """Keywords of a launch: num_warps and num_stages as given, and the overlap."""
    return {**more, "overlap": OVERLAP, **({"launch_pdl": True} if OVERLAP else {})}


def processors(device: torch.device) -> int:
    """Its multiprocessors, for persistent grids; 1 for Triton's interpreter."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


class Loading(ThreadPoolExecutor):
    """Compiles a kernel, then builds its launcher and brings it to the device, which its first launch would do else."""

    def submit(self, build: Callable[[], Any], /) -> Future[Any]:  # type: ignore[override]  # Triton's one use
        return super().submit(self._load, build, torch.cuda.current_device())

    @staticmethod
    def _load(build: Callable[[], Any], device: int) -> Any:
        torch.cuda.set_device(device)  # a thread has none of its own
        kernel = build()
        assert kernel.run is not None
        return kernel


@contextmanager
def compiling(threads: int, *, ignore_errors: bool = False) -> Iterator[None]:
    """Kernels that are launched inside are compiled, or read from Triton's cache, by so many ``threads`` and not run.

    All are there in the end; the first error is raised then, unless it is to be ignored.
    """
    kind = triton.JITFunction
    run = kind.run

    def compile_alone(self: Any, *args: Any, grid: Any, warmup: bool, **more: Any) -> Any:
        return run(self, *args, grid=grid, warmup=True, **more)

    try:
        with Loading(threads) as pool, triton.AsyncCompileMode(pool, ignore_errors=ignore_errors):
            kind.run = compile_alone
            try:
                yield
            finally:
                kind.run = run
    finally:
        active_mode.set(None)  # which Triton leaves set where a kernel did not compile
