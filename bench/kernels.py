"""Where the time of a decoding step goes: each kernel, beside what its bytes cost at least, and the idle time between.

    python bench/kernels.py [--shape llama-3.1-8b] [--rows 1 32 256] [--context 1024] [--steps 20] [--output DIR]

Profiles steps in which all rows decode. The bandwidth is that of a copy on this device, read and written bytes counted.
Kernels are told apart by their names; a kind's floor is its bytes over that bandwidth. Kernels that are launched behind
each other overlap: one's time is what it adds, from the end of those before it. On a CPU, where there are no
kernels, torch's operations stand in for them.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from _common import RESULTS
from torch.profiler import ProfilerActivity, profile

from preheat import LLM
from preheat.bench.machine import fingerprint
from preheat.bench.offline import Offline, greedy
from preheat.bench.report import Clock
from preheat.bench.shapes import CHOICES, FULL, engine_options, vocabulary
from preheat.model.layout import num_parameters
from preheat.model.specs import ModelSpec

KINDS = {
    "attention": ("_decode", "_prefill", "attention"),
    "sampler": ("peaks", "pick", "enter", "weigh", "settle", "penalise", "edit", "tally", "report"),
    "norm": ("norm",),
    "rope and cache": ("rope", "rotary"),
    "embedding": ("embed", "index_select"),
    "linear": ("in_order", "_wide", "linear", "gemm", "matmul", "nvjet", "cutlass", "sm90_", "splitk"),
}
"""A kernel is of the first kind one of whose words is in its name."""


@dataclass
class Span:
    """One run of a kernel, in microseconds since some moment."""

    name: str
    start: float
    end: float


def kind_of(name: str) -> str:
    low = name.lower()
    return next((kind for kind, words in KINDS.items() if any(word in low for word in words)), "other")


def floor_bytes(spec: ModelSpec, rows: int, context: int) -> dict[str, float]:
    """Bytes that a step must read at least, in bfloat16: each weight of a linear map once, each key and value once."""
    numbers = num_parameters(spec) - (0 if spec.tie_word_embeddings else spec.vocab_size * spec.hidden_size)
    cache = rows * context * spec.num_layers * 2 * spec.num_kv_heads * spec.head_dim
    return {"linear": 2.0 * numbers, "attention": 2.0 * cache}


def bandwidth(device: torch.device) -> float:
    """Bytes a second that a copy moves, read and written."""
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


def spans(found: profile, cuda: bool) -> list[Span]:
    """Kernels and copies on the device, in order; on a CPU the operations that no other one called."""
    wanted = torch.autograd.DeviceType.CUDA if cuda else torch.autograd.DeviceType.CPU
    events = [event for event in found.events() if event.device_type == wanted and (cuda or event.cpu_parent is None)]
    listed = [Span(event.name, event.time_range.start, event.time_range.end) for event in events]
    return sorted(listed, key=lambda span: span.start)


def idle(listed: Iterable[Span]) -> float:
    """Microseconds between the first start and the last end in which nothing runs; ``listed`` is in order of start."""
    total, busy_until = 0.0, None
    for span in listed:
        if busy_until is not None:
            total += max(span.start - busy_until, 0.0)
        busy_until = max(span.end, busy_until or span.end)
    return total


def table(listed: list[Span], steps: int, floors: dict[str, float]) -> list[dict[str, Any]]:
    """A line for each kernel and one for each kind, microseconds and calls of one step, the longest first."""
    spent: dict[tuple[str, str], list[float]] = defaultdict(list)
    busy_until = 0.0
    for span in listed:
        spent[kind_of(span.name), span.name].append(max(span.end - max(span.start, busy_until), 0.0))
        busy_until = max(span.end, busy_until)
    lines = [
        {"kind": kind, "name": name, "calls": len(each) / steps, "us": round(sum(each) / steps, 2)}
        for (kind, name), each in spent.items()
    ]
    for kind in {line["kind"] for line in lines}:
        whole = round(sum(line["us"] for line in lines if line["kind"] == kind and line["name"]), 2)
        lines.append({"kind": kind, "name": "", "us": whole, "floor_us": floors.get(kind)})
    return sorted(lines, key=lambda line: -line["us"])


def decode(llm: LLM, offline: Offline, rows: int, context: int, steps: int) -> profile:
    """Profile ``steps`` steps in which all rows decode."""
    door, cuda = llm.frontend, torch.cuda.is_available()
    tokens = steps + 40 + 2 * rows + rows * context // 2048
    tickets = [door.prepare(offline.prompt(context), greedy(tokens)) for _ in range(rows)]
    door.start(tickets)
    while len(tickets[-1].choices[0].token_ids) < 8:
        llm.advance()
    activities = [ProfilerActivity.CUDA] if cuda else [ProfilerActivity.CPU]
    with profile(activities=activities) as found:
        for _ in range(steps):
            llm.advance()
        if cuda:
            torch.cuda.synchronize()
    for ticket in tickets:
        door.abort(ticket)
    llm.loop.take(0)
    return found


def measure(llm: LLM, offline: Offline, rows: int, speed: float, args: argparse.Namespace) -> dict[str, Any]:
    spec = llm.loop.executor.decoder.spec
    floors = {kind: round(size / speed * 1e6, 1) for kind, size in floor_bytes(spec, rows, args.context).items()}
    listed = spans(decode(llm, offline, rows, args.context, args.steps), torch.cuda.is_available())
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=CHOICES, default="llama-3.1-8b")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 32, 256])
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--output", type=Path, default=RESULTS)
    parser.add_argument("--options", type=json.loads, default={})
    args = parser.parse_args()
    speed = bandwidth(
        torch.device("cuda" if torch.cuda.is_available() else "cpu")
    )  # before the engine takes the memory
    with tempfile.TemporaryDirectory() as folder:
        llm = LLM(**engine_options(args.shape, args.options, Path(folder), tiny=False))
        offline = Offline(llm, FULL, vocabulary(args.shape), Clock(3600))
        record: dict[str, Any] = {"benchmark": "kernels", "figures": [], "machine": fingerprint()}
        for rows in args.rows:
            record["figures"].append(measure(llm, offline, rows, speed, args))
            (args.output / f"kernels_{args.shape}.json").write_text(json.dumps(record, indent=1) + "\n")
            show(record["figures"][-1])


if __name__ == "__main__":
    main()
