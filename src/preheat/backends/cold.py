"""Detection of cold events: numbers that only grow, kept by torch or by a hook.

A step without cold events costs one comparison for each number. Every backend says which origins it watches;
docs/cold-events.md.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from importlib.abc import MetaPathFinder
from typing import Any, Literal

from preheat.utils.dynamo import compilations, compile_seconds, graph_breaks

How = Literal["hook", "counter", "none"]

MAX_DETAILS = 64
"""Events of one hook kept in words until they are taken; all events are counted."""

STEP = ("preheat.schedule.", "preheat.execution.")
"""The packages that the loop calls in a step.

Everything run by a step has one of them among its callers.
"""

SELDOM = 8
"""Steps between two looks at a number that takes tens of microseconds to read."""


class Counted:
    """An origin of cold events, such as a compiler, over a number that grows with each event.

    ``read`` returns the number; ``describe(n)`` puts the last n events in words. The number is read each ``every``-th
    time; events in between are reported then.
    """

    def __init__(
        self, name: str, read: Callable[[], int], describe: Callable[[int], Sequence[str]], *, every: int = 1
    ) -> None:
        self.name, self._read, self._describe = name, read, describe
        self._seen, self._every, self._asked = read(), every, 0

    def new_events(self) -> Sequence[str]:
        """Return the events since the last call, in words; empty without events."""
        self._asked += 1
        if self._asked % self._every:
            return ()
        count = self._read()
        if count == self._seen:
            return ()
        new = count - self._seen if count > self._seen else count  # a smaller number was cleared in between
        self._seen = count
        return self._describe(new) if new else ()

    def forget(self) -> None:
        """Drop all events until now."""
        self._seen = self._read()


class Tally:
    """Events reported by a hook: their number, and the latest in words."""

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
    """Count graphs compiled by Dynamo; Inductor builds code only for such graphs. Never imports Dynamo."""
    return Counted("dynamo", _graphs, _last_graphs)


def _graphs() -> int:
    utils = sys.modules.get("torch._dynamo.utils")
    return utils.counters["stats"]["unique_graphs"] if utils else 0


def _last_graphs(number: int) -> list[str]:
    metrics = sys.modules["torch._dynamo.utils"].get_compilation_metrics()[-number:]
    named = [f"{m.co_name} ({m.co_filename}:{m.co_firstlineno}) was compiled, {m.compile_id}" for m in metrics]
    return named + ["a graph was compiled"] * (number - len(named))


def imports(undo: ExitStack) -> Counted:
    """Count import statements run by a step and by no earlier step.

    Imports by other code of the process do not count.
    """
    finder = ImportFinder()
    sys.meta_path.insert(0, finder)
    undo.callback(sys.meta_path.remove, finder)
    return Counted("import", finder.tally.read, finder.tally.last)


class ImportFinder(MetaPathFinder):
    """A finder that finds nothing and counts the modules imported by a step.

    Python asks it first about each module that is not loaded yet.
    """

    def __init__(self) -> None:
        self.tally = Tally()

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        if _is_asked_by_a_step():
            self.tally.add(f"{name} was imported")


def _is_asked_by_a_step() -> bool:
    """Return whether a step is among the callers, with no other import in between."""
    frame, imports = sys._getframe(), 0
    while frame is not None and imports < 2:
        code = frame.f_code
        imports += code.co_name == "_find_and_load" and code.co_filename.startswith("<frozen importlib")
        if frame.f_globals.get("__name__", "").startswith(STEP):
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False


@dataclass(frozen=True)
class Watched:
    """How an origin is watched on a platform: the object of the look, or why there is none."""

    how: How
    text: str
    make: Callable[[ExitStack], Counted] | None = None


NO_RECIPES = Watched("none", "only Gaudi's graph compiler makes recipes")
NO_LLVM_FUNCTIONS = Watched("none", "no function of a layer is compiled for it")
NO_FALLBACK = Watched("none", "there is no device beside the host, or the device has kernels for all operations")
DYNAMO_COUNTERS: Mapping[str, Callable[[], tuple[int, float | None]]] = {
    "compilations": lambda: (compilations(), compile_seconds()),
    "fallbacks": lambda: (graph_breaks(), None),
}
"""Compilations and fallbacks of a step, where torch.compile is the only compiler."""
DYNAMO = Watched("counter", "graphs that Dynamo has compiled", dynamo)
IMPORTS = Watched("hook", "a module finder that checks whether a step is importing", imports)
