"""Dummy requests go through everything that serves, succeed, and leave nothing behind."""

from __future__ import annotations

import asyncio
import threading

import pytest
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from preheat import LLM
from preheat.core import Ready
from preheat.frontend.frontend import Frontend
from preheat.frontend.input_processor import InputProcessor
from preheat.server.app import build_app
from preheat.server.http.frontend_warmup import warm_up_server
from preheat.server.http.service import Service
from preheat.server.replicas.replicas import Replicas
from preheat.server.replicas.supervisor import Supervisor
from preheat.settings import Settings
from preheat.startup import boot_front
from preheat.warmup.dummy_requests import FRONTEND_REQUESTS, FRONTEND_ROUNDS
from tests.api.conftest import SCRIPTED


class Listening:
    """Application that keeps the status of every answer, and all bytes of the answers."""

    def __init__(self, service: Service) -> None:
        self.service, self._app = service, build_app(service)
        self.statuses: list[int] = []
        self.said = b""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def tap(message: Message) -> None:
            if message["type"] == "http.response.start":
                self.statuses.append(message["status"])
            self.said += message.get("body", b"")
            await send(message)

        await self._app(scope, receive, tap)


def warmed(**options: object) -> tuple[Frontend, Listening]:
    """Return the real frontend after the warm-up, and the application that answered the dummy requests."""
    settings, sent, apps = Settings.load(dict(options)), [], []
    frontend = boot_front(settings, sent.append)

    def build(service: Service) -> ASGIApp:
        apps.append(Listening(service))
        return apps[0]

    async def run() -> None:
        loop = asyncio.get_running_loop()
        await asyncio.to_thread(warm_up_server, settings, build, loop, frontend)

    asyncio.run(run())
    assert not sent, "the real engine was asked"
    return frontend, apps[0]


def test_every_dummy_request_is_answered_and_nothing_stays() -> None:
    frontend, app = warmed(api_key=["secret"])
    assert app.statuses == [200] * FRONTEND_ROUNDS * len(FRONTEND_REQUESTS)
    assert b"data: [DONE]" in app.said and b'"finish_reason":"length"' in app.said
    assert not frontend.busy and not app.service.busy
    assert (frontend.metrics.waiting, sum(frontend.metrics.finished.values())) == (0, 0)


def test_ids_and_seeds_of_the_real_frontend_are_untouched() -> None:
    frontend, _ = warmed(seed=3)
    fresh = boot_front(Settings.load({"seed": 3}), lambda message: None)
    made = []
    for each in (frontend, fresh):
        each.handle(Ready(64, 2, 64, 0.0))
        made.append(each.input.fan_out(each.prepare([0], each.input.params())))
    assert made[0] == made[1] and made[0][0].id == 1


def test_without_a_tokenizer_requests_with_text_are_left_out() -> None:
    _, app = warmed(skip_tokenizer_init=True)
    assert app.statuses.count(200) == FRONTEND_ROUNDS * sum(not request.text for request in FRONTEND_REQUESTS)


def run_supervisor(warm_up) -> Service:
    """Run the supervisor until the scripted engine is ready."""

    async def run() -> Service:
        ready = asyncio.Event()
        replicas = Replicas(Settings.load({}), SCRIPTED)
        service = Service(Settings.load({}), replicas.send)
        supervisor = Supervisor(service, replicas, on_message=lambda _: ready.set(), on_dead=ready.set)
        task = asyncio.create_task(supervisor.run(warm_up))
        await asyncio.wait_for(ready.wait(), 60)
        task.cancel()
        await supervisor.stop(now=True)
        return service

    return asyncio.run(run())


def test_the_server_warms_up_beside_its_event_loop() -> None:
    threads = []
    service = run_supervisor(lambda *_: threads.append(threading.current_thread()))
    assert service.max_model_len and service.dead is None
    assert len(threads) == 1 and threads[0] is not threading.main_thread()


def test_a_warm_up_that_fails_does_not_stop_the_server(caplog: pytest.LogCaptureFixture) -> None:
    def broken(*_: object) -> None:
        raise ValueError("broken")

    assert run_supervisor(broken).dead is None
    assert "The frontend warm-up failed" in caplog.text


@pytest.mark.parametrize("skip", [False, True])
def test_an_llm_warms_its_frontend_up(monkeypatch: pytest.MonkeyPatch, skip: bool) -> None:
    prepared = []
    prepare = InputProcessor.prepare
    monkeypatch.setattr(
        InputProcessor, "prepare", lambda self, *args, **how: prepared.append(self) or prepare(self, *args, **how)
    )
    llm = LLM(max_num_seqs=2, max_num_batched_tokens=16, max_model_len=64, skip_warmup=skip)
    assert len(prepared) == (0 if skip else len(FRONTEND_REQUESTS) * FRONTEND_ROUNDS)
    assert llm.frontend.input not in prepared
    assert llm.frontend.metrics.prompt_tokens == 0 and llm.loop.scheduler.stats().steps == 0
