"""The trace of ``VLLM_PROFILER_ENABLED``: Chrome's JSON events, which https://ui.perfetto.dev shows.

The file is whole, valid JSON after every event, so that what a crash leaves can be opened too.
"""

from __future__ import annotations

import functools
import itertools
import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, Protocol

Describe = Callable[[tuple[Any, ...], Any], dict[str, Any] | None]
"""What an event says of a call, from its arguments and its result; None leaves the event out."""


Span = Callable[..., AbstractContextManager[None]]
"""See :meth:`Trace.span`."""


def no_span(name: str, **args: Any) -> AbstractContextManager[None]:
    """For what is not traced."""
    return nullcontext()


class Trace(Protocol):
    """Where events go."""

    def span(self, name: str, **args: Any) -> AbstractContextManager[None]:
        """An event that lasts as long as the block; ``args`` are shown with it."""

    def watch(self, owner: object, method: str, describe: Describe) -> None:
        """From now on every call of ``owner.method`` is an event of that name."""


class NoTrace:
    """Traces nothing, at no cost: calls are not even wrapped."""

    span = staticmethod(no_span)

    def watch(self, owner: object, method: str, describe: Describe) -> None:
        pass


class Tracer:
    """Writes to ``path``, a new file. Times are microseconds of the monotonic clock."""

    def __init__(self, path: Path) -> None:
        self.path, self._pid = path, os.getpid()
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
        self._end = os.write(self._file, b"[")
        self._lock = threading.Lock()
        self._write(name="process_name", ph="M", args={"name": "preheat"})

    @contextmanager
    def span(self, name: str, **args: Any) -> Iterator[None]:
        started = time.perf_counter_ns()
        try:
            yield
        except BaseException as error:
            args["error"] = type(error).__name__
            raise
        finally:
            self._event(name, started, args)

    def watch(self, owner: object, method: str, describe: Describe) -> None:
        inner = getattr(owner, method)

        @functools.wraps(inner)
        def traced(*args: Any, **kwargs: Any) -> Any:
            started = time.perf_counter_ns()
            try:
                result = inner(*args, **kwargs)
            except BaseException as error:
                self._event(method, started, {"error": type(error).__name__})
                raise
            said = describe(args, result)
            if said is not None:
                self._event(method, started, said)
            return result

        setattr(owner, method, traced)

    def _event(self, name: str, started: int, args: dict[str, Any]) -> None:
        duration = time.perf_counter_ns() - started
        self._write(name=name, ph="X", ts=started / 1e3, dur=duration / 1e3, args=args)

    def _write(self, **event: Any) -> None:
        """One event in place of the closing bracket, and the bracket again."""
        line = json.dumps({"pid": self._pid, "tid": threading.get_native_id(), **event}).encode()
        with self._lock:
            first = self._end == 1
            self._end += os.pwrite(self._file, (b"\n" if first else b",\n") + line + b"\n]", self._end) - len(b"\n]")


def open_trace(enabled: bool, folder: Path | None = None) -> Trace:
    """A trace in ``preheat_trace_PID.json``, or ``preheat_trace_PID_2.json`` and so on where that exists.

    The folder is by default the one that the process works in. OSError where it cannot be written.
    """
    if not enabled:
        return NoTrace()
    for number in itertools.count(1):
        more = f"_{number}" if number > 1 else ""
        try:
            return Tracer((folder or Path.cwd()) / f"preheat_trace_{os.getpid()}{more}.json")
        except FileExistsError:
            continue
    raise AssertionError("count never ends")
