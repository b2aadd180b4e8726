"""Python that is compiled once, where the installation brings none compiled: containers often do not, and torch alone
is a thousand modules, which the interpreter would then compile at every start, for two seconds.
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
    """What is imported inside leaves its bytecode in a folder of ``root`` and finds it there, by Python's own rules.

    Nothing changes without a root, nor where ``module`` has its bytecode already. No bytecode is ever written beside
    sources, which those who forbid it to Python want clean.
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
