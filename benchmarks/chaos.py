"""Engines that are killed while they answer: every answer must equal the uninterrupted one.

    python -m benchmarks chaos [--requests 40] [--kills 10] [--seed 0] [--options JSON]
    python -m benchmarks chaos --every --requests 200 --tokens 24
    python -m benchmarks chaos --faults 10000 --seed 1 [--ground ranks] [--first ROUND]
    python -m benchmarks chaos --ray --requests 50

A server with two replicas of the bundled model, on this machine alone, answers a mix of requests at once. They are
greedy or seeded, with penalties, log-probabilities, stop strings, a pattern, JSON, a forced tool, several choices or an
adapter, in streams and not. Then the same requests run again, once for each kill. A kill is SIGKILL for a random engine
when the streams have got a random number of events, so the requests are cut at many positions. ``--signal STOP`` stops
the process instead. Text, tokens, log-probabilities, arguments, ends, ids and usage are compared. A seed repeats the
requests and the places. ``--every`` sends all requests to one engine and kills it at each token in turn, so that each
round cuts every request (:mod:`benchmarks.common.every`). ``--faults`` is :mod:`benchmarks.common.faults`: servers and
clients that fail in every way.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import sys
import time
from collections.abc import Sequence
from typing import Any

from benchmarks.common.crowd import (
    ADAPTER,
    Answer,
    Asked,
    blanked,
    engines,
    kinds,
    metric,
    mixed,
    normal,
    pauses,
    replicas,
    together,
    wait_for_engines,
)
from benchmarks.common.process import ServerProcess
from benchmarks.common.report import parser, part, save
from preheat.errors import PreheatError


def rounds(
    server: ServerProcess, asked: Sequence[Asked], kills: int, *, seed: int, number: int
) -> list[dict[str, Any]]:
    """Answer ``asked`` once, then once for each kill; return the figures of each round with a kill.

    A kill is the signal ``number`` for a drawn engine, at a drawn place.
    """
    port, process = server.port, server.process.pid
    draw, size = random.Random(seed), len(engines(process))
    plain = asyncio.run(together(port, asked))
    expected, parts = list(map(normal, plain)), sum(len(each.times) for each in plain)
    if refused := [each.raw[-300:] for each, one in zip(plain, expected, strict=True) if one["status"] != "200"]:
        raise PreheatError(f"the server refused {len(refused)} requests: {refused[0]!r}")
    found = []
    for turn in range(kills):
        after, victim, killed = draw.randrange(1, max(parts * 9 // 10, 2)), draw.choice(engines(process)), list[float]()

        def kill(so_far: list[Answer], victim: int = victim, killed: list[float] = killed) -> None:
            killed.append(time.monotonic())
            os.kill(victim, number)

        moves = metric(port, "request_moves_total")
        answers = asyncio.run(together(port, asked, after, kill))
        differing = [
            {"request": at, "kind": each.kind, "expected": want, "got": got}
            for at, (each, want, got) in enumerate(zip(asked, expected, map(normal, answers), strict=True))
            if want != got
        ]
        found.append({
            "round": turn, "after_events": after, "killed": len(killed), "answers": len(answers),
            "moved": metric(port, "request_moves_total") - moves, "differing": differing,
            "pauses_s": sorted(pauses(each, killed[0]) for each in answers) if killed else [],
            "raw_equal": sum(blanked(one) == blanked(other) for one, other in zip(plain, answers, strict=True)),
            "back_s": round(wait_for_engines(port, size), 2),
        })  # fmt: skip
        print(_line(found[-1]), flush=True)
    return found


def _line(each: dict[str, Any]) -> str:
    gaps = each["pauses_s"] or [0.0]
    return (
        f"{each['round']:>5}  {each['after_events']:>6}  {each['moved']:>5.0f}  {each['answers']:>7}  "
        f"{len(each['differing']):>6}  {gaps[len(gaps) // 2]:>7.3f}  {gaps[-1]:>7.3f}  {each['back_s']:>6.1f}"
    )


def summary(found: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return figures over all rounds: the pauses of cut streams."""
    gaps = sorted(gap for each in found for gap in each["pauses_s"])
    for each in found:
        each["pauses_s"] = [round(gap, 4) for gap in each["pauses_s"] if gap > 0.001]
    return {
        "raw_equal": sum(each["raw_equal"] for each in found),
        "pause_p50_s": round(gaps[len(gaps) // 2], 4) if gaps else 0.0,
        "pause_p99_s": round(gaps[len(gaps) * 99 // 100], 4) if gaps else 0.0,
    }  # fmt: skip


def main(words: Sequence[str]) -> None:
    flags = parser(__doc__, __name__)
    flags.add_argument("--requests", type=int, default=40)
    flags.add_argument("--kills", type=int, default=10, help="with --every: the most")
    flags.add_argument("--tokens", type=int, default=48)
    flags.add_argument("--seed", type=int, default=0)
    flags.add_argument("--signal", choices=("KILL", "STOP"), default="KILL")
    flags.add_argument("--every", action="store_true", help="all requests begin at the engine that is killed")
    flags.add_argument("--faults", type=int, metavar="N", help="faults of servers and clients")
    flags.add_argument("--ground", help="the servers of --faults: front, replicas, ranks, pooling or roles")
    flags.add_argument("--first", type=int, default=0, help="the first round of --faults")
    flags.add_argument("--record", default="chaos_every", help="the name of the record of --every")
    flags.add_argument("--part", type=part, default=(0, 1), help="of the positions of --every: 1/4 is the second of 4")
    flags.add_argument("--seconds", type=float, default=1e9, help="end --every or --faults earlier")
    flags.add_argument("--ray", action="store_true", help="a replica behind the ingress of Ray Serve is killed")
    flags.add_argument("--options", type=json.loads, default={}, help="of the server, as JSON")
    args = flags.parse_args(words)
    if args.faults is not None:
        from benchmarks.common import faults

        where = {"ground": args.ground, "first": args.first}
        faults.run(args.faults, args.seed, args.options, **where, seconds=args.seconds)
        return
    if args.every:
        from benchmarks.common import every

        asked = mixed(args.requests, args.seed, ADAPTER, args.tokens)
        limits = {"most": args.kills, "seconds": args.seconds}
        every.run(asked, args.seed, args.options, **limits, record=args.record, part=args.part)
        return
    if args.ray:
        from benchmarks.common import ray_ingress

        ray_ingress.run(args.requests, args.seed)
        return
    asked = mixed(args.requests, args.seed, ADAPTER, args.tokens)
    print(f"{args.requests} requests of {len(kinds(ADAPTER))} kinds at once, seed {args.seed}, SIG{args.signal}")
    print("round   after  moved  answers  differ  p50 gap  max gap  back s", flush=True)
    with replicas(args.options) as server:
        number = getattr(signal, f"SIG{args.signal}")
        found = rounds(server, asked, args.kills, seed=args.seed, number=number)
    differing = sum(len(each["differing"]) for each in found)
    figures = {"requests": args.requests, "seed": args.seed, "signal": args.signal, "options": args.options}
    figures |= {"kills": sum(each["killed"] for each in found), "moved": sum(each["moved"] for each in found)}
    figures |= summary(found)
    figures |= {"answers": sum(each["answers"] for each in found), "differing": differing, "rounds": found}
    print(
        f"{figures['kills']} kills, {figures['moved']:.0f} sequences moved, {differing} of {figures['answers']} differ"
    )
    print(save("chaos_stop" if args.signal == "STOP" else "chaos", figures))
    if differing:
        sys.exit(1)
