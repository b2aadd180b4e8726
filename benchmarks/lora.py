"""The cost of adapters, and of loading one while other rows decode.

    python -m benchmarks lora [--shape llama-3.1-8b] [--adapters 8] [--rank 16] [--context 32768] [--experts]
        [--itl-alone] [--tiny] [--output FOLDER] [OPTION ...]

First over HTTP: streams decode, without an adapter and with half of ``--adapters`` in turn. Meanwhile ``--adapters``
other adapters are loaded one after the other, and each then has its first request. The rest runs in this process.

There is an engine without adapters, and beside it one with ``--adapters`` adapter slots. An adapter is for every linear
layer of the decoder, and with ``--experts`` for all routed experts. In turns the engines take rows without adapters
(both), with one, and with all adapters in turn. Reported are:

- milliseconds between tokens for batches of such rows, and for reading prompts;
- seconds until each engine is ready; they are made one after the other;
- while rows decode: seconds to read another adapter and to put it into its slot, and the longest gaps between steps.

Then an engine for 8 prompts of ``--context`` tokens: the milliseconds to read one, and between tokens while all of them
decode, without adapters and with all of them in turn.

Weights and adapters are random numbers. Further arguments are options of the engine, as NAME=VALUE.
"""

from __future__ import annotations

import argparse
import gc
import math
import random
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.common.adapter import write_adapter
from benchmarks.common.client import quantile
from benchmarks.common.lora_serving import loading_over_http
from benchmarks.common.report import RESULTS, parser, save
from benchmarks.common.shapes import (
    CHOICES,
    FULL,
    TINY,
    Sizes,
    config_of,
    engine_options,
    long_answer,
    long_length,
    vocabulary,
)
from benchmarks.suite.offline import greedy
from preheat.configs.adapters import LoraModule
from preheat.frontend.adapters import LoRARequest
from preheat.frontend.request_state import RequestState
from preheat.llm import LLM
from preheat.lora.adapter import adapted_modules, expert_modules
from preheat.model.families import read_spec
from preheat.model.files import BUNDLED
from preheat.warmup.cold_monitor import ColdMonitor

Adapters = Sequence[LoRARequest | None]

TRIES = 4
"""Runs of each figure; the best counts."""


@dataclass
class Measured:
    """An engine with its sizes and the seconds until it was ready."""

    llm: LLM
    sizes: Sizes
    vocabulary: int
    ready: float

    def __post_init__(self) -> None:
        self._random = random.Random(0)

    def prompts(self, count: int, length: int) -> list[dict[str, list[int]]]:
        return [{"prompt_token_ids": self._random.choices(range(self.vocabulary), k=length)} for _ in range(count)]

    def seconds(self, rows: int, length: int, tokens: int, adapters: Adapters) -> float:
        """Return the seconds to answer ``rows`` prompts with ``adapters`` in turn."""
        if isinstance(monitor := self.llm.loop.listener, ColdMonitor):
            monitor.forget()  # cold events of another engine do not count here
        prompts = self.prompts(rows, length)
        asked = [adapters[row % len(adapters)] for row in range(rows)] if any(adapters) else None
        began = time.perf_counter()
        self.llm.generate(prompts, greedy(tokens), use_tqdm=False, lora_request=asked)
        return time.perf_counter() - began

    def start(self, length: int, tokens: int, adapters: Adapters) -> list[RequestState]:
        """Begin a request of random tokens with each of ``adapters``, which must be served."""
        states, frontend = [], self.llm.frontend
        for adapter, prompt in zip(adapters, self.prompts(len(adapters), length), strict=True):
            states.append(frontend.prepare(prompt["prompt_token_ids"], greedy(tokens)))
            states[-1].lora_name = adapter.lora_name if adapter else ""
        frontend.start(states)
        return states

    def advance(self, until: Callable[[], bool]) -> list[float]:
        """Step until ``until()`` is true, and return the seconds of each step."""
        gaps = []
        while not until():
            began = time.perf_counter()
            self.llm.advance()
            gaps.append(time.perf_counter() - began)
        return gaps

    def stop(self, states: Sequence[RequestState]) -> None:
        """Abort the requests of ``states``."""
        for state in states:
            self.llm.frontend.abort(state)
        self.llm.loop.take(0)
        self.llm.loop.finish()
        self.llm.advance()

    def long(self, rows: int, context: int, adapters: Adapters) -> dict[str, float]:
        """Return milliseconds to read a prompt, and between tokens.

        One of ``rows`` prompts given at once is read; then all decode. Each prompt has ``context`` tokens.
        """
        prompt = min(self.seconds(rows, context, 1, adapters) for _ in range(2)) / rows
        asked = [adapters[row % len(adapters)] for row in range(rows)]
        states = self.start(context, long_answer(self.sizes, rows, context), asked)
        last = states[-1].choices[0]
        self.advance(lambda: bool(last.token_ids))
        before = len(last.token_ids)
        spent = sum(self.advance(lambda: any(state.finished for state in states)))
        found = spent / (len(last.token_ids) - before)
        self.stop(states)
        return {"prompt_ms": round(prompt * 1e3, 3), "itl_ms": round(found * 1e3, 3)}


Kinds = Mapping[str, tuple[Measured, Adapters]]
"""Kinds of rows: an engine, and the adapters of its rows in turn."""


def seconds(kinds: Kinds, rows: int, length: int, tokens: int) -> dict[str, float]:
    """Return the best seconds of ``TRIES`` by kind, see :meth:`Measured.seconds`.

    The kinds take turns.
    """
    best = dict.fromkeys(kinds, math.inf)
    for _ in range(TRIES):
        for kind, (engine, adapters) in kinds.items():
            best[kind] = min(best[kind], engine.seconds(rows, length, tokens, adapters))
    return best


def figures(kinds: Kinds, batches: Sequence[int], sizes: Sizes) -> dict[str, dict[str, float]]:
    """Return by kind the milliseconds between tokens and of a prompt.

    Times between tokens are by rows. A prompt's time is taken of several read one after the other.
    """
    found: dict[str, dict[str, float]] = {kind: {} for kind in kinds}
    for rows in batches:
        short, long = (seconds(kinds, rows, sizes.context, tokens) for tokens in (2, 2 + sizes.steps))
        for kind in kinds:
            found[kind][str(rows)] = round((long[kind] - short[kind]) / sizes.steps * 1e3, 3)
        show(f"{rows} rows, ms", {kind: found[kind][str(rows)] for kind in kinds})
    for kind, spent in seconds(kinds, sizes.prompts, sizes.prompt, 1).items():
        found[kind]["prompt"] = round(spent / sizes.prompts * 1e3, 3)
    return found


def options_of(args: argparse.Namespace, sizes: Sizes, more: dict[str, Any]) -> dict[str, Any]:
    """Return the options of an engine; ``more`` wins."""
    usual = {"max_num_seqs": max(sizes.batches), "kv_cache_memory_bytes": 1 << (26 if args.tiny else 33)}
    return usual | dict(option.split("=", 1) for option in args.options) | more


def make(args: argparse.Namespace, folder: Path, sizes: Sizes, **more: Any) -> Measured:
    """Return an engine; ``folder`` is for its config."""
    shape = BUNDLED if args.tiny else args.shape
    options = engine_options(shape, options_of(args, sizes, more), folder, tiny=args.tiny)
    began = time.perf_counter()
    return Measured(LLM(**options), sizes, vocabulary(shape), time.perf_counter() - began)


def loading(engine: Measured, rows: int, running: Adapters, new: LoRARequest) -> dict[str, float | None]:
    """Return the milliseconds to load ``new``, and gaps meanwhile.

    ``rows`` rows decode; gaps are between their steps. Gaps are taken while nothing else happens, while a request
    without an adapter begins, and while ``new`` is read and a request with it begins.
    """
    executor, advance, context = engine.llm.loop.executor, engine.advance, engine.sizes.context
    placed = list[float]()
    right = executor.load_adapters

    def timed(loads: Any) -> None:
        began = time.perf_counter()
        right(loads)
        placed.append(time.perf_counter() - began)

    decoding = engine.start(context, 8 * engine.sizes.steps + 4, [running[row % len(running)] for row in range(rows)])
    advance(lambda: all(state.choices[0].token_ids for state in decoding))
    count = iter(range(engine.sizes.steps))
    still = advance(lambda: next(count, None) is None)
    (plain,) = engine.start(context, 1, [None])
    beside = advance(lambda: bool(plain.finished))
    executor.load_adapters = timed  # type: ignore[method-assign]
    began = time.perf_counter()
    answers: list[Any] = []
    engine.llm.frontend.adapters.load(LoraModule(new.lora_name, new.lora_path), answers.append)
    gaps = advance(lambda: bool(answers))
    read = time.perf_counter() - began
    (first,) = engine.start(context, 1, [new])
    began = time.perf_counter()
    placing = advance(lambda: bool(first.finished))
    until_token = time.perf_counter() - began
    executor.load_adapters = right  # type: ignore[method-assign]
    if answers != [None]:
        raise AssertionError(f"the adapter was not read: {answers}")
    if any(state.finished for state in decoding):
        raise AssertionError("the rows that decode ended before the adapter was there")
    engine.stop(decoding)
    return {
        "read_ms": round(read * 1e3, 1), "place_host_ms": round(sum(placed) * 1e3, 2),
        "first_token_ms": round(until_token * 1e3, 1), "gap_p50": quantile(still, 0.5),
        "gap_p99": quantile(still, 0.99), "gap_max_beside_a_plain_request": round(max(beside) * 1e3, 2),
        "gap_p99_while_read": quantile(gaps, 0.99), "gap_max_while_placed": round(max(placing) * 1e3, 2),
    }  # fmt: skip


def table(plain: dict[str, float], found: dict[str, dict[str, float]]) -> str:
    """Return the milliseconds without adapters, and the excess with.

    The excess is in percent for each kind of rows.
    """
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
    flags.add_argument("--context", type=int, help="tokens of the long prompts")
    flags.add_argument("--experts", action="store_true", help="adapt the experts, too")
    flags.add_argument("--itl-alone", action="store_true", help="only engines; saved as lora_itl")
    flags.add_argument("--tiny", action="store_true", help="a smoke test, whose figures mean nothing")
    flags.add_argument("--output", type=Path, help="the folder for the results, by default benchmarks/results")
    flags.add_argument("options", nargs="*", metavar="NAME=VALUE")
    args = flags.parse_intermixed_args(words)
    with tempfile.TemporaryDirectory() as name:
        figures = run(args, Path(name), sizes_of(args))
    if args.output or not args.tiny:
        name = "lora_itl" if args.itl_alone else "lora"
        name += "" if args.shape == flags.get_default("shape") else f"_{args.shape}"
        print(save(name, {"options": {**vars(args), "output": None}, **figures}, args.output or RESULTS))


def sizes_of(args: argparse.Namespace) -> Sizes:
    """Return the sizes of the run.

    The first long case is the only one.
    """
    sizes = TINY if args.tiny else replace(FULL, batches=(1, 32, 128), prompts=8, streams=16, long=((8, 32768),))
    rows, context = sizes.long[0]
    batches = tuple(args.batches) if args.batches else sizes.batches
    return replace(sizes, batches=batches, long=((rows, args.context or context),))


def run(args: argparse.Namespace, folder: Path, sizes: Sizes) -> dict[str, Any]:
    """Return the figures of the server, then of the engines here.

    Engines run one at a time.
    """
    spec, served = read_spec(config_of(args.shape if not args.tiny else BUNDLED)), list[LoRARequest]()
    modules = {name: shape for name, shape in adapted_modules(spec).items() if not name.endswith("lm_head")}
    modules |= expert_modules(spec) if args.experts else {}
    for number in range(args.adapters if args.itl_alone else 2 * args.adapters + 1):
        path = write_adapter(folder / str(number), modules, rank=args.rank, seed=number)
        served.append(LoRARequest(f"a{number}", number + 1, str(path)))
    adapted = {"enable_lora": True, "max_loras": args.adapters, "max_lora_rank": args.rank}
    more: dict[str, Any] = {}
    if not args.itl_alone:
        more["http"] = over_http(args, folder, sizes, served, adapted)
        show("http, ms", more["http"])
    without = make(args, folder, sizes)
    engine = make(args, folder, sizes, **adapted, max_cpu_loras=args.adapters + 1)
    ready, every = {"without": without.ready, "with": engine.ready}, served[: args.adapters]
    show("ready, s", ready)
    of_rows: dict[str, Adapters] = {"base rows": [None], "one": every[:1], "mixed": every}
    kinds = {"without": (without, [None])} | {kind: (engine, adapters) for kind, adapters in of_rows.items()}
    itl = figures(kinds, sizes.batches, sizes)
    print(table(itl["without"], itl))
    del without, kinds
    forget()
    if not args.itl_alone:
        running, rows = every[: max(args.adapters // 2, 1)], min(32, max(sizes.batches) - 1)
        more["loading"] = loading(engine, rows, running, served[args.adapters])
        show("loading, ms", more["loading"])
    adapter_slots = engine.llm.loop.executor.adapters
    assert adapter_slots is not None
    places = round(adapter_slots.bytes / 2**20, 1)
    del engine, adapter_slots
    forget()
    if not args.itl_alone:
        more["long"] = long_contexts(args, folder, sizes, every, adapted)
        show("long, ms", more["long"])
    return {"itl_ms": itl, "ready_s": ready, "places_mib": places, **more}


def show(section: str, figures: dict[str, Any]) -> None:
    """Print the figures of a section as soon as there are any."""
    print(f"{section}: " + ", ".join(f"{what} {value}" for what, value in figures.items()), flush=True)


def forget() -> None:
    """Free the memory of engines that nobody uses any longer."""
    gc.collect()
    torch.cuda.empty_cache()  # nothing, without a GPU


def over_http(
    args: argparse.Namespace, folder: Path, sizes: Sizes, served: Sequence[LoRARequest], adapted: dict[str, Any]
) -> dict[str, Any]:
    """Return the figures of :func:`loading_over_http`."""
    few = max(args.adapters // 2, 1)
    given = options_of(args, sizes, adapted | {
        "max_num_seqs": sizes.streams + 2, "max_cpu_loras": few + args.adapters, "lora_root": str(folder)
    })  # fmt: skip
    shape = BUNDLED if args.tiny else args.shape
    running, new = (
        {each.lora_name: each.lora_path for each in part} for part in (served[:few], served[-args.adapters :])
    )
    options = engine_options(shape, given, folder, tiny=args.tiny)
    return loading_over_http(options, running, new, sizes, vocabulary(shape))


def long_contexts(
    args: argparse.Namespace, folder: Path, sizes: Sizes, adapters: Adapters, adapted: dict[str, Any]
) -> dict[str, Any]:
    """Return the figures of long prompts.

    They run without adapters, and with all of them in turn.
    """
    (rows, context), length = sizes.long[0], long_length(sizes)
    config = config_of(BUNDLED if args.tiny else args.shape)
    token = (8 if args.tiny else 4) * config["num_hidden_layers"] * config["num_key_value_heads"] * config["head_dim"]
    more = {"max_num_seqs": rows, "max_model_len": length, "kv_cache_memory_bytes": token * (length + 1024) * rows}
    engine = make(args, folder, sizes, **adapted, **more)
    kinds: dict[str, Adapters] = {"none": [None], "mixed": adapters}
    return {"rows": rows, "context": context} | {kind: engine.long(rows, context, each) for kind, each in kinds.items()}
