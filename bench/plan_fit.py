"""How long the plan takes to make, and to answer for one step.

Prints nanoseconds a ``fit`` (with and without making the Need) for plans of growing size, and the seconds of planning
10,000 and 100,000 candidate shapes.
"""

from __future__ import annotations

import time
import timeit

from preheat.limits import Limits
from preheat.plan.options import PlanOptions
from preheat.plan.plan import make_plan
from preheat.plan.shape import Need

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


def _one(limits: Limits, options: PlanOptions) -> None:
    seconds = _best(lambda: make_plan(limits, options), 5)
    plan = make_plan(limits, options)
    need = Need("decode", 200, 200, longest=900, blocks=3000)
    fit = _best(lambda: plan.fit(need), CALLS)
    both = _best(lambda: plan.fit(Need("decode", 200, 200, 900, 3000)), CALLS)
    print(
        f"{options.bucketing_policy:8} {options.bucketing_strategy:14} {len(plan.table.shapes):5} shapes"
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
