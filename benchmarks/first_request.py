"""The first request after ready against the same request later.

    python -m benchmarks first_request [--repeats 15] [--offline-only] [--boot-options '{"max_num_seqs": 32}']

Every combination of a sampling setting and a prompt length gets boots of its own, one offline and one over HTTP. There
it is the very first request after ready. Steady is the median of its repeats. Prompts are random and all
different, so that none finds another in the prefix cache; over HTTP every request opens a connection.

The threads of an idle engine sleep, and by chance the kernel may wake two of them on one core. The first request finds
them asleep, the repeats do not. So more requests follow, each after a pause: a steady state as idle as the first
request found it.
"""

from __future__ import annotations

import argparse
import http.client
import json
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from benchmarks.common.process import environment, serving
from benchmarks.common.report import parser, save

MAX_TOKENS = 2
PAUSES, PAUSE_SECONDS = 8, 0.05
LENGTHS = (16, 64, 700)
SETTINGS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "top_p and top_k": {"temperature": 0.7, "top_p": 0.9, "top_k": 50},
    "min_p and seed": {"temperature": 1.0, "min_p": 0.1, "seed": 7},
    "penalties and bias": {"temperature": 0, "presence_penalty": 0.5, "repetition_penalty": 1.2, "logit_bias": {5: 1}},
    "logprobs": {"temperature": 0, "logprobs": 5},
    "stop and n": {"temperature": 1.0, "n": 2, "stop": ["zzz"]},
}


def prompts(length: int, count: int) -> list[list[int]]:
    chance = random.Random(length)
    return [[chance.randrange(300, 4000) for _ in range(length)] for _ in range(count)]


def timed(ask: Callable[[list[int]], object], length: int, repeats: int) -> list[float]:
    """Return the milliseconds of each request.

    They are the first, ``repeats`` right behind it, and ``PAUSES`` after a pause each.
    """
    found = []
    for number, prompt in enumerate(prompts(length, 1 + repeats + PAUSES)):
        if number > repeats:
            time.sleep(PAUSE_SECONDS)
        start = time.perf_counter()
        ask(prompt)
        found.append((time.perf_counter() - start) * 1e3)
    return found


def offline(setting: str, length: int, repeats: int, options: dict[str, Any]) -> list[float]:
    """Measure in this process, a fresh one."""
    from preheat import LLM, SamplingParams

    llm = LLM(**options)
    params = SamplingParams(max_tokens=MAX_TOKENS, ignore_eos=True, **SETTINGS[setting])
    return timed(lambda prompt: llm.generate(prompt, params, use_tqdm=False), length, repeats)


def over_http(setting: str, length: int, repeats: int, options: dict[str, Any]) -> list[float]:
    with serving(options | {"log_level": "error"}, stderr=subprocess.DEVNULL) as server:
        server.wait_for("/ready")
        body = {"max_tokens": MAX_TOKENS, "ignore_eos": True, **SETTINGS[setting]}

        def ask(prompt: list[int]) -> None:
            connection = http.client.HTTPConnection("127.0.0.1", server.port)
            connection.request("POST", "/v1/completions", json.dumps({**body, "prompt": prompt}))
            answer = connection.getresponse()
            text = answer.read()
            assert answer.status == 200, text
            connection.close()

        return timed(ask, length, repeats)


WAYS = {"offline": offline, "http": over_http}


def in_fresh_process(way: str, setting: str, length: int, args: argparse.Namespace) -> list[float]:
    case = json.dumps([way, setting, length, args.repeats, args.boot_options])
    command = [sys.executable, "-m", "benchmarks", "first_request", "--case", case]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(done.stderr)
    times: list[float] = json.loads(done.stdout.splitlines()[-1])
    return times


def main(words: Sequence[str]) -> None:
    flags = parser(__doc__, __name__)
    flags.add_argument("--repeats", type=int, default=15)
    flags.add_argument("--offline-only", action="store_true")
    flags.add_argument("--boot-options", type=json.loads, default={"max_num_seqs": 32, "max_num_batched_tokens": 1024})
    flags.add_argument("--case", type=json.loads, help=argparse.SUPPRESS)
    args = flags.parse_args(words)
    if args.case:
        way, *rest = args.case
        print(json.dumps(WAYS[way](*rest)))
        return
    rows = []
    for way in ["offline"] if args.offline_only else WAYS:
        for setting in SETTINGS:
            for length in LENGTHS:
                first, *rest = in_fresh_process(way, setting, length, args)
                later, rested = rest[: args.repeats], rest[args.repeats :]
                steady = statistics.median(later)
                row: dict[str, Any] = {"way": way, "setting": setting, "length": length, "first_ms": round(first, 2)}
                row |= {
                    "steady_ms": round(steady, 2),
                    "ratio": round(first / steady, 3),
                    "max_ms": round(max(later), 2),
                    "after_pause_ms": round(statistics.median(rested), 2),
                    "after_pause_max_ms": round(max(rested), 2),
                }
                rows.append(row)
                print(json.dumps(row), flush=True)
    worst = max(rows, key=lambda row: row["ratio"])
    print("worst:", worst)
    print(save("first_request", {"boot_options": args.boot_options, "boots": len(rows), "worst": worst, "rows": rows}))
