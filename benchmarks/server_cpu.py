"""The CPU that the HTTP process spends on a streamed token.

    python -m benchmarks server_cpu [--streams 64] [--tokens 200] [--rounds 5]

A scripted engine gives one token to each of ``--streams`` streams per step, so that the server alone is measured:
transport, frontend, detokenizer, events, sockets. Clients run in this process and only read.
"""

from __future__ import annotations

import asyncio
import json
import os
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.common.report import parser, save
from tests.api.conftest import Server, serving, write_model

ENGINE = "tests.api.scripted:run_paced_engine"
PATHS = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}


def cpu_seconds(pid: int) -> float:
    """Return the user and system time of a process, all its threads."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def request_for(kind: str, tokens: int) -> bytes:
    """Return a raw HTTP request for one stream."""
    body: dict[str, Any] = {"max_tokens": tokens, "stream": True, "ignore_eos": True}
    text = "def add(a, b): return a + b"
    body |= {"prompt": text} if kind == "completions" else {"messages": [{"role": "user", "content": text}]}
    data = json.dumps(body).encode()
    head = f"POST {PATHS[kind]} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {len(data)}\r\n\r\n"
    return head.encode() + data


async def stream(port: int, request: bytes) -> int:
    """Return the number of events received."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(request)
    events = 0
    while chunk := await reader.read(65536):
        events += chunk.count(b"data: ")
    writer.close()
    return events


async def run(server: Server, kind: str, streams: int, tokens: int) -> dict[str, float]:
    before, started = cpu_seconds(server.process.pid), time.perf_counter()
    events = await asyncio.gather(*(stream(server.port, request_for(kind, tokens)) for _ in range(streams)))
    cpu, wall = cpu_seconds(server.process.pid) - before, time.perf_counter() - started
    share = sum(events) / (streams * tokens)  # below 1 where several tokens shared a write
    return {"us_per_token": cpu / (streams * tokens) * 1e6, "events_per_token": share, "cpu_share": cpu / wall}


def main(words: Sequence[str]) -> None:
    flags = parser(__doc__, __name__)
    flags.add_argument("--streams", type=int, default=64)
    flags.add_argument("--tokens", type=int, default=200)
    flags.add_argument("--rounds", type=int, default=5)
    args = flags.parse_args(words)
    result: dict[str, object] = {"streams": args.streams, "tokens": args.tokens}
    with tempfile.TemporaryDirectory() as folder, serving(str(write_model(Path(folder))), engine=ENGINE) as server:
        for kind in PATHS:
            asyncio.run(run(server, kind, args.streams, args.tokens))
            rounds = [asyncio.run(run(server, kind, args.streams, args.tokens)) for _ in range(args.rounds)]
            result[kind] = {key: round(statistics.median(r[key] for r in rounds), 2) for key in rounds[0]}
    print(json.dumps(result, indent=1))
    save("server_cpu", result)
