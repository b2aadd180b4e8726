"""Keys of kernels in Triton's cache that depend on the kernels alone.

A key covers the global constants of a kernel and of all functions that it calls. Triton up to 3.7 takes the constants
of a called function before it has looked for them, unless the function has a key already. So a key would depend on the
kernels that were launched before: another process, or a boot with another option, would compile the kernel again.
"""

from __future__ import annotations

import threading

from triton.runtime.cache import triton_key
from triton.runtime.jit import DependenciesFinder, JITCallable

_take = DependenciesFinder._update_hash


def take(self: DependenciesFinder, function: JITCallable) -> None:
    """Take the key and the constants of a called ``function``, in this order."""
    _ = function.cache_key
    _take(self, function)


def hash_triton() -> threading.Thread:
    """Begin to hash Triton's files, which are a part of every key; a thread reads them in half a second."""
    thread = threading.Thread(target=triton_key, name="triton-key", daemon=True)
    thread.start()
    return thread


def order_keys() -> None:
    """Let Triton take called functions by :func:`take`."""
    DependenciesFinder._update_hash = take
