"""Where the time of the mix of `preheat bench throughput` goes: each size of step, and what lies between steps.

    python bench/mix.py [--shape llama-3.1-8b] [--options JSON] [--tiny]

Milliseconds of a step are those between two events on the device, around its two programs; on a CPU, of the call. The
second run of the mix is told. ``--tiny``: a smoke test, whose figures mean nothing.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch
from _common import report

from preheat import LLM
from preheat.bench.offline import Offline, nanobench
from preheat.bench.report import Clock
from preheat.bench.shapes import CHOICES, FULL, TINY, engine_options, vocabulary
from preheat.plan.buckets import Bucket

Moment = torch.cuda.Event | float


class Step(NamedTuple):
    """A step that was padded to ``shape``, of whose rows ``sampled`` had a token drawn."""

    shape: Bucket
    sampled: int
    begin: Moment
    end: Moment


class Watch:
    """Stands in for the ``launch`` of an executor and notes each step."""

    def __init__(self, executor: Any) -> None:
        self._launch, self.steps = executor.launch, list[Step]()
        executor.launch = self

    def __call__(self, batch: Any) -> Any:
        begin = now()
        running = self._launch(batch)
        self.steps.append(Step(batch.shape, len(batch.sampled_rows), begin, now()))
        return running


def now() -> Moment:
    """This moment, in the order of what the device does."""
    if not torch.cuda.is_available():
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()
    return event


def milliseconds(begin: Moment, end: Moment) -> float:
    if isinstance(begin, torch.cuda.Event):
        return float(begin.elapsed_time(end))
    assert isinstance(end, float)
    return (end - begin) * 1e3


def by_size(steps: list[Step]) -> list[dict[str, Any]]:
    """A line for each shape, in the order of its tokens."""
    found: dict[Bucket, list[Step]] = defaultdict(list)
    for step in steps:
        found[step.shape].append(step)
    lines = []
    for shape in sorted(found, key=lambda shape: (shape.phase, shape.tokens)):
        each = found[shape]
        spent = sum(milliseconds(step.begin, step.end) for step in each)
        lines.append(
            {
                "shape": str(shape),
                "steps": len(each),
                "rows": round(sum(step.sampled for step in each) / len(each)),
                "ms": round(spent / len(each), 3),
                "s": round(spent / 1e3, 3),
            }
        )
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=CHOICES, default="llama-3.1-8b")
    parser.add_argument("--options", type=json.loads, default={})
    parser.add_argument("--tiny", action="store_true")
    args = parser.parse_args()
    sizes = TINY if args.tiny else FULL
    with tempfile.TemporaryDirectory() as folder:
        llm = LLM(**engine_options(args.shape, args.options, Path(folder), tiny=args.tiny))
    offline = Offline(llm, sizes, vocabulary(args.shape), Clock(3600))
    prompts, params = nanobench(sizes, vocabulary(args.shape))
    offline.seconds(prompts, params)
    watch = Watch(llm.loop.executor)
    seconds = offline.seconds(prompts, params)
    between = sum(milliseconds(before.end, after.begin) for before, after in pairwise(watch.steps))
    figures = {
        "shape": args.shape,
        "tok_s": round(sum(each.max_tokens or 0 for each in params) / seconds),
        "s": round(seconds, 2),
        "between_steps_s": round(between / 1e3, 3),
        "steps": by_size(watch.steps),
    }
    for line in figures["steps"]:
        print(json.dumps(line))
    print({name: figure for name, figure in figures.items() if name != "steps"})
    print(report(f"mix_{args.shape}", figures))


if __name__ == "__main__":
    main()
