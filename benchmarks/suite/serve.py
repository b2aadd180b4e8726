"""The measurements over HTTP.

A server runs in a process of its own, a client in this one.
"""

from __future__ import annotations

import asyncio
from typing import Any

from benchmarks.common.client import Client
from benchmarks.common.process import serving
from benchmarks.common.report import Clock, PartReport
from benchmarks.common.shapes import Sizes
from benchmarks.suite.first import REPEATS, SETTINGS, ratio_row
from preheat.errors import PreheatError


def serve(report: PartReport, options: dict[str, Any], sizes: Sizes, vocabulary: int, clock: Clock) -> None:
    """Measure a server by first requests, streams, rates and a burst.

    A burst is ``sizes.burst`` requests at once.
    """
    with serving(options) as server:
        report.put(round(server.wait_for("/ready", clock.left), 2), "ready_s")
        asyncio.run(_load(server.port, vocabulary, report, sizes, clock))


async def _load(port: int, vocabulary: int, report: PartReport, sizes: Sizes, clock: Clock) -> None:
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


async def _first(client: Client, report: PartReport, sizes: Sizes, clock: Clock) -> None:
    """Measure the first request of each kind against later ones.

    The server has not seen the kind before. Later requests count by their median.
    """
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
