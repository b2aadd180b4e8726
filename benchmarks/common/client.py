"""An open-loop client of /v1/completions.

It sends on schedule, whether or not earlier answers are there. A request takes a connection of its own, and its token
times are the arrival times of its events.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate, islice
from typing import Any, Self

HIGHEST_ID = 120_000
PRACTICE = 8
"""Requests before the first one that counts."""
ECHO = b"HTTP/1.1 200 OK\r\n\r\n" + b"data: {}\n\n" * 2


@dataclass
class Served:
    """One request as a client saw it.

    Times in seconds, since ``began`` of ``time.perf_counter``. ``error`` is the failure, if there was one.
    """

    asked: int
    first: float | None = None
    last: float = 0.0
    gaps: list[float] = field(default_factory=list)
    error: str | None = None
    began: float = 0.0

    def gaps_between(self, start: float, end: float) -> list[float]:
        """Return the ``gaps`` that ended in this span of ``time.perf_counter``."""
        ends = accumulate(self.gaps, initial=self.began + (self.first or 0.0))
        return [gap for gap, at in zip(self.gaps, islice(ends, 1, None), strict=False) if start < at <= end]


class Client:
    """Asks the server at ``port``.

    Prompts are random ids below ``vocabulary``, the same in every run.
    """

    def __init__(self, port: int, vocabulary: int) -> None:
        self._port = port
        self._random = random.Random(0)
        self._highest = min(HIGHEST_ID, vocabulary - 1)

    def prompt(self, length: int) -> list[int]:
        return [self._random.randint(10, self._highest) for _ in range(length)]

    @classmethod
    async def practised(cls, port: int, vocabulary: int) -> Self:
        """Return a client that has asked an echo server before.

        The slow parts of the client's own first request are then not counted for the real server.
        """

        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(ECHO)
            await writer.drain()
            writer.close()

        async with await asyncio.start_server(answer, "127.0.0.1", 0) as echo:
            client = cls(echo.sockets[0].getsockname()[1], vocabulary)
            for _ in range(PRACTICE):
                await client.ask([0], 2)
        return cls(port, vocabulary)

    async def ask(self, prompt: Sequence[int], tokens: int, *, into: Served | None = None, **sampling: Any) -> Served:
        """Stream ``tokens`` tokens. ``into`` gets the progress, however the request ends."""
        body = {"prompt": prompt, "max_tokens": tokens, "stream": True, "ignore_eos": True, **sampling}
        data = json.dumps(body).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {len(data)}\r\n\r\n"
        served, started = into or Served(tokens), time.perf_counter()
        served.began = started
        try:
            reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
            try:
                writer.write(head.encode() + data)
                await self._read(reader, served, started)
            finally:
                writer.close()
        except OSError as error:
            served.error = repr(error)
        return served

    async def _read(self, reader: asyncio.StreamReader, served: Served, started: float) -> None:
        status = await reader.readline()
        if b" 200 " not in status:
            served.error = (status + await reader.read(2000)).decode(errors="replace")
            return
        before = started
        async for line in reader:
            if not line.startswith(b"data: {"):
                continue
            if b'"error"' in line[:20]:
                served.error = line.decode(errors="replace")
                return
            now = time.perf_counter()
            if served.first is None:
                served.first = now - started
            else:
                served.gaps.append(now - before)
            before = now
        served.last = before - started
        if served.first is None:
            served.error = "the stream ended before its first token"

    async def sweep(
        self, rate: float, seconds: float, lengths: tuple[int, int], answers: tuple[int, int]
    ) -> dict[str, Any]:
        """Send requests that arrive at random, ``rate`` a second on average, for ``seconds``."""
        chance = random.Random(int(rate * 1000))
        started, at, jobs = time.perf_counter(), 0.0, []
        while at < seconds:
            await asyncio.sleep(max(0.0, started + at - time.perf_counter()))
            prompt, tokens = self.prompt(chance.randint(*lengths)), chance.randint(*answers)
            jobs.append(asyncio.create_task(self.ask(prompt, tokens, temperature=0.6)))
            at += chance.expovariate(rate)
        return {"rate": rate, **summary(await asyncio.gather(*jobs), time.perf_counter() - started)}

    async def burst(self, requests: int, lengths: tuple[int, int], answers: tuple[int, int]) -> dict[str, Any]:
        """Send all requests at once: the server then takes them at its highest rate."""
        chance = random.Random(0)
        asked = [(self.prompt(chance.randint(*lengths)), chance.randint(*answers)) for _ in range(requests)]
        started = time.perf_counter()
        found = await asyncio.gather(*(self.ask(*each, temperature=0.6) for each in asked))
        wall = time.perf_counter() - started
        return {"requests_s": round(requests / wall, 2), **summary(found, wall)}

    async def streams(self, count: int, context: int, tokens: int) -> dict[str, Any]:
        """Run ``count`` equal streams, begun together."""
        prompts = [self.prompt(context) for _ in range(count)]
        started = time.perf_counter()
        found = await asyncio.gather(*(self.ask(prompt, tokens, temperature=0.0) for prompt in prompts))
        return {"streams": count, **summary(found, time.perf_counter() - started)}


def summary(found: Sequence[Served], wall: float) -> dict[str, Any]:
    """Return the figures of several requests, in milliseconds and tokens a second.

    ``wall`` seconds for all.
    """
    good = [each for each in found if each.error is None]
    firsts = [each.first for each in good if each.first is not None]
    gaps = [gap for each in good for gap in each.gaps]
    return {
        "sent": len(found),
        "ok": len(good),
        "out_tok_s": round(sum(each.asked for each in good) / wall),
        "ttft_p50": quantile(firsts, 0.5),
        "ttft_p99": quantile(firsts, 0.99),
        "itl_p50": quantile(gaps, 0.5),
        "itl_p99": quantile(gaps, 0.99),
        "itl_max": quantile(gaps, 1.0),
        "errors": sorted({each.error[:200] for each in found if each.error})[:3],
    }


def quantile(seconds: Sequence[float], share: float) -> float | None:
    """Return the milliseconds below which ``share`` of ``seconds`` lie."""
    if not seconds:
        return None
    return round(1e3 * sorted(seconds)[min(len(seconds) - 1, int(share * len(seconds)))], 2)
