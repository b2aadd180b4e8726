"""Kills at every token of every request, until all positions have been met.

All requests begin at one engine, which a :mod:`benchmarks.common.witness` in the server kills in the midst. The
journal tells how many tokens each request has then: a request and a number of its tokens are a position. One kill meets
a position of each open request. The rounds go on until each position of each request has been met.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import chaos
from benchmarks.common.process import ServerProcess
from benchmarks.common.report import save

MODULE, VARIABLE = "benchmarks.common.witness", "PREHEAT_WITNESS"
SECONDS = 10.0


def told(path: Path, count: int) -> list[dict[str, Any]]:
    """Return the witness's lines, once there are ``count``."""
    end = time.monotonic() + SECONDS
    while time.monotonic() < end:
        lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
        if len(lines) >= count:
            break
        time.sleep(0.02)
    return [json.loads(line) for line in lines]


def lengths(asked: Sequence[chaos.Asked], expected: Sequence[dict[str, Any]]) -> list[tuple[int, int, int]]:
    """Return seed, choice and tokens of each sequence."""
    return [
        (one.body["seed"], choice, len(answer["token_ids"]))
        for one, found in zip(asked, expected, strict=True)
        for choice, answer in found["choices"].items()
    ]


def run(asked: Sequence[chaos.Asked], seed: int, options: dict[str, Any], most: int) -> None:
    """Kill until every position is met, at most ``most`` times, and save the figures. Exit with 1 for a difference."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "witness"
        with chaos.replicas({"max_num_seqs": 256} | options, MODULE, **{VARIABLE: str(path)}) as server:
            figures = _rounds(server, asked, path, most)
    figures = {"requests": len(asked), "seed": seed, "options": options} | figures
    print({name: value for name, value in figures.items() if name != "rounds"})
    print(save("chaos_every", figures))
    if figures["differing"] or figures["positions_met"] != figures["positions"]:
        sys.exit(1)


def _rounds(server: ServerProcess, asked: Sequence[chaos.Asked], path: Path, most: int) -> dict[str, Any]:
    port, process = server.port, server.process.pid
    asyncio.run(chaos.together(port, asked, rank=0))  # so that the next round finds no first use
    plain = asyncio.run(chaos.together(port, asked, rank=1))
    expected = [chaos.normal(each) for each in plain]
    assert {each["status"] for each in expected} == {"200"}
    Path(f"{path}.lengths").write_text(json.dumps(lengths(asked, expected)), encoding="utf-8")
    os.kill(process, signal.SIGUSR2)
    undisturbed = told(path, 1)[0]["plain"]
    rounds, gaps = list[dict[str, Any]](), list[float]()
    moved = chaos.metric(port, "request_moves_total")
    for turn in range(most):
        os.kill(process, signal.SIGUSR1)
        answers = asyncio.run(chaos.together(port, asked, rank=turn % 2))
        os.kill(process, signal.SIGUSR2)
        lines = told(path, 2 + sum(each["killed"] for each in rounds))
        killed = len(lines) > 1 + sum(each["killed"] for each in rounds)
        line = lines[-1] if killed else {}
        differing = [
            {"request": at, "kind": each.kind, "expected": want, "got": got}
            for at, (each, want, got) in enumerate(zip(asked, expected, map(chaos.normal, answers), strict=True))
            if want != got
        ]
        if killed:
            gaps += [chaos.pauses(each, line["killed"]) for each in answers if each.times]
        rounds.append({"killed": int(killed), "differing": differing, **_figures(line)})
        rounds[-1]["back_s"] = round(chaos.wait_for_engines(port, 2), 2)
        print(turn, json.dumps(rounds[-1] | {"differing": len(differing)}), flush=True)
        if line.get("met") == line.get("of", -1):
            break
    met = max((each.get("met", 0) for each in rounds), default=0)
    first, gaps = undisturbed["first_token_s"], sorted(gap for gap in gaps if gap > 0)
    return {
        "kills": sum(each["killed"] for each in rounds), "moved": chaos.metric(port, "request_moves_total") - moved,
        "positions": sum(each[2] for each in lengths(asked, expected)), "positions_met": met,
        "answers": len(asked) * len(rounds), "differing": sum(len(each["differing"]) for each in rounds),
        "pause_p50_s": _at(gaps, 50), "pause_p99_s": _at(gaps, 99), "first_token_p99_s": _at(first, 99),
        "step_s": undisturbed["step_s"], "notice_p99_s": _at(sorted(e["notice_s"] for e in rounds if e["killed"]), 99),
        "rounds": rounds,
    }  # fmt: skip


def _figures(line: dict[str, Any]) -> dict[str, Any]:
    """Return the figures of a kill: how long it took to notice, and to give moved requests their next tokens."""
    if not line:
        return {}
    back = [each for each in line["back_s"] if each >= 0]
    return {
        "target": line["target"], "lost": line["lost_requests"], "met": line["met"], "of": line["of"],
        "notice_s": round(line["lost"] - line["killed"], 4), "next_p50_s": _at(back, 50), "next_p99_s": _at(back, 99),
    }  # fmt: skip


def _at(sorted_values: Sequence[float], percent: int) -> float:
    """Return a percentile, 0 without values."""
    return round(sorted_values[len(sorted_values) * percent // 100], 4) if sorted_values else 0.0
