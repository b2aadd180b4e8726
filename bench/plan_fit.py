"""How long the plan takes to make, and to answer for one step.

Prints nanoseconds a ``fit`` (with and without making the Need) for plans of growing size, the seconds of planning
10,000 and 100,000 candidate shapes, and what ``preheat plan`` of an 8-billion-parameter model's config takes from
start to end: processor time (user and system, of the whole process) and wall time, the best of five.
"""

from __future__ import annotations

import resource
import subprocess
import sys
import time
import timeit
from pathlib import Path

from preheat.limits import Limits
from preheat.plan.buckets import StepSize
from preheat.plan.options import PlanOptions
from preheat.plan.plan import make_plan

CALLS = 100_000


def main() -> None:
    limits = Limits(
        max_model_len=4096,
        max_num_seqs=256,
        max_num_batched_tokens=8192,
        max_num_prefill_seqs=None,
        block_size=64,
        num_blocks=256 * 64 + 1,
    )
    for policy in ("unified", "split"):
        for strategy in ("exponential", "linear", "padding_aware"):
            _one(limits, PlanOptions(bucketing_policy=policy, bucketing_strategy=strategy))
    _scaling()
    _command()


def _command() -> None:
    model = Path(__file__).parents[1] / "tests" / "models" / "llama-3.1-8b"
    command = [sys.executable, "-m", "preheat", "plan", str(model), "--max-num-seqs", "256", "--max-model-len", "4096"]
    runs = []
    for _ in range(5):
        before, started = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        wall, after = time.perf_counter() - started, resource.getrusage(resource.RUSAGE_CHILDREN)
        runs.append((after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime, wall))
    processor, wall = min(runs)
    print(f"preheat plan, 256 sequences x 4,096 tokens: {processor:.2f} s of processor time, {wall:.2f} s in all")


def _one(limits: Limits, options: PlanOptions) -> None:
    seconds = _best(lambda: make_plan(limits, options), 5)
    plan = make_plan(limits, options)
    need = StepSize("decode", 200, 200, longest=900, blocks=3000)
    fit = _best(lambda: plan.fit(need), CALLS)
    both = _best(lambda: plan.fit(StepSize("decode", 200, 200, 900, 3000)), CALLS)
    print(
        f"{options.bucketing_policy:8} {options.bucketing_strategy:14} {len(plan.dispatcher.buckets):5} shapes"
        f"  plan {seconds * 1e3:6.1f} ms  fit {fit * 1e9:4.0f} ns  need + fit {both * 1e9:4.0f} ns"
    )


def _scaling() -> None:
    seconds = [planning_seconds(count) for count in (10_000, 100_000)]
    print(f"planning 10,000 candidates {seconds[0]:.3f} s, 100,000 {seconds[1]:.3f} s: x {seconds[1] / seconds[0]:.1f}")


def planning_seconds(count: int) -> float:
    """The best of five plans of about ``count`` candidate shapes, in seconds of this process: others do not blur it."""
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


def _best(call: object, calls: int) -> float:
    return min(timeit.repeat(call, number=calls, repeat=3, timer=time.perf_counter)) / calls  # type: ignore[arg-type]


if __name__ == "__main__":
    main()
