"""What is measured over HTTP: a server in a process of its own, a client in this one."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

from preheat.bench.client import Client
from preheat.bench.first import REPEATS, SETTINGS, ratio_row
from preheat.bench.report import Clock, Report
from preheat.bench.shapes import Sizes
from preheat.errors import PreheatError


def serve(report: Report, options: dict[str, Any], sizes: Sizes, vocabulary: int, clock: Clock) -> None:
    """First requests, equal streams, a sweep over rates of arrival, and as many requests at once as are asked for."""
    started = time.monotonic()
    with serving(options, clock) as port:
        report.put(round(time.monotonic() - started, 2), "ready_s")
        asyncio.run(_load(port, vocabulary, report, sizes, clock))


async def _load(port: int, vocabulary: int, report: Report, sizes: Sizes, clock: Clock) -> None:
    client = await Client.practised(port, vocabulary)
    await _first(client, report, sizes, clock)
    if clock.left > 5:
        report.put(await client.streams(sizes.streams, sizes.context, sizes.steps), "streams")
    rows = []
    for place, rate in enumerate(sizes.rates):
        seconds = min(sizes.rate_seconds, (clock.left - 5) / (len(sizes.rates) + 1 - place))
        if seconds < sizes.rate_seconds / 5:
            report.leave_out(f"{rate} requests a second", "out of time")
            continue
        rows.append(await client.sweep(rate, seconds, sizes.served_tokens, sizes.answer_tokens))
        report.put(rows, "sweep")
    if clock.left > 5:
        report.put(await client.burst(sizes.burst, sizes.served_tokens, sizes.answer_tokens), "saturation")


async def _first(client: Client, report: Report, sizes: Sizes, clock: Clock) -> None:
    """The first request of each kind that this server has ever seen, against the median of the next ones."""
    rows = []
    for name, setting in SETTINGS.items():
        for length in sizes.first_lengths:
            if clock.left < 1:
                report.leave_out(f"{name}, {length} tokens", "out of time")
                continue
            served = [await client.ask(client.prompt(length), 2, **setting) for _ in range(1 + REPEATS)]
            if error := next((each.error for each in served if each.error), None):
                raise PreheatError(f"a request failed: {error}")
            first, *later = (each.last * 1e3 for each in served)
            rows.append(ratio_row(name, length, first, later))
    report.put(rows, "first_rows")
    if rows:
        report.put(max(row["ratio"] for row in rows), "first_worst_ratio")


@contextlib.contextmanager
def serving(options: dict[str, Any], clock: Clock) -> Iterator[int]:
    """A server with ``options``; gives its port once it is ready."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "preheat", "serve", f"--port={port}", *flags(options)]
    server = subprocess.Popen(command)
    try:
        _wait(server, port, clock)
        yield port
    finally:
        server.send_signal(signal.SIGINT)
        try:
            server.wait(10)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()


def flags(options: dict[str, Any]) -> list[str]:
    """``options`` as they are written on a command line."""
    found = []
    for name, value in options.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            found.append(f"--{flag}" if value else f"--no-{flag}")
        elif isinstance(value, list | tuple):
            found += [f"--{flag}", *map(str, value)]
        else:
            found.append(f"--{flag}={value}")
    return found


def _wait(server: subprocess.Popen[bytes], port: int, clock: Clock) -> None:
    while clock.left > 0:
        if server.poll() is not None:
            raise PreheatError(f"the server left with status {server.returncode}")
        with contextlib.suppress(OSError):
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
            connection.request("GET", "/ready")
            status = connection.getresponse().status
            connection.close()
            if status == 200:
                return
        time.sleep(0.02)
    raise PreheatError("the server was not ready in time")
