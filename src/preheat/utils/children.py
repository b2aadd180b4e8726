"""The environment of Python processes that this one starts."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from types import MappingProxyType

NOTHING: Mapping[str, str] = MappingProxyType({})


def child_environment(more: Mapping[str, str] = NOTHING) -> dict[str, str]:
    """Return the environment, with ``more``, of a child that imports from the places that this process imports from."""
    return {**os.environ, **more, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
