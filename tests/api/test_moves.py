"""Requests go on at other engines, or at the same one when it is back, and their clients see whole answers."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.api.conftest import Server, serving, write_model
from tests.api.scripted import DIE, FLIP
from tests.api.test_faults import ask

MORTAL = "tests.api.scripted:run_mortal_engine"
LENGTH = 120
PROMPTS = [[20 + 7 * each, 40, 50 + each, 61] for each in range(6)]
OPTIONS = {"engine_heartbeat_timeout_s": 1.5, "shutdown_timeout": 1.0, "log_level": "error", "engine_restarts": 50}


@pytest.fixture(scope="module")
def pair(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    log = tmp_path_factory.mktemp("pair") / "log"
    with serving(str(folder), engine=MORTAL, log=log, data_parallel_size=2, **OPTIONS) as server:
        yield server


def bodies(length: int = LENGTH) -> list[dict]:
    """Return requests with and without streams, one of them with two choices; all answers repeat their prompts."""
    shared = {"max_tokens": length, "ignore_eos": True, "return_token_ids": True, "logprobs": 1}
    return [shared | {"prompt": prompt, "stream": at % 2 == 0, "n": 2 if at == 4 else 1}
            for at, prompt in enumerate(PROMPTS)]  # fmt: skip


def tokens_of(answer: bytes) -> dict[int, list[int]]:
    """Return the tokens of each choice, of a stream or of a whole answer."""
    assert answer.startswith(b"HTTP/1.1 200"), answer[:300]
    body = answer.split(b"\r\n\r\n", 1)[1]
    if b"text/event-stream" not in answer:
        return {choice["index"]: choice["token_ids"] for choice in json.loads(body)["choices"]}
    found = dict[int, list[int]]()
    for line in body.split(b"\n"):
        if line.startswith(b"data: {"):
            for choice in json.loads(line[6:])["choices"]:
                found.setdefault(choice["index"], []).extend(choice["token_ids"])
    return found


def assert_whole(answers: list[bytes], length: int = LENGTH) -> None:
    """Assert that each answer is the one that the script tells: no token is missing, none comes twice."""
    for body, answer in zip(bodies(length), answers, strict=True):
        prompt = body["prompt"]
        expected = [prompt[(place + 1) % len(prompt)] for place in range(length)]
        assert tokens_of(answer) == dict.fromkeys(range(body["n"]), expected)


async def until_running(server: Server, engines: int, count: int) -> None:
    """Wait until ``count`` sequences run and have got some ten tokens each together."""

    def running() -> float:
        return sum(server.metric("num_requests_running", engine=str(engine)) for engine in range(engines))

    while await asyncio.to_thread(running) < count:
        await asyncio.sleep(0.02)
    enough = await asyncio.to_thread(server.metric, "generation_tokens_total") + 10 * count
    while await asyncio.to_thread(server.metric, "generation_tokens_total") < enough:
        await asyncio.sleep(0.02)


async def asked(server: Server, number: int, pid: int, length: int, engines: int) -> list[bytes]:
    """Return the answers to all requests while the engine ``pid`` gets the signal ``number`` in their midst."""
    running = [asyncio.create_task(ask(server.port, body)) for body in bodies(length)]
    await until_running(server, engines, len(running) + 1)
    os.kill(pid, number)
    return await asyncio.gather(*running)


def run(server: Server, number: int, pid: int, length: int = LENGTH, engines: int = 2) -> list[bytes]:
    return asyncio.run(asyncio.wait_for(asked(server, number, pid, length, engines), 120))


@pytest.mark.parametrize(
    ("number", "reason", "length"),
    [(signal.SIGKILL, "died", LENGTH), (signal.SIGSTOP, "silent", 400), (signal.SIGTERM, "drained", 400)],
    ids=["killed", "stopped", "drained at the deadline"],
)
def test_requests_go_on_at_another_engine(pair: Server, number: int, reason: str, length: int) -> None:
    moves, restarts = (pair.metric(name, reason=reason) for name in ("request_moves_total", "engine_restarts_total"))
    victim = pair.engine_pids[0]
    assert_whole(run(pair, number, victim, length), length)
    assert pair.metric("request_moves_total", reason=reason) > moves
    pair.wait_for_engines(2)
    assert pair.metric("engine_restarts_total", reason=reason) == restarts + 1
    assert victim not in pair.engine_pids
    assert pair.log is not None
    if reason == "died":
        told = pair.log.read_text()
        assert told.index("process dies") < told.index("process ended with status -9"), "noticed before the exit"


def test_an_engine_that_drains_finishes_its_requests(pair: Server) -> None:
    moves = pair.metric("request_moves_total", reason="drained")
    victim = pair.engine_pids[0]
    assert_whole(run(pair, signal.SIGTERM, victim, 60), 60)
    pair.wait_for_engines(2)
    assert pair.metric("request_moves_total", reason="drained") == moves
    assert victim not in pair.engine_pids


def test_a_request_that_kills_its_engines_ends_and_the_others_go_on(pair: Server) -> None:
    async def scenario() -> tuple[list[bytes], bytes]:
        running = [asyncio.create_task(ask(pair.port, body)) for body in bodies(40)]
        await until_running(pair, 2, len(running) + 1)
        answers = await asyncio.gather(*running)
        return answers, await ask(pair.port, {"prompt": [DIE, 30, 31], "max_tokens": 5, "stream": True})

    answers, poison = asyncio.run(asyncio.wait_for(scenario(), 120))
    assert_whole(answers, 40)
    assert poison.startswith(b"HTTP/1.1 500") and b"have ended 3 times" in poison
    pair.wait_for_engines(2)
    assert pair.post("/v1/completions", {"prompt": [1, 2], "max_tokens": 2}).status == 200


@pytest.fixture(scope="module")
def lone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = write_model(tmp_path_factory.mktemp("lone"))
    log = folder / "log"
    with serving(str(folder), engine=MORTAL, log=log, engine_restart_wait=20.0, **OPTIONS) as server:
        yield server


def test_a_stream_waits_for_its_only_engine(lone: Server) -> None:
    async def scenario() -> list[bytes]:
        running = [asyncio.create_task(ask(lone.port, body)) for body in bodies()]
        await until_running(lone, 1, len(running) + 1)
        os.kill(lone.engine_pids[0], signal.SIGKILL)
        while (await asyncio.to_thread(lone.get, "/ready")).status == 200:
            await asyncio.sleep(0.01)
        refused = await asyncio.to_thread(lone.post, "/v1/completions", {"prompt": "x"})
        assert refused.status == 503 and "starts again" in refused.error["message"]
        assert lone.get("/health").status == 503 and lone.get("/metrics").status == 200
        return await asyncio.gather(*running)

    answers = asyncio.run(asyncio.wait_for(scenario(), 120))
    assert_whole(answers)
    streams = [answer for answer in answers if b"text/event-stream" in answer]
    assert all(b"\n: an engine starts again" in stream for stream in streams)
    lone.wait_for_engines(1)


def test_requests_of_an_engine_with_faulty_memory_end_and_it_starts_again(lone: Server) -> None:
    async def scenario() -> tuple[list[bytes], bytes]:
        running = [asyncio.create_task(ask(lone.port, body)) for body in bodies(400)]
        await until_running(lone, 1, len(running) + 1)
        flipped = await ask(lone.port, {"prompt": [FLIP, 30, 31], "max_tokens": 5})
        return await asyncio.gather(*running), flipped

    restarts = lone.metric("engine_restarts_total", reason="memory_fault")
    answers, flipped = asyncio.run(asyncio.wait_for(scenario(), 120))
    assert all(b"The audit found a fault: a weight" in answer for answer in [*answers, flipped])
    lone.wait_for_engines(1)
    assert lone.metric("engine_restarts_total", reason="memory_fault") == restarts + 1
    assert lone.metric("request_moves_total", reason="memory_fault") == 0
    assert lone.post("/v1/completions", {"prompt": [1, 2], "max_tokens": 2}).status == 200


def test_an_engine_that_comes_back_with_other_bits_is_refused(lone: Server) -> None:
    Path(lone.model, "changed").touch()

    answers = run(lone, signal.SIGKILL, lone.engine_pids[0], engines=1)
    assert all(b"digest: d16e57 on engine 0, changed on engine 0" in answer for answer in answers), answers[0]
    assert lone.process.wait(60) == 1


def test_a_server_without_restarts_lives_as_long_as_its_last_engine(folder: Path) -> None:
    """Also: requests wait for a limited time."""
    options = OPTIONS | {"engine_restarts": 0}
    with serving(str(folder), engine=MORTAL, data_parallel_size=2, **options) as server:
        first, last = server.engine_pids
        assert_whole(run(server, signal.SIGKILL, first))
        assert server.get("/ready").json["engines"] == 1 and server.get("/health").status == 200
        answers = run(server, signal.SIGKILL, last, engines=2)
        assert all(b'"type":"engine_dead"' in answer for answer in answers)
        assert server.process.wait(60) == 1


def test_requests_wait_for_a_limited_time(folder: Path) -> None:
    options = OPTIONS | {"engine_restart_wait": 0.0}
    with serving(str(folder), engine=MORTAL, **options) as server:
        answers = run(server, signal.SIGKILL, server.engine_pids[0], engines=1)
        assert all(b"--engine-restart-wait" in answer for answer in answers)
        server.wait_for_engines(1)
