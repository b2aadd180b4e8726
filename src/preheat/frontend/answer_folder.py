"""Kept answers on disk: one file each, in a folder of bounded size, that other boots with the same contract read too.

A file is named by its key. It has the digest of its answer, then the answer. A file that is damaged, or is no regular
file, counts as no answer. A thread writes, so no answer waits for the disk.
"""

from __future__ import annotations

import atexit
import hashlib
import logging
import os
import queue
import re
import stat
import threading
from collections import OrderedDict
from contextlib import suppress
from pathlib import Path

from preheat.errors import SettingsError
from preheat.utils.files import read_file, why_unread, write_whole

logger = logging.getLogger(__name__)

DIGEST_BYTES = 16
NAME = re.compile(r"[0-9a-f]{32}\.answer")

MOST_WAITING = 256
"""Answers that wait for the disk. Later ones are only in memory."""

MOST_BYTES = 1 << 22
"""Bytes of the largest answer on disk. The event loop reads and hashes it in about 5 ms."""


class AnswerFolder:
    """The answers in the folder ``path``, at most ``size`` bytes. The oldest ones go first.

    Raises SettingsError for a folder that cannot be made or read.
    """

    def __init__(self, path: str, size: int) -> None:
        self._folder, self._size, self.bytes, self.lost = Path(path).expanduser(), size, 0, 0
        self._sizes: OrderedDict[str, int] = OrderedDict()
        self._lock = threading.Lock()
        self._waiting: queue.Queue[tuple[bytes, bytes] | None] = queue.Queue(MOST_WAITING)
        try:
            self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._find()
        except OSError as error:
            raise SettingsError(
                f"answer_cache_dir {path} cannot be used: {why_unread(error)}", param="answer_cache_dir"
            ) from None
        self._thread = threading.Thread(target=self._run, name="answers", daemon=True)
        self._thread.start()
        atexit.register(self.close)

    def get(self, key: bytes) -> bytes | None:
        """Return the answer of ``key``, None if there is no whole one."""
        name = _name(key)
        if name not in self._sizes:
            return None
        path = self._folder / name
        try:
            if not stat.S_ISREG(os.lstat(path).st_mode):
                raise OSError("it is no regular file")
            data = read_file(path, most=MOST_BYTES + DIGEST_BYTES)
            if _digest(data[DIGEST_BYTES:]) != data[:DIGEST_BYTES]:
                raise OSError("it is damaged")
        except OSError as error:
            logger.warning("The kept answer %s is not used: %s", path, why_unread(error))
            with self._lock:
                self.bytes -= self._sizes.pop(name, 0)
            return None
        return data[DIGEST_BYTES:]

    def put(self, key: bytes, answer: bytes) -> None:
        """Write an answer, later and in another thread."""
        if len(answer) > MOST_BYTES:
            return
        try:
            self._waiting.put_nowait((key, answer))
        except queue.Full:
            self.lost += 1

    def clear(self) -> None:
        """Remove all answers, also the ones that wait for the disk."""
        with suppress(queue.Empty):
            while True:
                self._waiting.get_nowait()
        with self._lock:
            for name in self._sizes:
                (self._folder / name).unlink(missing_ok=True)
            self._sizes.clear()
            self.bytes = 0

    def close(self) -> None:
        """Wait until all answers are written."""
        if self._thread.is_alive():
            self._waiting.put(None)
            self._thread.join()

    def _find(self) -> None:
        """Note the answers of earlier boots, the oldest first."""
        found = []
        with os.scandir(self._folder) as entries:
            for entry in entries:
                if NAME.fullmatch(entry.name) and entry.is_file(follow_symlinks=False):
                    about = entry.stat(follow_symlinks=False)
                    found.append((about.st_mtime_ns, entry.name, about.st_size))
        self._sizes = OrderedDict((name, size) for _, name, size in sorted(found))
        self.bytes = sum(self._sizes.values())

    def _run(self) -> None:
        while (item := self._waiting.get()) is not None:
            try:
                self._write(*item)
            except OSError as error:  # a full disk: later answers may fit again
                self.lost += 1
                if self.lost.bit_count() == 1:  # at 1, 2, 4 and so on
                    logger.warning("%d answers could not be kept in %s: %s", self.lost, self._folder, why_unread(error))

    def _write(self, key: bytes, answer: bytes) -> None:
        name, data = _name(key), _digest(answer) + answer
        if len(data) > self._size:
            return
        with self._lock:  # a folder that is cleared meanwhile would keep this answer
            self.bytes -= self._sizes.pop(name, 0)
            while self.bytes + len(data) > self._size:
                old, size = self._sizes.popitem(last=False)
                self.bytes -= size
                (self._folder / old).unlink(missing_ok=True)
            write_whole(self._folder / name, data)
            self._sizes[name] = len(data)
            self.bytes += len(data)


def _name(key: bytes) -> str:
    return f"{key.hex()}.answer"


def _digest(answer: bytes) -> bytes:
    return hashlib.blake2b(answer, digest_size=DIGEST_BYTES).digest()
