"""Triton's cache on disk, in which a shared library is never replaced.

Triton writes a launcher again if two threads or processes build it at the same time, as ranks and replicas do when they
start. CPython (`Python/dynload_shlib.c`) recognizes libraries that it has loaded by their inodes. It looks at a file's
inode before the library is loaded by name, and so may remember that of a file which another process replaces just then.
The next file that is given this inode then counts as loaded, and its kernel gets another kernel's launcher.
"""

from __future__ import annotations

import os
from contextlib import suppress
from tempfile import NamedTemporaryFile

from triton import knobs
from triton.runtime.cache import FileCacheManager


class KeptLibraries(FileCacheManager):  # type: ignore[misc]  # Triton has no types
    """The first that was written stays: what is called the same has the same source."""

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
