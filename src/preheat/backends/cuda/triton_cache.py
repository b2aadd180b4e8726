"""Triton's cache on disk, with shared libraries that are never replaced.

Triton writes a launcher again if two threads or processes build it at the same time, as ranks and replicas do when they
start. CPython (`Python/dynload_shlib.c`) recognizes loaded libraries by their inodes. It reads a file's inode before it
loads the library by name. If another process replaces the file in between, CPython remembers the old inode. The next
file with this inode then counts as loaded, and its kernel gets another kernel's launcher.
"""

from __future__ import annotations

import os
from contextlib import suppress
from tempfile import NamedTemporaryFile

from triton import knobs
from triton.runtime.cache import FileCacheManager


class KeptLibraries(FileCacheManager):  # type: ignore[misc]  # Triton has no types
    """A cache that keeps the first library written under a name; equal names have equal sources."""

    def put(self, data: bytes | str, filename: str, binary: bool = True) -> str:
        if not filename.endswith(".so"):
            return str(super().put(data, filename, binary))
        assert isinstance(data, bytes)
        path = os.path.join(self.cache_dir, filename)
        with NamedTemporaryFile(dir=self.cache_dir) as file:
            file.write(data)
            file.flush()
            os.fchmod(file.fileno(), 0o644)
            with suppress(FileExistsError):
                os.link(file.name, path)
        return path


def keep_libraries() -> None:
    """Let Triton use this cache, unless ``TRITON_CACHE_MANAGER`` names another."""
    if knobs.cache.manager_class is None:
        knobs.cache.manager_class = KeptLibraries
