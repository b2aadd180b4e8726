"""A bytecode cache for installations without bytecode, as in many containers.

Torch alone is a thousand modules. The interpreter would compile them at every start, for two seconds.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

FOLDER = "bytecode"


@contextmanager
def kept(root: Path | None, module: str = "torch") -> Iterator[None]:
    """Keep the bytecode of imports inside in a folder of ``root``.

    They write it there and read it from there, by Python's own rules. Nothing changes without a root, or if ``module``
    has bytecode already. No bytecode is ever written beside the sources.
    """
    spec = importlib.util.find_spec(module) if root is not None else None
    if root is None or spec is None or spec.cached is None or Path(spec.cached).exists():
        yield
        return
    before = sys.pycache_prefix, sys.dont_write_bytecode
    sys.pycache_prefix, sys.dont_write_bytecode = str(root / FOLDER), False
    try:
        yield
    finally:
        sys.pycache_prefix, sys.dont_write_bytecode = before
