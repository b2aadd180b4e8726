"""Kept answers: hits over HTTP of all kinds of requests, a share of them computed live and compared.

    python -m benchmarks answer_cache [--hits 100000] [--requests 120] [--check-every 100] [--seed 0]

A server with ``--answer-cache-size`` answers requests of all kinds of ``benchmarks chaos`` once, and keeps the answers.
Then the same requests come again until there are ``--hits`` hits. One hit in ``--check-every`` is computed live, and
the server compares it with the kept answer. Each answer is compared with the first one here.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any
from urllib.request import urlopen

from benchmarks.common.crowd import Answer, Asked, mixed, normal
from benchmarks.common.process import environment, serving
from benchmarks.common.report import parser, save

CLIENTS = 8
NAMES = ("hits", "misses", "checked", "different")


async def client(port: int, asked: Sequence[Asked], turns: int, take: Any) -> None:
    """Send ``asked`` over one connection, ``turns`` times; ``take`` gets place and body of each answer."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    bodies = [json.dumps(each.body).encode() for each in asked]
    for _ in range(turns):
        for at, (each, body) in enumerate(zip(asked, bodies, strict=True)):
            head = f"POST {each.path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
            writer.write(head.encode() + body)
            got = await reader.readuntil(b"\r\n\r\n")
            size = int(got.lower().partition(b"content-length: ")[2].split(b"\r\n")[0])
            take(at, got + await reader.readexactly(size))
    writer.close()


def comparable(raw: bytes) -> dict[str, Any]:
    """Return an answer without ids and without the mark of a kept answer."""
    found = normal(Answer(raw))
    found["usage"].pop("cached_answer", None)
    return {name: value for name, value in found.items() if name != "ids"}


def counts(port: int) -> dict[str, float]:
    """Return the counters of the answer cache."""
    with urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as page:
        lines = page.read().decode().splitlines()
    found = {line.partition("{")[0]: float(line.rpartition(" ")[2]) for line in lines if not line.startswith("#")}
    return {name: found.get(f"preheat:answer_cache_{name}_total", 0.0) for name in NAMES}


def measured(port: int, asked: Sequence[Asked], hits: int) -> dict[str, Any]:
    """Return the figures of ``hits`` hits."""
    first: dict[int, dict[str, Any]] = {}
    differing = answers = 0

    def keep(at: int, raw: bytes) -> None:
        first[at] = comparable(raw)

    def compare(at: int, raw: bytes) -> None:
        nonlocal differing, answers
        answers += 1
        differing += comparable(raw) != first[at]

    asyncio.run(client(port, asked, 1, keep))
    assert {each["status"] for each in first.values()} == {"200"}
    began = time.monotonic()
    while (found := counts(port))["hits"] + found["checked"] < hits:
        turns = max(1, min(20, int((hits - found["hits"] - found["checked"]) / len(asked) / CLIENTS)))

        async def all_clients(turns: int = turns) -> None:
            await asyncio.gather(*(client(port, asked, turns, compare) for _ in range(CLIENTS)))

        asyncio.run(all_clients())
        print(found, flush=True)
    seconds = time.monotonic() - began
    return {"requests": len(asked), "answers": answers, "differing": differing, **found,
            "seconds": round(seconds, 1), "answers_per_s": round(answers / seconds)}  # fmt: skip


def main(words: Sequence[str]) -> None:
    flags = parser(__doc__, __name__)
    flags.add_argument("--hits", type=int, default=100_000)
    flags.add_argument("--requests", type=int, default=120)
    flags.add_argument("--check-every", type=int, default=100)
    flags.add_argument("--tokens", type=int, default=16)
    flags.add_argument("--seed", type=int, default=0)
    args = flags.parse_args(words)
    asked = [
        each for each in mixed(2 * args.requests, args.seed, None, args.tokens) if "prompt_logprobs" not in each.body
    ]
    asked = [Asked(each.kind, each.path, each.body | {"stream": False}) for each in asked][: args.requests]
    for each in asked:
        each.body.pop("stream_options", None)
    options = {
        "model": "bundled", "num_threads": 1, "kv_cache_memory_bytes": 128 << 20, "max_num_seqs": 64,
        "log_level": "error", "enable_auto_tool_choice": True, "tool_call_parser": "hermes", "answer_cache_size": 0.5,
        "answer_cache_check_every": args.check_every, "skip_warmup": True,
    }  # fmt: skip
    with serving(options, env=environment(), stderr=subprocess.DEVNULL) as server:
        server.wait_for("/ready")
        figures = {"check_every": args.check_every, "seed": args.seed} | measured(server.port, asked, args.hits)
    print(json.dumps(figures))
    print(save("answer_cache", figures))
    if figures["differing"] or figures["different"]:
        sys.exit(1)
