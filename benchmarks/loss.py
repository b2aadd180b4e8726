"""The loss on held-out text, plain and with other numerics.

    python -m benchmarks loss --set kv_cache_dtype=fp8
    python -m benchmarks loss --set quantization=inc --set quant_config=FILE --set kv_cache_dtype=fp8_inc

The text is the part of Python's standard library that the bundled model's training held out, by the same hash of the
paths. It has the version of the Python that runs this. The loss is in nats per token over pieces of up to 1,024 tokens.
It comes from the engine's prompt logprobs.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.common.report import parser, save
from preheat import LLM, SamplingParams

PIECE, LEAST = 1024, 16


def main(words: Sequence[str]) -> None:
    arguments = parser(__doc__, __name__)
    arguments.add_argument("--model", default="bundled")
    arguments.add_argument("--device", default="auto")
    arguments.add_argument("--dtype", default="auto")
    arguments.add_argument("--tokens", type=int, default=16_384, help="about so many tokens of text")
    arguments.add_argument(
        "--set", action="append", default=[], metavar="NAME=VALUE", help="an option of the other run"
    )
    arguments.add_argument("--save", metavar="NAME", help="keep the figures in benchmarks/results/NAME.json")
    args = arguments.parse_args(words)
    plain = {"model": args.model, "device": args.device, "dtype": args.dtype}
    other = dict(each.split("=", 1) for each in args.set)
    before, tokens = loss(plain, args.tokens)
    after, _ = loss({**plain, **other}, args.tokens)
    figures = {
        "tokens": tokens, "options": other, "plain_nats": round(before, 5), "nats": round(after, 5),
        "change_percent": round(100 * (after / before - 1), 3),
    }  # fmt: skip
    print(json.dumps(figures, indent=1))
    if args.save:
        save(args.save, figures)


def loss(options: dict[str, Any], tokens: int) -> tuple[float, int]:
    """Return the mean nats per token, and the number of tokens."""
    llm = LLM(**options, max_num_seqs=4, skip_warmup=True, boot_check="off", on_cold="off", enable_prefix_caching=False)
    tokenizer = llm.frontend.tokenizer
    pieces: list[Sequence[int]] = []
    for text in held_out():
        ids = tokenizer.encode(text, True)
        pieces += [ids[at : at + PIECE] for at in range(0, len(ids), PIECE) if len(ids) - at >= LEAST]
        if sum(map(len, pieces)) >= tokens:
            break
    params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0)
    results = llm.generate([list(piece) for piece in pieces], params, use_tqdm=False)
    found = [
        position[token].logprob
        for result, piece in zip(results, pieces, strict=True)
        for token, position in zip(piece, result.prompt_logprobs or (), strict=True)
        if position is not None
    ]
    return -math.fsum(found) / len(found), len(found)


def held_out() -> list[str]:
    """Return the files of this Python's library that training held out."""
    from examples.train_bundled.corpus import HELDOUT_ONE_IN, library_files, path_hash

    files = library_files(Path(os.__file__).parent)
    return [path.read_text(encoding="utf-8") for name, path in files if path_hash(name) % HELDOUT_ONE_IN == 0]
