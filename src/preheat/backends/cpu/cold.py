"""Sources of cold events on a CPU."""

from __future__ import annotations

from collections.abc import Mapping

from preheat.backends.cold import DYNAMO, IMPORTS, NO_FALLBACK, NO_RECIPES, Watched

COLD_SOURCES: Mapping[str, Watched] = {
    "dynamo": DYNAMO,
    "triton": Watched("none", "Triton has no target for a CPU"),
    "recipe": NO_RECIPES,
    "host fallback": NO_FALLBACK,
    "graph capture": Watched("none", "a CPU has no graphs"),
    "allocator": Watched("none", "torch keeps no pool on a CPU: every tensor comes from the C library"),
    "module loading": Watched("none", "the system maps a library's pages on first touch and gives no notice"),
    "import": IMPORTS,
}
