"""What adapters cost, and what loading one costs those that decode.

    python -m benchmarks lora [--shape llama-3.1-8b] [--adapters 8] [--rank 16] [--tiny] [--output FOLDER] [OPTION ...]

An engine without adapters, then one with places for ``--adapters`` of them, each for every linear layer of the decoder.
Reported are milliseconds between tokens for batches of rows without adapters (of both engines), with one adapter, and
with all of them in turn; the same for reading prompts; the seconds until each engine is ready; and, while rows decode,
the seconds that it takes to read another adapter and to put it into its place, and the longest gaps between steps
meanwhile. Weights and adapters are random numbers. Further arguments are options of the engine, as NAME=VALUE.
"""

from __future__ import annotations

import argparse
import gc
import random
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.common.adapter import write_adapter
from benchmarks.common.client import quantile
from benchmarks.common.report import RESULTS, parser, save
from benchmarks.common.shapes import CHOICES, FULL, TINY, Sizes, engine_options, vocabulary
from benchmarks.suite.offline import greedy
from preheat.frontend.adapters import LoRARequest
from preheat.llm import LLM
from preheat.model.files import BUNDLED
from preheat.utils.adapters import LoraModule

Adapters = Sequence[LoRARequest | None]


@dataclass
class Measured:
    """An engine, and how it was made."""

    llm: LLM
    sizes: Sizes
    vocabulary: int
    ready: float

    def __post_init__(self) -> None:
        self._random = random.Random(0)

    def prompts(self, count: int, length: int) -> list[dict[str, list[int]]]:
        return [{"prompt_token_ids": self._random.choices(range(self.vocabulary), k=length)} for _ in range(count)]

    def seconds(self, rows: int, length: int, tokens: int, adapters: Adapters, tries: int) -> float:
        """The best time of so many to answer ``rows`` prompts, which have ``adapters`` in turn."""
        found = []
        for _ in range(tries):
            prompts = self.prompts(rows, length)
            asked = [adapters[row % len(adapters)] for row in range(rows)] if any(adapters) else None
            began = time.perf_counter()
            self.llm.generate(prompts, greedy(tokens), use_tqdm=False, lora_request=asked)
            found.append(time.perf_counter() - began)
        return min(found)

    def between_tokens(self, rows: int, adapters: Adapters) -> float:
        """Milliseconds."""
        sizes = self.sizes
        self.seconds(rows, sizes.context, 4, adapters, 1)
        short = self.seconds(rows, sizes.context, 2, adapters, 3)
        long = self.seconds(rows, sizes.context, 2 + sizes.steps, adapters, 2)
        return (long - short) / sizes.steps * 1e3

    def reading(self, adapters: Adapters) -> float:
        """Milliseconds that a prompt takes, of several read one after the other."""
        sizes = self.sizes
        return self.seconds(sizes.prompts, sizes.prompt, 1, adapters, 3) / sizes.prompts * 1e3

    def figures(self, batches: Sequence[int], kinds: dict[str, Adapters]) -> dict[str, dict[str, float]]:
        """Of each kind of rows."""
        found: dict[str, dict[str, float]] = {}
        for kind, adapters in kinds.items():
            found[kind] = {str(rows): round(self.between_tokens(rows, adapters), 3) for rows in batches}
            found[kind]["prompt"] = round(self.reading(adapters), 3)
        return found


def make(args: argparse.Namespace, folder: Path, sizes: Sizes, **more: Any) -> Measured:
    """An engine; ``folder`` is for its config."""
    given = {
        "max_num_seqs": max(sizes.batches), "kv_cache_memory_bytes": 1 << (26 if args.tiny else 33),
    } | dict(option.split("=", 1) for option in args.options)  # fmt: skip
    shape = BUNDLED if args.tiny else args.shape
    options = engine_options(shape, given | more, folder, tiny=args.tiny)
    began = time.perf_counter()
    return Measured(LLM(**options), sizes, vocabulary(shape), time.perf_counter() - began)


def loading(engine: Measured, rows: int, running: Adapters, new: LoRARequest) -> dict[str, float | None]:
    """What it takes to load ``new`` while ``rows`` decode, and the gaps between their steps, in milliseconds: while
    nothing else happens, while a request without an adapter begins, and while ``new`` is read and a request with it
    begins.
    """
    llm, frontend, executor = engine.llm, engine.llm.frontend, engine.llm.loop.executor
    tokens, gaps, placed = 8 * engine.sizes.steps + 4, list[float](), list[float]()
    right = executor.load_adapters

    def timed(loads: Any) -> None:
        began = time.perf_counter()
        right(loads)
        placed.append(time.perf_counter() - began)

    def start(adapters: Adapters, tokens: int) -> list[Any]:
        states = []
        for adapter, prompt in zip(adapters, engine.prompts(len(adapters), engine.sizes.context), strict=True):
            states.append(frontend.prepare(prompt["prompt_token_ids"], greedy(tokens)))
            states[-1].lora_name = adapter.lora_name if adapter else ""
        frontend.start(states)
        return states

    def advance(until: Callable[[], bool]) -> list[float]:
        gaps = []
        while not until():
            began = time.perf_counter()
            llm.advance()
            gaps.append(time.perf_counter() - began)
        return gaps

    decoding = start([running[row % len(running)] for row in range(rows)], tokens)
    advance(lambda: all(state.choices[0].token_ids for state in decoding))
    count = iter(range(engine.sizes.steps))
    still = advance(lambda: next(count, None) is None)
    (plain,) = start([None], 1)
    beside = advance(lambda: bool(plain.finished))
    executor.load_adapters = timed  # type: ignore[method-assign]
    began = time.perf_counter()
    answers: list[Any] = []
    frontend.adapters.load(LoraModule(new.lora_name, new.lora_path), answers.append)
    gaps = advance(lambda: bool(answers))
    read = time.perf_counter() - began
    (first,) = start([new], 1)
    began = time.perf_counter()
    placing = advance(lambda: bool(first.finished))
    until_token = time.perf_counter() - began
    executor.load_adapters = right  # type: ignore[method-assign]
    if answers != [None]:
        raise AssertionError(f"the adapter was not read: {answers}")
    if any(state.finished for state in decoding):
        raise AssertionError("the rows that decode ended before the adapter was there")
    for state in decoding:
        frontend.abort(state)
    llm.loop.take(0)
    llm.loop.finish()
    llm.advance()
    return {
        "read_ms": round(read * 1e3, 1), "place_host_ms": round(sum(placed) * 1e3, 2),
        "first_token_ms": round(until_token * 1e3, 1), "gap_p50": quantile(still, 0.5),
        "gap_p99": quantile(still, 0.99), "gap_max_beside_a_plain_request": round(max(beside) * 1e3, 2),
        "gap_p99_while_read": quantile(gaps, 0.99), "gap_max_while_placed": round(max(placing) * 1e3, 2),
    }  # fmt: skip


def table(plain: dict[str, float], found: dict[str, dict[str, float]]) -> str:
    """Milliseconds of the engine without adapters, and what each kind of rows takes more, in percent."""
    kinds = [kind for kind in found if kind != "without"]
    lines = [f"{'rows':<8}{'without, ms':>13}" + "".join(f"{kind:>22}" for kind in kinds)]
    for what, before in plain.items():
        cells = (f"{found[kind][what]:.3f} ({found[kind][what] / before - 1:+.1%})" for kind in kinds)
        lines.append(f"{what:<8}{before:>13.3f}" + "".join(f"{cell:>22}" for cell in cells))
    return "\n".join(lines)


def main(words: Sequence[str]) -> None:
    flags = parser(__doc__, __name__)
    flags.add_argument("--shape", choices=CHOICES, default="llama-3.1-8b")
    flags.add_argument("--adapters", type=int, default=8)
    flags.add_argument("--rank", type=int, default=16)
    flags.add_argument("--batches", type=int, nargs="+")
    flags.add_argument("--tiny", action="store_true", help="a smoke test, whose figures mean nothing")
    flags.add_argument("--output", type=Path, help="the folder for lora.json, by default benchmarks/results")
    flags.add_argument("options", nargs="*", metavar="NAME=VALUE")
    args = flags.parse_intermixed_args(words)
    sizes = TINY if args.tiny else replace(FULL, batches=(1, 32, 128), prompts=8)
    sizes = replace(sizes, batches=tuple(args.batches)) if args.batches else sizes
    with tempfile.TemporaryDirectory() as name:
        figures = run(args, Path(name), sizes)
    print(table(figures["itl_ms"]["without"], figures["itl_ms"]))
    print("ready, s: " + ", ".join(f"{kind} {value:.1f}" for kind, value in figures["ready_s"].items()))
    print("loading, ms: " + ", ".join(f"{what} {value}" for what, value in figures["loading"].items()))
    if args.output or not args.tiny:
        print(save("lora", {"options": {**vars(args), "output": None}, **figures}, args.output or RESULTS))


def run(args: argparse.Namespace, folder: Path, sizes: Sizes) -> dict[str, Any]:
    """The figures of both engines."""
    without = make(args, folder, sizes)
    itl = {"without": without.figures(sizes.batches, {"none": [None]})["none"]}
    ready = {"without": without.ready}
    del without
    gc.collect()
    engine = make(
        args, folder, sizes, enable_lora=True, max_loras=args.adapters, max_cpu_loras=args.adapters + 1,
        max_lora_rank=args.rank,
    )  # fmt: skip
    ready["with"] = engine.ready
    seats = engine.llm.loop.executor.adapters
    assert seats is not None
    modules = {name: shape for name, shape in seats.modules.items() if not name.endswith("lm_head")}
    served = []
    for number in range(1, args.adapters + 2):
        path = write_adapter(folder / str(number), modules, rank=args.rank, seed=number)
        served.append(LoRARequest(f"a{number}", number, str(path)))
    kinds: dict[str, Adapters] = {"base rows": [None], "one": served[:1], "mixed": served[:-1]}
    itl |= engine.figures(sizes.batches, kinds)
    load = loading(engine, min(32, max(sizes.batches) - 1), served[: max(args.adapters // 2, 1)], served[-1])
    return {"itl_ms": itl, "ready_s": ready, "loading": load, "places_mib": round(seats.bytes / 2**20, 1)}
