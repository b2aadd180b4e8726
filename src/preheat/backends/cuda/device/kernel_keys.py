"""Keys of kernels in Triton's cache that depend on the kernels alone.

A key covers the global constants of a kernel and of all functions that it calls. Triton up to 3.7 takes the constants
of a called function before it has looked for them, unless the function has a key already. So a key would depend on the
kernels that were launched before: another process, or a boot with another option, would compile the kernel again.
"""

from __future__ import annotations

from collections.abc import Callable

import triton
from triton.runtime import build, cache
from triton.runtime.jit import DependenciesFinder, JITCallable

from preheat.backends.cuda.device.triton_key import ASKED

_take = DependenciesFinder._update_hash


def take(self: DependenciesFinder, function: JITCallable) -> None:
    """Take the key and the constants of a called ``function``, in this order."""
    _ = function.cache_key
    _take(self, function)


def order_keys() -> None:
    """Let Triton take called functions by :func:`take`, and its own key from the process that has computed it."""
    DependenciesFinder._update_hash = take
    if (found := ASKED.answer()) is not None and found.installation == triton.__file__:
        cache.triton_key, build.platform_key = _always(found.files), _always(found.platform)


def _always(value: str) -> Callable[[], str]:
    return lambda: value
