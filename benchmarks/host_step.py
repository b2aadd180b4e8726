"""The host's work in a decoding step, and a GPU's wait.

    python -m benchmarks host_step [--rows 256] [--steps 500] [--shape qwen3-0.6b] [--engine-rows 1 32 256]
        [--execution-mode llvm] [--options JSON]

Medians in microseconds. First, where there is a GPU or with --shape, the steps of an engine: all rows greedy, random,
random among filtered tokens, or greedy with logprobs. ``host`` adds up its parts. Waiting for the device is not a part
of it, but on a CPU launching is running. With --execution-mode llvm the model is the bundled one, ``functions`` is the
time in compiled layers and head, and ``host`` the rest of the step; ``best`` is the tenth percentile of ``host``, for a
machine with other work. ``idle`` is from a profile: the time between the device's last work in a step, sending the
tokens, and its first work in the next step.

Then without a model: schedule, pack, settle, send, with the packer of a CPU and with the packer of a GPU. Half of the
rows are greedy, half draw at random; contexts are ragged, so that blocks fill and splits begin at different steps.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from itertools import pairwise
from typing import Any

import msgspec
import numpy as np
import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.common.decoding import DecodingRows, Span, spans
from benchmarks.common.report import parser, save
from benchmarks.common.shapes import CHOICES
from benchmarks.suite.offline import Offline
from preheat import LLM
from preheat.backends.base.attention import Attention, AttentionLayer
from preheat.backends.cpu.backend import CpuBackend
from preheat.backends.cpu.facts import FACTS as CPU
from preheat.core import Request, SamplingParams, StepResult
from preheat.execution.buffers import StepBuffers
from preheat.execution.input_batch import Packer
from preheat.limits import Limits
from preheat.model.families import read_spec
from preheat.model.files import BUNDLED, BUNDLED_PATH, read_config
from preheat.plan.options import PlanOptions
from preheat.plan.plan import make_plan
from preheat.schedule.defrag import THRESHOLD
from preheat.schedule.scheduler import Scheduler

PACKERS = ("cpu", *(["cuda"] if find_spec("triton") else []))


def make(rows: int, steps: int, packer: str) -> tuple[Scheduler, Packer]:
    """Return a scheduler and the packer of a platform.

    ``rows`` sequences are past their prompt.
    """
    spec, size = read_spec(read_config(BUNDLED_PATH)), CPU.block_size if packer == "cpu" else 64
    limits = Limits(
        max_model_len=2048,
        max_num_seqs=rows,
        max_num_batched_tokens=8192,
        max_num_prefill_seqs=None,
        block_size=size,
        num_blocks=1 + rows * (2048 // size),
    )
    plan = make_plan(limits, PlanOptions())
    scheduler, rng = Scheduler(limits, padded=plan.padded, defrag_threshold=THRESHOLD), random.Random(0)
    for number in range(rows):
        params = SamplingParams(temperature=float(number % 2), max_tokens=steps + 1000)
        prompt = [rng.randrange(4096) for _ in range(rng.randrange(16, 500))]
        scheduler.add(Request(number, prompt, params, number, steps + 1000, stop_ids=[0, 1]))
    while (step := scheduler.schedule()) is not None and step.num_decode < rows:
        scheduler.process_results(step, StepResult(np.full(int(step.samples.sum()), 7)))
    assert step is not None
    scheduler.process_results(step, StepResult(np.full(rows, 7)))
    layer = AttentionLayer(
        num_heads=spec.attentions[0].num_heads,
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        scale=1.0,
        window=None,
        cache=torch.zeros(1, 2, spec.num_kv_heads, limits.block_size, spec.head_dim, dtype=torch.bfloat16),
        dtype=torch.bfloat16,
        rope=torch.zeros(1),
        qk_norm=None,
    )
    backend = CpuBackend()
    attention = _attention(packer, layer, limits, backend)
    return scheduler, Packer(scheduler.slots, plan, StepBuffers(limits, attention, backend))


def _attention(packer: str, layer: AttentionLayer, limits: Limits, backend: CpuBackend) -> Attention:
    """Return a platform's attention, which cuts a step into work.

    Only its host part is used.
    """
    if packer == "cpu":
        return backend.attention([layer], limits, contiguous=True)
    from preheat.backends.cuda.attention.layers import CudaAttention

    return CudaAttention([layer], limits, backend)


def measure(rows: int, steps: int, platform: str) -> dict[str, float]:
    """Return the median microseconds of each part, and of the whole."""
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
        delta = scheduler.process_results(schedule, result)
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
    "random": {"temperature": 1.0},
    "filtered": {"temperature": 0.6, "top_p": 0.95, "top_k": 50},
    "logprobs": {"temperature": 0.0, "logprobs": 5},
}
CONTEXT = 128
PROFILED = 50


@contextmanager
def timed(llm: LLM) -> Iterator[dict[str, list[float]]]:
    """Yield the seconds of every call of each part inside the block."""
    loop = llm.loop
    parts = {
        "schedule": (loop.scheduler, "schedule"),
        "pack": (loop.packer, "pack"),
        "launch": (loop.executor, "launch"),
        "observe": (loop.listener, "step"),
        "process_results": (loop.scheduler, "process_results"),
        "frontend": (llm.frontend, "handle"),
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
    """Return the idle microseconds behind each step but the last.

    ``listed`` is in order of start.
    """
    found, busy_until = [], 0.0
    for span, behind in pairwise(listed):
        busy_until = max(busy_until, span.end)
        if "DtoH" in span.name and "DtoH" not in behind.name:
            found.append(max(behind.start - busy_until, 0.0))
    return found


def by_the_clock(llm: LLM, steps: int) -> dict[str, float]:
    """Return the median microseconds of a step's parts.

    The whole step is the mean.
    """
    with timed(llm) as spent:
        started = time.perf_counter()
        for _ in range(steps):
            llm.advance()
        step = (time.perf_counter() - started) / steps
    parts = {name: round(statistics.median(times) * 1e6, 1) for name, times in spent.items()}
    host = sum(parts.values()) - parts["frontend"]
    return {"step": round(step * 1e6, 1), "host": round(host, 1), **parts}


def beside_functions(llm: LLM, steps: int) -> dict[str, float]:
    """Return the median microseconds of a step, in compiled functions and in the rest, and the rest's best tenth.

    Functions that run beside the host's work count only while the host waits for them.
    """
    team, inside = llm.loop.executor.decoder.functions.team, list[float]()  # type: ignore[union-attr]
    whole, rest = list[float](), list[float]()
    for name in ("run", "run_all", "join"):
        setattr(team, name, _timing(getattr(team, name), inside))
    try:
        for _ in range(steps):
            inside.clear()
            started = time.perf_counter()
            llm.advance()
            whole.append(time.perf_counter() - started)
            rest.append(whole[-1] - sum(inside))
    finally:
        del team.run, team.run_all, team.join
    step, host, best = statistics.median(whole), statistics.median(rest), sorted(rest)[len(rest) // 10]
    figures = {"step": step, "functions": step - host, "host": host, "best": best}
    return {name: round(seconds * 1e6, 1) for name, seconds in figures.items()}


def idle(llm: LLM, steps: int) -> dict[str, float]:
    """Return the median and the most microseconds that a GPU waits between steps."""
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        for _ in range(steps):
            llm.advance()
        torch.cuda.synchronize()
    waited = gaps(spans(found, True))
    return {"median": round(statistics.median(waited), 1), "worst": round(max(waited), 1)}


def engine_figures(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Return the figures of every number of rows with every kind of sampling.

    A process that was profiled once launches more slowly from then on, so profiles are taken last.
    """
    steps, clock = min(args.steps, 200), by_the_clock if args.execution_mode is None else beside_functions
    cases = [{"rows": rows, "sampling": sampling} for rows in args.engine_rows for sampling in SAMPLING]
    mode = {} if args.execution_mode is None else {"execution_mode": args.execution_mode}
    offline = Offline.of_shape(args.shape, {"max_num_seqs": max(args.engine_rows), **mode, **args.options})
    llm = offline.llm

    def decoding(case: dict[str, Any], steps: int) -> DecodingRows:
        return DecodingRows(llm, offline.vocabulary, case["rows"], CONTEXT, steps, **SAMPLING[case["sampling"]])

    for case in cases:
        with decoding(case, steps):
            case.update(clock(llm, steps))
        print(json.dumps(case), flush=True)
    for case in cases if torch.cuda.is_available() else ():
        with decoding(case, PROFILED):
            case["idle"] = idle(llm, PROFILED)
        print(json.dumps(case), flush=True)
    return cases


def main(words: Sequence[str]) -> None:
    flags = parser(__doc__, __name__)
    flags.add_argument("--rows", type=int, default=256)
    flags.add_argument("--steps", type=int, default=500)
    flags.add_argument("--shape", choices=CHOICES, default="qwen3-0.6b" if torch.cuda.is_available() else None)
    flags.add_argument("--engine-rows", type=int, nargs="+", default=[1, 32, 256])
    flags.add_argument("--execution-mode", choices=("llvm",))
    flags.add_argument("--options", type=json.loads, default={}, help="of the engine, as JSON")
    args = flags.parse_args(words)
    if args.execution_mode is not None:
        args.shape = args.shape or BUNDLED
    figures: dict[str, Any] = {"rows": args.rows, "steps": args.steps}
    if args.shape:
        figures |= {"shape": args.shape, "engine": engine_figures(args)}
    torch.set_num_threads(1)
    figures["microseconds"] = {packer: measure(args.rows, args.steps, packer) for packer in PACKERS}
    print(json.dumps(figures["microseconds"]), flush=True)
    save("_".join(filter(None, ("host_step", args.execution_mode))), figures)
