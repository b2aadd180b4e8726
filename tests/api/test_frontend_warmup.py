"""The rehearsal goes through everything that serves, succeeds, and leaves nothing behind."""

from __future__ import annotations

import asyncio
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from preheat.server.app import build_app
from preheat.server.frontend_warmup import BODIES, ROUNDS, rehearse
from preheat.server.service import Service
from preheat.settings import Settings
from preheat.startup import boot_front
from tests.api.conftest import SCRIPTED


async def answers(**options: Any) -> tuple[Service, list[int], bytes]:
    """The service, the status of every answer, and all that was said."""
    service = Service(Settings.load(options), SCRIPTED)
    statuses: list[int] = []
    said: list[bytes] = []

    def listening(stage: Service) -> ASGIApp:
        app = build_app(stage)

        async def run(scope: Scope, receive: Receive, send: Send) -> None:
            async def tap(message: Message) -> None:
                if message["type"] == "http.response.start":
                    statuses.append(message["status"])
                said.append(message.get("body", b""))
                await send(message)

            await app(scope, receive, tap)

        return run

    try:
        door, service._template = boot_front(service.settings, lambda message: None, service.metrics)
        service.take_door(door)
        await rehearse(service, listening)
    finally:
        await service.stop(now=True)
    return service, statuses, b"".join(said)


def test_every_body_is_answered_and_nothing_stays() -> None:
    service, statuses, said = asyncio.run(answers(api_key=["secret"]))
    assert statuses == [200] * ROUNDS * len(BODIES)
    assert b"data: [DONE]" in said
    assert not service.busy
    assert sum(service.metrics.finished.values()) == 0


def test_a_rehearsal_that_fails_stops_nobody(caplog) -> None:
    def broken(stage: Service) -> ASGIApp:
        raise_it: Any = None
        return raise_it

    async def run() -> None:
        service = Service(Settings.load({}), SCRIPTED)
        try:
            door, _ = boot_front(service.settings, lambda message: None, service.metrics)
            service.take_door(door)
            await rehearse(service, broken)
        finally:
            await service.stop(now=True)

    asyncio.run(run())
    assert "The rehearsal failed" in caplog.text
