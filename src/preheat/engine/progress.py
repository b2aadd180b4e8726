"""A progress bar of the engine's start, for a terminal."""

from __future__ import annotations

import sys
from typing import Any, TextIO

from preheat.core import Died, FromEngine, Progress, Ready
from preheat.plan.lines import time_left

_WIDTH = 72  # shorter than a log line, which overwrites the bar


class ProgressBar:
    """Shows the engine's messages, unless ``shown`` is false or standard error is no terminal."""

    def __init__(self, shown: bool = True) -> None:
        self._bar: Any = None
        self._disable = None if shown else True  # None: where there is no terminal

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


class _LineStart:
    """Leaves the cursor at the start of the line, so that log lines overwrite the bar instead of continuing it."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self.isatty, self.flush = stream.isatty, stream.flush
        self.encoding = stream.encoding

    def write(self, text: str) -> None:
        self._stream.write(text + "\r")
