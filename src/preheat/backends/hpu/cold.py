"""Sources of cold events on Gaudi: the bridge's own counters.

They are read after each step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack

from preheat.backends.cold import DYNAMO, IMPORTS, NO_LLVM_FUNCTIONS, SELDOM, Counted, Watched
from preheat.backends.hpu.bridge import Bridge


def cold_sources(bridge: Bridge, captured: Callable[[], int]) -> Mapping[str, Watched]:
    """Return the sources; ``captured`` returns the number of captured graphs."""

    def metric(name: str, what: str) -> Callable[[ExitStack], Counted]:
        def read() -> int:
            return int(bridge.metric(name)["TotalNumber"])

        def describe(number: int) -> list[str]:
            details = bridge.metric(name).get("Details", [])[-number:]
            return [f"{what}: {detail}" for detail in details] or [f"{number} times {what}"]

        return lambda undo: Counted(name, read, describe)

    def memory(undo: ExitStack) -> Counted:
        grown = [0, used()]

        def read() -> int:
            now = used()
            if now > grown[1]:
                grown[:] = grown[0] + 1, now
            return grown[0]

        return Counted("allocator", read, lambda n: [f"the device holds {grown[1]:,} bytes"], every=SELDOM)

    def used() -> int:
        free, total = bridge.hpu.mem_get_info()
        return int(total - free)

    def captures(undo: ExitStack) -> Counted:
        return Counted("graph capture", captured, lambda n: [f"{n} HPU graphs were captured"])

    return {
        "dynamo": DYNAMO,
        "triton": Watched("none", "Triton has no target for it"),
        "llvm": NO_LLVM_FUNCTIONS,
        "recipe": Watched(
            "counter", "the bridge's metric `graph_compilation`",
            metric("graph_compilation", "a recipe was compiled"),
        ),
        "host fallback": Watched(
            "counter", "the bridge's metric `cpu_fallback`", metric("cpu_fallback", "an operation ran on the host")
        ),
        "graph capture": Watched("counter", "modules that the graph driver has wrapped and called", captures),
        "allocator": Watched("counter", "`mem_get_info` of the bridge, every eighth step", memory),
        "module loading": Watched("none", "Gaudi loads only recipes, counted at their compilation"),
        "import": IMPORTS,
    }  # fmt: skip
