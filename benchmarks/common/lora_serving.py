"""The cost of loading adapters over HTTP for streams that decode meanwhile."""

from __future__ import annotations

import asyncio
import http.client
import json
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from benchmarks.common.client import Client, Served, quantile
from benchmarks.common.process import serving
from benchmarks.common.shapes import Sizes
from preheat.errors import PreheatError


def loading_over_http(
    options: dict[str, Any], adapters: dict[str, str], new: dict[str, str], sizes: Sizes, vocabulary: int
) -> dict[str, Any]:
    """Return the figures of a server with ``options`` that loads adapters.

    Adapters are folders by name. ``sizes.streams`` streams without an adapter or with one of ``adapters``, in turn,
    begin again as they end. Reported is the time between their tokens in three phases: while nothing else happens,
    while requests with ``adapters`` begin one after the other, and while each of ``new`` is loaded and has a first
    request.
    """
    modules = [f"{name}={path}" for name, path in adapters.items()]
    runtime = {"lora_modules": modules, "allow_runtime_lora_updating": True}
    with serving(options | runtime) as server:
        server.wait_for("/ready")
        return asyncio.run(_Streams(server.port, sizes, vocabulary).figures([*adapters], new))


class _Streams:
    """Streams of the server at ``port`` that decode, and the requests beside them."""

    def __init__(self, port: int, sizes: Sizes, vocabulary: int) -> None:
        self._port, self._sizes, self._vocabulary = port, sizes, vocabulary
        self._seen: list[Served] = []

    async def figures(self, adapters: Sequence[str], new: dict[str, str]) -> dict[str, Any]:
        self._client = await Client.practised(self._port, self._vocabulary)
        models = [{}, *({"model": name} for name in adapters)]
        streams = [
            asyncio.create_task(self._again_and_again(models[place % len(models)]))
            for place in range(self._sizes.streams)
        ]
        try:
            while sum(served.first is not None for served in self._seen) < len(streams):
                if failed := next((stream for stream in streams if stream.done()), None):
                    await failed
                await asyncio.sleep(0.01)
            still = await self._during(lambda: asyncio.sleep(self._sizes.rate_seconds / 3))
            firsts = list[float]()
            beside = await self._during(lambda: self._requests(adapters, len(new), firsts))
            loads, new_firsts = list[float](), list[float]()
            loading = await self._during(lambda: self._loads(new, loads, new_firsts))
        finally:
            for stream in streams:
                stream.cancel()
            ended = await asyncio.gather(*streams, return_exceptions=True)
        for each in ended:
            if isinstance(each, PreheatError):
                raise each
        return {
            "streams": len(streams), "loads": len(new), "still": still, "beside_requests": beside,
            "while_loading": loading, "load_ms_p50": quantile(loads, 0.5), "load_ms_max": quantile(loads, 1.0),
            "first_token_ms_p50": quantile(firsts, 0.5), "first_token_ms_p50_after_load": quantile(new_firsts, 0.5),
        }  # fmt: skip

    async def _again_and_again(self, model: dict[str, str]) -> None:
        """Run one stream after another."""
        while True:
            self._seen.append(Served(self._sizes.stream_tokens))
            _checked(await self._ask(self._sizes.stream_tokens, self._seen[-1], **model))

    async def _ask(self, tokens: int, into: Served | None = None, **model: str) -> Served:
        prompt = self._client.prompt(self._sizes.context)
        return await self._client.ask(prompt, tokens, into=into, temperature=0.0, **model)

    async def _during(self, act: Callable[[], Awaitable[None]]) -> dict[str, Any]:
        """Return the figures of the streams' gaps while ``act`` runs."""
        start = time.perf_counter()
        await act()
        end = time.perf_counter()
        gaps = [gap for served in self._seen for gap in served.gaps_between(start, end)]
        return {
            "seconds": round(end - start, 2), "tokens": len(gaps), "itl_p50": quantile(gaps, 0.5),
            "itl_p99": quantile(gaps, 0.99), "itl_max": quantile(gaps, 1.0),
        }  # fmt: skip

    async def _requests(self, models: Sequence[str], count: int, firsts: list[float]) -> None:
        for place in range(count):
            firsts.append(_checked(await self._ask(2, model=models[place % len(models)])))

    async def _loads(self, new: dict[str, str], loads: list[float], firsts: list[float]) -> None:
        for name, path in new.items():
            began = time.perf_counter()
            await asyncio.to_thread(load, self._port, name, path)
            loads.append(time.perf_counter() - began)
            firsts.append(_checked(await self._ask(2, model=name)))


def _checked(served: Served) -> float:
    """Return the seconds until the first token.

    Raises PreheatError for a request that failed.
    """
    if served.error is not None or served.first is None:
        raise PreheatError(f"a request failed: {served.error}")
    return served.first


def load(port: int, name: str, path: str) -> None:
    """Make the server at ``port`` load an adapter.

    Raises PreheatError if it does not.
    """
    connection = http.client.HTTPConnection("127.0.0.1", port)
    body = json.dumps({"lora_name": name, "lora_path": path})
    connection.request("POST", "/v1/load_lora_adapter", body, {"Content-Type": "application/json"})
    answer = connection.getresponse()
    text = answer.read().decode(errors="replace")
    connection.close()
    if answer.status != 200:
        raise PreheatError(f"the adapter {name} was not loaded: {answer.status} {text}")
