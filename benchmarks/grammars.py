"""The cost of structured outputs, between tokens and to the first one.

    python -m benchmarks grammars [--shape llama-3.1-8b] [--rows 64 256] [--steps 100] [--device cuda] [--tiny]

Random weights, and a byte-level BPE that is made here, as large as the model's vocabulary. Times between tokens are
beside plain rows. ``full`` are plain rows at the sampler's highest level, which rows with masks need; the difference
between ``full`` and ``nested`` is due to masks alone. ``nested`` rows write a list of nested objects, longer than the
measurement. A step with grammars waits for the part of the masks that the model's time does not hide: ``wait`` is that
part of a step. Times to the first token are of one request alone: without a grammar, with one that was compiled before,
and with a new one. ``first`` is the first request after the start with a grammar that the boot knows, beside the median
of later ones.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from itertools import islice, product
from pathlib import Path
from string import ascii_lowercase
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from benchmarks.common.decoding import DecodingRows
from benchmarks.common.report import parser, save
from benchmarks.common.shapes import SHAPES
from preheat import LLM, SamplingParams, StructuredOutputsParams

SPECIAL = 256
"""Tokens at the end of the vocabulary that stand for no text, as in Llama 3."""

WORD = {"type": "string", "maxLength": 24}
OBJECT = {
    "type": "object",
    "properties": {
        "id": {"type": "integer"}, "name": WORD, "kind": {"enum": ["person", "place", "thing"]},
        "address": {
            "type": "object",
            "properties": {"street": WORD, "city": WORD, "zip": {"type": "string", "pattern": "^[0-9]{5}$"}},
            "required": ["street", "city", "zip"], "additionalProperties": False,
        },
        "tags": {"type": "array", "items": WORD, "maxItems": 4}, "active": {"type": "boolean"},
    },
    "required": ["id", "name", "kind", "address", "tags", "active"], "additionalProperties": False,
}  # fmt: skip
ENDLESS = StructuredOutputsParams(json={"type": "array", "items": OBJECT, "minItems": 64})
"""A list with more tokens than a row is measured for.

A list that may end would, with random weights.
"""

TINY = {
    "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 32, "vocab_size": 1024, "bos_token_id": 768, "eos_token_id": 769,
}  # fmt: skip


def tokenizer(size: int) -> Tokenizer:
    """Return a byte-level BPE of ``size`` tokens.

    They are bytes, pieces of JSON, then words of two to four letters.
    """
    vocabulary = {letter: place for place, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    merges = list[tuple[str, str]]()
    for left, right in islice(_merges(), size - SPECIAL - len(vocabulary)):
        vocabulary[left + right] = len(vocabulary)
        merges.append((left, right))
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    rest = size - len(vocabulary)
    backend.add_special_tokens([AddedToken(f"<|{place}|>", special=True) for place in range(rest)])
    return backend


def _merges() -> Iterator[tuple[str, str]]:
    """Yield pairs of earlier tokens; no two pairs make the same text."""
    yield from (('"', ":"), ('"', ","), ("{", '"'), ('"', "}"), ('":', '"'), ('",', '"'))
    yield from product("0123456789", repeat=2)
    pairs = ["".join(pair) for pair in product(ascii_lowercase, repeat=2)]
    yield from product(ascii_lowercase, repeat=2)
    yield from (("Ġ", pair) for pair in pairs)
    yield from product(pairs, ascii_lowercase)
    yield from (("Ġ", pair + letter) for pair, letter in product(pairs, ascii_lowercase))
    yield from product(pairs, repeat=2)


def write_model(folder: Path, shape: str, tiny: bool) -> Path:
    """Write the config, for dummy weights, and the tokenizer into ``folder``."""
    config = SHAPES[shape] | (TINY if tiny else {})
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    backend = tokenizer(config["vocab_size"])
    backend.save(str(folder / "tokenizer.json"))
    end = backend.id_to_token(config["eos_token_id"])
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": end}), encoding="utf-8")
    return folder


def step_ms(llm: LLM, rows: int, args: argparse.Namespace, **sampling: Any) -> dict[str, float]:
    """Return milliseconds of a step of ``rows`` decoding rows.

    They are mean, median, 99th percentile, and wait for masks.
    """
    vocabulary = llm.frontend.tokenizer.vocab_size - SPECIAL
    times = []
    with DecodingRows(llm, vocabulary, rows, args.context, args.steps, temperature=1.0, **sampling):
        stats = getattr(llm.loop.grammars, "stats")  # noqa: B009 - a str where there are no grammars, which fails here
        waited = stats.wait_seconds
        for _ in range(args.steps):
            began = time.perf_counter()
            llm.advance()
            times.append(1e3 * (time.perf_counter() - began))
        waited = stats.wait_seconds - waited
    return {
        "itl": round(statistics.fmean(times), 4), "median": round(statistics.median(times), 4),
        "p99": round(sorted(times)[int(0.99 * (len(times) - 1))], 4), "wait": round(1e3 * waited / args.steps, 4),
    }  # fmt: skip


def between_tokens(llm: LLM, args: argparse.Namespace) -> dict[str, Any]:
    """Return the best run of each load, by number of rows.

    Loads take turns. Each has the percent by which it exceeds plain.
    """
    loads: dict[str, dict[str, Any]] = {
        "plain": {}, "full": {"presence_penalty": 0.1}, "nested": {"structured_outputs": ENDLESS},
    }  # fmt: skip
    found: dict[str, Any] = {}
    for rows in args.rows:
        runs: dict[str, list[dict[str, float]]] = {name: [] for name in loads}
        for _ in range(args.turns):
            for name, sampling in loads.items():
                runs[name].append(step_ms(llm, rows, args, **sampling))
        best = {name: min(each, key=lambda run: run["itl"]) for name, each in runs.items()}
        for name, figures in best.items():
            figures["more_percent"] = round(100 * (figures["itl"] / best["plain"]["itl"] - 1), 2)
            print(
                f"{rows:>4} rows  {name:<8} {figures['itl']:>9.3f} ms  {figures['more_percent']:>+7.2f} %  "
                f"median {figures['median']:.3f}  p99 {figures['p99']:.3f}  waits for masks {figures['wait']:.3f}",
                flush=True,
            )
        found[str(rows)] = best
    return found


def to_first(llm: LLM, args: argparse.Namespace) -> dict[str, float]:
    """Return milliseconds to the first token of a lone request.

    They are medians, and the first one with a known grammar.
    """
    chance = random.Random(1)
    vocabulary = llm.frontend.tokenizer.vocab_size - SPECIAL

    def ms(asked: StructuredOutputsParams | None) -> float:
        prompt = [chance.randrange(vocabulary) for _ in range(args.context)]
        params = SamplingParams(seed=0, max_tokens=1, structured_outputs=asked)
        began = time.perf_counter()
        llm.generate([prompt], params, use_tqdm=False)
        return 1e3 * (time.perf_counter() - began)

    def median(asked: list[StructuredOutputsParams | None]) -> float:
        return statistics.median(ms(each) for each in asked)

    known = StructuredOutputsParams(json_object=True)
    new = [{"type": "object", "properties": {f"key{n}": {"type": "integer"}, "b": WORD}} for n in range(args.requests)]
    asked = [StructuredOutputsParams(json=schema) for schema in new]
    found = {
        "first": ms(known), "later": median([known] * args.requests), "plain": median([None] * args.requests),
        "new": median([*asked]), "cached": median([*asked]),
    }  # fmt: skip
    found |= {
        "first_to_later": found["first"] / found["later"],
        "new_more": found["new"] - found["plain"], "cached_more": found["cached"] - found["plain"],
    }  # fmt: skip
    for name, value in found.items():
        print(f"to the first token  {name:<16} {value:>9.3f}{'' if name == 'first_to_later' else ' ms'}", flush=True)
    return {name: round(value, 4) for name, value in found.items()}


def main(words: Sequence[str]) -> None:
    flags = parser(__doc__, __name__)
    flags.add_argument("--shape", choices=SHAPES, default="llama-3.1-8b")
    flags.add_argument("--rows", type=int, nargs="+", default=[64, 256])
    flags.add_argument("--steps", type=int, default=100)
    flags.add_argument("--turns", type=int, default=2, help="of each load; the best counts")
    flags.add_argument("--requests", type=int, default=20, help="of each kind of time to the first token")
    flags.add_argument("--context", type=int, default=128, help="tokens of a prompt")
    flags.add_argument("--device", default="auto")
    flags.add_argument("--tiny", action="store_true", help="a smoke test, whose figures mean nothing")
    flags.add_argument("--output", type=Path, help="a folder for the figures; else benchmarks/results")
    args = flags.parse_args(words)
    if args.tiny:
        args.rows, args.steps, args.turns, args.requests, args.context = [1, 2], 4, 1, 2, 8
    with tempfile.TemporaryDirectory(prefix="preheat-bench-") as folder:
        model = write_model(Path(folder), args.shape, args.tiny)
        longest = args.context + args.steps + 2 * max(args.rows) + max(args.rows) * args.context // 2048 + 64
        llm = LLM(
            str(model), load_format="dummy", device=args.device, max_num_seqs=max(args.rows), max_model_len=longest,
            enable_prefix_caching=False, skip_warmup=False, boot_check="off", on_cold="raise", log_level="warning",
            seed=0,
        )  # fmt: skip
        first = to_first(llm, args)
        figures = {"to_first_token_ms": first, "between_tokens_ms": between_tokens(llm, args)}
    options = {name: value for name, value in vars(args).items() if name != "output"}
    where = {} if args.output is None else {"folder": args.output}
    print(save(f"grammars_{args.shape}", {"options": options, **figures}, **where))
