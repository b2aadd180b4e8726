"""The log: an event is one printable line, and logging never waits.

Texts of clients and of checkpoints reach log lines and error lines. One formatter escapes them, for every handler. A
separate thread writes the lines to standard error. A pipe that nobody reads, a full disk or a closed terminal costs
only lines; lost lines are counted.
"""

from __future__ import annotations

import atexit
import contextlib
import io
import json
import logging
import os
import re
import select
import sys
import threading
import time
from queue import SimpleQueue
from types import TracebackType
from typing import Any, Protocol, TextIO

from preheat.utils.log_config import log_as

HELD_BYTES = 1 << 20
"""Most bytes that wait for the reader of standard error; further lines are dropped."""

EXIT_SECONDS = 1.0
"""Seconds that an ending process waits for the reader of its last lines."""

_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")

TRACEBACK = "    | "
"""The beginning of each line of a traceback, so that no text in it looks like an event."""

_FORM = "%(levelname)s %(asctime)s [%(process)d] %(name)s: %(message)s"


def one_line(text: str) -> str:
    """Return ``text`` with unprintable characters escaped as in JSON: line breaks, controls, marks of direction."""
    if text.isprintable():
        return text
    return "".join(each if each.isprintable() else _escaped(each) for each in text)


def _escaped(char: str) -> str:
    shown = json.dumps(char)[1:-1]
    return shown if shown.isprintable() else f"\\u{ord(char):04x}"  # JSON leaves DEL as it is


def printable(text: str) -> str:
    """Return ``text`` with :func:`one_line` applied to each line."""
    return "\n".join(map(one_line, text.split("\n")))


def without_controls(text: str) -> str:
    """Return ``text`` with a terminal's control characters escaped, except tabs and line breaks."""
    return _CONTROLS.sub(lambda found: _escaped(found[0]), text)


class LineFormatter(logging.Formatter):
    """Formatter of an event as one line, and of a traceback as lines that begin with :data:`TRACEBACK`."""

    def format(self, record: logging.LogRecord) -> str:
        record.exc_text = None  # another formatter may have left its text
        return super().format(record)

    def formatMessage(self, record: logging.LogRecord) -> str:
        return one_line(super().formatMessage(record))

    def formatException(self, ei: Any) -> str:
        return _marked(super().formatException(ei))

    def formatStack(self, stack_info: str) -> str:
        return _marked(super().formatStack(stack_info))


def _marked(text: str) -> str:
    return "\n".join(TRACEBACK + one_line(line) for line in text.split("\n"))


class BackgroundStream(io.TextIOBase):
    """A writer to the file of ``stream``, in a thread and in order.

    Text beyond ``held`` waiting bytes is dropped. Neither ``write`` nor ``flush`` ever waits; :meth:`drain` does.
    """

    def __init__(self, stream: TextIO, held: int = HELD_BYTES) -> None:
        self._stream, self._fd, self._most = stream, stream.fileno(), held
        self._queue: SimpleQueue[bytes] = SimpleQueue()
        self._lock = threading.RLock()  # a signal's handler may write in the middle of a write
        self._held = self._dropped = 0
        self._process = os.getpid()
        threading.Thread(target=self._run, daemon=True, name="log").start()

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return self._stream.encoding

    @property
    def errors(self) -> str | None:  # type: ignore[override]
        return self._stream.errors

    @property
    def buffer(self) -> Any:
        return self._stream.buffer

    def fileno(self) -> int:
        return self._fd

    def isatty(self) -> bool:
        return self._stream.isatty()

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        """Hand ``text`` to the thread, or drop it and count it. A fork has no thread, so it writes directly."""
        data = text.encode(self.encoding, "backslashreplace")
        if os.getpid() != self._process:
            os.write(self._fd, data)
            return len(text)
        with self._lock:
            if self._held + len(data) > self._most:
                self._dropped += 1
            elif data:
                self._put(self._drop_notice() + data)
        return len(text)

    def drain(self, seconds: float) -> bool:
        """Wait until all is written, for ``seconds`` at most. Return whether it is."""
        if os.getpid() != self._process:
            return True
        with self._lock:
            if told := self._drop_notice():
                self._put(told)
        end = time.monotonic() + seconds
        while self._held and time.monotonic() < end:
            time.sleep(0.002)
        return not self._held

    def _put(self, data: bytes) -> None:
        self._held += len(data)
        self._queue.put(data)

    def _drop_notice(self) -> bytes:
        """Return a line about dropped lines, if there were any."""
        count, self._dropped = self._dropped, 0
        return b"WARNING %d lines were dropped here: standard error was not read\n" % count if count else b""

    def _run(self) -> None:
        while True:
            data = self._queue.get()
            written = self._written(data)
            with self._lock:
                self._held -= len(data)
                self._dropped += not written

    def _written(self, data: bytes) -> bool:
        """Write ``data``, and wait for the reader. Return whether all could be written."""
        while data:
            try:
                data = data[os.write(self._fd, data) :]
            except BlockingIOError:  # another process has made the file non-blocking
                select.select([], [self._fd], [], 1.0)
            except OSError:  # closed, full or gone
                return False
        return True


def protect_stderr() -> None:
    """Put a :class:`BackgroundStream` in the place of standard error, unless something else is there already."""
    stream = sys.__stderr__
    if stream is None or sys.stderr is not stream:
        return
    try:
        background = BackgroundStream(stream)
    except OSError:  # the stream has no file
        return
    sys.stderr = background
    atexit.register(background.drain, EXIT_SECONDS)


def leave(status: int) -> None:
    """End the process with ``status`` after its last output, but within :data:`EXIT_SECONDS`, whatever hangs."""
    with contextlib.suppress(Exception):  # a stream may be in the middle of a write
        exit_after(EXIT_SECONDS, status)
        sys.stdout.flush()
        if isinstance(sys.stderr, BackgroundStream):
            sys.stderr.drain(EXIT_SECONDS)
    os._exit(status)


def exit_after(seconds: float, status: int) -> None:
    """Exit with ``status`` after ``seconds``, whatever hangs."""
    last = threading.Timer(seconds, os._exit, [status])
    last.daemon = True
    last.start()


class Logged(Protocol):
    """Settings of the log: the least level, and a file with more settings."""

    @property
    def log_level(self) -> str: ...
    @property
    def log_config_file(self) -> str | None: ...


def set_up_logging(settings: Logged) -> None:
    """Log to standard error as ``settings`` say, with warnings of Python and uncaught errors. Raises SettingsError."""
    protect_stderr()
    logging.basicConfig(level=settings.log_level.upper(), handlers=[line_handler(_FORM)])
    if settings.log_config_file is not None:
        log_as(settings.log_config_file)
    logging.captureWarnings(True)
    if sys.excepthook is sys.__excepthook__:
        sys.excepthook = _uncaught
    if threading.excepthook is threading.__excepthook__:
        threading.excepthook = lambda told: _uncaught(told.exc_type, told.exc_value, told.exc_traceback)


def _uncaught(kind: type[BaseException], error: BaseException | None, trace: TracebackType | None) -> None:
    if not issubclass(kind, SystemExit | KeyboardInterrupt):
        logging.getLogger("preheat").critical("An error that nobody caught", exc_info=(kind, error, trace))  # type: ignore[arg-type]


def line_handler(form: str) -> logging.Handler:
    """Return a handler that writes events of this ``form`` to standard error, each on one line."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(LineFormatter(form, "%m-%d %H:%M:%S"))
    return handler
