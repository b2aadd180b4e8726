"""Audits under load: adapters, sleep, updates and replicas for minutes, which must give no false alarm.

Three servers read their memory all the time: one loads and unloads adapters and sleeps, one gets new weights and
sleeps, one has two replicas. Clients send requests of all kinds meanwhile.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

from benchmarks.common import crowd
from benchmarks.common.adapter import write_adapter
from benchmarks.common.process import environment, serving
from preheat.lora.adapter import adapted_modules
from preheat.model.families import read_spec
from preheat.model.files import BUNDLED_PATH, read_config

EVERY = 2.0
KEY = "operator"
ENGINE: dict[str, Any] = {
    "model": "bundled", "num_threads": 1, "kv_cache_memory_bytes": 64 << 20, "max_num_seqs": 32, "log_level": "error",
    "enable_auto_tool_choice": True, "tool_call_parser": "hermes", "audit_every": EVERY, "skip_warmup": True,
    "boot_check": "quick",
}  # fmt: skip
OPERATED: dict[str, Any] = {"server_dev_mode": True, "api_key": [KEY], "enable_sleep_mode": True}


def tell(port: int, path: str, body: object = None) -> None:
    """Send a command of an operator. Raise HTTPError if it fails."""
    data = b"" if body is None else json.dumps(body).encode()
    headers = {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"}
    urlopen(Request(f"http://127.0.0.1:{port}{path}", data, headers), timeout=120).read()


def load(port: int, seed: int) -> int:
    """Answer a mix of requests, and return how many there were."""
    asked = crowd.mixed(11, seed, None, 24)
    asyncio.run(crowd.together(port, asked, key=KEY))
    return len(asked)


def commands(name: str, port: int, folder: Path) -> Iterator[str]:
    """Send one command after the other, without an end, and yield its name."""
    turn = 0
    while True:
        turn += 1
        if name == "adapters":
            tell(port, "/v1/load_lora_adapter", {"lora_name": f"a{turn}", "lora_path": str(folder / "adapter")})
            yield "load an adapter"
            tell(port, "/v1/completions", {"model": f"a{turn}", "prompt": "def f(", "max_tokens": 8})
            tell(port, "/v1/unload_lora_adapter", {"lora_name": f"a{turn}"})
            yield "unload an adapter"
        elif name == "updates":
            tell(port, "/update_weights", {"path": "weights"})
            yield "replace the weights"
        if name != "replicas" and turn % 3 == 0:
            tell(port, "/sleep?level=1")
            tell(port, "/wake_up")
            yield "sleep and wake"
        yield "load"


def options(name: str, folder: Path) -> dict[str, Any]:
    """Return the options of a server."""
    return (
        ENGINE
        | {
            "adapters": OPERATED | {"enable_lora": True, "allow_runtime_lora_updating": True, "lora_root": str(folder)},
            "updates": OPERATED | {"weights_root": str(folder)},
            "replicas": {"data_parallel_size": 2, "api_key": [KEY]},
        }[name]
    )


def run(minutes: float) -> dict[str, Any]:
    """Return the figures of ``minutes`` under load."""
    done: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as root, contextlib.ExitStack() as opened:
        folder = Path(root)
        (folder / "weights").mkdir()
        shutil.copy(BUNDLED_PATH / "model.safetensors", folder / "weights")
        modules = adapted_modules(read_spec(read_config(BUNDLED_PATH)))
        (folder / "adapter").mkdir()
        write_adapter(folder / "adapter", {name: size for name, size in modules.items() if name.endswith("q_proj")})
        servers = {}
        for name in ("adapters", "updates", "replicas"):
            starting = serving(options(name, folder), env=environment(), stderr=subprocess.DEVNULL)
            servers[name] = opened.enter_context(starting)
            done[name] = {"answers": 0, "commands": {}}
        for server in servers.values():
            server.wait_for("/ready")
        steps = {name: commands(name, server.port, folder) for name, server in servers.items()}
        end = time.monotonic() + 60 * minutes
        while time.monotonic() < end:
            for name, server in servers.items():
                command = next(steps[name])
                done[name]["commands"][command] = done[name]["commands"].get(command, 0) + 1
                done[name]["answers"] += load(server.port, done[name]["answers"])
        for name, server in servers.items():
            for counter in ("passes", "slices", "faults"):
                done[name][counter] = crowd.metric(server.port, f"audit_{counter}_total")
            done[name]["restarts"] = crowd.metric(server.port, "engine_restarts_total")
    return {"minutes": minutes, "every_s": EVERY, "servers": done}
