"""Structured outputs: what grammars cost rows that decode, and requests that begin.

    python -m benchmarks grammars [--shape llama-3.1-8b] [--options JSON] [--tiny] [--save]

The tokenizer has as many tokens as the model and is made up (``benchmarks/common/vocabulary.py``); all rows sample at
temperature 1 from random weights, so that grammars are met in many states.

``between tokens``: batches of rows that are all plain, then all held to a nested JSON schema, in turns; the best round
of each. ``masks`` is how long threads computed masks in a step, ``wait`` how long the step was waited for by them.
``to the first token``: requests one by one, plain, with a schema that is new each time, with one that was seen before;
medians. ``first``: the first request of a kind that this engine has ever seen against the median of later ones; where
``own`` stands each has a grammar of its own. ``--tiny``: a smoke test, whose figures mean nothing.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.common.decoding import DecodingRows
from benchmarks.common.report import Clock, parser, save
from benchmarks.common.shapes import CHOICES, FULL, TINY, engine_options, vocabulary
from benchmarks.common.vocabulary import write_tokenizer
from benchmarks.suite.first import REPEATS, ratio_row
from benchmarks.suite.offline import Offline
from preheat import LLM, SamplingParams, StructuredOutputsParams
from preheat.grammar.service import Grammars
from preheat.model.files import BUNDLED

ROWS, TINY_ROWS = (64, 256), (2,)
ROUNDS, REQUESTS = 3, 15
PRELOADED = "point"
AIMS = {64: 5.0, 256: 10.0, "new": 20.0, "cached": 1.0, "first": 1.1}
"""Percent between tokens by rows, milliseconds to the first token, first ÷ steady."""


def closed(**properties: Any) -> dict[str, Any]:
    """An object that has all of these properties and no others."""
    return {
        "type": "object", "properties": properties, "required": [*properties], "additionalProperties": False,
    }  # fmt: skip


def small(number: int) -> dict[str, Any]:
    """A schema like no other of another ``number``."""
    return closed(
        **{
            f"name_{number}": {"type": "string", "maxLength": 20},
            "size": {"type": "integer"},
            "kind": {"enum": ["a", "b", number]},
        }
    )


WORD: dict[str, Any] = {"type": "string", "maxLength": 40}
NESTED: dict[str, Any] = {
    "type": "array",
    "minItems": 100,  # no row ends while it is timed
    "items": closed(
        id={"type": "integer", "minimum": 0, "maximum": 99999},
        name=WORD,
        state={"enum": ["open", "closed", "unknown"]},
        place=closed(street=WORD, at=closed(x={"type": "number"}, y={"type": "number"})),
        tags={"type": "array", "items": WORD, "minItems": 1, "maxItems": 4},
        parent={"anyOf": [{"type": "null"}, closed(id={"type": "integer"}, name=WORD)]},
    ),
}


def held(**asked: Any) -> StructuredOutputsParams:
    return StructuredOutputsParams(**asked)


def kinds() -> dict[str, Callable[[int], StructuredOutputsParams | None]]:
    """What the n-th request of each kind asks for."""
    point = small(-1)
    return {
        "plain": lambda n: None,
        "json_object": lambda n: held(json_object=True),
        "preloaded schema": lambda n: held(json=point),
        "schema, own": lambda n: held(json=small(n)),
        "choice, own": lambda n: held(choice=[f"yes {n}", f"no {n}", f"perhaps {n}"]),
        "regex, own": lambda n: held(regex=f"[a-z]{{3,9}} {n} [0-9]{{2,4}}"),
    }


def engine(shape: str, given: dict[str, Any], *, tiny: bool) -> Offline:
    """With a tokenizer, and one grammar that is compiled at boot."""
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        options = engine_options(shape, given, place, tiny=tiny)
        if shape != BUNDLED:
            write_tokenizer(place, vocabulary(shape))
        preloads = place / "grammars.jsonl"
        preloads.write_text(json.dumps({"name": PRELOADED, "json": small(-1)}) + "\n")
        options |= {"skip_tokenizer_init": False, "preload_grammars": str(preloads)}
        llm = LLM(**options)
    return Offline(llm, TINY if tiny else FULL, vocabulary(shape), Clock(float("inf")))


def grammars_of(llm: LLM) -> Grammars:
    found = llm.loop.grammars
    if isinstance(found, str):
        raise SystemExit(f"this engine has no grammars: {found}")
    return found


def sampling(asked: StructuredOutputsParams | None, seed: int, tokens: int) -> SamplingParams:
    ends = asked is None  # a text that is complete ends in any case
    return SamplingParams(
        temperature=1.0, seed=seed, max_tokens=tokens, ignore_eos=ends, detokenize=False, structured_outputs=asked
    )  # fmt: skip


def first(offline: Offline) -> list[dict[str, Any]]:
    """A row for each kind of request, whose first one this engine has not seen the like of."""
    found, length = [], offline.sizes.first_lengths[0]
    for name, asked in kinds().items():
        times = [offline.seconds([offline.prompt(length)], sampling(asked(n), n, 2)) * 1e3 for n in range(1 + REPEATS)]
        found.append(ratio_row(name, length, times[0], times[1:]))
    return found


def to_first_token(offline: Offline) -> dict[str, float]:
    """Median milliseconds of requests that end with their first token."""
    length, asked = offline.sizes.context, kinds()
    ways: dict[str, Callable[[int], StructuredOutputsParams | None]] = {
        "plain": asked["plain"], "new": lambda n: held(json=small(1000 + n)), "cached": asked["preloaded schema"],
    }  # fmt: skip
    times: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(REQUESTS):
        for name, way in ways.items():
            params = sampling(way(number), number, 1)
            times[name].append(offline.seconds([offline.prompt(length)], params) * 1e3)
    return {name: round(statistics.median(each), 3) for name, each in times.items()}


def between_tokens(offline: Offline, rows: int, asked: StructuredOutputsParams | None) -> dict[str, float]:
    """Milliseconds a step while ``rows`` decode, and what of it masks took."""
    llm, sizes = offline.llm, offline.sizes
    with DecodingRows(llm, offline.vocabulary, rows, 16, sizes.steps, temperature=1.0, structured_outputs=asked):
        grammars_of(llm).forget()
        llm.loop.scheduler.forget()
        started = time.perf_counter()
        for _ in range(sizes.steps):
            llm.advance()
        spent = time.perf_counter() - started
        stats, steps = grammars_of(llm).stats, sizes.steps
        tokens = llm.loop.scheduler.stats().generation_tokens
        if not 0.98 <= tokens / (rows * steps) <= 1.02:
            raise SystemExit(f"{tokens} tokens came in {steps} steps of {rows} rows: some had ended")
        return {
            "step_ms": spent / steps * 1e3, "masks_ms": stats.mask_seconds / steps * 1e3,
            "wait_ms": stats.wait_seconds / steps * 1e3, "slowest_mask_ms": stats.slowest_mask * 1e3,
        }  # fmt: skip


def rows_table(offline: Offline, sizes: Sequence[int]) -> list[dict[str, Any]]:
    """A line for each number of rows."""
    found, most = [], offline.llm.loop.scheduler.limits.max_num_seqs
    for rows in (each for each in sizes if each <= most):
        ways = {"plain": None, "grammar": held(json=NESTED)}
        rounds: dict[str, list[dict[str, float]]] = {name: [] for name in ways}
        for _ in range(ROUNDS):
            for name, asked in ways.items():
                rounds[name].append(between_tokens(offline, rows, asked))
        plain, grammar = (min(rounds[name], key=lambda each: each["step_ms"]) for name in ways)
        more = (grammar["step_ms"] / plain["step_ms"] - 1) * 100
        line: dict[str, Any] = (
            {"rows": rows, "plain_ms": round(plain["step_ms"], 3)}
            | {name: round(value, 3) for name, value in grammar.items()}
            | {"more_percent": round(more, 1), "aim_percent": AIMS.get(rows)}
        )
        found.append(line)
    return found


def show(figures: dict[str, Any]) -> None:
    """The tables, for a terminal."""
    print(f"{'rows':>6}{'plain ms':>10}{'grammar ms':>12}{'more':>9}{'aim':>7}{'masks ms':>10}{'wait ms':>9}")
    for line in figures["between_tokens"]:
        aim = "" if line["aim_percent"] is None else f"{line['aim_percent']:g} %"
        print(
            f"{line['rows']:>6}{line['plain_ms']:>10.3f}{line['step_ms']:>12.3f}{line['more_percent']:>7.1f} %{aim:>7}"
            f"{line['masks_ms']:>10.3f}{line['wait_ms']:>9.3f}"
        )
    times = figures["to_first_token_ms"]
    for name in ("new", "cached"):
        more = times[name] - times["plain"]
        print(f"first token, {name} schema: {times[name]:.2f} ms, {more:+.2f} ms (aim +{AIMS[name]:g} ms)")
    for line in figures["first"]:
        print(
            f"first ÷ steady, {line['setting']:<18}{line['first_ms']:>9.2f} ÷ {line['steady_ms']:.2f} = {line['ratio']}"
        )


def main(words: Sequence[str]) -> None:
    flags = parser(__doc__, __name__)
    flags.add_argument("--shape", choices=CHOICES, default="llama-3.1-8b")
    flags.add_argument("--options", type=json.loads, default={}, help="of the engine, as JSON")
    flags.add_argument("--tiny", action="store_true")
    flags.add_argument("--save", action="store_true", help="keep the figures in benchmarks/results")
    args = flags.parse_args(words)
    offline = engine(args.shape, args.options, tiny=args.tiny)
    figures: dict[str, Any] = {"first": first(offline), "to_first_token_ms": to_first_token(offline)}
    figures["between_tokens"] = rows_table(offline, TINY_ROWS if args.tiny else ROWS)
    show(figures)
    print(json.dumps(figures))
    if args.save:
        print(save(f"grammars_{args.shape}", {"options": vars(args), **figures}))
