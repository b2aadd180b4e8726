"""Decoding from a scattered cache: reads gathered or in place, with and without compaction.

    python -m benchmarks defrag [--rows 64] [--stay 16] [--steps 10] [--rounds 7] [--threads 1]

``rows`` sequences of ragged lengths fill the cache from the bottom. All but the last ``stay`` of them leave, so that
the remaining sequences lie above the holes. Then ``steps`` steps are timed. In two more loads no sequence leaves; in
one of them the sequences are short. The settings take turns. Medians of the rounds are reported: tokens a second, the
highest block in use, and the milliseconds of the compaction, a delay of one step. The prompts are booked, not computed:
it costs the same to read a cache of noise.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from benchmarks.common.report import parser, save
from preheat import LLM
from preheat.core import FromEngine, Request, SamplingParams, StepResult, ToEngine

NEVER = 1_000_000
READS: dict[str, dict[str, Any]] = {
    "gathered, blocks of 64": {"block_size": 64},
    "gathered, blocks of 256": {"block_size": 256},
    "in place, blocks of 256": {"block_size": 256, "contiguous_pa": True},
}


class NoTransport:
    """A transport without anything at its other end."""

    def take(self, timeout: float | None) -> list[ToEngine]:
        return []

    def put(self, message: FromEngine) -> None:
        pass

    def waker(self) -> Callable[[], None]:
        return lambda: None


def make(args: argparse.Namespace, reads: dict[str, Any]) -> LLM:
    blocks = args.rows * -(-(args.longest + args.steps + 2) // reads["block_size"]) + 1
    llm = LLM(
        args.model, max_num_seqs=args.rows, num_gpu_blocks_override=blocks, enable_prefix_caching=False,
        max_num_batched_tokens=1 << 17, max_model_len=args.longest + args.steps + 16, num_threads=args.threads,
        skip_warmup=True, on_cold="off", **reads,
    )  # fmt: skip
    llm.loop.transport = NoTransport()
    executor: Any = llm.loop.executor
    executor.cache.data.normal_()
    return llm


@dataclass(frozen=True)
class ScatteredLoad:
    """Prompts have ``lengths`` (shortest, longest) tokens; the last ``stay`` sequences remain."""

    lengths: tuple[int, int]
    stay: int
    thresholds: tuple[int, ...] = (NEVER,)


def scatter(llm: LLM, args: argparse.Namespace, load: ScatteredLoad) -> None:
    """Bring the load's sequences past their prompts, and let some of them leave."""
    scheduler, draw = llm.loop.scheduler, random.Random(0)
    for number in range(args.rows):
        prompt = [draw.randrange(10, 4096) for _ in range(draw.randint(*load.lengths))]
        scheduler.add(Request(number, prompt, SamplingParams(temperature=0), number, args.steps + 8))
    while scheduler.waiting or (scheduler.slots.cached_len < scheduler.slots.prompt_len)[scheduler.running.order].any():
        schedule = scheduler.schedule()
        assert schedule is not None
        scheduler.process_results(schedule, StepResult(np.full(int(schedule.samples.sum()), 7)))
    for number in range(args.rows - load.stay):
        scheduler.cancel(number)


def measure(llm: LLM, args: argparse.Namespace, load: ScatteredLoad, threshold: int) -> dict[str, float]:
    """Return the figures of one round, from an empty engine to an empty engine."""
    scheduler = llm.loop.scheduler
    scatter(llm, args, load)
    scheduler._defrag_threshold = threshold
    moved, started = scheduler.stats().blocks_moved, time.perf_counter()
    llm.loop._compact()
    compaction = time.perf_counter() - started
    llm.loop.step()
    highest, used = int(np.flatnonzero(scheduler.pool.refs)[-1]), scheduler.pool.num_used
    started = time.perf_counter()
    for _ in range(args.steps):
        llm.loop.step()
    seconds = time.perf_counter() - started
    moved = scheduler.stats().blocks_moved - moved
    scheduler.cancel_all()
    return {
        "tokens_per_s": load.stay * args.steps / seconds,
        "highest_block": highest,
        "blocks_in_use": used,
        "blocks_moved": moved,
        "compaction_ms": compaction * 1e3 if moved else 0.0,
    }


def main(words: Sequence[str]) -> None:
    flags = parser(__doc__, __name__)
    flags.add_argument("--rows", type=int, default=64)
    flags.add_argument("--stay", type=int, default=16)
    flags.add_argument("--shortest", type=int, default=300)
    flags.add_argument("--longest", type=int, default=1000)
    flags.add_argument("--steps", type=int, default=10)
    flags.add_argument("--rounds", type=int, default=7)
    flags.add_argument("--threads", type=int, default=torch.get_num_threads())
    flags.add_argument("--model", default="bundled")
    args = flags.parse_args(words)
    engines = {name: make(args, reads) for name, reads in READS.items()}
    ragged = (args.shortest, args.longest)
    loads = {
        "scattered": ScatteredLoad(ragged, args.stay, (NEVER, 32)),
        "all stay": ScatteredLoad(ragged, args.rows),
        "short": ScatteredLoad((16, 56), args.rows),
    }
    settings = [(name, reads, t) for name, load in loads.items() for reads in READS for t in load.thresholds]
    rounds: dict[tuple[str, str, int], list[dict[str, float]]] = {setting: [] for setting in settings}
    for _ in range(args.rounds):
        for (load, reads, threshold), results in rounds.items():
            results.append(measure(engines[reads], args, loads[load], threshold))
    figures: list[dict[str, Any]] = []
    for (load, reads, threshold), results in rounds.items():
        median = {name: round(statistics.median(r[name] for r in results), 2) for name in results[0]}
        every = sorted(round(r["tokens_per_s"], 1) for r in results)
        figures.append({"load": load, "reads": reads, "compaction": threshold != NEVER, **median, "rounds": every})
        print(json.dumps(figures[-1]))
    print(save("defrag", {"options": vars(args), "figures": figures}))
