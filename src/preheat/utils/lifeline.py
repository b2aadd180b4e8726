"""A lock that the kernel opens when its holder dies, before the memory of the holder is freed.

The exit of a killed process is reported only once its memory and its device are free: tenths of a second for some
hundred MiB, seconds for a GPU. A robust mutex in a shared file is opened in the first moment of the end of a thread.
The holder is a thread that only sleeps, so that it ends at once.

Systems without robust mutexes, as macOS, notice the exit alone.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
from pathlib import Path

BYTES = 64
"""The room of the mutex in its file; the largest one of a known system takes 48 bytes."""

_LIBC = ctypes.CDLL(None)
AVAILABLE = hasattr(_LIBC, "pthread_mutexattr_setrobust")
_SHARED, _ROBUST = 1, 1  # PTHREAD_PROCESS_SHARED and PTHREAD_MUTEX_ROBUST on Linux


class Lifeline:
    """A mutex in the file ``path``: one process holds it while it lives, another one waits for its end."""

    def __init__(self, path: Path) -> None:
        with open(path, "r+b") as file:
            self._memory = mmap.mmap(file.fileno(), BYTES)
        self._mutex = ctypes.c_void_p(ctypes.addressof(ctypes.c_char.from_buffer(self._memory)))
        self._held, self._released = threading.Event(), threading.Event()
        self._holder: threading.Thread | None = None

    @classmethod
    def create(cls, path: Path) -> Lifeline | None:
        """Return the lifeline of a new file, None on a system without robust mutexes."""
        if not AVAILABLE:
            return None
        path.write_bytes(bytes(BYTES))
        line, attributes = cls(path), ctypes.create_string_buffer(BYTES)
        _checked(_LIBC.pthread_mutexattr_init(attributes))
        _checked(_LIBC.pthread_mutexattr_setpshared(attributes, _SHARED))
        _checked(_LIBC.pthread_mutexattr_setrobust(attributes, _ROBUST))
        _checked(_LIBC.pthread_mutex_init(line._mutex, attributes))
        return line

    @classmethod
    def hold(cls, path: Path) -> Lifeline | None:
        """Hold the lifeline of ``path`` until :meth:`release`; return None if there is no file."""
        if not path.exists():
            return None
        line = cls(path)
        line._holder = threading.Thread(target=line._sleep, name="lifeline", daemon=True)
        line._holder.start()
        line._held.wait()
        return line

    def _sleep(self) -> None:
        _LIBC.pthread_mutex_lock(self._mutex)
        self._held.set()
        self._released.wait()
        _LIBC.pthread_mutex_unlock(self._mutex)

    def release(self) -> None:
        """Let go: the process says itself that it ends, and why."""
        self._released.set()
        if self._holder is not None:
            self._holder.join()

    def note_held(self) -> None:
        """Let :meth:`died` wait for the holder: before, the mutex is free although nobody has died."""
        self._held.set()

    def died(self) -> bool:
        """Wait until the holder has died, or has let go. Return whether it has died."""
        self._held.wait()
        if self._released.is_set():
            return False
        died: bool = _LIBC.pthread_mutex_lock(self._mutex) != 0
        _LIBC.pthread_mutex_unlock(self._mutex)
        return died

    def close(self) -> None:
        """End a wait in :meth:`died` that has not begun."""
        self._released.set()
        self._held.set()


def _checked(error: int) -> None:
    """Raise OSError for the error of a call of the C library."""
    if error:
        raise OSError(error, os.strerror(error))
