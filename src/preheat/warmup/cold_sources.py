"""The origins of cold events: `ORIGINS`.

Each backend watches them in its own way (:mod:`preheat.backends.cold`); docs/cold-events.md shows how.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from contextlib import ExitStack
from types import MappingProxyType

from preheat.backends.base.backend import Backend
from preheat.backends.cold import Counted

ORIGINS: Mapping[str, str] = MappingProxyType(
    {
        "dynamo": "`torch.compile`: Dynamo traces a frame and Inductor builds it",
        "triton": "Triton compiles a kernel, or loads it onto the device",
        "llvm": "LLVM compiles the functions of a model's layers",
        "recipe": "Gaudi's graph compiler compiles a recipe",
        "host fallback": "an operation without a device kernel runs on the host",
        "graph capture": "a step is recorded as a graph",
        "allocator": "the memory pool grows",
        "module loading": "CUDA loads the code of a library's kernel when it is first launched",
        "import": "a step imports a module that is not loaded yet",
    }
)
"""Every origin of cold events except first runs of planned items.

The cold monitor notices first runs itself.
"""


class ColdSources:
    """The sources that a backend watches after warm-up.

    ``close()``, or the end of this object, removes the hooks.
    """

    def __init__(self, backend: Backend, others: Mapping[str, Counted] = MappingProxyType({})) -> None:
        """Start watching; ``others`` are the sources of other processes, by their names."""
        undo, watched = ExitStack(), backend.cold_sources()
        self.sources = {name: watch.make(undo) for name in ORIGINS if (watch := watched[name]).make} | dict(others)
        self.close = weakref.finalize(self, undo.close)

    def new_events(self) -> list[tuple[str, str]]:
        """Return the events since the last call as (source, detail) pairs."""
        return [(name, detail) for name, source in self.sources.items() for detail in source.new_events()]

    def forget(self) -> None:
        """Discard the events until now."""
        for source in self.sources.values():
            source.forget()
