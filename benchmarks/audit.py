"""The audit of an engine on a CPU: the time of a pass, of a slice, and the share of a decoding step.

    python -m benchmarks audit [--shape qwen3-0.6b] [--rows 4] [--tokens 64] [--options JSON]

Random weights, in one process. ``pass_ms`` is the time of all slices of a pass, one after another. ``slice_ms`` is the
longest one. ``step_ms`` is the median time of a decoding step without the audit. ``every_step_percent`` is the share
that a slice adds to a step if each step has one. With ``--audit-every S`` the audit takes ``pass_ms`` of every S
seconds.

    python -m benchmarks audit --watch 30

serves for 30 minutes under load, with adapters, updates, sleep and replicas (:mod:`benchmarks.common.watch`).
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.common.checkpoint import write_checkpoint
from benchmarks.common.report import parser, save
from benchmarks.common.shapes import CHOICES, SHAPES
from preheat import LLM, SamplingParams

FIXED: dict[str, Any] = {
    "audit_every": 1e6,
    "boot_check": "off",
    "skip_warmup": True,
    "max_num_seqs": 8,
    "max_model_len": 512,
}


def pass_times(llm: LLM) -> list[float]:
    """Return the seconds of each slice of a pass."""
    assert llm.loop.audit is not None
    memory = llm.loop.audit.memory
    while memory.take():
        pass
    memory.begin()
    return [seconds(partial(memory.check, at)) for at in range(len(memory))]


def seconds(work: Callable[[], object]) -> float:
    """Return the seconds that ``work`` takes."""
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def step_times(llm: LLM, rows: int, tokens: int) -> Iterator[float]:
    """Yield the seconds of decoding steps of ``rows`` rows, without the audit."""
    audit, llm.loop.audit = llm.loop.audit, None
    step, times = llm.loop.step, list[float]()
    llm.loop.step = lambda: times.append(seconds(step)) or True  # type: ignore[method-assign, func-returns-value]
    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
    llm.generate([{"prompt_token_ids": [5 + row] * 160} for row in range(rows)], params, use_tqdm=False)
    llm.loop.step, llm.loop.audit = step, audit  # type: ignore[method-assign]
    yield from times[1:-1]


def measure(llm: LLM, rows: int, tokens: int) -> dict[str, Any]:
    """Return the figures of one engine."""
    for _ in step_times(llm, rows, tokens):  # publishes blocks
        pass
    step = statistics.median(step_times(llm, rows, tokens))
    passes = [pass_times(llm) for _ in range(5)]
    best = min(passes, key=sum)
    memory: Any = llm.loop.audit and llm.loop.audit.memory
    size = sum(len(each.ends) + each.words.nbytes for each in memory.slices)
    return {
        "mib": round(size / 2**20, 1),
        "blocks": len(memory.blocks.digests),
        "slices": len(best),
        "pass_ms": round(sum(best) * 1e3, 2),
        "slice_ms": round(max(best) * 1e3, 3),
        "step_ms": round(step * 1e3, 3),
        "every_step_percent": round(statistics.mean(best) / step * 100, 2),
    }


def main(words: Sequence[str]) -> None:
    flags = parser(__doc__, __name__)
    flags.add_argument("--shape", choices=CHOICES, default="qwen3-0.6b")
    flags.add_argument("--rows", type=int, default=4)
    flags.add_argument("--tokens", type=int, default=64)
    flags.add_argument("--options", type=json.loads, default={}, help="of the engine, as JSON")
    flags.add_argument("--watch", type=float, metavar="MINUTES", help="serve under load, and count false alarms")
    args = flags.parse_args(words)
    if args.watch is not None:
        from benchmarks.common import watch

        found = watch.run(args.watch)
        print(json.dumps(found))
        print(save("audit_watch", found))
        if any(each["faults"] or each["restarts"] or not each["passes"] for each in found["servers"].values()):
            sys.exit(1)
        return
    with tempfile.TemporaryDirectory() as name:
        options = FIXED | {"kv_cache_memory_bytes": 1 << 28, "dtype": "bfloat16"}
        if args.shape in SHAPES:
            (Path(name) / "config.json").write_text(json.dumps(SHAPES[args.shape]), encoding="utf-8")
            write_checkpoint(SHAPES[args.shape], Path(name))
            options |= {"model": name, "skip_tokenizer_init": True}
        figures = {"shape": args.shape, "rows": args.rows, "options": args.options}
        figures |= measure(LLM(**options | args.options), args.rows, args.tokens)
    print(json.dumps(figures))
    print(save("audit", figures))
