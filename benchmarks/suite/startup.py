"""Seconds from the start of a process to a ready engine.

The first boot has empty caches, the second one the first boot's.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.common.process import environment
from benchmarks.common.report import Clock, PartReport


def startup(report: PartReport, options: dict[str, Any], folder: Path, clock: Clock) -> None:
    """Boot twice, each in a process of its own.

    Both compile into ``folder``, which is empty at first.
    """
    for name in ("cold", "second"):
        if clock.left < 1:
            report.leave_out(name, "out of time")
            continue
        found = boot(options, caches(folder), clock.left)
        report.put(found.pop("ready_s"), f"ready_{name}_s")
        report.put(found, f"steps_{name}")


def caches(folder: Path) -> dict[str, str]:
    """Return an environment that keeps everything compiled in ``folder``."""
    folders = {
        "PREHEAT_CACHE_DIR": "preheat",
        "TRITON_CACHE_DIR": "triton",
        "TORCHINDUCTOR_CACHE_DIR": "inductor",
        "CUDA_CACHE_PATH": "cuda",
    }
    return environment(**{name: str(folder / place) for name, place in folders.items()})


def boot(options: dict[str, Any], environment: Mapping[str, str], seconds: float) -> dict[str, Any]:
    """Return the seconds until ready, and of each boot step.

    The engine boots in a new process.
    """
    asked = json.dumps({"options": options, "at": time.time()})
    done = subprocess.run(
        [sys.executable, "-m", __name__, asked], env=environment, timeout=seconds, check=False, capture_output=True
    )
    if done.returncode:
        raise RuntimeError(f"the engine did not start: {done.stderr.decode()[-2000:]}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def child(asked: str) -> None:
    """Boot in the new process, and print the seconds since it was asked for."""
    given = json.loads(asked)
    from preheat.llm import LLM

    llm = LLM(**given["options"])
    ready = time.time() - given["at"]
    record = json.loads(llm.frontend.ready.record) if llm.frontend.ready else {}
    print(json.dumps({"ready_s": round(ready, 2), **record_seconds(record)}))


def record_seconds(record: dict[str, Any]) -> dict[str, Any]:
    """Return the record's steps, and the outcomes of its items by count."""
    outcomes: dict[str, int] = {}
    for entry in record.get("entries", ()):
        outcomes[entry["outcome"]] = outcomes.get(entry["outcome"], 0) + 1
    return {"steps": record.get("steps", []), "items": outcomes}


if __name__ == "__main__":
    child(sys.argv[1])
