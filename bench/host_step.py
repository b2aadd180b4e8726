"""What the host does in a step of decoding rows, and how long a GPU waits for it.

    python bench/host_step.py [--rows 256] [--steps 500] [--shape qwen3-0.6b] [--engine-rows 1 32 256] [--options JSON]

Medians in microseconds. First, where there is a GPU or with --shape, the steps of an engine, all greedy or all drawing
at random among filtered tokens. ``host`` adds up its parts; waiting for the device is none of them, but on a CPU
launching is running. ``idle`` is what a profile shows between the last that the device does of a step, which is to send
the tokens, and the first of the next one.

Then without a model: schedule, pack, settle, send, with the packer of a CPU and with that of a GPU. Half of the rows
are greedy, half draw at random; contexts are ragged, so that blocks fill and splits begin at different steps.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from _common import report
from kernels import Span, spans
from torch.profiler import ProfilerActivity, profile

from preheat import LLM
from preheat.backends.cuda.work import SPLIT
from preheat.bench.shapes import CHOICES, engine_options, vocabulary
from preheat.core import Request, SamplingParams, StepResult
from preheat.execution.buffers import StepBuffers
from preheat.execution.flat import FlatPacker
from preheat.execution.pack import Packer
from preheat.limits import Limits
from preheat.model.files import BUNDLED_PATH, read_config
from preheat.model.specs import read_spec
from preheat.plan.options import PlanOptions
from preheat.plan.plan import make_plan
from preheat.schedule.defrag import THRESHOLD
from preheat.schedule.scheduler import Scheduler

PACKERS = ("cpu", "cuda")


def make(rows: int, steps: int, packer: str) -> tuple[Scheduler, Packer | FlatPacker]:
    """``rows`` sequences past their prompt, and the packer of a platform."""
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
    if packer == "cpu":
        return scheduler, Packer(scheduler.slots, spec, torch.bfloat16, plan)
    buffers = StepBuffers(limits, tile=TILE, split=SPLIT, windows=[None], device=torch.device("cpu"))
    return scheduler, FlatPacker(scheduler.slots, plan, buffers)


def measure(rows: int, steps: int, platform: str) -> dict[str, float]:
    """Median microseconds of each part, and of the whole."""
    scheduler, packer = make(rows, steps, platform)
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


SAMPLING: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "filtered": {"temperature": 0.6, "top_p": 0.95, "top_k": 50},
}
TILE = 64  # of queries; no row here is as long
CONTEXT = 128
WARM = 8
PROFILED = 50


@contextmanager
def timed(llm: LLM) -> Iterator[dict[str, list[float]]]:
    """Seconds of every call of each part, while this lasts."""
    loop = llm.loop
    parts = {
        "schedule": (loop.scheduler, "schedule"),
        "pack": (loop.packer, "pack"),
        "launch": (loop.executor, "launch"),
        "observe": (loop.listener, "step"),
        "settle": (loop.scheduler, "settle"),
        "front door": (llm.frontend, "handle"),
    }
    spent: dict[str, list[float]] = {name: [] for name in parts}
    for name, (owner, method) in parts.items():
        setattr(owner, method, _timing(getattr(owner, method), spent[name]))
    try:
        yield spent
    finally:
        for owner, method in parts.values():
            delattr(owner, method)


def _timing(method: Any, times: list[float]) -> Any:
    def call(*args: Any) -> Any:
        started = time.perf_counter()
        try:
            return method(*args)
        finally:
            times.append(time.perf_counter() - started)

    return call


def gaps(listed: Sequence[Span]) -> list[float]:
    """Microseconds in which nothing runs after each step but the last; ``listed`` is in order of start."""
    found, busy_until = [], 0.0
    for span, behind in pairwise(listed):
        busy_until = max(busy_until, span.end)
        if "DtoH" in span.name and "DtoH" not in behind.name:
            found.append(max(behind.start - busy_until, 0.0))
    return found


class Rows:
    """``count`` sequences that all decode, for ``steps`` more steps at least."""

    def __init__(self, llm: LLM, vocabulary: int, count: int, sampling: str, steps: int) -> None:
        door, chance = llm.frontend, random.Random(0)
        tokens = steps + 2 * count + count * CONTEXT // 2048 + 40
        params = SamplingParams(max_tokens=tokens, ignore_eos=True, detokenize=False, seed=0, **SAMPLING[sampling])
        prompts = [[chance.randrange(vocabulary) for _ in range(CONTEXT)] for _ in range(count)]
        self._llm, self._tickets = llm, [door.prepare(prompt, params) for prompt in prompts]
        door.start(self._tickets)

    def __enter__(self) -> None:
        while len(self._tickets[-1].choices[0].token_ids) < WARM:
            self._llm.advance()

    def __exit__(self, *_: object) -> None:
        for ticket in self._tickets:
            self._llm.frontend.abort(ticket)
        self._llm.loop.take(0)
        self._llm.loop.finish()
        self._llm.advance()


def by_the_clock(llm: LLM, steps: int) -> dict[str, float]:
    """Median microseconds of the parts of a step, and what a step takes."""
    with timed(llm) as spent:
        started = time.perf_counter()
        for _ in range(steps):
            llm.advance()
        step = (time.perf_counter() - started) / steps
    parts = {name: round(statistics.median(times) * 1e6, 1) for name, times in spent.items()}
    host = sum(parts.values()) - parts["front door"]
    return {"step": round(step * 1e6, 1), "host": round(host, 1), **parts}


def idle(llm: LLM, steps: int) -> dict[str, float]:
    """Microseconds that a GPU waits between steps."""
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        for _ in range(steps):
            llm.advance()
        torch.cuda.synchronize()
    waited = gaps(spans(found, True))
    return {"median": round(statistics.median(waited), 1), "worst": round(max(waited), 1)}


def engine_figures(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Every number of rows with every kind of sampling. Whoever was profiled once launches more slowly from then on:
    that comes last.
    """
    steps = min(args.steps, 200)
    cases = [{"rows": rows, "sampling": sampling} for rows in args.engine_rows for sampling in SAMPLING]
    with tempfile.TemporaryDirectory() as folder:
        llm = LLM(**engine_options(args.shape, args.options, Path(folder), tiny=False))
        for case in cases:
            with Rows(llm, vocabulary(args.shape), case["rows"], case["sampling"], steps):
                case.update(by_the_clock(llm, steps))
            print(json.dumps(case), flush=True)
        for case in cases if torch.cuda.is_available() else ():
            with Rows(llm, vocabulary(args.shape), case["rows"], case["sampling"], PROFILED):
                case["idle"] = idle(llm, PROFILED)
            print(json.dumps(case), flush=True)
    return cases


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--shape", choices=CHOICES, default="qwen3-0.6b" if torch.cuda.is_available() else None)
    parser.add_argument("--engine-rows", type=int, nargs="+", default=[1, 32, 256])
    parser.add_argument("--options", type=json.loads, default={}, help="of the engine, as JSON")
    args = parser.parse_args()
    figures: dict[str, Any] = {"rows": args.rows, "steps": args.steps}
    if args.shape:
        figures |= {"shape": args.shape, "engine": engine_figures(args)}
    torch.set_num_threads(1)
    figures["microseconds"] = {packer: measure(args.rows, args.steps, packer) for packer in PACKERS}
    print(json.dumps(figures["microseconds"]), flush=True)
    report("host_step", figures)


if __name__ == "__main__":
    main()
