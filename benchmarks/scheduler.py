"""The cost of the scheduler for many rows and long queues.

    python -m benchmarks scheduler [--rows 256] [--steps 2000]

Figures are microseconds of a step with many decoding rows, and time and memory of a long queue. No model runs: the
device's part is a constant array.
"""

from __future__ import annotations

import json
import random
import time
import tracemalloc
from collections.abc import Sequence

import numpy as np

from benchmarks.common.report import parser, save
from preheat.core import Request, SamplingParams, Schedule, StepResult
from preheat.limits import Limits
from preheat.schedule.scheduler import Scheduler

BLOCK_SIZE = 64


def make(rows: int, max_model_len: int = 8192) -> Scheduler:
    limits = Limits(
        max_model_len=max_model_len,
        max_num_seqs=rows,
        max_num_batched_tokens=8192,
        max_num_prefill_seqs=None,
        block_size=BLOCK_SIZE,
        num_blocks=1 + rows * max_model_len // BLOCK_SIZE,
    )
    return Scheduler(limits)


def request(number: int, length: int, max_tokens: int, rng: random.Random) -> Request:
    prompt = [rng.randrange(3, 30_000) for _ in range(length)]
    params = SamplingParams(max_tokens=max_tokens)
    return Request(id=number, prompt=prompt, params=params, seed=number, max_tokens=max_tokens, stop_ids=[1, 2])


def answer(schedule: Schedule) -> StepResult:
    return StepResult(np.full(int(schedule.samples.sum()), 7, np.int32))


def decode(rows: int, steps: int, aligned: bool) -> dict[str, dict[str, float]]:
    """Return the microseconds of steps of decoding rows only.

    Aligned rows all fill a block, and all need the next one, in the same step.
    """
    scheduler, rng = make(rows), random.Random(0)
    for number in range(rows):
        scheduler.add(request(number, 100 if aligned else rng.randrange(32, 160), steps + 1_000, rng))
    spent: dict[str, list[float]] = {"schedule": [], "settle": []}
    while len(spent["settle"]) < steps:
        start = time.perf_counter()
        schedule = scheduler.schedule()
        middle = time.perf_counter()
        assert schedule is not None
        result = answer(schedule)
        before = time.perf_counter()
        scheduler.process_results(schedule, result)
        end = time.perf_counter()
        if schedule.num_decode == rows:
            spent["schedule"].append((middle - start) * 1e6)
            spent["settle"].append((end - before) * 1e6)
    return {name: _summary(values) for name, values in spent.items()}


def _summary(values: list[float]) -> dict[str, float]:
    median, high = np.quantile(values, [0.5, 0.99])
    figures = {"mean": sum(values) / len(values), "p50": median, "p99": high, "max": max(values)}
    return {name: round(float(value), 1) for name, value in figures.items()}


def queue(count: int) -> dict[str, float]:
    """Measure a queue of ``count`` requests.

    They arrive, leave in random order before any step, and arrive again to be served.
    """
    rng = random.Random(0)
    requests = [request(number, 64, 2, rng) for number in range(count)]
    order = list(range(count))
    rng.shuffle(order)
    scheduler = make(256, 512)
    seconds = {}
    start = time.perf_counter()
    for each in requests:
        scheduler.add(each)
    seconds["add"] = time.perf_counter() - start
    start = time.perf_counter()
    for number in order:
        scheduler.cancel(number)
    seconds["cancel"] = time.perf_counter() - start
    start = time.perf_counter()
    for each in requests:
        scheduler.add(each)
    while (schedule := scheduler.schedule()) is not None:
        scheduler.process_results(schedule, answer(schedule))
    seconds["serve"] = time.perf_counter() - start
    scheduler.check()
    tracemalloc.start()
    for each in requests:
        scheduler.add(each)
    grown, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    figures = {f"{name}_us_per_request": round(value / count * 1e6, 2) for name, value in seconds.items()}
    return {**figures, "queue_bytes_per_request": round(grown / count)}


def main(words: Sequence[str]) -> None:
    flags = parser(__doc__, __name__)
    flags.add_argument("--rows", type=int, default=256)
    flags.add_argument("--steps", type=int, default=2000)
    args = flags.parse_args(words)
    figures = {
        "rows": args.rows,
        "decode_us": decode(args.rows, args.steps, aligned=False),
        "decode_aligned_us": decode(args.rows, args.steps, aligned=True),
        "queued_2000": queue(2_000),
        "queued_20000": queue(20_000),
    }
    print(json.dumps(figures, indent=1))
    save("scheduler", figures)
