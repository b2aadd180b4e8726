"""Every fault ends well: no leaked block, no hung client, the right errors, and a truthful /health."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from pathlib import Path

import pytest

from benchmarks.common.ports import free_port
from tests.api.conftest import Server, serving
from tests.waiting import until

COMPLETIONS = "/v1/completions"
HANG = [3, 5]


def request(body: dict, **headers: str) -> bytes:
    data = json.dumps(body).encode()
    more = "".join(f"{name}: {value}\r\n" for name, value in headers.items()).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\n%bContent-Length: %d\r\n\r\n%b"
    return head % (more, len(data), data)


async def ask(port: int, body: dict, leave_after: int | None = None, **headers: str) -> bytes:
    """Return the raw answer.

    The client closes silently after ``leave_after`` bytes of it.
    """
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(request(body, **headers))
    if leave_after is None:
        answer = await reader.read(-1)
    else:
        answer = await reader.readexactly(leave_after) if leave_after else b""
        writer.transport.abort()
    writer.close()
    return answer


async def ask_many(port: int, bodies: list[dict], leave_after: int | None = None) -> list[bytes]:
    return await asyncio.gather(*(ask(port, body, leave_after) for body in bodies))


def run(port: int, bodies: list[dict], leave_after: int | None = None, seconds: float = 120) -> list[bytes]:
    return asyncio.run(asyncio.wait_for(ask_many(port, bodies, leave_after), seconds))


def assert_idle(server: Server, seconds: float = 20) -> None:
    """Assert that nothing runs, waits or holds a block.

    A request brings the engine's last report of its blocks.
    """
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        assert server.post(COMPLETIONS, {"prompt": "x", "max_tokens": 1}).status == 200
        busy = [server.metric(f"num_requests_{state}") for state in ("running", "waiting")]
        if busy == [0, 0] and server.metric("kv_cache_usage_perc") == 0:
            return
        time.sleep(0.1)
    raise AssertionError(f"still busy: {busy}, {server.metric('kv_cache_usage_perc')} of the cache")


def test_clients_that_vanish_leave_nothing_behind(server: Server) -> None:
    aborted = server.metric("request_success_total", finished_reason="abort")
    body = {"prompt": "def f(x):", "max_tokens": 1900, "ignore_eos": True, "stream": True}
    run(server.port, [body | {"n": 1 + i % 3} for i in range(12)], leave_after=400)
    run(server.port, [body | {"stream": False} for _ in range(4)], leave_after=0)
    assert_idle(server)
    assert server.metric("request_success_total", finished_reason="abort") - aborted >= 20


def test_a_running_stream_is_no_idle_server(server: Server) -> None:
    """Control: the metrics that :func:`assert_idle` reads do show a running sequence."""

    async def scenario() -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(request({"prompt": "def f(x):", "max_tokens": 1900, "ignore_eos": True, "stream": True}))
        await reader.readexactly(1000)
        assert server.metric("num_requests_running") == 1 and server.metric("kv_cache_usage_perc") > 0
        writer.transport.abort()

    asyncio.run(scenario())
    assert_idle(server)


def test_a_thousand_streams(server: Server) -> None:
    body = {"prompt": "import os\n", "max_tokens": 4, "ignore_eos": True, "stream": True, "temperature": 0}
    answers = run(server.port, [body] * 1000, seconds=200)
    assert all(answer.startswith(b"HTTP/1.1 200") and b"data: [DONE]" in answer for answer in answers)
    texts = {"".join(json.loads(line[6:])["choices"][0]["text"] for line in answer.split(b"\r\n\r\n", 1)[1].split(b"\n")
                     if line.startswith(b"data: {")) for answer in answers}  # fmt: skip
    assert len(texts) == 1
    assert_idle(server)


def test_a_mix_of_bad_clients_harms_no_other(server: Server) -> None:
    good = {"prompt": "import os\n", "max_tokens": 16, "temperature": 0, "ignore_eos": True}
    expected = server.post(COMPLETIONS, good).json["choices"][0]["text"]
    bad = [{"prompt": "x" * 30_000}, {"prompt": 7}, {"prompt": "x", "n": 10**9}, {"prompt": [-1]}, {}]

    async def mixed() -> list[bytes]:
        goods = asyncio.gather(*(ask(server.port, good) for _ in range(8)))
        await ask_many(server.port, bad * 8)
        await ask_many(server.port, [good | {"max_tokens": 500, "stream": True}] * 8, leave_after=200)
        return await goods

    for answer in asyncio.run(mixed()):
        assert json.loads(answer.split(b"\r\n\r\n", 1)[1])["choices"][0]["text"] == expected
    assert_idle(server)


async def until_running(server: Server, count: int) -> None:
    """Wait until ``count`` requests run and have got some three tokens each together."""
    while await asyncio.to_thread(server.metric, "num_requests_running") < count:
        await asyncio.sleep(0.02)
    enough = await asyncio.to_thread(server.metric, "generation_tokens_total") + 3 * count
    while await asyncio.to_thread(server.metric, "generation_tokens_total") < enough:
        await asyncio.sleep(0.02)


@pytest.mark.parametrize("engine", [None, "tests.api.scripted:run_engine"], ids=["real", "scripted"])
def test_a_killed_engine(folder: Path, engine: str | None) -> None:
    with serving(str(folder) if engine else "bundled", engine=engine, engine_restarts=0) as server:
        body = {"prompt": "def f(x):", "max_tokens": 1900, "ignore_eos": True, "stream": True}

        async def scenario() -> list[bytes]:
            running = [asyncio.create_task(ask(server.port, body | {"stream": i % 2 == 0})) for i in range(8)]
            await until_running(server, len(running))
            os.kill(server.engine_pid, signal.SIGKILL)
            return await asyncio.gather(*running)

        answers = asyncio.run(asyncio.wait_for(scenario(), 120))
        health = server.get("/health").status if server.process.poll() is None else None
        assert health in {503, None}
        assert server.process.wait(60) == 1
        for i, answer in enumerate(answers):
            assert b'"type":"engine_dead"' in answer, answer[-300:]
            assert answer.startswith(b"HTTP/1.1 200" if i % 2 == 0 else b"HTTP/1.1 500")


def test_an_engine_that_never_starts(folder: Path) -> None:
    with serving(str(folder), engine="tests.api.scripted:missing", wait=False) as server:
        assert server.process.wait(60) == 1


def test_the_port_is_open_before_the_engine_is_ready(folder: Path) -> None:
    with serving(str(folder), engine="tests.api.scripted:run_late_engine", wait=False) as server:
        server.wait_until_open()
        assert server.get("/live").status == 200
        refused = server.post(COMPLETIONS, {"prompt": "x"})
        assert refused.status == 503 and refused.error["code"] == "not_ready" and refused.headers["retry-after"] == "1"
        assert server.get("/ready").status == 503 and server.get("/metrics").status == 200
        server.wait_until_ready()
        assert server.post(COMPLETIONS, {"prompt": "x"}).status == 200


def test_a_step_that_hangs(folder: Path) -> None:
    with serving(str(folder), engine_iteration_timeout_s=0.5) as server:
        running = {"prompt": "x", "max_tokens": 4000, "stream": True}

        async def scenario() -> list[bytes]:
            first = asyncio.create_task(ask(server.port, running))
            await until_running(server, 1)
            return [await ask(server.port, {"prompt": HANG}), await first]

        hung, streamed = asyncio.run(asyncio.wait_for(scenario(), 120))
        assert hung.startswith(b"HTTP/1.1 504") and b"VLLM_ENGINE_ITERATION_TIMEOUT_S" in hung
        assert streamed.startswith(b"HTTP/1.1 200") and b'"type":"timeout"' in streamed
        assert server.get("/health").status == 504 and server.get("/ready").status == 503
        assert server.post(COMPLETIONS, {"prompt": "x"}).status == 503


def test_a_request_that_is_not_taken(folder: Path) -> None:
    with serving(str(folder), rpc_timeout_ms=1500) as server:
        os.kill(server.engine_pid, signal.SIGSTOP)
        answer = server.post(COMPLETIONS, {"prompt": "x"})
        assert answer.status == 504 and "VLLM_RPC_TIMEOUT" in answer.error["message"]
        assert server.get("/health").status == 504
        os.kill(server.engine_pid, signal.SIGCONT)  # the engine comes back, and the server says so
        assert until(lambda: server.get("/health").status == 200)
        assert_idle(server)


def health_becomes(server: Server, status: int) -> None:
    assert until(lambda: server.get("/health").status == status)


def test_an_engine_that_is_stopped_while_it_runs(folder: Path) -> None:
    with serving(str(folder), engine_heartbeat_timeout_s=1.5, rpc_timeout_ms=2500) as server:

        async def scenario() -> tuple[bytes, list[bytes]]:
            running = asyncio.create_task(ask(server.port, {"prompt": "x", "max_tokens": 1500, "stream": True}))
            await until_running(server, 1)
            os.kill(server.engine_pid, signal.SIGSTOP)
            await asyncio.to_thread(health_becomes, server, 504)
            assert "heartbeat" in server.get("/health").error["message"] and server.get("/ready").status == 503
            late = [await asyncio.wait_for(ask(server.port, {"prompt": "x"}), 60) for _ in range(2)]
            await asyncio.sleep(3.5)  # another hand-over timeout, while no request waits
            assert not running.done()  # it has the time of a step, ten minutes
            os.kill(server.engine_pid, signal.SIGCONT)
            return await running, late

        streamed, late = asyncio.run(asyncio.wait_for(scenario(), 240))
        for answer in late:
            assert answer.startswith(b"HTTP/1.1 504") and b"VLLM_RPC_TIMEOUT" in answer
        assert b"[DONE]" in streamed and b'"error"' not in streamed
        health_becomes(server, 200)
        assert_idle(server)


def test_a_long_step_is_no_stopped_engine(folder: Path) -> None:
    """Control: an engine that takes no request for long, but beats, is well, and the request waits."""
    with serving(str(folder), engine_heartbeat_timeout_s=1.5, rpc_timeout_ms=500) as server:

        async def scenario() -> None:
            running = asyncio.create_task(ask(server.port, {"prompt": "x", "max_tokens": 4000, "stream": True}))
            await until_running(server, 1)
            hanging = asyncio.create_task(ask(server.port, {"prompt": HANG}))
            await asyncio.sleep(0.5)
            waiting = asyncio.create_task(ask(server.port, {"prompt": "x"}))
            for _ in range(40):
                assert (await asyncio.to_thread(server.get, "/health")).status == 200
                await asyncio.sleep(0.1)
            assert not (running.done() or hanging.done() or waiting.done())
            server.process.kill()
            await asyncio.gather(running, hanging, waiting, return_exceptions=True)

        asyncio.run(asyncio.wait_for(scenario(), 30))


@pytest.mark.parametrize("engine", ["runs", "is stopped"])
def test_draining_has_a_deadline(folder: Path, tmp_path: Path, engine: str) -> None:
    with serving(str(folder), log=tmp_path / "log", shutdown_timeout=1.0) as server:

        async def scenario() -> list[bytes]:
            body = {"prompt": "x", "max_tokens": 4000}
            running = [asyncio.create_task(ask(server.port, body | {"stream": i % 2 == 0})) for i in range(4)]
            await until_running(server, 4)
            if engine == "is stopped":
                os.kill(server.engine_pid, signal.SIGSTOP)
            server.process.terminate()
            return await asyncio.gather(*running)

        answers = asyncio.run(asyncio.wait_for(scenario(), 120))
        assert server.process.wait(60) == 0
        for i, answer in enumerate(answers):
            assert answer.startswith(b"HTTP/1.1 503" if i % 2 else b"HTTP/1.1 200"), answer[:100]
            assert b"did not finish in 1 s" in answer and (i % 2 or b"[DONE]" in answer)
        assert "Traceback" not in (tmp_path / "log").read_text()


def test_a_second_signal_leaves_no_traceback(folder: Path, tmp_path: Path) -> None:
    with serving(str(folder), log=tmp_path / "log") as server:

        async def scenario() -> list[bytes]:
            hanging = [asyncio.create_task(ask(server.port, {"prompt": HANG, "stream": True})) for _ in range(8)]
            running = [
                asyncio.create_task(ask(server.port, {"prompt": "x", "max_tokens": 4000, "stream": True}))
                for _ in range(8)
            ]
            assert await asyncio.to_thread(until, lambda: taken(server) == 16)
            server.process.terminate()
            assert await asyncio.to_thread(until, lambda: refuses(server))
            server.process.terminate()
            answers = await asyncio.gather(*running, *hanging)
            assert await asyncio.to_thread(server.process.wait, 60) == 0
            return answers

        answers = asyncio.run(asyncio.wait_for(scenario(), 120))
        assert all(b"A second signal" in answer for answer in answers)
        assert "Traceback" not in (tmp_path / "log").read_text()


def test_a_client_that_does_not_read(folder: Path) -> None:
    with serving(str(folder), max_concurrent_requests=2) as server:

        async def scenario() -> None:
            _, writer = await asyncio.open_connection("127.0.0.1", server.port, limit=1)
            writer.write(request({"prompt": "x" * 500, "max_tokens": 3000, "stream": True, "n": 4}))
            await asyncio.sleep(0.5)
            assert (await ask(server.port, {"prompt": "x"})).startswith(b"HTTP/1.1 200")
            reader, other = await asyncio.open_connection("127.0.0.1", server.port)
            other.write(request({"prompt": "x", "max_tokens": 3000, "stream": True}))
            assert (await reader.read(15)).startswith(b"HTTP/1.1 200")
            refused = await ask(server.port, {"prompt": "x"})
            assert refused.startswith(b"HTTP/1.1 429") and b'"code":"too_many_requests"' in refused
            server.process.terminate()
            assert b"[DONE]" in await reader.read(-1)
            assert await asyncio.to_thread(server.process.wait, 60) == 0
            other.close()
            writer.transport.abort()

        asyncio.run(asyncio.wait_for(scenario(), 240))


def test_draining(folder: Path) -> None:
    with serving(str(folder)) as server:

        async def scenario() -> bytes:
            running = asyncio.create_task(ask(server.port, {"prompt": "x", "max_tokens": 400, "stream": True}))
            await until_running(server, 1)
            server.process.terminate()
            assert await asyncio.to_thread(until, lambda: refuses(server))
            return await running

        answer = asyncio.run(asyncio.wait_for(scenario(), 120))
        assert answer.count(b"data: ") > 150 and b'"finish_reason":"length"' in answer and b"[DONE]" in answer
        assert server.process.wait(60) == 0


def test_a_second_signal_stops_now(folder: Path) -> None:
    with serving(str(folder)) as server:

        async def scenario() -> None:
            running = asyncio.create_task(ask(server.port, {"prompt": HANG, "stream": True}))
            assert await asyncio.to_thread(until, lambda: taken(server))
            server.process.terminate()
            assert await asyncio.to_thread(until, lambda: refuses(server))
            server.process.send_signal(signal.SIGINT)  # the request itself would hang for an hour
            await asyncio.to_thread(server.process.wait, 60)
            await running

        asyncio.run(asyncio.wait_for(scenario(), 120))


def taken(server: Server) -> float:
    """Return the number of requests that run or wait."""
    return sum(server.metric(f"num_requests_{state}") for state in ("running", "waiting"))


def refuses(server: Server) -> bool:
    """Return whether a server that drains refuses a request with the reason."""
    answer = server.post(COMPLETIONS, {"prompt": "x", "max_tokens": 1})
    return answer.status == 503 and "stop" in answer.error["message"]


def test_the_engine_leaves_with_its_server(folder: Path) -> None:
    with serving(str(folder), forks_engines=False) as server:
        engine = server.engine_pid
        arguments = Path(f"/proc/{engine}/cmdline").read_text().split("\0")
        sockets = Path(next(word for word in arguments if word.startswith("ipc://")).removeprefix("ipc://"))
        assert sockets.is_dir()
        server.process.kill()
        end = time.monotonic() + 60
        while Path(f"/proc/{engine}").exists() and "Z" not in Path(f"/proc/{engine}/stat").read_text().split()[2]:
            assert time.monotonic() < end
            time.sleep(0.02)
        assert not sockets.exists()


def test_a_taken_port_is_named(scripted: Server, folder: Path) -> None:
    assert free_port() != scripted.port
    from preheat.errors import SettingsError
    from preheat.server.app import run_server
    from preheat.settings import Settings

    with pytest.raises(SettingsError, match=str(scripted.port)):
        run_server(Settings(model=str(folder), port=scripted.port))
