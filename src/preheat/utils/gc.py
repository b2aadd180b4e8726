"""What the garbage collector need not look at: it would hold up a request while it walks what never goes away."""

from __future__ import annotations

import functools
import gc


def settle() -> None:
    """Collect once; all that is left stays for good, as far as the collector is concerned."""
    gc.collect()
    gc.freeze()


@functools.cache
def keep_imports() -> None:
    """After torch was imported, whose modules are most of what a process holds: settle, the first time only. Engines
    come later, and can be collected.
    """
    settle()
