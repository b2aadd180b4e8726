"""Compiling kernels side by side, before anything runs.

Launches inside :func:`compiling` compile their kernels and do not run them. Kernels that Triton's cache lacks are
compiled by processes (:mod:`preheat.backends.cuda.device.builders`); threads of this process load them onto the device.
"""

from __future__ import annotations

import importlib
import io
import pickle
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from hashlib import sha256
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import triton
from triton._C.libtriton import get_cache_invalidating_env_vars
from triton.compiler.compiler import make_backend
from triton.runtime import driver
from triton.runtime._async_compile import FutureKernel, active_mode
from triton.runtime.cache import get_cache_key, get_cache_manager
from triton.runtime.errors import TritonError
from triton.runtime.jit import JITCallable

from preheat.backends.cuda.device.builders import CREW
from preheat.backends.cuda.device.detect import card_at
from preheat.errors import KernelRefused


class Job(NamedTuple):
    """A kernel to compile, with everything that its program depends on."""

    kernel: Any
    source: type
    signature: dict[str, Any]
    constants: dict[tuple[int, ...], Any]
    attrs: dict[tuple[int, ...], Any]
    options: Any
    target: Any

    def source_code(self) -> Any:
        """Return the source as Triton compiles it."""
        return self.source(self.kernel, self.signature, self.constants, self.attrs)

    def is_cached(self) -> bool:
        """Return whether Triton's cache has the kernel."""
        source = self.source_code()
        key = get_cache_key(source, make_backend(self.target), self.options, get_cache_invalidating_env_vars())
        folder = get_cache_manager(sha256(key.encode()).hexdigest())
        return folder.get_group(f"{source.name[:150]}.json") is not None

    def packed(self) -> bytes:
        """Return the job as bytes for another process. Functions are named there, and found by their names."""
        file = io.BytesIO()
        _Pickler(file).dump(tuple(self))
        return file.getvalue()


class _Pickler(pickle.Pickler):
    """Names a function of Triton by its module and its name there."""

    def reducer_override(self, value: Any) -> Any:
        if not isinstance(value, JITCallable):
            return NotImplemented
        return _named, (value.fn.__module__, value.fn.__qualname__)


def _named(module: str, name: str) -> Any:
    return getattr(importlib.import_module(module), name)


def compile_job(packed: bytes) -> None:
    """Compile the kernel of a packed job into Triton's cache. The process needs no GPU."""
    job = Job(*pickle.loads(packed))
    driver.set_active(SimpleNamespace(get_current_target=lambda: job.target))
    triton.compile(job.source_code(), target=job.target, options=job.options.__dict__)


class Loading(ThreadPoolExecutor):
    """A pool that compiles kernels, builds their launchers and loads them onto the device.

    Otherwise the first launch of a kernel builds its launcher and loads it.
    """

    def __init__(self, threads: int) -> None:
        super().__init__(threads)
        self.job: Job | None = None  # of the kernel that is submitted next

    def submit(self, build: Callable[[], Any], /) -> Future[Any]:  # type: ignore[override]  # Triton's one use
        return super().submit(self._load, build, torch.cuda.current_device(), self.job)

    @staticmethod
    def _load(build: Callable[[], Any], device: int, job: Job | None = None) -> Any:
        torch.cuda.set_device(device)  # each thread has its own current device, at first the default
        if job is not None:
            _build_elsewhere(job)
        try:
            kernel = build()
            assert kernel.run is not None
        except torch.OutOfMemoryError:
            raise
        except (TritonError, RuntimeError) as error:
            raise KernelRefused(_why(error)) from error
        return kernel


def _build_elsewhere(job: Job) -> None:
    """Let a builder compile the kernel, unless it is compiled; without builders do nothing."""
    if not job.is_cached() and (found := CREW.start()) is not None:
        with suppress(pickle.PicklingError):  # a kernel made inside of a function; no kernel of ours is
            found.build(job.packed())


def _why(error: Exception) -> str:
    """Return one line on a kernel that was refused."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (
        f"a kernel does not compile for compute capability {card_at().version}: {type(error).__name__}: "
        f"{lines[-1] if lines else 'no reason given'}"
    )


@contextmanager
def compiling(threads: int, *, ignore_errors: bool = False) -> Iterator[None]:
    """Compile kernels launched inside, or read them from Triton's cache, without running them.

    The pool has ``threads`` threads. All kernels are ready at the end. Unless ``ignore_errors``, raise
    KernelRefused then if one of them does not compile.
    """
    kind = triton.JITFunction
    run, compile_one = kind.run, kind._do_compile
    begun: list[tuple[dict[Any, Any], Any]] = []

    def run_nothing(self: Any, *args: Any, grid: Any, warmup: bool, **more: Any) -> Any:
        return run(self, *args, grid=grid, warmup=True, **more)

    def submit(self: Any, key: Any, *given: Any) -> Any:
        signature, device, constants, options, attrs, *_ = given
        kernels, _, target, *_ = self.device_caches[device]
        pool.job = Job(self, self.ASTSource, signature, constants, attrs, options, target)
        kernels[key] = compile_one(self, key, *given)  # the next launch finds it, and asks for nothing
        begun.append((kernels, key))
        return kernels[key]

    try:
        with Loading(threads) as pool, triton.AsyncCompileMode(pool, ignore_errors=ignore_errors):
            kind.run, kind._do_compile = run_nothing, submit
            try:
                yield
            finally:
                kind.run, kind._do_compile = run, compile_one
    finally:
        active_mode.set(None)  # Triton leaves it set where a kernel did not compile
        for kernels, key in begun:
            found = kernels.pop(key)
            kernel = found.kernel if isinstance(found, FutureKernel) else found
            if kernel is not None:  # it has compiled
                kernels[key] = kernel
