"""Dynamo's own counters, read without importing it: what this process has compiled with ``torch.compile``."""

from __future__ import annotations

import sys
from typing import Any


def compile_seconds() -> float:
    """Seconds that this process has spent in torch.compile so far; what came from the cache on disk took less."""
    utils = _dynamo_utils()
    return sum(utils.compilation_time_metrics.get("_compile.compile_inner", ())) if utils else 0.0


def compilations() -> int:
    """Graphs that this process has compiled so far: of our regions, one a program."""
    utils = _dynamo_utils()
    return int(utils.counters["stats"]["unique_graphs"]) if utils else 0


def graph_breaks() -> int:
    """Times that compiled code had to leave an operation to eager Python, so far.

    Our regions never do: one that cannot be compiled whole fails.
    """
    utils = _dynamo_utils()
    return sum(utils.counters["graph_break"].values()) if utils else 0


def _dynamo_utils() -> Any:
    """Dynamo's counters; None while nothing has imported it, which takes seconds."""
    return sys.modules.get("torch._dynamo.utils")
