"""Display of the progress of the engine's start.

It is a bar on a terminal, and otherwise a line now and then.
"""

from __future__ import annotations

import sys
import threading
import time
from types import TracebackType
from typing import Any, Self, TextIO

from preheat.core import Died, FromEngine, Progress, Ready
from preheat.plan.lines import time_left

LINE_SECONDS = 10.0
"""Seconds between two lines."""

_WIDTH = 72  # shorter than a log line, so that log lines overwrite the bar


class ProgressBar:
    """Progress bar of the engine's start.

    It shows nothing if ``shown`` is false or standard error is no terminal.
    """

    def __init__(self, shown: bool = True) -> None:
        self._bar: Any = None
        self._disable = None if shown else True  # None: tqdm shows nothing without a terminal

    def show(self, message: FromEngine) -> None:
        """Draw a Progress message; remove the bar once the engine is ready or dead."""
        match message:
            case Progress():
                self._draw(message)
            case Ready() | Died() if self._bar is not None:
                self._bar.close()
                self._bar = None

    def _draw(self, progress: Progress) -> None:
        if self._bar is None:
            from tqdm import tqdm

            self._bar = tqdm(
                desc="Warming up", total=progress.total, leave=False, disable=self._disable,
                file=_LineStart(sys.stderr), ncols=_WIDTH, bar_format="{desc} {bar} {n_fmt}/{total_fmt}{postfix}",
            )  # fmt: skip
        left = "" if progress.eta_s is None else time_left(progress.eta_s)
        self._bar.set_postfix_str(left, refresh=False)
        self._bar.update(progress.done - self._bar.n)


class ProgressLines:
    """Progress as by :class:`ProgressBar`, or without a terminal as lines.

    The lines go to standard error.

    A thread writes a line every :data:`LINE_SECONDS` inside the context (``with``).
    """

    def __init__(self, shown: bool = True) -> None:
        self._bar, self._last = ProgressBar(shown), Progress(0, 0, "")
        self._began, self._over = time.monotonic(), threading.Event()
        self._tells = shown and sys.stderr is not None and not sys.stderr.isatty()

    def __enter__(self) -> Self:
        if self._tells:
            threading.Thread(target=self._run, daemon=True, name="start-lines").start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()

    def show(self, message: FromEngine) -> None:
        """Handle a message of the engine."""
        if isinstance(message, Progress):
            self._last = message
        self._bar.show(message)

    def _run(self) -> None:
        while not self._over.wait(LINE_SECONDS):
            sys.stderr.write(f"{self.line()}\n")
            sys.stderr.flush()

    def line(self) -> str:
        """Return a line about the progress."""
        last, seconds = self._last, time.monotonic() - self._began
        if not last.total:
            return f"preheat is loading the model ({seconds:.0f} s)"
        left = "" if last.eta_s is None else f", {time_left(last.eta_s)}"
        return f"preheat is warming up: {last.done} of {last.total}{left} ({seconds:.0f} s)"


class _LineStart:
    """Stream that leaves the cursor at the start of the line.

    So log lines overwrite the bar instead of continuing it.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self.isatty, self.flush = stream.isatty, stream.flush
        self.encoding = stream.encoding

    def write(self, text: str) -> None:
        self._stream.write(text + "\r")
