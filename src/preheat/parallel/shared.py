"""What all ranks see of each other: a folder with files that every one maps into its memory.

The board has a line for each rank: its heartbeat, how many messages it has read, how many cold events it has
noticed, and why it failed. Rank 0, the leader, also writes whether the engine is over. No torch here.
"""

from __future__ import annotations

import mmap
import os
import shutil
import tempfile
import threading
from pathlib import Path

import numpy as np

from preheat.errors import RankDied

TEXT_BYTES = 2048
_WORDS = 8
_BEAT, _READ, _COLD, _OVER = range(4)


def shared_folder() -> Path:
    """A new folder for one engine's files, in memory where the system offers it."""
    memory = Path("/dev/shm")
    usable = memory.is_dir() and os.access(memory, os.W_OK)
    return Path(tempfile.mkdtemp(prefix="preheat-", dir=memory if usable else None))


def remove_folder(folder: Path) -> None:
    """What is mapped stays usable until it is unmapped."""
    shutil.rmtree(folder, ignore_errors=True)


def mapped(path: Path, size: int) -> np.ndarray:
    """The bytes of a file that several processes map, zeros at first."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        if os.fstat(descriptor).st_size < size:
            os.ftruncate(descriptor, size)
        return np.frombuffer(mmap.mmap(descriptor, size), dtype=np.uint8)
    finally:
        os.close(descriptor)


class Board:
    """The lines of ``world`` ranks, as ``rank`` sees them."""

    def __init__(self, folder: Path, rank: int, world: int) -> None:
        self.rank, self.world = rank, world
        data = mapped(folder / "board", world * (8 * _WORDS + 2 * TEXT_BYTES))
        words = world * 8 * _WORDS
        self._words = data[:words].view(np.int64).reshape(world, _WORDS)
        self._texts = data[words:].reshape(world, 2, TEXT_BYTES)  # why it failed, its last cold event
        self._fence = threading.Lock()

    def beat(self) -> None:
        self._words[self.rank, _BEAT] += 1

    def beats(self, rank: int) -> int:
        return int(self._words[rank, _BEAT])

    @property
    def read(self) -> np.ndarray:
        """int64 [ranks]: messages that each has read."""
        return self._words[:, _READ]

    def fail(self, why: str) -> None:
        """This rank cannot go on."""
        self._write(self.rank, 0, why)

    def failure(self, rank: int) -> str:
        """Why ``rank`` failed; empty if it has not said."""
        return self._text(rank, 0)

    def end(self, why: str) -> None:
        """The engine is over: whoever waits for others stops waiting."""
        self._write(0, 0, why)
        with self._fence:
            self._words[0, _OVER] = 1

    def check(self) -> None:
        """Raise RankDied, with the reason, if the engine is over."""
        if self._words[0, _OVER]:
            raise RankDied(self.failure(0))

    def cold(self, detail: str) -> None:
        """This rank has noticed a cold event."""
        self._write(self.rank, 1, detail)
        with self._fence:
            self._words[self.rank, _COLD] += 1

    def cold_events(self, rank: int) -> int:
        return int(self._words[rank, _COLD])

    def last_cold_event(self, rank: int) -> str:
        return self._text(rank, 1)

    def _write(self, rank: int, place: int, text: str) -> None:
        data = text.encode()[: TEXT_BYTES - 1]
        self._texts[rank, place, : len(data)] = np.frombuffer(data, np.uint8)
        self._texts[rank, place, len(data) :] = 0

    def _text(self, rank: int, place: int) -> str:
        data: bytes = self._texts[rank, place].tobytes()
        return data.split(b"\0", 1)[0].decode(errors="replace")
