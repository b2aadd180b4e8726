"""The time to make a plan, and to choose the bucket of one step.

    python -m benchmarks plan_fit

Plans of growing size; the seconds of planning with 10,000 and with 100,000 candidate buckets; and the time of ``preheat
plan`` for Llama-3.1-8B from start to end: processor time (user and system, of the whole process) and wall time.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import tempfile
import time
import timeit
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.common.report import parser, save
from benchmarks.common.shapes import SHAPES
from preheat.limits import Limits
from preheat.plan.buckets import StepSize
from preheat.plan.options import PlanOptions
from preheat.plan.plan import make_plan

CALLS = 100_000


def main(words: Sequence[str]) -> None:
    parser(__doc__, __name__).parse_args(words)
    limits = Limits(
        max_model_len=4096,
        max_num_seqs=256,
        max_num_batched_tokens=8192,
        max_num_prefill_seqs=None,
        block_size=64,
        num_blocks=256 * 64 + 1,
    )
    plans = [
        plan_and_fit(limits, PlanOptions(bucketing_policy=policy, bucketing_strategy=strategy))
        for policy in ("unified", "split")
        for strategy in ("exponential", "linear", "padding_aware")
    ]
    candidates = {str(count): round(planning_seconds(count), 3) for count in (10_000, 100_000)}
    figures = {"plans": plans, "planning_s_by_candidates": candidates, "command": command_seconds()}
    print(json.dumps(figures, indent=1))
    save("plan_fit", figures)


def command_seconds() -> dict[str, float]:
    """Return the best of five runs of ``preheat plan`` for the config of Llama-3.1-8B."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(SHAPES["llama-3.1-8b"]), encoding="utf-8")
        command = [sys.executable, "-m", "preheat", "plan", folder, "--max-num-seqs", "256", "--max-model-len", "4096"]
        runs = []
        for _ in range(5):
            before, started = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
            wall, after = time.perf_counter() - started, resource.getrusage(resource.RUSAGE_CHILDREN)
            runs.append((after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime, wall))
    processor, wall = min(runs)
    return {"processor_s": round(processor, 2), "wall_s": round(wall, 2)}


def plan_and_fit(limits: Limits, options: PlanOptions) -> dict[str, Any]:
    """Return the times to make a plan and to choose a bucket.

    A plan is in milliseconds. A choice is in nanoseconds, with and without making the StepSize.
    """
    seconds = _best(lambda: make_plan(limits, options), 5)
    plan = make_plan(limits, options)
    size = StepSize("decode", 200, 200, longest=900, blocks=3000)
    fit = _best(lambda: plan.fit(size), CALLS)
    both = _best(lambda: plan.fit(StepSize("decode", 200, 200, 900, 3000)), CALLS)
    return {
        "policy": options.bucketing_policy,
        "strategy": options.bucketing_strategy,
        "buckets": len(plan.dispatcher.buckets),
        "plan_ms": round(seconds * 1e3, 1),
        "fit_ns": round(fit * 1e9),
        "size_and_fit_ns": round(both * 1e9),
    }


def planning_seconds(count: int) -> float:
    """Return the best seconds of five plans of about ``count`` candidates.

    Other processes do not count.
    """
    side = round(count**0.5)
    limits = Limits(
        max_model_len=side * 16,
        max_num_seqs=side,
        max_num_batched_tokens=side * side * 16,
        max_num_prefill_seqs=None,
        block_size=16,
        num_blocks=side * side + 1,
    )
    options = PlanOptions(
        bucketing_policy="split",
        bucketing_strategy="linear",
        prompt_bs_bucket_step=1,
        prompt_bs_bucket_max=side,
        decode_bs_bucket_max=2,
        decode_seq_bucket_step=side * 16,
        allow_large_plan=True,
    )
    return min(timeit.repeat(lambda: make_plan(limits, options), number=1, repeat=5, timer=time.process_time))


def _best(call: Callable[[], object], calls: int) -> float:
    return min(timeit.repeat(call, number=calls, repeat=3, timer=time.perf_counter)) / calls
