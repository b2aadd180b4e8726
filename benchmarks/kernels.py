"""The time of a decoding step by kernel, and its idle time.

    python -m benchmarks kernels [--shape llama-3.1-8b] [--format fp8] [--rows 1 32 256] [--context 1024] [--steps 20]

Profiles steps in which all rows decode. A kernel's time is beside the least time of its bytes. The bandwidth is
measured by a copy on this device, read and written bytes counted. Kernels are told apart by their names; a kind's floor
is its bytes over that bandwidth. Kernels launched behind each other overlap: a kernel's time runs from the end of the
kernels before it. On a CPU, where there are no kernels, torch's operations stand in for them.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.common.decoding import DecodingRows, Span, spans
from benchmarks.common.report import RESULTS, parser, save
from benchmarks.common.shapes import CHOICES, FORMATS, named
from benchmarks.suite.offline import Offline
from preheat.model.specs import ModelSpec

KINDS = {
    "states": ("recur", "settle_rows", "prepare", "finish"),
    "routing": ("_route", "_arrange", "_spread", "_combine"),
    "experts": ("experts",),
    "attention": ("_decode", "_prefill", "attention"),
    "sampler": ("peaks", "pick", "enter", "weigh", "settle", "penalise", "edit", "tally", "report"),
    "norm": ("norm",),
    "quantize": ("_quantize",),
    "rope and cache": ("rope", "rotary"),
    "embedding": ("embed", "index_select"),
    "linear": ("in_order", "_wide", "linear", "gemm", "matmul", "_dequantize", "nvjet", "cutlass", "sm90_", "splitk"),
}
"""The words of each kind of kernel.

A kernel is of the first kind with a word in the kernel's name.
"""


def kind_of(name: str) -> str:
    low = name.lower()
    return next((kind for kind, words in KINDS.items() if any(word in low for word in words)), "other")


def floor_bytes(spec: ModelSpec, rows: int, context: int) -> dict[str, float]:
    """Return the least bytes that a step reads.

    It reads each weight of a linear map once, and each key and value once. It reads and writes each row's states.
    Weights that are not quantized are bfloat16, and so is the cache.
    """
    weights = sum(spec.weight_bytes(2).values()) - (0 if spec.tied else 2 * spec.embedding.params)
    cache = rows * context * spec.kv_bytes_per_token(2)
    states = {"states": 2.0 * rows * spec.state_bytes(2)} if spec.has_states else {}
    return {"linear": float(weights), "attention": float(cache), **states}


def bandwidth(device: torch.device) -> float:
    """Return the bytes a second that a copy moves, read and written."""
    size = 1 << (30 if device.type == "cuda" else 26)
    source, target = torch.ones(2, size, dtype=torch.uint8, device=device).unbind()
    best = float("inf")
    for _ in range(5):
        if device.type == "cuda":
            torch.cuda.synchronize()
        started = time.perf_counter()
        target.copy_(source)
        if device.type == "cuda":
            torch.cuda.synchronize()
        best = min(best, time.perf_counter() - started)
    del source, target
    torch.cuda.empty_cache()  # nothing, without a GPU
    return 2 * size / best


def idle(listed: Iterable[Span]) -> float:
    """Return the idle microseconds between the first start and the last end.

    ``listed`` is in order of start.
    """
    total, busy_until = 0.0, None
    for span in listed:
        if busy_until is not None:
            total += max(span.start - busy_until, 0.0)
        busy_until = max(span.end, busy_until or span.end)
    return total


def table(listed: list[Span], steps: int, floors: dict[str, float]) -> list[dict[str, Any]]:
    """Return the microseconds and calls of one step by kernel.

    There is a line for each kernel and each kind, the longest first.
    """
    spent: dict[tuple[str, str], list[float]] = defaultdict(list)
    busy_until = 0.0
    for span in listed:
        spent[kind_of(span.name), span.name].append(max(span.end - max(span.start, busy_until), 0.0))
        busy_until = max(span.end, busy_until)
    lines: list[dict[str, Any]] = [
        {"kind": kind, "name": name, "calls": len(each) / steps, "us": round(sum(each) / steps, 2)}
        for (kind, name), each in spent.items()
    ]
    for kind in {line["kind"] for line in lines}:
        whole = round(sum(line["us"] for line in lines if line["kind"] == kind and line["name"]), 2)
        lines.append({"kind": kind, "name": "", "us": whole, "floor_us": floors.get(kind)})
    return sorted(lines, key=lambda line: -line["us"])


def decode(offline: Offline, rows: int, context: int, steps: int) -> profile:
    """Profile ``steps`` steps in which all rows decode."""
    cuda = torch.cuda.is_available()
    activities = [ProfilerActivity.CUDA] if cuda else [ProfilerActivity.CPU]
    decoding = DecodingRows(offline.llm, offline.vocabulary, rows, context, steps, temperature=0.0)
    profiler = profile(activities=activities)
    with decoding, profiler:
        for _ in range(steps):
            offline.llm.advance()
        if cuda:
            torch.cuda.synchronize()
    return profiler


def measure(offline: Offline, rows: int, speed: float, args: argparse.Namespace) -> dict[str, Any]:
    spec = offline.llm.loop.executor.decoder.spec
    floors = {kind: round(size / speed * 1e6, 1) for kind, size in floor_bytes(spec, rows, args.context).items()}
    listed = spans(decode(offline, rows, args.context, args.steps), torch.cuda.is_available())
    return {
        "rows": rows,
        "context": args.context,
        "bandwidth_tb_s": round(speed / 1e12, 3),
        "step_us": round((listed[-1].end - listed[0].start) / args.steps, 1),
        "idle_us": round(idle(listed) / args.steps, 2),
        "kernels": table(listed, args.steps, floors),
    }


def show(found: dict[str, Any]) -> None:
    print(f"\n{found['rows']} rows of {found['context']}: {found['step_us']} us a step, {found['idle_us']} us idle")
    for line in found["kernels"]:
        least = line.get("floor_us")
        floor = f"  (at least {least} us, {least / line['us']:.0%})" if least and line["us"] else ""
        name = line["name"][:60] if line["name"] else f"= all of {line['kind']}"
        print(f"  {line['us']:9.1f} us  {line.get('calls', ''):>6}  {name}{floor}")


def main(words: Sequence[str]) -> None:
    flags = parser(__doc__, __name__)
    flags.add_argument("--shape", choices=CHOICES, default="llama-3.1-8b")
    flags.add_argument("--format", choices=FORMATS, help="of the weights [the shape's own]")
    flags.add_argument("--rows", type=int, nargs="+", default=[1, 32, 256])
    flags.add_argument("--context", type=int, default=1024)
    flags.add_argument("--steps", type=int, default=20)
    flags.add_argument("--output", type=Path, default=RESULTS)
    flags.add_argument("--options", type=json.loads, default={})
    args = flags.parse_args(words)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    speed = bandwidth(device)  # before the engine takes the memory
    offline, figures = Offline.of_shape(args.shape, args.options, number_format=args.format), []
    for rows in args.rows:
        figures.append(measure(offline, rows, speed, args))
        save(f"kernels_{named(args.shape, args.format, args.options)}", figures, args.output)
        show(figures[-1])
