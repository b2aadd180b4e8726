"""Receipts: answers replayed on other boots and ranks, flipped bits, and the cost.

    python -m benchmarks receipts [--answers 1000] [--tokens 16] [--bits 10] [--cost bundled:1 bundled:256 ...]

A server with ``--receipts-log`` answers requests of all kinds of ``benchmarks chaos``. ``preheat replay`` gives each
answer again on a boot of its own with one rank, and on one with two. A server with two ranks then answers, and one rank
replays. Single bits are flipped in weights, scales, an adapter, prompts and seeds
(:mod:`benchmarks.common.planted_bits`). The cost is the processor time of answers with receipts over the time without,
in pairs.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.common.crowd import mixed, normal, together
from benchmarks.common.planted_bits import planted
from benchmarks.common.process import environment, flags, serving
from benchmarks.common.report import parser, save
from benchmarks.common.shapes import CHOICES, SHAPES
from preheat import LLM, SamplingParams
from preheat.backends.cpu.llvm.sampler import Draws
from preheat.backends.cpu.sampler import CpuSampler
from preheat.frontend.receipt import StepDigests
from preheat.frontend.receipts import Receipts
from preheat.ops.sampling import SamplingInput
from preheat.schedule import results

AT_ONCE, LEAST_PAIRS, TIMED = 32, 5, 8
OWN = (
    (CpuSampler, "digest"), (CpuSampler, "digests"), (results, "_digests"), (StepDigests, "add"), (StepDigests, "give"),
    (StepDigests, "_give"), (Receipts, "begin"), (Receipts, "end"),
)  # fmt: skip
"""The functions of receipts in a step. The digests themselves are computed by the function that draws.

Most calls of ``give`` find nothing to do, so its median has no ``_give``. The reading of receipts is not among them.
"""

ENGINE: dict[str, Any] = {
    "num_threads": 1, "kv_cache_memory_bytes": 128 << 20, "max_num_seqs": 64, "tp_invariant": True,
    "skip_warmup": True, "boot_check": "off", "log_level": "error",
    "enable_auto_tool_choice": True, "tool_call_parser": "hermes",
}  # fmt: skip


def answered(log: Path, answers: int, tokens: int, seed: int, ranks: int) -> None:
    """Answer requests with receipts by a server with ``ranks``, into ``log``."""
    options = ENGINE | {"model": "bundled", "receipts_log": str(log), "receipts": True, "tensor_parallel_size": ranks}
    asked = mixed(answers, seed, None, tokens)
    with serving(options, env=environment(), stderr=subprocess.DEVNULL) as server:
        server.wait_for("/ready")
        for start in range(0, answers, AT_ONCE):
            found = asyncio.run(together(server.port, asked[start : start + AT_ONCE]))
            assert {normal(each)["status"] for each in found} == {"200"}


def replayed(log: Path, ranks: int) -> dict[str, Any]:
    """Return how many receipts of ``log`` an engine with ``ranks`` gives again."""
    words = [*flags(ENGINE | {"receipts_log": str(log), "tensor_parallel_size": ranks})]
    words = [word for word in words if "tool" not in word]
    began = time.monotonic()
    command = [sys.executable, "-m", "preheat", "replay", "bundled", "--json", *words]
    done = subprocess.run(command, capture_output=True, text=True, env=environment(), check=False)
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    equal = sum(line["position"] is None for line in lines)
    differing = [line for line in lines if line["position"] is not None][:10]
    return {"receipts": len(lines), "equal": equal, "tokens": sum(line["positions"] for line in lines),
            "seconds": round(time.monotonic() - began, 1), "differing": differing}  # fmt: skip


def engine_of(shape: str, rows: int, folder: Path) -> LLM:
    """Return an engine of ``shape`` for ``rows`` requests at a time, with random weights unless it is bundled."""
    options: dict[str, Any] = {"model": "bundled"}
    if shape in SHAPES:
        (folder / "config.json").write_text(json.dumps(SHAPES[shape]), encoding="utf-8")
        options = {"model": str(folder), "load_format": "dummy", "skip_tokenizer_init": True}
    return LLM(**options, num_threads=1, max_num_seqs=rows, max_model_len=256, boot_check="off", skip_warmup=True,
               on_cold="off", log_level="error", kv_cache_memory_bytes=512 << 20)  # fmt: skip


def nothing(*args: object) -> None:
    """Do nothing."""


@contextmanager
def timed() -> Iterator[dict[str, list[int]]]:
    """Yield the nanoseconds of each call of the functions of receipts, by name, and of digests in a draw."""
    owners = (*OWN, (Draws, "__call__"))
    spent, right = {name: list[int]() for _, name in owners}, [(*each, getattr(*each)) for each in owners]

    def clocked(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            began = time.perf_counter_ns()
            found = function(*args)
            ended = time.perf_counter_ns()
            nothing(*args)
            spent[name].append(2 * ended - began - time.perf_counter_ns())  # less the time of a call and of the clock
            return found

        return run

    def doubled(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Draw with digests and without. Both find the logits in the same caches, and each is first in turn."""

        def run(draws: Draws, logits: Any, step: SamplingInput) -> Any:
            if not step.digested:
                return function(draws, logits, step)
            plain, took = replace(step, digested=False), dict[bool, int]()
            function(draws, logits, plain)
            for digested in (True, False) if len(spent[name]) % 2 else (False, True):
                began = time.perf_counter_ns()
                function(draws, logits, step if digested else plain)
                took[digested] = time.perf_counter_ns() - began
            spent[name].append(took[True] - took[False])  # more by the first one's wait for memory, or less
            return function(draws, logits, step)

        return run

    for owner, name, function in right:
        setattr(owner, name, (doubled if owner is Draws else clocked)(name, function))
    try:
        yield spent
    finally:
        for owner, name, function in right:
            setattr(owner, name, function)


def middle(times: Sequence[int]) -> float:
    """Return the mean of the medians of both halves, the calls in even places and in odd ones."""
    return statistics.fmean(statistics.median(times[first::2]) for first in range(min(2, len(times))))


def cost(shape: str, rows: int, seconds: float) -> dict[str, Any]:
    """Return the processor time of answers with receipts over the time without, in pairs for about ``seconds``.

    The first of a pair has no receipts, then the first of the next pair has them, and so on. ``percent`` is the median
    over the pairs, ``quartiles`` are those of the pairs. On a machine with other work they are wide. So ``own_us``
    are microseconds a step in the functions of receipts: the median of each, times its calls. The digests are part of
    the function that draws, so it runs with digests and without. Other work on the machine slows everything down, so
    the least of several turns counts, and ``own_percent`` is its share of the least step without receipts.
    """
    tokens = 64
    with tempfile.TemporaryDirectory() as folder:
        llm = engine_of(shape, rows, Path(folder))
        prompts: list[Any] = [{"prompt_token_ids": [5 + row % 200, 7]} for row in range(rows)]

        def turn(receipt: bool) -> float:
            params = SamplingParams(temperature=1, seed=1, max_tokens=tokens, ignore_eos=True, receipt=receipt)
            began = time.process_time()
            llm.generate(prompts, params, use_tqdm=False)
            return (time.process_time() - began) / tokens * 1e3

        turn(False), turn(True)
        pairs, end = list[dict[bool, float]](), time.monotonic() + seconds
        while len(pairs) < LEAST_PAIRS or time.monotonic() < end:
            first = len(pairs) % 2 == 1
            pairs.append({each: turn(each) for each in (first, not first)})
        owns = list[float]()
        for _ in range(TIMED):
            with timed() as spent:
                turn(True)
            owns.append(sum(middle(each) * len(each) for each in spent.values()) / tokens / 1e3)
    own, least = min(owns), min(each[False] for each in pairs)
    plain = statistics.median(each[False] for each in pairs)
    shares = [(each[True] / each[False] - 1) * 100 for each in pairs]
    more = [(each[True] - each[False]) * 1e3 for each in pairs]
    low, _, high = statistics.quantiles(shares, n=4)
    return {
        "shape": shape, "rows": rows, "pairs": len(pairs),
        "plain_ms": round(plain, 3), "own_us": round(own, 1), "own_percent": round(own / least / 10, 2),
        "more_us": round(statistics.median(more), 1), "percent": round(statistics.median(shares), 2),
        "quartiles": [round(low, 2), round(high, 2)],
    }  # fmt: skip


def measured(words: str) -> tuple[str, int]:
    """Return the shape and the rows that SHAPE:ROWS names."""
    shape, _, rows = words.partition(":")
    if shape not in CHOICES or not rows.isdigit():
        raise argparse.ArgumentTypeError(f"{words} is no SHAPE:ROWS; shapes are {', '.join(CHOICES)}")
    return shape, int(rows)


def main(words: Sequence[str]) -> None:
    flag = parser(__doc__, __name__)
    flag.add_argument("--answers", type=int, default=1000)
    flag.add_argument("--tokens", type=int, default=16)
    flag.add_argument("--seed", type=int, default=0)
    flag.add_argument("--bits", type=int, default=10, help="flipped bits of each kind")
    flag.add_argument("--cost", type=measured, nargs="*", default=[("bundled", 1), ("bundled", 256), ("qwen3-0.6b", 1)])
    flag.add_argument("--seconds", type=float, default=30.0, help="of each cost")
    args = flag.parse_args(words)
    figures: dict[str, Any] = {"answers": args.answers, "tokens": args.tokens, "seed": args.seed, "replays": {}}
    with tempfile.TemporaryDirectory() as folder:
        for ranks, others in ((1, (1, 2)), (2, (1,))):
            if args.answers:
                log = Path(folder) / f"of_{ranks}"
                answered(log, args.answers, args.tokens, args.seed, ranks)
                for other in others:
                    figures["replays"][f"{ranks} to {other}"] = found = replayed(log, other)
                    print(f"answers of {ranks} ranks by {other}:", found, flush=True)
    if args.bits:
        figures["bits"] = planted(args.bits, args.seed)
    if args.answers or args.bits:
        print(json.dumps(figures))
        print(save("receipts", figures))
    if args.cost:
        costs = list[dict[str, Any]]()
        for shape, rows in args.cost:
            costs.append(cost(shape, rows, args.seconds))
            print(json.dumps(costs[-1]), flush=True)
            save("receipts_cost", {"cost": costs})
    unequal = any(each["equal"] < each["receipts"] or not each["receipts"] for each in figures["replays"].values())
    if unequal or any(each["found"] < each["planted"] for each in figures.get("bits", {}).values()):
        sys.exit(1)
