"""A folder with files that every process of one node may map into its memory. No torch here."""

from __future__ import annotations

import mmap
import os
import shutil
import tempfile
from pathlib import Path

import numpy as np


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
