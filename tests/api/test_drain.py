"""The order of a drain, as a gateway's scraper and probes see it.

The names and labels are the ones that the endpoint picker of Kubernetes' Gateway API inference extension and of llm-d
reads.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.api.conftest import Server, serving
from tests.api.test_faults import ask
from tests.waiting import until

KEY = {"Authorization": "Bearer operator"}
OPTIONS = {"api_key": ["operator"], "server_dev_mode": True, "metrics_prefix": "vllm", "enable_lora": True}
PICKED = {
    "vllm:num_requests_waiting": (), "vllm:num_requests_running": (), "vllm:kv_cache_usage_perc": (),
    "vllm:lora_requests_info": ("max_lora", "running_lora_adapters", "waiting_lora_adapters"),
    "vllm:cache_config_info": ("block_size", "num_gpu_blocks"),
}  # fmt: skip
"""Gauges of a picker, with the labels that it reads."""


def scraped(server: Server) -> dict[str, tuple[float, dict[str, str]]]:
    """Return the last sample of each gauge of a picker, with its labels."""
    page = server.get("/metrics")
    assert page.status == 200 and page.headers["content-type"].startswith("text/plain")
    families = text_string_to_metric_families(page.body.decode())
    return {
        sample.name: (sample.value, sample.labels)
        for family in families if family.name in PICKED and family.type == "gauge"
        for sample in family.samples
    }  # fmt: skip


def probes(server: Server) -> dict[str, int]:
    return {path: server.get(path).status for path in ("/ready", "/health", "/live")}


@pytest.fixture
def operated(folder: Path) -> Iterator[Server]:
    with serving(str(folder), shutdown_timeout=30.0, **OPTIONS) as server:
        yield server


def stream(length: int) -> dict:
    return {"prompt": [20, 30, 40], "max_tokens": length, "ignore_eos": True, "stream": True}


async def begun(server: Server, body: dict) -> asyncio.Task[bytes]:
    """Return the task of a stream that runs."""
    task = asyncio.create_task(ask(server.port, body, None, **KEY))
    assert await asyncio.to_thread(until, lambda: scraped(server)["vllm:num_requests_running"][0] > 0)
    return task


def test_a_drained_server_stays_to_be_scraped(operated: Server) -> None:
    assert operated.post("/drain", b"").status == 401
    assert operated.post("/drain?wait=2", b"", **KEY).status == 400

    async def scenario() -> bytes:
        running = await begun(operated, stream(2000))
        assert operated.post("/drain", b"", **KEY).json["status"] == "draining"
        assert probes(operated) == {"/ready": 503, "/health": 503, "/live": 200}
        seen = scraped(operated)
        assert set(seen) == set(PICKED) and seen["vllm:num_requests_running"][0] == 1
        assert all(set(names) <= set(seen[gauge][1]) for gauge, names in PICKED.items())
        refused = operated.post("/v1/completions", stream(1), **KEY)
        assert refused.status == 503 and "about to stop" in refused.error["message"]
        drained = await asyncio.to_thread(operated.post, "/drain?wait=1", b"", "POST", **KEY)
        assert drained.json["status"] == "drained"
        return await running

    answer = asyncio.run(asyncio.wait_for(scenario(), 60))
    assert answer.startswith(b"HTTP/1.1 200") and b"data: [DONE]" in answer and b"error" not in answer
    assert until(lambda: scraped(operated)["vllm:num_requests_running"][0] == 0)
    assert probes(operated)["/ready"] == 503
    os.kill(operated.process.pid, signal.SIGTERM)
    assert operated.process.wait(30) == 0


def test_a_drain_has_the_deadline_of_a_signal(folder: Path) -> None:
    with serving(str(folder), shutdown_timeout=0.2, **OPTIONS) as server:

        async def scenario() -> bytes:
            running = await begun(server, stream(4000))
            assert server.post("/drain?wait=1", b"", **KEY).json["status"] == "drained"
            return await running

        answer = asyncio.run(asyncio.wait_for(scenario(), 60))
        assert b"The server was drained: this request did not finish in 0.2 s" in answer
        assert server.get("/live").status == 200
