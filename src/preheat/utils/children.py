"""Commands and environment of Python processes that this one starts."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from types import MappingProxyType

NOTHING: Mapping[str, str] = MappingProxyType({})


def python_command(module: str, *words: object, warns: bool = True) -> list[str]:
    """Return the command of a Python process that runs ``module`` with ``words``.

    It imports nothing from the folder where it starts, unless its environment names the folder. Without ``warns`` it
    prints no warnings of Python.
    """
    quiet = () if warns else ("-W", "ignore")
    return [sys.executable, "-P", *quiet, "-m", module, *map(str, words)]


def child_environment(more: Mapping[str, str] = NOTHING) -> dict[str, str]:
    """Return the environment, with ``more``, of a child that imports from the places that this process imports from."""
    return {**os.environ, **more, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
