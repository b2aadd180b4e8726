"""How long /health takes while clients send what is large or hostile, and the server's memory before and after.

    python -m benchmarks overload [--seconds 10] [--clients 4] [--only NAME ...]

A scripted engine answers, so that the server alone is measured, with the bundled model's tokenizer. ``--clients``
connections, in a process of their own, send one attack after the other for ``--seconds``; meanwhile this process asks
for /health every 20 ms, whether it has answered or not, and keeps a stream open, whose longest pause it reports.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.common.report import parser, save
from tests.api.conftest import Server, serving

SHORT = "tests.api.scripted:run_engine"
ROOMY = "tests.api.scripted:run_roomy_engine"
PAUSE_SECONDS = 0.02
PATIENCE_SECONDS = 60.0


def _text(length: int) -> str:
    """Text of varied words, as a tokenizer's cache does not help with."""
    draw = random.Random(length)
    common = "the a def return if for in of to".split()
    text = " ".join(f"{draw.choice(common)} word{draw.randrange(10**6)}" for _ in range(5000))
    return (text * (length // len(text) + 1))[:length]


def _completion(**fields: object) -> bytes:
    data = json.dumps({"max_tokens": 1, **fields}).encode()
    return b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(data) + data


ATTACKS: dict[str, tuple[str, Callable[[], bytes]]] = {
    "rest": (SHORT, lambda: b""),
    "prompts_1MB": (ROOMY, lambda: _completion(prompt=_text(10**6))),
    "prompts_1MB_too_long": (SHORT, lambda: _completion(prompt=_text(10**6))),
    "prompts_16MB_too_long": (SHORT, lambda: _completion(prompt=_text(16 * 10**6))),
    "lists_of_500_prompts_of_8kB": (ROOMY, lambda: _completion(prompt=[_text(8000)] * 500)),
    "prompts_of_5M_token_ids": (SHORT, lambda: _completion(prompt=[7] * 5_000_000)),
    "endless_header": (SHORT, lambda: b"GET /health HTTP/1.1\r\nX-Long: " + b"x" * 20_000_000 + b"\r\n\r\n"),
}
"""For each attack the engine, and what a client sends."""


async def _attack(port: int, name: str, seconds: float, clients: int) -> Counter[str]:
    """Send ``name`` until the time is over; the answers' statuses."""
    payload, seen = ATTACKS[name][1](), Counter[str]()
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
    """Milliseconds for one answer of /health."""
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
    """Milliseconds between two reads of a stream that never ends, the longest; until cancelled."""
    longest = 0.0
    try:
        while True:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(_completion(prompt="def f(x):", max_tokens=4000, stream=True, ignore_eos=True))
            last = None
            while (chunk := await reader.read(65536)) and b"[DONE]" not in chunk:
                now = time.perf_counter()
                longest, last = max(longest, now - (last or now)), now
            writer.close()
    except asyncio.CancelledError:
        return longest * 1e3


async def _probe(port: int, attack: subprocess.Popen[str]) -> dict[str, float]:
    """Times of /health, asked for at a fixed pace, whatever the answers take: a stall delays many."""
    stream, asked = asyncio.create_task(_longest_pause(port)), list[asyncio.Task[float]]()
    while attack.poll() is None:
        asked.append(asyncio.create_task(_health(port)))
        await asyncio.sleep(PAUSE_SECONDS)
    times = sorted(await asyncio.gather(*asked))
    stream.cancel()
    at = {name: times[min(len(times) - 1, int(len(times) * share))] for name, share in (("p50", 0.5), ("p99", 0.99))}
    found = {"health_p50_ms": at["p50"], "health_p99_ms": at["p99"], "health_max_ms": times[-1]}
    found["stream_longest_pause_ms"] = await stream
    return {name: round(value, 1) for name, value in found.items()} | {"health_answers": len(times)}


def _memory(server: Server) -> int:
    """The server's resident memory in MiB."""
    status = Path(f"/proc/{server.process.pid}/status").read_text()
    return int(next(line for line in status.splitlines() if line.startswith("VmRSS")).split()[1]) // 1024


def measure(name: str, args: argparse.Namespace) -> dict[str, Any]:
    """The figures of one attack, on a server of its own."""
    with serving("bundled", engine=ATTACKS[name][0]) as server:
        before = _memory(server)
        command = [sys.executable, "-m", "benchmarks.overload", str(server.port), name]
        command += [str(args.seconds), str(args.clients)]
        attack = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        found: dict[str, Any] = asyncio.run(_probe(server.port, attack))
        assert attack.stdout is not None
        answers = json.loads(attack.stdout.read())
        return found | {"answers": answers, "memory_MiB": [before, _memory(server)]}


def main(words: Sequence[str]) -> None:
    flags = parser(__doc__, __name__)
    flags.add_argument("--seconds", type=float, default=10)
    flags.add_argument("--clients", type=int, default=4)
    flags.add_argument("--only", nargs="+", choices=list(ATTACKS), default=list(ATTACKS))
    args = flags.parse_args(words)
    result: dict[str, Any] = {"seconds": args.seconds, "clients": args.clients}
    for name in args.only:
        result[name] = measure(name, args)
        print(name, json.dumps(result[name]), flush=True)
    if set(args.only) == set(ATTACKS):
        save("overload", result)


if __name__ == "__main__":  # the process of the clients
    port, name, seconds, clients = sys.argv[1:]
    print(json.dumps(asyncio.run(_attack(int(port), name, float(seconds), int(clients)))))
