"""The cost of batch invariance on a GPU.

    python -m benchmarks invariance_cost --shape llama-3.1-8b --seconds 120

Figures are times between tokens, to the first one, and of reading prompts. `preheat bench latency` runs with and
without invariance in turns, each time in a process of its own and for at most ``--seconds``. The best figure of each
counts, since the first process finds a cooler card. The table goes into docs/determinism.md
(`python -m benchmarks.performance_doc`). A CPU refuses, since it has nothing faster to choose.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.common.compared import Figures, best, in_turns, percent_slower
from benchmarks.common.process import environment
from benchmarks.common.report import parser, read_parts, save
from benchmarks.common.shapes import SHAPES
from benchmarks.common.table import flat, shown


def main(words: Sequence[str]) -> None:
    flags = parser(__doc__, __name__)
    flags.add_argument("--shape", choices=SHAPES, default="llama-3.1-8b")
    flags.add_argument("--seconds", type=float, default=600.0, help="of each engine; what does not fit is left out")
    flags.add_argument("--turns", type=int, default=2, help="of each engine")
    flags.add_argument("--tiny", action="store_true", help="a smoke test, whose figures mean nothing")
    own = flags.parse_args(words)
    modes = "--no-batch-invariant", "--batch-invariant"
    runs: dict[str, list[dict[str, float]]] = {mode: [] for mode in modes}
    for flag in in_turns(*modes, own.turns):
        runs[flag].append(measure(own, flag))
    varying, invariant = map(best, runs.values())
    rows = beside(invariant, varying)
    for row in rows:
        print(
            f"{row['what']:<36} {shown(row['invariant']):>8} {shown(row['varying']):>8} {row['cost_percent']:>+7.1f} %"
        )
    print(save(f"invariance_cost_{own.shape}", rows))


def measure(own: argparse.Namespace, *flags: str) -> dict[str, float]:
    """Return the figures of one engine, by name.

    If it failed, end this process with its status.
    """
    with tempfile.TemporaryDirectory(prefix="preheat-bench-") as folder:
        asked = [f"--shape={own.shape}", f"--output={folder}", f"--seconds={own.seconds:g}", *(["--tiny"] * own.tiny)]
        command = [sys.executable, "-m", "benchmarks", "latency", *asked, *flags]
        if status := subprocess.run(command, env=environment(), stdout=subprocess.DEVNULL, check=False).returncode:
            sys.exit(status)
        return flat(read_parts(Path(folder) / f"{own.shape}.json"))


def beside(invariant: Figures, varying: Figures) -> list[dict[str, Any]]:
    """Return the figures of both engines, and by how many percent invariance takes longer."""
    cost = percent_slower(varying, invariant)
    return [
        {"what": what, "invariant": ours, "varying": varying[what], "cost_percent": round(cost[what], 1)}
        for what, ours in invariant.items()
        if what in cost
    ]
