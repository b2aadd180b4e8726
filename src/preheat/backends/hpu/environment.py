"""Gaudi's part of `preheat doctor`, without torch.

It looks at the installed parts of the software stack. Source: the environment verification in the documentation of vLLM
on Gaudi: ``hl-smi``, the system's packages, Python's packages, and neural-compressor for FP8.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator

from preheat.backends.hpu.detect import frameworks, is_simulated, nodes
from preheat.utils.finding import Finding, Verdict
from preheat.utils.versions import version_of

SYSTEM = (
    "habanalabs-firmware-tools", "habanalabs-graph", "habanalabs-rdma-core", "habanalabs-thunk",
    "habanalabs-container-runtime",
)  # fmt: skip
PYTHON = ("habana-torch-plugin", "habana-torch-dataloader", "habana-pyhlml", "habana-media-loader")
FP8 = "neural-compressor"


def findings() -> Iterator[Finding]:
    """Yield findings on devices and on packages.

    The packages are the driver's, with its tool, and the bridge's. If nothing is installed, yield one finding.
    """
    if not nodes() and frameworks() is None and shutil.which("hl-smi") is None:
        advice = "without a Gaudi models run elsewhere; for one, see docs.habana.ai, Installation Guide"
        yield Finding("Gaudi", "no device, no hl-smi, no habana_frameworks", "note", advice)
        return
    if is_simulated():
        advice = "it computes on the host, and only with VLLM_USE_FAKE_HPU=1: take it off PYTHONPATH for a real card"
        yield Finding("habana_frameworks", f"a fake in {frameworks()}", "note", advice)
    found = nodes()
    advice = "install the driver, or start the container with --runtime=habana"
    yield Finding("Gaudi devices", ", ".join(found)) if found else Finding("Gaudi devices", "none", "fail", advice)
    tool = shutil.which("hl-smi")
    yield Finding("hl-smi", tool) if tool else Finding("hl-smi", "not in PATH", "note", f"apt install {SYSTEM[0]}")
    for name in SYSTEM:
        yield _package(name, _system_version_of(name), "note", f"apt install {name}")
    for name in PYTHON:
        needed = name == PYTHON[0]
        yield _package(
            name, version_of(name), "fail" if needed else "note", f"pip install {name}, of the driver's version"
        )
    yield _package(FP8, version_of(FP8), "note", f"pip install {FP8}, if you want FP8")


def _package(name: str, version: str | None, verdict: Verdict, advice: str) -> Finding:
    return Finding(name, "not installed", verdict, advice) if version is None else Finding(name, version)


def _system_version_of(name: str) -> str | None:
    """Return a Debian package's version; None without it or dpkg."""
    query = shutil.which("dpkg-query")
    if query is None:
        return None
    done = subprocess.run([query, "-W", "-f=${Version}", name], check=False, capture_output=True, text=True, timeout=10)
    return done.stdout.strip() or None
