"""Requests through the ingress of Ray Serve while a replica is killed, and the items a second that pass through it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.common import crowd
from benchmarks.common.report import save
from preheat.errors import PreheatError

PORT = 8124
SECONDS = 240.0
SETTINGS: dict[str, Any] = {
    "model": "bundled", "device": "cpu", "num_threads": 1, "kv_cache_memory_bytes": 128 << 20, "max_num_seqs": 64,
    "max_model_len": 512, "skip_warmup": False, "enable_auto_tool_choice": True, "tool_call_parser": "hermes",
}  # fmt: skip


def replicas() -> list[int]:
    """Return the processes of the engines' replicas on this machine."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            if path.read_bytes().startswith(b"ray::ServeReplica:default:preheat\0"):
                found.append(int(path.parent.name))
    return sorted(found)


def start(count: int = 2, **more: Any) -> None:
    """Run ``count`` replicas behind an ingress, in Ray on this machine, and wait until both are hot."""
    import ray
    from ray import serve

    from preheat.serve_ray import front

    ray.init(num_cpus=count + 2, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    serve.start(http_options={"host": "127.0.0.1", "port": PORT})
    deployment = {"num_replicas": count, "ray_actor_options": {"num_cpus": 1}}
    serve.run(front({"deployment": deployment, "ingress": {"ray_actor_options": {"num_cpus": 0}}, **SETTINGS, **more}))
    wait(count)


def wait(count: int) -> None:
    """Wait until ``count`` replicas run."""
    from ray import serve

    end = time.monotonic() + SECONDS
    while (states := serve.status().applications["default"].deployments["preheat"].replica_states) != {
        "RUNNING": count
    }:
        if time.monotonic() > end:
            raise PreheatError(f"the replicas did not start: {states}")
        time.sleep(0.2)


def stop() -> None:
    """End the application, and Ray."""
    import ray
    from ray import serve

    serve.shutdown()
    ray.shutdown()


def killed(asked: Sequence[crowd.Asked]) -> dict[str, Any]:
    """Answer ``asked`` twice, the second time while a replica is killed; return what differs."""
    plain = asyncio.run(crowd.together(PORT, asked))
    parts = sum(len(each.times) for each in plain)
    victim, at = replicas()[0], list[float]()

    def kill(_: list[crowd.Answer]) -> None:
        at.append(time.monotonic())
        os.kill(victim, signal.SIGKILL)

    answers = asyncio.run(crowd.together(PORT, asked, max(parts // 3, 1), kill))
    expected, got = list(map(crowd.normal, plain)), list(map(crowd.normal, answers))
    pauses = sorted(crowd.pauses(each, at[0]) for each in answers) if at else []
    return {
        "requests": len(asked), "killed": len(at), "statuses": sorted({each["status"] for each in expected}),
        "differing": [
            {"kind": one.kind, "expected": want, "got": other}
            for one, want, other in zip(asked, expected, got, strict=True) if want != other
        ],
        "longest_pause_s": round(pauses[-1], 3) if pauses else 0.0,
    }  # fmt: skip


def items(streams: int = 64, tokens: int = 100) -> dict[str, Any]:
    """Return the items a second through the ingress: ``streams`` streams with an event for each token."""
    body = {"prompt": "def f(x):", "max_tokens": tokens, "ignore_eos": True, "stream": True, "temperature": 1}
    asked = [crowd.Asked("items", crowd.COMPLETIONS, body | {"seed": at}) for at in range(streams)]
    best = 0.0
    for _ in range(3):
        began = time.monotonic()
        answers = asyncio.run(crowd.together(PORT, asked))
        count = sum(each.raw.count(b"data: {") for each in answers)
        best = max(best, count / (time.monotonic() - began))
    return {"streams": streams, "tokens": tokens, "items_per_s": round(best)}


def run(requests: int, seed: int) -> None:
    """Kill a replica under ``requests`` requests, measure items a second, and save the figures."""
    start()
    try:
        figures = {"seed": seed, **killed(crowd.mixed(requests, seed, None, 32))}
        wait(2)
        figures["through"] = items()
    finally:
        stop()
    print({**figures, "differing": len(figures["differing"])})
    print(save("chaos_ray", figures))
    if figures["differing"] or figures["statuses"] != ["200"]:
        raise SystemExit(1)
