"""Times of /health while clients send large or hostile requests.

    python -m benchmarks overload [--seconds 10] [--clients 4] [--only NAME ...]

A scripted engine answers, so that the server alone is measured, with the bundled model's tokenizer; where files are
read, the real one does. ``--clients`` connections, in a process of their own, send a row of ``tests/api/abuse.py``
again and again for ``--seconds``. Meanwhile this process asks for /health every 20 ms, whether it has answered or not,
and keeps a stream open and reports its longest pause. The server's memory is read before and after. The last figures,
"all", are of all rows together.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.common.report import parser, save
from preheat.utils.gc import paused
from tests.api.abuse import ROWS, Row, abused, http
from tests.api.conftest import Server

BODY_BYTES = 16 * 2**20
"""The default of --max-body-bytes."""

REST = Row("/health", lambda _: b"", frozenset())
ATTACKS = {"rest": REST, **ROWS}
PAUSE_SECONDS = 0.02
PATIENCE_SECONDS = 60.0


async def _attack(port: int, name: str, seconds: float, clients: int) -> Counter[str]:
    """Send ``name`` until the time is over; return the answers' statuses."""
    payload, seen = ATTACKS[name].payload(BODY_BYTES), Counter[str]()
    end = time.monotonic() + seconds

    async def client() -> None:
        while time.monotonic() < end:
            try:
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
                writer.write(payload)
                line = await asyncio.wait_for(reader.readline(), PATIENCE_SECONDS)
                seen[line.split(b" ")[1].decode() if line else "closed"] += 1
                writer.transport.abort()
            except (OSError, TimeoutError) as error:
                seen[type(error).__name__] += 1

    if payload:
        await asyncio.gather(*(client() for _ in range(clients)))
    else:
        await asyncio.sleep(seconds)
    return seen


async def _health(port: int) -> float:
    """Return the milliseconds of one answer of /health."""
    started = time.perf_counter()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
    try:
        answer = await asyncio.wait_for(reader.read(-1), PATIENCE_SECONDS)
    except TimeoutError:
        return PATIENCE_SECONDS * 1e3
    writer.close()
    assert answer.startswith(b"HTTP/1.1 200"), answer[:100]
    return (time.perf_counter() - started) * 1e3


async def _longest_pause(port: int) -> float:
    """Return the most milliseconds between two reads of an endless stream.

    Runs until cancelled.
    """
    longest = 0.0
    try:
        while True:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            asked = {"prompt": "def f(x):", "max_tokens": 4000, "stream": True, "ignore_eos": True}
            writer.write(http("/v1/completions", json.dumps(asked).encode()))
            last = None
            while (chunk := await reader.read(65536)) and b"[DONE]" not in chunk:
                now = time.perf_counter()
                longest, last = max(longest, now - (last or now)), now
            writer.close()
    except asyncio.CancelledError:
        return longest * 1e3


async def _probe(port: int, attack: subprocess.Popen[str], *, streams: bool) -> tuple[list[float], dict[str, float]]:
    """Return the milliseconds of /health, and their figures.

    A stream's figures are included if the server ``streams``. /health is asked for at a fixed pace, however long
    answers take: a stall delays many.
    """
    stream, asked = asyncio.create_task(_longest_pause(port)) if streams else None, list[asyncio.Task[float]]()
    while attack.poll() is None:
        asked.append(asyncio.create_task(_health(port)))
        await asyncio.sleep(PAUSE_SECONDS)
    times, found = list(await asyncio.gather(*asked)), dict[str, float]()
    if stream is not None:
        stream.cancel()
        found["stream_longest_pause_ms"] = round(await stream, 1)
    return times, _figures(times) | found


def _figures(times: Sequence[float]) -> dict[str, float]:
    times = sorted(times)
    shares = {"p50": 0.5, "p99": 0.99, "max": 1.0}
    found = {f"health_{name}_ms": times[min(len(times) - 1, int(len(times) * share))] for name, share in shares.items()}
    return {name: round(value, 1) for name, value in found.items()} | {"health_answers": len(times)}


def _memory(server: Server) -> int:
    """Return the server's resident memory in MiB."""
    status = Path(f"/proc/{server.process.pid}/status").read_text()
    return int(next(line for line in status.splitlines() if line.startswith("VmRSS")).split()[1]) // 1024


def measure(name: str, args: argparse.Namespace) -> tuple[list[float], dict[str, Any]]:
    """Return the times of /health during one attack, and its figures.

    The attack has a server of its own.
    """
    with paused(), abused(ATTACKS[name].server) as server:  # walks of the garbage collector would delay /health here
        before = _memory(server)
        command = [sys.executable, "-m", "benchmarks.overload", str(server.port), name]
        command += [str(args.seconds), str(args.clients)]
        attack = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        times, found = asyncio.run(_probe(server.port, attack, streams=ATTACKS[name].server != "pooling"))
        assert attack.stdout is not None
        answers = json.loads(attack.stdout.read())
        return times, {**found, "answers": answers, "memory_MiB": [before, _memory(server)]}


def main(words: Sequence[str]) -> None:
    flags = parser(__doc__, __name__)
    flags.add_argument("--seconds", type=float, default=10)
    flags.add_argument("--clients", type=int, default=4)
    flags.add_argument("--only", nargs="+", choices=list(ATTACKS), default=list(ATTACKS))
    args = flags.parse_args(words)
    every = list[float]()
    result: dict[str, Any] = {"seconds": args.seconds, "clients": args.clients}
    for name in args.only:
        times, result[name] = measure(name, args)
        every += times
        print(name, json.dumps(result[name]), flush=True)
    result["all"] = _figures(every)
    print("all", json.dumps(result["all"]), flush=True)
    if set(args.only) == set(ATTACKS):
        save("overload", result)


if __name__ == "__main__":  # the process of the clients
    port, name, seconds, clients = sys.argv[1:]
    print(json.dumps(asyncio.run(_attack(int(port), name, float(seconds), int(clients)))))
