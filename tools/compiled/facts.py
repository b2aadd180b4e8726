"""Facts of a compiled kernel, and faults by the limits of a card."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import sys
import tempfile
from collections.abc import Mapping
from contextlib import redirect_stdout
from typing import Any

from preheat.backends.cuda.device.card import Capability, Card
from tools.oracles.card import Launch

SECONDS = 300
"""A compilation that takes longer is a fault."""

SPILLED = 256
"""Bytes of registers in memory that need no record."""

INSTRUCTIONS = re.compile(r"\b(wgmma\.mma_async|mma\.sync|tcgen05\.mma)\b")
EXPECTED = {
    "mma.sync": {"mma.sync"},
    "wgmma": {"wgmma.mma_async", "mma.sync"},
    "tcgen05": {"tcgen05.mma", "mma.sync"},
}
"""Instructions of products, by the card's instruction for large tiles."""

Facts = dict[str, Any]


def facts(launch: Launch, capability: Capability) -> Facts:
    """Compile ``launch`` in this process and return its facts; an ``error`` if it does not compile."""
    import triton

    triton.knobs.nvidia.dump_ptxas_log = True
    said = io.StringIO()
    try:
        with redirect_stdout(said):
            made = launch.compiled(capability)
    except Exception as error:
        lines = [line.strip() for line in f"{error}".splitlines() if line.strip()]
        return {"error": f"{type(error).__name__}: {lines[-1] if lines else ''}"[:300]}
    ptx, text = made.asm["ptx"], made.asm["ttgir"]
    first = made.asm.get("ttir", text)  # Gluon's programs begin with layouts
    spills = re.findall(r"(\d+) bytes spill stores, (\d+) bytes spill loads", said.getvalue())
    registers = [int(each) for each in re.findall(r"Used (\d+) registers", said.getvalue())]
    return {
        "shared": made.metadata.shared,
        "registers": max(registers, default=0),
        "spills": max((int(one) + int(other) for one, other in spills), default=0),
        "instructions": sorted(set(INSTRUCTIONS.findall(ptx))),
        "products": bool(re.search(r"(?:tt\.dot|warp_group_dot)\b.*(?:bf16|f16|f8)", first)),
        "widths": sorted({int(each) for each in re.findall(r"xbf16, #ttg\.dot_op<\{[^}]*kWidth = (\d+)", text)}),
        "waits": "griddepcontrol" in ptx,
    }


class Child:
    """A compilation of ``launch`` in a child, because the compiler may end its process."""

    def __init__(self, launch: Launch, capability: Capability) -> None:
        self._told = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed behind the child's end
        sys.stdout.flush()
        self._process = os.fork()
        if self._process == 0:
            signal.alarm(SECONDS)
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
            json.dump(facts(launch, capability), self._told)
            self._told.flush()
            os._exit(0)

    def facts(self) -> Facts:
        """Wait for the end of the child, and return the facts."""
        _, status = os.waitpid(self._process, 0)
        with self._told as told:
            told.seek(0)
            if status == 0 and (text := told.read()):
                found: Facts = json.loads(text)
                return found
        return {"error": f"the compiler ended with signal {status & 127}"}


def in_child(launch: Launch, capability: Capability) -> Facts:
    """Return the facts of ``launch``, compiled in a child."""
    return Child(launch, capability).facts()


def faults(card: Card, found: Facts, spilled: int = SPILLED) -> list[str]:
    """Return the faults of a compiled kernel on ``card``; ``spilled`` bytes of registers are known."""
    if "error" in found:
        return [found["error"]]
    said = []
    if found["shared"] > card.shared_bytes:
        said.append(f"{found['shared']} bytes of shared memory, and the card has {card.shared_bytes}")
    if found["spills"] > max(spilled, SPILLED):
        said.append(f"{found['spills']} bytes of registers are spilled, and {max(spilled, SPILLED)} are known")
    used = set(found["instructions"])
    if used - EXPECTED[card.products]:
        said.append(f"instructions {', '.join(sorted(used))} on a card with {card.products}")
    if found["products"] and not used:
        said.append("a product without a matrix instruction")
    if set(found["widths"]) - {2}:
        said.append(f"kWidth {found['widths']} in products of 16 bits: other sums than with 2")
    if found["waits"] != card.early_launch and (found["waits"] or not card.early_launch):
        said.append("a wait for the launch ahead, on a card without early launches")
    return said


def summary(results: Mapping[str, Facts], wrong: Mapping[str, list[str]]) -> dict[str, Any]:
    """Return the counts of a target, and its kernels that spill."""
    good = [each for each in results.values() if "error" not in each]
    return {
        "configurations": len(results),
        "compiled": len(good),
        "faults": len(wrong),
        "kernels": len({name.partition(",")[0] for name in results}),
        "most_shared": max((each["shared"] for each in good), default=0),
        "most_registers": max((each["registers"] for each in good), default=0),
        "instructions": sorted({each for one in good for each in one["instructions"]}),
        "spills": {name: each["spills"] for name, each in results.items() if each.get("spills", 0) > SPILLED},
    }
