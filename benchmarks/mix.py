"""The time of the mix of `preheat bench throughput` by step size.

    python -m benchmarks mix [--shape llama-3.1-8b] [--options JSON] [--tiny]

The time between steps is summed, too. Milliseconds of a step are taken between two events on the device, around its two
programs; on a CPU, of the call. The second run of the mix is reported. ``--tiny`` is a smoke test: its figures mean
nothing.
"""

from __future__ import annotations

import json
import time
from collections import defaultdict
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch

from benchmarks.common.report import parser, save
from benchmarks.common.shapes import CHOICES
from benchmarks.suite.offline import Offline, nanobench
from preheat.plan.buckets import Bucket

Moment = torch.cuda.Event | float


class TimedStep(NamedTuple):
    """A step that was padded to ``bucket``, with ``sampled`` sampled rows."""

    bucket: Bucket
    sampled: int
    begin: Moment
    end: Moment


class StepWatch:
    """Replaces an executor's ``launch`` and notes each step."""

    def __init__(self, executor: Any) -> None:
        self._launch, self.steps = executor.launch, list[TimedStep]()
        executor.launch = self

    def __call__(self, batch: Any) -> Any:
        begin = now()
        running = self._launch(batch)
        self.steps.append(TimedStep(batch.bucket, len(batch.sampled_rows), begin, now()))
        return running


def now() -> Moment:
    """Return this moment in the order of the device's work."""
    if not torch.cuda.is_available():
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()
    return event


def milliseconds(begin: Moment, end: Moment) -> float:
    if isinstance(begin, float) and isinstance(end, float):
        return (end - begin) * 1e3
    assert isinstance(begin, torch.cuda.Event) and isinstance(end, torch.cuda.Event)
    return float(begin.elapsed_time(end))


def by_size(steps: list[TimedStep]) -> list[dict[str, Any]]:
    """Return a line for each shape, in the order of its tokens."""
    found: dict[Bucket, list[TimedStep]] = defaultdict(list)
    for step in steps:
        found[step.bucket].append(step)
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


def main(words: Sequence[str]) -> None:
    flags = parser(__doc__, __name__)
    flags.add_argument("--shape", choices=CHOICES, default="llama-3.1-8b")
    flags.add_argument("--options", type=json.loads, default={})
    flags.add_argument("--tiny", action="store_true")
    args = flags.parse_args(words)
    offline = Offline.of_shape(args.shape, args.options, tiny=args.tiny)
    prompts, params = nanobench(offline.sizes, offline.vocabulary)
    offline.seconds(prompts, params)
    watch = StepWatch(offline.llm.loop.executor)
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
    print(save(f"mix_{args.shape}", figures))
