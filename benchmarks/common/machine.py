"""The fingerprint of the machine, with the versions and the commit of its figures.

Run as a script, this file prints it as JSON, for a process that must not import torch.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
"""The checkout."""

LIBRARIES = ("preheat", "torch", "triton", "numpy", "transformers")


def fingerprint() -> dict[str, Any]:
    """Return processor, cores, threads, GPU, versions, commit and time. Imports torch."""
    return {
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "versions": {name: _version(name) for name in LIBRARIES},
        "commit": _commit(),
        "at": datetime.now(UTC).isoformat(timespec="seconds"),
        **_torch(),
    }


def fingerprint_from_outside() -> dict[str, Any]:
    """Return the fingerprint, computed in another process."""
    done = subprocess.run([sys.executable, __file__], check=True, capture_output=True, text=True)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _commit() -> str | None:
    """Return the commit, with a plus sign when files differ from it.

    None outside of a checkout.
    """

    def git(*words: str) -> str:
        done = subprocess.run(["git", *words], cwd=ROOT, check=True, capture_output=True, text=True)
        return done.stdout.strip()

    try:
        return git("rev-parse", "--short=12", "HEAD") + ("+" if git("status", "--porcelain", "-uno") else "")
    except (OSError, subprocess.CalledProcessError):
        return None


def _torch() -> dict[str, Any]:
    """Return threads, instruction set and GPU.

    ``gpu`` is None where preheat cannot use one.
    """
    import torch

    from preheat.backends.registry import pick_backend

    chosen = pick_backend("auto")
    gpu = chosen.fingerprint if chosen.facts.name == "cuda" else None
    return {"threads": torch.get_num_threads(), "isa": torch.backends.cpu.get_cpu_capability(), "gpu": gpu}


if __name__ == "__main__":
    print(json.dumps(fingerprint()))
