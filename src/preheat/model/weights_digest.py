"""The digest of a checkpoint's weights: every byte of every tensor, as the loader reads it.

Definition. A tensor's line is its name, dtype, shape and the sha256 of its bytes. The digest is the sha256 of all lines
in the order of names, cut to 32 hexadecimal digits. So it does not depend on how tensors are divided among files. A
file that is not in safetensors counts as one tensor with the file's name.
"""

from __future__ import annotations

import hashlib
import os
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import msgspec

from preheat.utils.files import open_file

CHUNK = 1 << 20
"""Bytes that are read at once."""

HEADER_BYTES = 100_000_000
"""The longest header that safetensors reads."""

THREADS = 4
"""Most threads that hash. sha256 releases Python's lock, and takes about 1.8 GB a second in one thread."""


class _Piece(NamedTuple):
    """A tensor's bytes in a file, and the line's part that describes the tensor. A whole file has no ``name``."""

    name: str | None
    path: Path
    first: int
    size: int
    said: str


class WeightsDigest:
    """The digest of ``files``; :meth:`result` waits for it.

    A loader gives each tensor to :meth:`read` as it reads the tensor, so bytes come from the disk once. Tensors that
    no loader reads are hashed from the files, after :meth:`loaded`. Threads take one tensor after another.
    """

    def __init__(self, files: Sequence[Path]) -> None:
        self._left: dict[str, _Piece] = {}
        self._lines: list[Future[str]] = []
        count = max(min(THREADS, (os.cpu_count() or 1) // 2), 1)
        self._pool = ThreadPoolExecutor(count, "weights-digest", _yield_to_others)
        for piece in (piece for path in files for piece in _pieces(path)):
            if piece.name is None or self._left.setdefault(piece.name, piece) is not piece:
                self._submit(piece)

    def read(self, name: str, data: Callable[[], memoryview]) -> None:
        """Hash tensor ``name``, all ``data`` of which a loader has in memory. A tensor that is known is skipped."""
        if (piece := self._left.pop(name, None)) is not None:
            self._submit(piece, data())

    def loaded(self) -> None:
        """Hash the tensors that were not read: those of other ranks, and unused ones."""
        while self._left:
            self._submit(self._left.popitem()[1])
        self._pool.shutdown(wait=False)  # the threads end with their work

    def close(self) -> None:
        """Begin nothing more, as after a boot that failed."""
        self._left.clear()
        self._pool.shutdown(wait=False, cancel_futures=True)

    def result(self) -> str:
        """Return the digest. Raises OSError for a file that cannot be read."""
        self.loaded()
        lines = sorted(line.result() for line in self._lines)
        return hashlib.sha256("".join(lines).encode()).hexdigest()[:32]

    def _submit(self, piece: _Piece, data: memoryview | None = None) -> None:
        self._lines.append(self._pool.submit(_line, piece, data))


def _yield_to_others() -> None:
    """Give this thread the lowest priority, so that the boot goes first; only Linux has priorities of threads."""
    if sys.platform == "linux":
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)


def _pieces(path: Path) -> Iterator[_Piece]:
    """Yield the tensors of a file, or the file as a whole. A file that cannot be read raises at its turn."""
    try:
        with open_file(path) as file:
            size = os.fstat(file.fileno()).st_size
            length = int.from_bytes(file.read(8), "little")
            header = _header(file.read(length)) if length <= min(HEADER_BYTES, size) else None
    except OSError:
        size, header = 0, None
    if header is None:
        yield _Piece(None, path, 0, size, path.name)
        return
    for name, tensor in header.items():
        first, last = tensor.data_offsets
        yield _Piece(name, path, 8 + length + first, last - first, f"{name} {tensor.dtype} {tensor.shape}")


class _Tensor(msgspec.Struct):
    """A tensor in the header of a file."""

    dtype: str
    shape: list[int]
    data_offsets: tuple[int, int]


def _header(data: bytes) -> dict[str, _Tensor] | None:
    try:
        found: dict[str, msgspec.Raw] = msgspec.json.decode(data, type=dict[str, msgspec.Raw])
        found.pop("__metadata__", None)
        return {name: msgspec.json.decode(tensor, type=_Tensor) for name, tensor in found.items()}
    except (msgspec.MsgspecError, RecursionError):
        return None


def _line(piece: _Piece, data: memoryview | None) -> str:
    """Return the line of a tensor: of its ``data`` in memory, or of its bytes in the file."""
    if data is None:
        return f"{piece.said} {_digest(piece)}\n"
    if data.nbytes != piece.size:
        raise OSError(f"{piece.path}: tensor {piece.name} has {data.nbytes:,} bytes in memory, not {piece.size:,}")
    return f"{piece.said} {hashlib.sha256(data).hexdigest()}\n"


def _digest(piece: _Piece) -> str:
    """Return the sha256 of the bytes in the file."""
    found, left = hashlib.sha256(), piece.size
    with open_file(piece.path) as file:
        file.seek(piece.first)
        while left > 0 and (data := file.read(min(CHUNK, left))):
            found.update(data)
            left -= len(data)
    return found.hexdigest()
