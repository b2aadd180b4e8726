"""The digest of a checkpoint's weights: every byte of every tensor, in threads beside the boot.

Definition. A tensor's line is its name, dtype, shape and the sha256 of its bytes. The digest is the sha256 of all lines
in the order of names, cut to 32 hexadecimal digits. So it does not depend on how tensors are divided among files. A
file that is not in safetensors counts as one tensor with the file's name.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from preheat.utils.files import open_file

CHUNK = 1 << 20
"""Bytes that are read at once."""

HEADER_BYTES = 100_000_000
"""The longest header that safetensors reads."""

THREADS = 4
"""Most threads that hash. sha256 releases Python's lock, and takes about 1.8 GB a second in one thread."""


class _Piece(NamedTuple):
    """A tensor's bytes in a file, and the line's part that describes the tensor."""

    path: Path
    first: int
    size: int
    said: str


class WeightsDigest:
    """The digest of ``files``, being computed from now on; :meth:`result` waits for it.

    Threads take one tensor after another, so a checkpoint of one file is hashed by all of them, too.
    """

    def __init__(self, files: Sequence[Path]) -> None:
        self._pieces, self._lock = (piece for path in files for piece in _pieces(path)), threading.Lock()
        count = max(min(THREADS, (os.cpu_count() or 1) // 2), 1)
        pool = ThreadPoolExecutor(count, "weights-digest", _yield_to_others)
        self._lines: list[Future[list[str]]] = [pool.submit(self._work) for _ in range(count)]
        pool.shutdown(wait=False)  # the threads end with their work

    def result(self) -> str:
        """Return the digest. Raises OSError for a file that cannot be read."""
        lines = sorted(line for future in self._lines for line in future.result())
        return hashlib.sha256("".join(lines).encode()).hexdigest()[:32]

    def _work(self) -> list[str]:
        """Return the lines of the tensors that this thread has taken."""
        return [f"{piece.said} {_digest(piece)}\n" for piece in iter(self._next, None)]

    def _next(self) -> _Piece | None:
        with self._lock:
            return next(self._pieces, None)


def _yield_to_others() -> None:
    """Give this thread the lowest priority, so that the boot goes first; only Linux has priorities of threads."""
    if sys.platform == "linux":
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)


def _pieces(path: Path) -> Iterator[_Piece]:
    """Yield the tensors of a file, or the file as a whole."""
    with open_file(path) as file:
        size = os.fstat(file.fileno()).st_size
        length = int.from_bytes(file.read(8), "little")
        header = _header(file.read(length)) if length <= min(HEADER_BYTES, size) else None
    if header is None:
        yield _Piece(path, 0, size, path.name)
        return
    for name, tensor in header.items():
        if name != "__metadata__":
            first, last = tensor["data_offsets"]
            yield _Piece(path, 8 + length + first, last - first, f"{name} {tensor['dtype']} {tensor['shape']}")


def _header(data: bytes) -> dict[str, dict[str, list[int]]] | None:
    try:
        found = json.loads(data)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def _digest(piece: _Piece) -> str:
    found, left = hashlib.sha256(), piece.size
    with open_file(piece.path) as file:
        file.seek(piece.first)
        while left > 0 and (data := file.read(min(CHUNK, left))):
            found.update(data)
            left -= len(data)
    return found.hexdigest()
