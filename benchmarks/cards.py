"""Receipts of one card, given again on another: tokens, and the digests of the logits behind each token.

    python -m benchmarks cards FOLDER              # on one card: answers into FOLDER
    python -m benchmarks cards FOLDER --replay     # on another card: the same answers again

The bundled model and random weights of Qwen3-0.6B's shape answer greedy and seeded requests with penalties, biases,
filters and log-probabilities, many at once. The other card answers them again. ``difference`` is the first part in
which the contracts of the cards differ, such as the device. ``cost`` compares answers with and without receipts: the
median over pairs, by the wall clock, so nothing else may run on the machine. Nobody reads these receipts: ``read_us``
is the time of the first reading, a token.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.common.report import parser, save
from benchmarks.common.shapes import SHAPES
from preheat import LLM, SamplingParams
from preheat.frontend.receipt import Receipt
from preheat.model.files import BUNDLED
from preheat.settings import Settings
from preheat.startup import boot_engine
from preheat.verify import replay
from preheat.verify.drive import Engine

MODELS = (BUNDLED, "qwen3-0.6b")
LARGE = ("llama-3.1-8b",)
"""Models that only ``--models`` chooses: their weights take 16 GB."""

LOAD, DECODED = 256, 64
KINDS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 0.8, "top_p": 0.9, "top_k": 40},
    {"temperature": 1.3, "min_p": 0.05, "n": 2},
    {"temperature": 0.0, "repetition_penalty": 1.2, "presence_penalty": 0.5},
    {"temperature": 1.0, "frequency_penalty": 0.4, "logit_bias": {7: 2.5, 11: -100.0}},
    {"temperature": 0.6, "logprobs": 3, "min_tokens": 8},
)


def options_of(model: str, folder: Path, more: dict[str, Any]) -> dict[str, Any]:
    """Return the options of an engine of ``model``, with random weights unless it is bundled."""
    options: dict[str, Any] = {"model": BUNDLED}
    if model in SHAPES:
        place = folder / model
        place.mkdir(parents=True, exist_ok=True)
        (place / "config.json").write_text(json.dumps(SHAPES[model]), encoding="utf-8")
        options = {"model": str(place), "load_format": "dummy", "skip_tokenizer_init": True}
    return options | {"max_num_seqs": LOAD, "max_model_len": 256, "boot_check": "off", "log_level": "error"} | more


def answers(llm: LLM, count: int, tokens: int) -> list[Receipt]:
    """Return the receipts of ``count`` requests, all at once."""
    prompts: list[Any] = [
        {"prompt_token_ids": [3 + (37 * row + 11 * at) % 4000 for at in range(1 + row % 50)]} for row in range(count)
    ]
    params = [
        SamplingParams(**KINDS[row % len(KINDS)], seed=2**40 + row, max_tokens=tokens, ignore_eos=True, receipt=True)
        for row in range(count)
    ]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    return [choice.receipt for output in outputs for choice in output.outputs if choice.receipt is not None]


def cost(llm: LLM, rows: int, count: int) -> dict[str, Any]:
    """Return the time of a decoding step of ``rows`` rows, and what receipts add, in ``count`` pairs."""
    prompts: list[Any] = [{"prompt_token_ids": [5 + row % 200, 7]} for row in range(rows)]

    def step(receipt: bool) -> float:
        params = SamplingParams(temperature=1, seed=1, max_tokens=DECODED, ignore_eos=True, receipt=receipt)
        began = time.perf_counter()
        llm.generate(prompts, params, use_tqdm=False)
        return (time.perf_counter() - began) / DECODED * 1e3

    step(False), step(True)
    pairs = [{each: step(each) for each in (at % 2 == 0, at % 2 == 1)} for at in range(count)]
    shares = [(each[True] / each[False] - 1) * 100 for each in pairs]
    low, middle, high = statistics.quantiles(shares, n=4)
    plain = statistics.median(each[False] for each in pairs)
    return {
        "rows": rows, "plain_ms": round(plain, 3), "percent": round(middle, 2),
        "quartiles": [round(low, 2), round(high, 2)], "read_us": round(read(llm, prompts), 2),
    }  # fmt: skip


def read(llm: LLM, prompts: list[Any]) -> float:
    """Return the microseconds a token that the first reading of receipts takes, behind the last step."""
    params = SamplingParams(temperature=1, seed=1, max_tokens=DECODED, ignore_eos=True, receipt=True)
    outputs = llm.generate(prompts, params, use_tqdm=False)
    began = time.perf_counter()
    receipts = [choice.receipt for output in outputs for choice in output.outputs]
    assert all(receipts), "an answer has no receipt"
    return (time.perf_counter() - began) / len(receipts) / DECODED * 1e6


def made(model: str, args: argparse.Namespace) -> dict[str, Any]:
    """Answer with receipts into a folder, and return the figures."""
    args.folder.mkdir(parents=True, exist_ok=True)
    llm = LLM(**options_of(model, args.folder, args.options))
    receipts = answers(llm, args.requests, args.tokens)
    lines = b"".join(msgspec.json.encode(each) + b"\n" for each in receipts)
    (args.folder / f"{model}.jsonl").write_bytes(lines)
    return {
        "receipts": len(receipts), "tokens": sum(len(each.tokens) for each in receipts),
        "cost": [cost(llm, rows, args.pairs) for rows in (1, LOAD) if args.pairs],
    }  # fmt: skip


def replayed(model: str, args: argparse.Namespace) -> dict[str, Any]:
    """Give the answers in a folder again, and return how many are equal."""
    receipts = replay.read_receipts(str(args.folder / f"{model}.jsonl"))
    engine = Engine(boot_engine, Settings.load(options_of(model, args.folder, args.options)))
    assert engine.ready.contract is not None
    difference = replay.difference(receipts[0], engine.ready.contract)
    found = list(replay.replay_log(receipts, engine, any_contract=True))
    differing = [str(each) for each in found if not each.equal]
    return {
        "receipts": len(found), "equal": len(found) - len(differing), "tokens": sum(each.positions for each in found),
        "difference": str(difference or ""), "differing": differing[:5],
    }  # fmt: skip


def main(words: Sequence[str]) -> None:
    flags = parser(__doc__, __name__)
    flags.add_argument("folder", type=Path)
    flags.add_argument("--replay", action="store_true")
    flags.add_argument("--models", nargs="*", choices=(*MODELS, *LARGE), default=MODELS)
    flags.add_argument("--requests", type=int, default=200)
    flags.add_argument("--tokens", type=int, default=24)
    flags.add_argument("--pairs", type=int, default=31, help="of answers with and without receipts, for the cost")
    flags.add_argument("--options", type=json.loads, default={}, help="of the engine, as JSON")
    args = flags.parse_args(words)
    figures = dict[str, Any]()
    for model in args.models:
        began = time.monotonic()
        figures[model] = (replayed if args.replay else made)(model, args)
        figures[model]["seconds"] = round(time.monotonic() - began, 1)
        print(model, json.dumps(figures[model]), flush=True)
    print(save("cards_replayed" if args.replay else "cards", figures))
    if args.replay and any(each["equal"] < each["receipts"] for each in figures.values()):
        sys.exit(1)
