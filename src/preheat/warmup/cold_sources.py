"""Where cold events come from, and how each origin is watched: by a hook, by a counter, or not at all.

`ORIGINS` is the table; docs/cold-events.md shows it. Every watched origin is a number that only grows, kept by torch or
by a hook of ours, so that a step in which nothing was cold costs one comparison for each. `ColdSources` owns the hooks
of an engine and removes them when it is closed.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from importlib.abc import MetaPathFinder
from typing import Any, Literal

from preheat.errors import SettingsError

How = Literal["hook", "counter", "none"]

MAX_DETAILS = 64
"""Events of one hook that are kept in words until they are taken; all of them are counted."""

STEP = ("preheat.schedule.", "preheat.execution.")
"""The packages that the loop calls in a step: everything that a step runs has one of them among its callers."""

SELDOM = 8
"""Steps after which a number is looked at that takes tens of microseconds to read."""


class Counted:
    """An origin of cold events, such as a compiler, over ``read``, a number that grows with each event;
    ``describe(n)`` puts the last n events in words.

    It is read each ``every``-th time; what happened in between is reported then.
    """

    def __init__(
        self, name: str, read: Callable[[], int], describe: Callable[[int], Sequence[str]], *, every: int = 1
    ) -> None:
        self.name, self._read, self._describe = name, read, describe
        self._seen, self._every, self._asked = read(), every, 0

    def taken(self) -> Sequence[str]:
        """What happened since the last call, in words; empty when nothing did."""
        self._asked += 1
        if self._asked % self._every:
            return ()
        count = self._read()
        if count == self._seen:
            return ()
        new = count - self._seen if count > self._seen else count  # less than before: it was cleared
        self._seen = count
        return self._describe(new) if new else ()


class Tally:
    """What a hook has reported: how many events, and the last of them in words."""

    def __init__(self) -> None:
        self.count, self._details = 0, deque[str](maxlen=MAX_DETAILS)

    def add(self, detail: str) -> None:
        self.count += 1
        self._details.append(detail)

    def read(self) -> int:
        return self.count

    def last(self, number: int) -> Sequence[str]:
        return list(self._details)[-number:]


def dynamo(undo: ExitStack) -> Counted:
    """Graphs that Dynamo compiles; whatever Inductor builds is built for one of them. Never imports Dynamo."""
    return Counted("dynamo", _graphs, _last_graphs)


def _graphs() -> int:
    utils = sys.modules.get("torch._dynamo.utils")
    return utils.counters["stats"]["unique_graphs"] if utils else 0


def _last_graphs(number: int) -> list[str]:
    metrics = sys.modules["torch._dynamo.utils"].get_compilation_metrics()[-number:]
    named = [f"{m.co_name} ({m.co_filename}:{m.co_firstlineno}) was compiled, {m.compile_id}" for m in metrics]
    return named + ["a graph was compiled"] * (number - len(named))


def imports(undo: ExitStack) -> Counted:
    """Import statements that a step runs and no earlier one ran; imports by other code of the process do not count."""
    finder = ImportFinder()
    sys.meta_path.insert(0, finder)
    undo.callback(sys.meta_path.remove, finder)
    return Counted("import", finder.tally.read, finder.tally.last)


class ImportFinder(MetaPathFinder):
    """Finds nothing: it is asked first about each module that is not loaded yet, and counts those that a step wants."""

    def __init__(self) -> None:
        self.tally = Tally()

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        if _is_asked_by_a_step():
            self.tally.add(f"{name} was imported")


def _is_asked_by_a_step() -> bool:
    """Whether a step is among the callers, with no other import between it and this one."""
    frame, imports = sys._getframe(), 0
    while frame is not None and imports < 2:
        code = frame.f_code
        imports += code.co_name == "_find_and_load" and code.co_filename.startswith("<frozen importlib")
        if frame.f_globals.get("__name__", "").startswith(STEP):
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False


def triton(undo: ExitStack) -> Counted:
    """Kernels that Triton compiles, or reads from its disk cache, and those that it loads onto the device."""
    tally = Tally()
    with suppress(ModuleNotFoundError):  # without Triton there is nothing to compile with
        from triton import knobs

        undo.callback(hook_triton(knobs, tally))
    return Counted("triton", tally.read, tally.last)


def hook_triton(knobs: Any, tally: Tally) -> Callable[[], None]:
    """Listen to ``triton.knobs``, after the listener that is there already. Calling the result ends it."""
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
    """Graphs captured through torch, Inductor's own included."""
    import torch

    tally = Tally()
    undo.callback(count_calls(torch.cuda.CUDAGraph, "capture_begin", tally, "a CUDA graph was captured"))
    return Counted("graph capture", tally.read, tally.last)


def count_calls(owner: type, method: str, tally: Tally, detail: str) -> Callable[[], None]:
    """Tell ``tally`` of every call of ``owner.method``, for classes without a hook. Calling the result ends it."""
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
    """Requests of torch's caching allocator to CUDA: memory that warm-up did not need."""
    import torch

    stats = functools.partial(torch._C._cuda_memoryStats, torch.cuda.current_device())

    def grown(number: int) -> list[str]:
        reserved = stats()["reserved_bytes"]["all"]["current"]
        return [f"{number} times the allocator asked CUDA for memory; it holds {reserved:,} bytes"]

    return Counted("allocator", lambda: stats()["num_device_alloc"], grown, every=SELDOM)


@dataclass(frozen=True)
class Watched:
    """How an origin is watched on a platform: what is looked at, or why nothing is."""

    how: How
    text: str
    make: Callable[[ExitStack], Counted] | None = None


@dataclass(frozen=True)
class Origin:
    """One origin of cold events, on each platform."""

    name: str
    what: str
    on: Mapping[str, Watched]


_DYNAMO = Watched("counter", "graphs that Dynamo has compiled", dynamo)
_IMPORTS = Watched("hook", "a finder of modules, which looks whether a step is asking", imports)

ORIGINS: tuple[Origin, ...] = (
    Origin(
        "dynamo",
        "`torch.compile`: Dynamo traces a frame and Inductor builds it",
        {"cpu": _DYNAMO, "cuda": _DYNAMO},
    ),
    Origin(
        "triton",
        "Triton compiles a kernel, or loads it onto the device",
        {
            "cpu": Watched("none", "Triton has no target for a CPU"),
            "cuda": Watched("hook", "Triton's compilation listener and kernel load hook", triton),
        },
    ),
    Origin(
        "graph capture",
        "a step is recorded as a graph",
        {
            "cpu": Watched("none", "a CPU has no graphs"),
            "cuda": Watched("hook", "calls of `torch.cuda.CUDAGraph.capture_begin`", graph_capture),
        },
    ),
    Origin(
        "allocator",
        "the memory pool grows",
        {
            "cpu": Watched("none", "torch keeps no pool on a CPU: every tensor comes from the C library"),
            "cuda": Watched("counter", "`num_device_alloc` of torch's caching allocator, every eighth step", allocator),
        },
    ),
    Origin(
        "module loading",
        "CUDA loads the code of a library's kernel when it is first launched",
        {
            "cpu": Watched("none", "the system maps a library's pages on first touch and gives no notice"),
            "cuda": Watched(
                "none", "the driver gives no notice; `CUDA_MODULE_LOADING=EAGER` loads everything at the start"
            ),
        },
    ),
    Origin("import", "a step imports a module that is not loaded yet", {"cpu": _IMPORTS, "cuda": _IMPORTS}),
)
"""Every origin of cold events but one: that a planned item runs first after ready, which the cold monitor sees."""


class ColdSources:
    """All that is watched on a platform. Made once warm-up is over: what happened before does not count.

    ``close()`` removes the hooks, as does the end of this object.
    """

    def __init__(self, platform: str) -> None:
        if platform not in ORIGINS[0].on:
            raise SettingsError(f"no cold events are known for {platform!r}; known are {', '.join(ORIGINS[0].on)}")
        undo = ExitStack()
        watched = [origin.on[platform] for origin in ORIGINS]
        self.sources = {made.name: made for watch in watched if watch.make for made in [watch.make(undo)]}
        self.close = weakref.finalize(self, undo.close)

    def taken(self) -> list[tuple[str, str]]:
        """What happened since the last call: (source, detail) pairs."""
        return [(source.name, detail) for source in self.sources.values() for detail in source.taken()]
