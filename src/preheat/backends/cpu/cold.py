"""Sources of cold events on a CPU."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from contextlib import ExitStack

from preheat.backends.cold import DYNAMO, IMPORTS, NO_FALLBACK, NO_RECIPES, Counted, Watched

MACHINE = "preheat.backends.cpu.llvm.machine"


def llvm(undo: ExitStack) -> Counted:
    """Functions of layers that LLVM compiles. Never imports llvmlite."""
    return Counted("llvm", _compiled, lambda count: ["the functions of a model were compiled"] * count)


def _compiled() -> int:
    machine = sys.modules.get(MACHINE)
    return machine.compilations if machine else 0


COLD_SOURCES: Mapping[str, Watched] = {
    "dynamo": DYNAMO,
    "triton": Watched("none", "Triton has no target for a CPU"),
    "llvm": Watched("counter", "functions of layers that LLVM has compiled", llvm),
    "recipe": NO_RECIPES,
    "host fallback": NO_FALLBACK,
    "graph capture": Watched("none", "a CPU has no graphs"),
    "allocator": Watched("none", "torch keeps no pool on a CPU: every tensor comes from the C library"),
    "module loading": Watched("none", "the system maps a library's pages on first touch and gives no notice"),
    "import": IMPORTS,
}
