"""A folder of files in memory that a node's processes share.

Processes map the files. No torch here.
"""

from __future__ import annotations

import mmap
import os
import shutil
import tempfile
from pathlib import Path

import numpy as np


def shared_folder() -> Path:
    """Create a new folder for one engine's files.

    It is in memory where the system offers it.
    """
    memory = Path("/dev/shm")
    usable = memory.is_dir() and os.access(memory, os.W_OK)
    return Path(tempfile.mkdtemp(prefix="preheat-", dir=memory if usable else None))


def remove_folder(folder: Path) -> None:
    """Remove the folder; mapped files stay usable until they are unmapped."""
    shutil.rmtree(folder, ignore_errors=True)


def mapped(path: Path, size: int) -> np.ndarray:
    """Map the bytes of a file that several processes share.

    A new file has zeros.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        if os.fstat(descriptor).st_size < size:
            os.ftruncate(descriptor, size)
        return np.frombuffer(mmap.mmap(descriptor, size), dtype=np.uint8)
    finally:
        os.close(descriptor)
