"""Gaudi's PyTorch bridge: the only module that imports ``habana_frameworks``.

In lazy mode operations accumulate until ``mark_step``, which looks their graph up, compiles it if it is new, and
launches it. The end of a graph therefore decides the compiled recipe: :meth:`Bridge.unit` ends a graph.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import torch

from preheat.backends.hpu.detect import FRAMEWORKS, is_simulated
from preheat.errors import SettingsError
from preheat.settings import Settings

P = ParamSpec("P")
R = TypeVar("R")

LAZY = "PT_HPU_LAZY_MODE"
DEVICES = torch.device("hpu", 0), torch.device("cpu", 0)
"""Device of tensors: the card, or for a fake the host.

The host has a number here that its own code never gives.
"""


def wants_lazy(settings: Settings) -> bool:
    """Return whether ``settings`` run on the bridge's lazy backend.

    It is the backend of their execution mode, lazy by default.
    """
    if settings.execution_mode != "auto":
        return settings.execution_mode in ("graphs", "lazy")
    return settings.lazy_mode is not False


class Bridge:
    """The loaded bridge.

    ``device`` is the device of tensors. ``lazy`` tells whether operations accumulate, and ``inside`` whether a unit is
    running. ``collects`` tells whether captured or accumulated graphs may hold collectives.

    Raises SettingsError if the bridge was loaded before in the other mode: it reads the mode once in a process.
    """

    def __init__(self, settings: Settings) -> None:
        self.simulated, self.lazy = is_simulated(), wants_lazy(settings)
        asked = settings.lazy_collectives
        self.collects = not self.lazy or asked is not False
        told = {  # variables that the bridge itself reads, when it is loaded
            LAZY: self.lazy,
            "PT_HPU_ENABLE_LAZY_COLLECTIVES": True if asked is None and settings.tensor_parallel_size > 1 else asked,
            "PT_HPU_METRICS_GC_DETAILS": settings.metrics_gc_details,
        }
        os.environ.update({name: str(int(value)) for name, value in told.items() if value is not None})
        self._core = importlib.import_module(f"{FRAMEWORKS}.torch.core")
        self.hpu = importlib.import_module(f"{FRAMEWORKS}.torch.hpu")
        self._metrics = importlib.import_module(f"{FRAMEWORKS}.torch.hpu.metrics")
        internal = importlib.import_module(f"{FRAMEWORKS}.torch.utils.internal")
        if internal.is_lazy() != self.lazy:
            raise SettingsError(
                f"the bridge is already loaded in this process with {LAZY}={int(not self.lazy)}: set it to "
                f"{int(self.lazy)} before the process starts",
                param="lazy_mode",
            )
        self.device = DEVICES[self.simulated]
        self.inside = False

    @contextmanager
    def unit(self) -> Iterator[None]:
        """Run the code inside on the device, as its own lazy graph.

        So the same operations on the same shapes are one recipe, whatever runs before and after. No graph ends within a
        unit.
        """
        if self.inside:
            yield
            return
        self.end()
        self.inside = True
        try:
            with self.hpu.stream(self.hpu.current_stream()):
                yield
        finally:
            self.inside = False
        self.end()

    def end(self) -> None:
        """End the accumulated lazy graph, if any, except within a unit."""
        if self.lazy and not self.inside:
            self._core.mark_step()

    @contextmanager
    def program(self) -> Iterator[None]:
        """Run units as a program, in lazy mode.

        Operations between the units inside accumulate too. Operations after the last unit end in a graph of their own,
        so that successive programs share no graph.
        """
        if not self.lazy:
            yield
            return
        with self.hpu.stream(self.hpu.current_stream()):
            yield
            self.end()

    def as_unit(self, function: Callable[P, R]) -> Callable[P, R]:
        """Return ``function`` with each call as a unit."""
        return _within(self.unit, function)

    def as_program(self, function: Callable[P, R]) -> Callable[P, R]:
        """Return ``function`` with each call as a program."""
        return _within(self.program, function)

    @contextmanager
    def whole(self) -> Iterator[None]:
        """Capture the code inside in one piece: no unit ends in it."""
        before, self.inside = self.inside, True
        try:
            yield
        finally:
            self.inside = before

    def compile_backend(self) -> str:
        """Register torch.compile's backend, and return its name."""
        with suppress(ModuleNotFoundError):  # versions that register it when they are loaded
            importlib.import_module(f"{FRAMEWORKS}.torch.dynamo.compile_backend")
        return "hpu_backend"

    def metric(self, name: str) -> dict[str, Any]:
        """Return a counter of the bridge, ``graph_compilation`` or ``cpu_fallback``.

        ``TotalNumber`` is a count, and ``TotalTime`` is in microseconds.
        """
        return dict(self._metrics.metric_global(name).stats())

    def synchronize(self) -> None:
        self.hpu.synchronize()

    @property
    def process_group(self) -> str:
        """Name of torch.distributed's backend for collectives among cards.

        The bridge's module registers the backend first.
        """
        importlib.import_module(f"{FRAMEWORKS}.torch.distributed.hccl")
        return "hccl"


def _within(context: Callable[[], AbstractContextManager[None]], function: Callable[P, R]) -> Callable[P, R]:
    """Return ``function`` with each call in a new ``context``."""

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        with context():
            return function(*args, **kwargs)

    return call
