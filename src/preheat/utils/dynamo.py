"""Dynamo's counters of this process's compilations by ``torch.compile``, read without importing it."""

from __future__ import annotations

import sys
from typing import Any


def compile_seconds() -> float:
    """Return the seconds that this process has spent in torch.compile so far."""
    utils = _dynamo_utils()
    return sum(utils.compilation_time_metrics.get("_compile.compile_inner", ())) if utils else 0.0


def compilations() -> int:
    """Return the number of graphs compiled so far; each of our regions is one graph."""
    utils = _dynamo_utils()
    return int(utils.counters["stats"]["unique_graphs"]) if utils else 0


def graph_breaks() -> int:
    """Return the number of graph breaks so far. Our regions have none: they fail if they cannot be compiled whole."""
    utils = _dynamo_utils()
    return sum(utils.counters["graph_break"].values()) if utils else 0


def _dynamo_utils() -> Any:
    """Return the module of Dynamo's counters; None if nothing has imported it."""
    return sys.modules.get("torch._dynamo.utils")
