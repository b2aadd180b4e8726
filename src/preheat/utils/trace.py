"""The trace of ``VLLM_PROFILER_ENABLED``: Chrome's JSON events, for https://ui.perfetto.dev.

The file is valid JSON after every event, so it can be opened even after a crash.
"""

from __future__ import annotations

import itertools
import json
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, ParamSpec, Protocol, TypeVar

P = ParamSpec("P")
R = TypeVar("R")

Describe = Callable[[tuple[Any, ...], Any], dict[str, Any]]
"""A function of the positional arguments and the result of a call; it returns the arguments of the event."""

Span = Callable[..., AbstractContextManager[None]]
"""See :meth:`Trace.span`."""


class Call(Protocol):
    """A function that calls ``function``; a trace shows the call as an event ``name``."""

    def __call__(self, name: str, function: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> R: ...


def untraced(name: str, function: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> R:
    """Call ``function``, without an event."""
    return function(*args, **kwargs)


class Trace:
    """A trace without events; see :class:`Tracer`."""

    def span(self, name: str, **args: Any) -> AbstractContextManager[None]:
        """Return a context manager that makes an event ``name``; ``args`` are shown with it."""
        return nullcontext()

    def calls(self, describe: Mapping[str, Describe]) -> Call:
        """Return a function that makes an event of each call.

        ``describe`` has functions for the events' arguments, by the calls' names.
        """
        return untraced

    def close(self) -> None:
        """Write no more events."""


no_span = Trace().span


class Tracer(Trace):
    """A trace with events in ``path``, a new file. Times are microseconds of the monotonic clock."""

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

    def calls(self, describe: Mapping[str, Describe]) -> Call:
        def traced(name: str, function: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> R:
            started = time.perf_counter_ns()
            try:
                result = function(*args, **kwargs)
            except BaseException as error:
                self._event(name, started, {"error": type(error).__name__})
                raise
            self._event(name, started, describe[name](args, result) if name in describe else {})
            return result

        return traced

    def close(self) -> None:
        os.close(self._file)

    def _event(self, name: str, started: int, args: dict[str, Any]) -> None:
        duration = time.perf_counter_ns() - started
        self._write(name=name, ph="X", ts=started / 1e3, dur=duration / 1e3, args=args)

    def _write(self, **event: Any) -> None:
        """Replace the closing bracket by one event and the bracket."""
        line = json.dumps({"pid": self._pid, "tid": threading.get_native_id(), **event}).encode()
        with self._lock:
            first = self._end == 1
            self._end += os.pwrite(self._file, (b"\n" if first else b",\n") + line + b"\n]", self._end) - len(b"\n]")


def open_trace(enabled: bool, folder: Path | None = None, *, prefix: str = "preheat") -> Trace:
    """Return a trace in ``PREFIX_trace_PID.json`` in ``folder`` (default: the working directory).

    If the file exists, the name gets a number. Raises OSError if it cannot be written.
    """
    if not enabled:
        return Trace()
    for number in itertools.count(1):
        more = f"_{number}" if number > 1 else ""
        try:
            return Tracer((folder or Path.cwd()) / f"{prefix}_trace_{os.getpid()}{more}.json")
        except FileExistsError:
            continue
    raise AssertionError("count never ends")
