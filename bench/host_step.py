"""What the host does in a step of many decoding rows, without the model: schedule, pack, settle, send.

    python bench/host_step.py [--rows 256] [--steps 500]

Medians in microseconds. Half of the rows are greedy, half draw at random; contexts are ragged, so that blocks fill and
splits begin at different steps.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time

import msgspec
import numpy as np
import torch
from _common import report

from preheat.batch.pack import Packer
from preheat.core import Request, SamplingParams, StepResult
from preheat.limits import Limits
from preheat.model.files import BUNDLED_PATH, read_config
from preheat.model.spec import read_spec
from preheat.plan.options import PlanOptions
from preheat.plan.plan import make_plan
from preheat.schedule.defrag import THRESHOLD
from preheat.schedule.scheduler import Scheduler


def make(rows: int, steps: int) -> tuple[Scheduler, Packer]:
    """``rows`` sequences past their prompt."""
    spec = read_spec(read_config(BUNDLED_PATH))
    limits = Limits(
        max_model_len=2048,
        max_num_seqs=rows,
        max_num_batched_tokens=8192,
        max_num_prefill_seqs=None,
        block_size=64,
        num_blocks=1 + rows * 32,
    )
    plan = make_plan(limits, PlanOptions())
    scheduler, rng = Scheduler(limits, padded=plan.padded, defrag_threshold=THRESHOLD), random.Random(0)
    for number in range(rows):
        params = SamplingParams(temperature=float(number % 2), max_tokens=steps + 1000)
        prompt = [rng.randrange(4096) for _ in range(rng.randrange(16, 500))]
        scheduler.add(Request(number, prompt, params, number, steps + 1000, stop_ids=[0, 1]))
    while (step := scheduler.schedule()) is not None and step.num_decode < rows:
        scheduler.settle(step, StepResult(np.full(int(step.samples.sum()), 7)))
    assert step is not None
    scheduler.settle(step, StepResult(np.full(rows, 7)))
    return scheduler, Packer(scheduler.slots, spec, torch.bfloat16, plan)


def measure(rows: int, steps: int) -> dict[str, float]:
    """Median microseconds of each part, and of the whole."""
    scheduler, packer = make(rows, steps)
    encode = msgspec.msgpack.Encoder().encode
    spent: dict[str, list[float]] = {name: [] for name in ("compact", "schedule", "pack", "settle", "send", "total")}
    result = StepResult(np.full(rows, 7))
    for _ in range(steps):
        times = [time.perf_counter()]
        scheduler.compact()
        times.append(time.perf_counter())
        schedule = scheduler.schedule()
        assert schedule is not None
        times.append(time.perf_counter())
        packer.pack(schedule)
        times.append(time.perf_counter())
        delta = scheduler.settle(schedule, result)
        times.append(time.perf_counter())
        delta.stats = scheduler.stats()
        encode(delta)
        times.append(time.perf_counter())
        for name, begin, end in zip(spent, times, times[1:], strict=False):
            spent[name].append(end - begin)
        spent["total"].append(times[-1] - times[0])
    return {name: round(statistics.median(values) * 1e6, 1) for name, values in spent.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--steps", type=int, default=500)
    args = parser.parse_args()
    torch.set_num_threads(1)
    figures = {"rows": args.rows, "steps": args.steps, "microseconds": measure(args.rows, args.steps)}
    print(json.dumps(figures))
    report("host_step", figures)


if __name__ == "__main__":
    main()
