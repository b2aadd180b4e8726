"""Kills at every token of every request, until all positions have been met.

All requests begin at one engine, which a :mod:`benchmarks.common.witness` in the server kills in the midst. The
journal tells how many tokens each request has then: a request and a number of its tokens are a position. One kill meets
a position of each open request. The rounds go on until each position of each request has been met. A run with the
seed, the options and the requests of the record goes on where it stopped. Runs side by side take a part of the
positions each, and add to one record.

The pause of a moved request has parts: the kernel's notice of the death, the new messages, the engine's taking of them,
the queue behind other moved requests, and the step that reads the text.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.common import crowd
from benchmarks.common.process import ServerProcess
from benchmarks.common.report import RESULTS, alone, save

MODULE, VARIABLE = "benchmarks.common.witness", "PREHEAT_WITNESS"
SECONDS = 10.0
REFUSED = "503"
"""The status of a new request that comes while no engine takes requests: it has no answer to compare."""


def told(path: Path, count: int) -> list[dict[str, Any]]:
    """Return the witness's whole lines, once there are ``count``."""
    end = time.monotonic() + SECONDS
    while time.monotonic() < end:
        whole = path.read_text(encoding="utf-8").rpartition("\n")[0] if path.exists() else ""
        lines = whole.splitlines()
        if len(lines) >= count:
            break
        time.sleep(0.02)
    return [json.loads(line) for line in lines]


PARTS = {
    "notice_s": "the server notices the death",
    "resend_s": "it sends the requests to another engine",
    "take_s": "the engine takes them, behind the step that it is in",
    "queue_s": "the steps that read other moved texts",
    "read_s": "the step that reads this text, and draws its next token",
    "next_s": "all but the notice",
}
"""The parts of a pause in the server, then their sum."""


def lengths(asked: Sequence[crowd.Asked], expected: Sequence[dict[str, Any]]) -> list[tuple[int, int, int]]:
    """Return seed, choice and tokens of each sequence."""
    return [
        (one.body["seed"], choice, len(answer["token_ids"]))
        for one, found in zip(asked, expected, strict=True)
        for choice, answer in found["choices"].items()
    ]


def positions(known: Sequence[tuple[int, int, int]], part: tuple[int, int] = (0, 1)) -> list[tuple[int, int, int]]:
    """Return seed, choice and tokens of each position; of part (1, 4) those in the second quarter of each sequence."""
    return [
        (seed, choice, k) for seed, choice, length in known for k in range(length) if k * part[1] // length == part[0]
    ]  # fmt: skip


def run(
    asked: Sequence[crowd.Asked], seed: int, options: dict[str, Any], *,
    most: int, seconds: float, record: str, part: tuple[int, int] = (0, 1),
) -> None:  # fmt: skip
    """Kill until every position of ``part`` is met, at most ``most`` times and for ``seconds``.

    Add the figures to ``record``. Exit with 1 for a difference.
    """
    same = {"requests": len(asked), "seed": seed, "tokens": asked[0].body["max_tokens"], "options": options}
    limits = most, time.monotonic() + seconds
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "witness"
        with crowd.replicas({"max_num_seqs": 256} | options, MODULE, **{VARIABLE: str(path)}) as server:
            own = _rounds(server, asked, path, limits, (_before(same, record), part))
    with alone(record):
        figures = same | _joined(asked, _before(same, record), own)
        print({name: value for name, value in figures.items() if name not in ("rounds", "missing")})
        print(table(figures))
        print(save(record, figures))
    if figures["differing"]:
        sys.exit(1)


def _before(same: dict[str, Any], record: str) -> dict[str, Any]:
    """Return the figures so far of runs of the same requests."""
    path = RESULTS / f"{record}.json"
    if path.exists():
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))["figures"]
        if "missing" in found and all(found.get(name) == value for name, value in same.items()):
            return found
    return {}


def table(figures: dict[str, Any]) -> str:
    """Return the parts of the pauses as rows of a table."""
    rows = [f"| {name[:-2]} | {PARTS[name]} | {p50:.3f} | {p99:.3f} |" for name, (p50, p99) in figures["parts"].items()]
    return "\n".join(["| Part | | p50, s | p99, s |", "| --- | --- | --- | --- |", *rows])


def _place(missing: str) -> tuple[int, int, int]:
    """Return the position of a line of the witness."""
    seed, choice, k, _ = map(int, missing.split())
    return seed, choice, k


def _undisturbed(
    server: ServerProcess, asked: Sequence[crowd.Asked], path: Path, of: tuple[dict[str, Any], tuple[int, int]]
) -> tuple[list[dict[str, Any]], dict[str, Any], set[tuple[int, int, int]]]:
    """Return the answers without a kill, the witness's times and the positions to meet. Tell them to the witness.

    They are those of a part that the record lacks.
    """
    port, process = server.port, server.process.pid
    asyncio.run(crowd.together(port, asked, rank=0))  # so that the next round finds no first use
    os.kill(process, signal.SIGHUP)
    plain = asyncio.run(crowd.together(port, asked, rank=1))
    expected = [crowd.normal(each) for each in plain]
    assert {each["status"] for each in expected} == {"200"}
    (before, part), known = of, lengths(asked, expected)
    open_ = set(positions(known, part))
    open_ &= set(map(_place, before["missing"])) if before else open_
    told_met = [each for each in positions(known) if each not in open_]
    Path(f"{path}.lengths").write_text(json.dumps({"lengths": known, "met": told_met}), encoding="utf-8")
    os.kill(process, signal.SIGUSR2)
    return expected, told(path, 1)[0]["plain"], open_


def _rounds(
    server: ServerProcess, asked: Sequence[crowd.Asked], path: Path, most: tuple[int, float],
    of: tuple[dict[str, Any], tuple[int, int]],
) -> dict[str, Any]:  # fmt: skip
    """Return the rounds of this run, with the positions that it has met."""
    port, process = server.port, server.process.pid
    expected, undisturbed, open_ = _undisturbed(server, asked, path, of)
    rounds, missing, begun = list[dict[str, Any]](), None, len(of[0].get("rounds", []))
    moved = crowd.metric(port, "request_moves_total")
    while open_ and missing != [] and len(rounds) < most[0] and time.monotonic() < most[1]:
        os.kill(process, signal.SIGUSR1)
        answers = asyncio.run(crowd.together(port, asked, rank=(begun + len(rounds)) % 2))
        os.kill(process, signal.SIGUSR2)
        killed = bool(line := told(path, 2 + len(rounds))[-1])
        missing = line.pop("missing", missing)
        differing = [
            {"request": at, "kind": each.kind, "expected": want, "got": got}
            for at, (each, want, got) in enumerate(zip(asked, expected, map(crowd.normal, answers), strict=True))
            if want != got and got["status"] != REFUSED
        ]
        refused = sum(b" 503 " in each.raw.partition(b"\r\n")[0] for each in answers)
        gaps = [crowd.pauses(each, line["killed"]) for each in answers if each.times] if killed else []
        rounds.append({"killed": int(killed), "differing": differing, "refused": refused})
        rounds[-1] |= _figures(line, gaps, undisturbed)
        rounds[-1]["back_s"] = round(crowd.wait_for_engines(port, 2), 2)
        print(begun + len(rounds), json.dumps(rounds[-1] | {"differing": len(differing)}), flush=True)
    return {
        "rounds": rounds, "moved": crowd.metric(port, "request_moves_total") - moved,
        "first_token_p99_s": _at(undisturbed["first_token_s"], 99), "step_s": undisturbed["step_s"],
        "known": lengths(asked, expected), "met": open_.difference(map(_place, missing)) if missing is not None else (),
        "missing": missing or [],
    }  # fmt: skip


def _joined(asked: Sequence[crowd.Asked], before: dict[str, Any], own: dict[str, Any]) -> dict[str, Any]:
    """Return the figures of the record with the rounds of a run. A position is missing unless any run has met it."""
    before_missing = before["missing"] if before else ["{} {} {} 0".format(*each) for each in positions(own["known"])]
    seen = {_place(each) for each in (*before_missing, *own["missing"]) if each.endswith(" 1")}
    places = (each for each in map(_place, before_missing) if each not in own["met"])
    missing = ["{} {} {} {}".format(*each, int(each in seen)) for each in places]
    figures = _summary(asked, own["known"], [*before.get("rounds", []), *own["rounds"]], missing)
    same = {name: own[name] for name in ("first_token_p99_s", "step_s")}
    return figures | same | {"moved": own["moved"] + before.get("moved", 0.0), "missing": missing}


def _summary(
    asked: Sequence[crowd.Asked], known: Sequence[tuple[int, int, int]], rounds: Sequence[dict[str, Any]],
    missing: Sequence[str],
) -> dict[str, Any]:  # fmt: skip
    """Return the figures of all rounds."""
    kills = [each for each in rounds if each["killed"] and each["lost"]]
    kind = {one.body["seed"]: one.kind for one in asked}
    kinds = (kind[int(each.split()[0])] for each in missing)
    positions = sum(length for _, _, length in known)
    gaps = sorted(float(gap) for each in kills for gap in each["pauses_s"].split())
    worst = {part: sorted(each[part][1] for each in kills) for part in PARTS}
    return {
        "kills": sum(each["killed"] for each in rounds), "positions": positions,
        "positions_met": positions - len(missing), "missing_by_kind": Counter(kinds),
        "never_in_a_journal": sum(each.endswith(" 0") for each in missing),
        "answers": len(asked) * len(rounds), "differing": sum(len(each["differing"]) for each in rounds),
        "refused": sum(each.get("refused", 0) for each in rounds),
        "pause_p50_s": _at(gaps, 50), "pause_p99_s": _at(gaps, 99),
        "parts": {part: [_at(sorted(each[part][0] for each in kills), 50), _at(worst[part], 99)] for part in PARTS},
        "kills_with_requests": len(kills), "within_bound": sum(map(_within, kills)),
        "read_tokens_p50": _at(sorted(each["tokens"] for each in kills), 50),
        "read_cpu_p50_s": _at(sorted(each["cpu_s"] for each in kills), 50), "rounds": rounds,
    }  # fmt: skip


def _within(kill: dict[str, Any]) -> bool:
    """Return whether the pauses of a kill, at their 99th percentile, are within the bound."""
    return bool(kill["notice_s"][1] + kill["next_s"][1] <= kill["bound_s"])


def _figures(line: dict[str, Any], gaps: Sequence[float], undisturbed: dict[str, Any]) -> dict[str, Any]:
    """Return the figures of a kill, each part of the pauses as its median and its 99th percentile.

    ``bound_s`` is two steps and the reading of the moved texts, at the pace of the undisturbed round.
    """
    if not line:
        return {}
    found = {"lost": line["lost_requests"], "met": line["met"], "of": line["of"], "least": round(line["least"], 1)}
    if not line["lost_requests"]:
        return found
    line["notice_s"] = [line["lost"] - line["killed"]]
    pace = max(undisturbed["first_token_s"]) / undisturbed["prompts"]
    return found | {part: [_at(line[part], 50), _at(line[part], 99)] for part in PARTS} | {
        "tokens": line["tokens"], "cpu_s": round(line["cpu_s"], 2), "grammar_s": round(line["grammar_s"], 4),
        "bound_s": round(2 * undisturbed["step_s"] + pace * line["tokens"], 4),
        "pauses_s": " ".join(f"{gap:.2f}" for gap in sorted(gaps) if gap > 0.001),
    }  # fmt: skip


def _at(sorted_values: Sequence[float], percent: int) -> float:
    """Return a percentile, 0 without values."""
    return round(sorted_values[len(sorted_values) * percent // 100], 4) if sorted_values else 0.0
