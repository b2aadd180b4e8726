"""Bucket sizes solved from recorded traffic against exponential ones.

    python -m benchmarks traffic [--rounds 3] [--options '{"max_num_seqs": 32}']

There are three mixes. Each mix runs on an engine with exponential sizes, and `preheat plan --from-traffic` solves its
record. Then the mix runs on an engine with the solved sizes. Reported: buckets, warm-up seconds, padding of the tokens
computed, and the seconds of the mix, the median of rounds in turns.
"""

from __future__ import annotations

import json
import random
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.common.report import parser, save
from preheat import LLM, SamplingParams
from preheat.warmup.record import Record
from preheat.warmup.traffic import solved

GROUPS = 12


def chat(chance: random.Random) -> list[tuple[int, int]]:
    """Return short turns, a few at a time."""
    return [(int(chance.lognormvariate(4.0, 0.5)) + 8, chance.randrange(8, 24)) for _ in range(chance.randrange(1, 6))]


def documents(chance: random.Random) -> list[tuple[int, int]]:
    """Return long prompts with short answers, one or two at a time."""
    return [(chance.randrange(500, 900), 4) for _ in range(chance.randrange(1, 3))]


def bursts(chance: random.Random) -> list[tuple[int, int]]:
    """Return thirty-two prompts of one template at once."""
    return [(chance.randrange(40, 48), 8) for _ in range(32)]


MIXES = {"chat": chat, "documents": documents, "bursts": bursts}


def run(llm: LLM, name: str) -> float:
    """Return the seconds of the mix; its groups follow each other."""
    chance, began = random.Random(name), time.perf_counter()
    for _ in range(GROUPS):
        load = MIXES[name](chance)
        prompts = [[chance.randrange(300, 4000) for _ in range(length)] for length, _ in load]
        params = [SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True) for _, tokens in load]
        llm.generate(prompts, params, use_tqdm=False)
    return time.perf_counter() - began


def record_of(llm: LLM) -> Record:
    return Record.from_json(llm.loop.listener.report())


def described(llm: LLM, seconds: Sequence[float]) -> dict[str, Any]:
    record, buckets = record_of(llm), llm.loop.packer.plan.dispatcher
    asked = sum(size * steps for sizes in record.traffic.values() for size, steps in sizes.items())
    forward = [entry for entry in record.entries if entry.kind in record.traffic]
    computed = sum(entry.shape.get("tokens", entry.shape["rows"]) * entry.hits for entry in forward)
    return {
        "buckets": len(buckets.buckets),
        "warm_up_s": round(sum(entry.seconds for entry in forward), 3),
        "padding": round(computed / asked - 1, 4),
        "seconds": round(statistics.median(seconds), 3),
    }


def main(words: Sequence[str]) -> None:
    flags = parser(__doc__, __name__)
    flags.add_argument("--rounds", type=int, default=3)
    flags.add_argument("--options", type=json.loads, default={"max_num_seqs": 32})
    args = flags.parse_args(words)
    options = {"enable_prefix_caching": False, "boot_check": "off", "cache_dir": "off", **args.options}
    figures: dict[str, Any] = {"options": args.options}
    for name in MIXES:
        usual = LLM(**options)
        run(usual, name)
        with tempfile.TemporaryDirectory() as folder:
            record, sizes = Path(folder) / "record.json", Path(folder) / "buckets.txt"
            record.write_bytes(usual.loop.listener.report())
            sizes.write_text(solved(record))
            file = {"bucketing_policy": "unified", "bucketing_strategy": "file", "bucketing_from_file": str(sizes)}
            best = LLM(**options, **file)
        times = [(run(usual, name), run(best, name)) for _ in range(args.rounds)]
        before, after = zip(*times, strict=True)
        figures[name] = {"exponential": described(usual, before), "traffic": described(best, after)}
        print(name, json.dumps(figures[name]), flush=True)
    print(save("traffic", figures))
