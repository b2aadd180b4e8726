"""A failure outside of requests ends the server, since no other task listens to the engine."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from preheat.errors import ModelError
from preheat.server.http.service import Service
from preheat.server.replicas import supervisor
from preheat.server.replicas.supervisor import Supervisor
from preheat.settings import Settings


@pytest.mark.parametrize(
    ("error", "said"),
    [(ModelError("no such model"), "no such model"), (RuntimeError("a hole"), "RuntimeError: a hole")],
)
def test_an_error_of_the_boot_ends_the_server(monkeypatch: pytest.MonkeyPatch, error: Exception, said: str) -> None:
    def fails(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr(supervisor, "boot_front", fails)
    service, ended = Service(Settings(), lambda message: None), list[bool]()
    replicas: Any = SimpleNamespace(members=[], takers=[], joined=False, send=None)
    watcher = Supervisor(service, replicas, on_message=print, on_dead=lambda: ended.append(True))
    asyncio.run(watcher.run(None))
    assert ended and service.dead is not None and said in service.dead
    assert watcher.boot_error is not None
