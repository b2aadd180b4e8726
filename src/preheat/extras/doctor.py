"""``preheat doctor`` checks whether preheat will run here; ``preheat collect-env`` prints facts for a report.

Nothing is changed, no GPU memory is taken, and torch is not imported.
"""

from __future__ import annotations

import dataclasses
import os
import platform
import re
import shutil
import socket
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import preheat
from preheat.backends.registry import ENVIRONMENTS
from preheat.errors import PreheatError
from preheat.model.files import BUNDLED, find_model, weight_files
from preheat.model.weights_digest import WeightsDigest
from preheat.settings import OPTIONS, Settings
from preheat.startup import planned
from preheat.utils.caches import cache_root
from preheat.utils.finding import Finding
from preheat.utils.versions import version_of

PACKAGES = ("torch", "triton", "numpy", "safetensors", "tokenizers", "huggingface_hub", "msgspec", "pyzmq", "starlette",
            "uvicorn", "uvloop", "transformers", "vllm")  # fmt: skip
TORCH = (2, 11), (2, 13)
"""The first and the last version of torch in the tests."""

MIN_DISK, MIN_SHM, MIN_FILES = 2**30, 64 * 2**20, 1024
PREFIXES = ("PREHEAT_", "VLLM_", "PT_HPU", "CUDA_", "NVIDIA_", "NCCL_", "TORCH", "TRITON_", "OMP_", "MKL_", "HF_",
            "HABANA_", "QUANT_CONFIG")  # fmt: skip
SECRET = re.compile(r"(KEY|TOKEN|SECRET|PASSWORD|CREDENTIALS?)$")
MASKED = "(set)"


def findings(settings: Settings) -> Iterator[Finding]:
    """Yield all checks for an engine with ``settings``, one after the other."""
    yield Finding("preheat", f"{preheat.__version__} in Python {platform.python_version()}")
    yield _torch()
    for device in [settings.device] if settings.device in ENVIRONMENTS else ENVIRONMENTS:
        yield from ENVIRONMENTS[device]()
    root = cache_root(settings)
    yield (
        Finding("store", "off", "note", "every boot compiles everything again")
        if root is None
        else _folder("store", root)
    )
    yield _folder("models", Path(os.environ.get("HF_HOME", "~/.cache/huggingface")).expanduser())
    yield _weights(settings)
    yield _options(settings)
    yield _port(settings)
    yield from _limits()


def _torch() -> Finding:
    if (version := version_of("torch")) is None:
        return Finding("torch", "not installed", "fail", "scripts/install, or pip install with constraints.txt")
    release = tuple(int(part) for part in version.split(".")[:2])
    first, last = (".".join(map(str, bound)) for bound in TORCH)
    if release < TORCH[0]:
        return Finding("torch", version, "fail", f"install {first} or later")
    if release > TORCH[1]:
        return Finding("torch", version, "note", f"later than {last}, the latest tested version")
    return Finding("torch", version)


def _folder(what: str, folder: Path) -> Finding:
    """Check that files can be created in ``folder`` (or where it would be), and find the free space."""
    place = next(path for path in (folder, *folder.parents) if path.exists())
    try:
        with tempfile.TemporaryFile(dir=place):
            free = shutil.disk_usage(place).free
    except OSError as error:
        variable = "--cache-dir" if what == "store" else "HF_HOME"
        return Finding(
            what, f"{folder}: {error.strerror}", "note", f"it cannot be written; set {variable} to another folder"
        )
    found = f"{folder}, {free / 2**30:.1f} GiB free"
    return Finding(what, found, "note", "little space is left") if free < MIN_DISK else Finding(what, found)


def _weights(settings: Settings) -> Finding:
    """Return the digest of the model's weights, a part of its contract; nothing is downloaded."""
    if settings.load_format == "dummy":
        return Finding("weights", "random: --load-format dummy")
    if settings.model != BUNDLED and not Path(settings.model).expanduser().is_dir():
        return Finding("weights", f"{settings.model} is no folder here, so its weights are not hashed")
    try:
        return Finding(
            "weights", f"{settings.model}, digest {WeightsDigest(weight_files(find_model(settings))).result()}"
        )
    except (OSError, PreheatError) as error:
        return Finding("weights", str(error), "fail", "name a folder with a checkpoint, or fetch it again")


def _options(settings: Settings) -> Finding:
    """Return the error of the plan of these settings, which is the error of a boot; nothing is downloaded."""
    if settings.model != BUNDLED and not Path(settings.model).expanduser().is_dir():
        return Finding("options", f"{settings.model} is no folder here, so the options are not checked with it")
    try:
        planned(settings)
    except PreheatError as error:
        return Finding("options", str(error), "fail", "change the options, as the error says")
    return Finding("options", "they go together with the model")


def _port(settings: Settings) -> Finding:
    if settings.uds is not None:
        return Finding("socket", settings.uds)
    where = f"{settings.host}:{settings.port}"
    try:
        with socket.create_server((settings.host, settings.port)):
            return Finding("port", f"{where} is free")
    except OSError as error:
        return Finding("port", f"{where}: {error.strerror}", "fail", "name another with --port, or 0 for any")


def _limits() -> Iterator[Finding]:
    import resource

    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    advice = "each connection takes a file descriptor: run ulimit -n 65536"
    yield Finding("open files", str(files), *(("note", advice) if files < MIN_FILES else ()))
    shared = Path("/dev/shm")
    if shared.is_dir():
        size = shutil.disk_usage(shared).total
        found = f"{size / 2**20:,.0f} MiB"
        advice = "ranks of one engine share memory there: start the container with --shm-size 1g"
        yield Finding("/dev/shm", found, *(("note", advice) if size < MIN_SHM else ()))


def table(found: list[Finding]) -> str:
    """Format ``found`` for a terminal."""
    width = max(len(finding.what) for finding in found)
    lines = []
    for finding in found:
        lines.append(f"{finding.verdict:<5} {finding.what:<{width}}  {finding.found}")
        if finding.advice:
            lines.append(f"{'':<5} {'':<{width}}  -> {finding.advice}")
    failed = sum(finding.verdict == "fail" for finding in found)
    lines.append(f"{failed} of {len(found)} checks failed" if failed else f"{len(found)} checks, none failed")
    return "\n".join(lines)


def collected(settings: Settings) -> dict[str, Any]:
    """Return the facts for a report: versions, the machine, variables, changed settings, findings.

    Secrets are masked.
    """
    versions = {"python": sys.version.split()[0], "preheat": preheat.__version__}
    versions |= {name: version for name in PACKAGES if (version := version_of(name)) is not None}
    variables = {name: value for name, value in sorted(os.environ.items()) if name.startswith(PREFIXES)}
    secret = {field.name for field in dataclasses.fields(settings) if not field.repr}
    given = {opt.name: getattr(settings, opt.name) for opt in OPTIONS.values()}
    given = {name: value for name, value in given.items() if value != OPTIONS[name].default}
    return {
        "versions": versions,
        "system": platform.platform(),
        "environment": {name: MASKED if SECRET.search(name) else value for name, value in variables.items()},
        "settings": {name: MASKED if name in secret else value for name, value in given.items()},
        "findings": [finding._asdict() for finding in findings(settings)],
    }
