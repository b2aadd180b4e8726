"""Sources of cold events on CUDA: Triton's hooks, captured graphs, the allocator's counter."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from typing import Any

import torch

from preheat.backends.cold import (
    DYNAMO,
    IMPORTS,
    NO_FALLBACK,
    NO_LLVM_FUNCTIONS,
    NO_RECIPES,
    SELDOM,
    Counted,
    Tally,
    Watched,
)


def triton(undo: ExitStack) -> Counted:
    """Count kernels compiled by Triton, read from its disk cache or loaded onto the device."""
    tally = Tally()
    with suppress(ModuleNotFoundError):  # without Triton there is nothing to compile with
        from triton import knobs

        undo.callback(hook_triton(knobs, tally))
    return Counted("triton", tally.read, tally.last)


def hook_triton(knobs: Any, tally: Tally) -> Callable[[], None]:
    """Listen to ``triton.knobs``, after the listener already there; return a function that stops."""
    before, active = knobs.compilation.listener, [True]

    def compiled(*, src: Any, cache_hit: bool, **more: Any) -> None:
        if before is not None:
            before(src=src, cache_hit=cache_hit, **more)
        if active:
            tally.add(f"{src.name} was {'read from the cache' if cache_hit else 'compiled'}")

    def loaded(module: Any, function: Any, name: str, metadata_group: Any, hash: str) -> None:  # noqa: A002
        tally.add(f"{name} was loaded")

    def end() -> None:
        active.clear()  # another listener may have been put in front of this one since
        if knobs.compilation.listener is compiled:
            knobs.compilation.listener = before
        knobs.runtime.kernel_load_end_hook.remove(loaded)

    knobs.compilation.listener = compiled
    knobs.runtime.kernel_load_end_hook.add(loaded)
    return end


def graph_capture(undo: ExitStack) -> Counted:
    """Count graphs captured through torch, Inductor's own included."""
    tally = Tally()
    undo.callback(count_calls(torch.cuda.CUDAGraph, "capture_begin", tally, "a CUDA graph was captured"))
    return Counted("graph capture", tally.read, tally.last)


def count_calls(owner: type, method: str, tally: Tally, detail: str) -> Callable[[], None]:
    """Tell ``tally`` of every call of ``owner.method``; return a function that stops.

    It serves classes without a hook.
    """
    inner, active = getattr(owner, method), [True]

    @functools.wraps(inner)
    def counted(*args: Any, **kwargs: Any) -> Any:
        if active:
            tally.add(detail)
        return inner(*args, **kwargs)

    def end() -> None:
        active.clear()  # it may have been wrapped again since
        if getattr(owner, method) is counted:
            setattr(owner, method, inner)

    setattr(owner, method, counted)
    return end


def allocator(undo: ExitStack) -> Counted:
    """Count requests of torch's caching allocator to CUDA for memory not needed by warm-up."""
    stats = functools.partial(torch._C._cuda_memoryStats, torch.cuda.current_device())

    def grown(number: int) -> list[str]:
        reserved = stats()["reserved_bytes"]["all"]["current"]
        return [f"{number} times the allocator asked CUDA for memory; it holds {reserved:,} bytes"]

    return Counted("allocator", lambda: stats()["num_device_alloc"], grown, every=SELDOM)


COLD_SOURCES: Mapping[str, Watched] = {
    "dynamo": DYNAMO,
    "triton": Watched("hook", "Triton's compilation listener and kernel load hook", triton),
    "llvm": NO_LLVM_FUNCTIONS,
    "recipe": NO_RECIPES,
    "host fallback": NO_FALLBACK,
    "graph capture": Watched("hook", "calls of `torch.cuda.CUDAGraph.capture_begin`", graph_capture),
    "allocator": Watched("counter", "`num_device_alloc` of torch's caching allocator, every eighth step", allocator),
    "module loading": Watched(
        "none", "the driver gives no notice; `CUDA_MODULE_LOADING=EAGER` loads everything at the start"
    ),
    "import": IMPORTS,
}
