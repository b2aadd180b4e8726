"""A front moves the requests of pods that die, freeze, drain or are full, and its clients see whole answers."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.common.crowd import answer, mixed, normal
from benchmarks.common.ports import free_port
from tests.api.conftest import Server, serving
from tests.api.test_faults import ask
from tests.api.test_moves import LENGTH, MORTAL, assert_whole, bodies, until_running
from tests.waiting import until

KEY = {"Authorization": "Bearer k"}
POD = {"shutdown_timeout": 1.0, "log_level": "error", "api_key": ["k"], "server_dev_mode": True}
FRONT = POD | {"engine_heartbeat_timeout_s": 1.5, "engine_restarts": 50, "server_dev_mode": False}


class Pods:
    """Two pods, which can be started again, and the front before them."""

    def __init__(self, folder: Path, opened: contextlib.ExitStack) -> None:
        self.folder, self._opened = folder, opened
        self.ports = [free_port(), free_port()]
        self.pods: list[Server] = []
        for place in (0, 1):
            self.start(place)
        urls = [f"http://127.0.0.1:{port}" for port in self.ports]
        self.front = opened.enter_context(serving(str(folder), pods=urls, data_parallel_size=2, **FRONT))
        self.front.wait_for_engines(2)

    def start(self, place: int, folder: Path | None = None) -> None:
        """Start the pod of ``place``, again if there was one."""
        pod = self._opened.enter_context(
            serving(str(folder or self.folder), engine=MORTAL, port=self.ports[place], **POD)
        )
        self.pods[place : place + 1] = [pod]

    def whole(self, length: int, event: object) -> None:
        """Send requests, call ``event`` in their midst, and assert that all answers are whole."""

        async def scenario() -> list[bytes]:
            running = [asyncio.create_task(ask(self.front.port, body, None, **KEY)) for body in bodies(length)]
            await until_running(self.front, 2, len(running) + 1)
            await asyncio.to_thread(event)  # type: ignore[arg-type]
            return await asyncio.gather(*running)

        assert_whole(asyncio.run(asyncio.wait_for(scenario(), 120)), length)

    def moves(self, reason: str) -> float:
        return self.front.metric("request_moves_total", reason=reason)


@pytest.fixture(scope="module")
def pods(folder: Path) -> Iterator[Pods]:
    with contextlib.ExitStack() as opened:
        yield Pods(folder, opened)


def test_a_killed_pod_loses_no_stream(pods: Pods) -> None:
    before = pods.moves("died")
    pods.whole(LENGTH, pods.pods[0].process.kill)
    assert pods.moves("died") > before
    assert pods.front.get("/ready").json["engines"] == 1
    pods.start(0)
    pods.front.wait_for_engines(2)


def test_a_frozen_pod_that_wakes_adds_nothing(pods: Pods) -> None:
    before, frozen = pods.moves("silent"), pods.pods[1].process.pid

    def freeze() -> None:
        os.kill(frozen, signal.SIGSTOP)
        assert until(lambda: pods.moves("silent") > before)
        os.kill(frozen, signal.SIGCONT)

    pods.whole(900, freeze)
    pods.front.wait_for_engines(2)


def test_a_full_pod_declines_and_one_with_another_contract_is_refused_by_name(pods: Pods, tmp_path: Path) -> None:
    other, log = tmp_path / "other", tmp_path / "log"
    shutil.copytree(pods.folder, other)
    config = (other / "tokenizer_config.json").read_text()
    (other / "tokenizer_config.json").write_text(config.replace("{{ m.role }}:", "{{ m.role }}"))
    with contextlib.ExitStack() as opened:
        full, stranger = (
            opened.enter_context(serving(str(folder), engine=MORTAL, wait=False, **POD | more))
            for folder, more in ((pods.folder, {"max_queued_requests": 2}), (other, {}))
        )
        stranger.wait_until_ready()
        urls = [stranger.url, full.url, pods.pods[1].url]
        front = opened.enter_context(serving(str(pods.folder), log=log, pods=urls, data_parallel_size=3, **FRONT))
        full.wait_until_ready()
        front.wait_for_engines(2)
        assert until(lambda: "do not agree" in log.read_text())
        assert "template: " in log.read_text()

        async def scenario() -> list[bytes]:
            # A stopped engine takes no request, so those that the front gives it wait until no more may wait.
            os.kill(full.engine_pids[0], signal.SIGSTOP)
            running = [asyncio.create_task(ask(front.port, body, None, **KEY)) for body in bodies() * 3]
            declined = await asyncio.to_thread(
                until, lambda: front.metric("request_moves_total", reason="overloaded") > 0
            )
            os.kill(full.engine_pids[0], signal.SIGCONT)
            assert declined
            return await asyncio.gather(*running)

        answers = asyncio.run(asyncio.wait_for(scenario(), 120))
        for start in range(0, len(answers), len(bodies())):
            assert_whole(answers[start : start + len(bodies())])
        assert front.get("/ready").json["engines"] == 2


def test_bad_requests_of_a_front_are_refused(pods: Pods) -> None:
    answer = pods.pods[1].post(
        "/inference/v1/generate", b"\xc1", **KEY, **{"content-type": "application/vnd.preheat.relay+msgpack"}
    )
    assert answer.status == 400 and "no request of a front" in answer.error["message"]
    refused = pods.front.post("/v1/completions", {"prompt": [1, 2], "max_tokens": 5000}, **KEY)
    assert refused.status == 400 and "maximum context length" in refused.error["message"]


def test_tokens_in_tokens_out_in_the_form_of_vllm(pods: Pods) -> None:
    body = {"token_ids": [20, 40, 50, 61], "sampling_params": {"max_tokens": 3, "logprobs": 1, "ignore_eos": True}}
    answer = pods.pods[1].post("/inference/v1/generate", body, **KEY)
    assert answer.status == 200, answer.body
    (choice,) = answer.json["choices"]
    assert choice["token_ids"] == [40, 50, 61] and choice["finish_reason"] == "length"
    assert [entry["logprob"] for entry in choice["logprobs"]["content"]] == [-0.5] * 3
    stream = pods.front.post("/inference/v1/generate", body | {"stream": True}, **KEY)
    assert stream.status == 200 and stream.body.endswith(b"data: [DONE]\n\n") and b'"token_ids":[40' in stream.body
    body["sampling_params"]["nonsense"] = 1
    assert pods.pods[1].post("/inference/v1/generate", body, **KEY).status == 400


def test_answers_through_a_front_are_the_answers_of_its_pod(server: Server) -> None:
    """All fields of requests of many kinds, one after the other: streams and not."""
    kinds = mixed(22, seed=3, tokens=24)
    with serving("bundled", wait=False, pods=[server.url], skip_warmup=True, log_level="error") as front:
        expected = [normal(asyncio.run(answer(server.port, each, "c", lambda: None))) for each in kinds]
        front.wait_until_ready()
        got = [normal(asyncio.run(answer(front.port, each, "c", lambda: None))) for each in kinds]
        searched = {"prompt": "def add(a, b):", "max_tokens": 6, "n": 2, "use_beam_search": True}
        texts = [each.post("/v1/completions", searched).json["choices"] for each in (server, front)]
        refused = front.post("/reset_prefix_cache", b"")
    assert {one["status"] for one in expected} == {"200"} and got == expected
    assert texts[0] == texts[1] and len(texts[0]) == 2
    assert refused.status == 400 and "ask its pods" in refused.error["message"]


def test_a_pod_that_drains_ends_its_streams_or_gives_them_up(pods: Pods) -> None:
    def drain() -> None:
        assert pods.pods[0].post("/drain", b"", **KEY).status == 200

    pods.whole(900, drain)  # longer than the time of the drain
    assert until(lambda: pods.front.get("/ready").json["engines"] == 1)
