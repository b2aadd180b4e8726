"""The log of receipts: JSON lines in files of bounded size, written in a thread of its own."""

from __future__ import annotations

import atexit
import errno
import logging
import os
import queue
import threading
from collections.abc import Callable
from pathlib import Path

from preheat.errors import SettingsError
from preheat.utils.files import why_unread

logger = logging.getLogger(__name__)

MOST_BYTES = 64 * 2**20
"""Bytes of a file; then the next one begins."""

KEPT = 8
"""Files that are kept, the current one included: ``path``, ``path.1`` and so on, the latest first."""

MOST_WAITING = 4096
"""Receipts that wait for the disk. Later ones are dropped, and counted in a warning, so that no answer waits."""


def log_files(path: str) -> list[Path]:
    """Return the files of the log at ``path`` that there are, the oldest first."""
    return [each for each in reversed(_names(Path(path).expanduser())) if each.exists()]


def _names(path: Path) -> list[Path]:
    """Return the files that a log may have, the latest first."""
    return [path, *(path.with_name(f"{path.name}.{number}") for number in range(1, KEPT))]


class ReceiptLog:
    """Receipts in ``path``, from now on. Raises SettingsError if the file cannot be written."""

    def __init__(self, path: str, most_bytes: int = MOST_BYTES) -> None:
        self._path, self._most = Path(path).expanduser(), most_bytes
        self._waiting: queue.Queue[Callable[[], bytes] | None] = queue.Queue(MOST_WAITING)
        self._torn, self.written, self.lost = False, 0, 0
        try:
            self._append(b"")
        except OSError as error:
            raise SettingsError(
                f"receipts_log {path} cannot be written: {why_unread(error)}", param="receipts_log"
            ) from None
        self._thread = threading.Thread(target=self._run, name="receipts", daemon=True)
        self._thread.start()
        atexit.register(self.close)

    def write(self, receipt: Callable[[], bytes]) -> None:
        """Append a receipt, one line of JSON that the thread asks for. Never waits."""
        try:
            self._waiting.put_nowait(receipt)
        except queue.Full:
            self._lose("the disk is too slow")

    def close(self) -> None:
        """Wait until all receipts are written."""
        if self._thread.is_alive():
            self._waiting.put(None)
            self._thread.join()

    def _run(self) -> None:
        while (receipt := self._waiting.get()) is not None:
            try:
                self._append(receipt() + b"\n")
            except OSError as error:  # a full disk: later lines may be written again
                self._lose(why_unread(error))
            else:
                self.written += 1

    def _lose(self, why: str) -> None:
        self.lost += 1
        if self.lost.bit_count() == 1:  # at 1, 2, 4 and so on
            logger.warning("%d receipts could not be written to %s so far: %s", self.lost, self._path, why)

    def _append(self, line: bytes) -> None:
        """Append ``line`` with one write, so that lines of several processes stay whole."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NONBLOCK
        descriptor = os.open(self._path, flags, 0o600)
        try:
            data = b"\n" + line if self._torn else line
            written = os.write(descriptor, data)
            self._torn = written < len(data)
            if self._torn:
                raise OSError(errno.ENOSPC, "the disk is full, and the line is not whole")
            full = os.fstat(descriptor).st_size >= self._most
        finally:
            os.close(descriptor)
        if full:
            self._rotate()

    def _rotate(self) -> None:
        names = _names(self._path)
        for newer, older in zip(names[-2::-1], names[:0:-1], strict=True):
            if newer.exists():
                os.replace(newer, older)
