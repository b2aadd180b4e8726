"""A faulty server that does all its work in the event loop.

It serves the control of the /health test. The server's process imports this module as the module of the scripted
engine, and the engine runs beside it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from starlette.requests import Request

from preheat.frontend.encoding import TextBound
from preheat.server.http import turns
from preheat.server.openai import schema
from preheat.settings import Settings
from tests.api import scripted


async def _in_loop(_: Request, work: Callable[[], Any], __: object = None) -> Any:
    return work()


def run_engine(settings: Settings, address: str) -> None:
    scripted.run_engine(settings, address)


turns._in_thread = _in_loop
schema.check_size = lambda *_, **__: None
TextBound.check = TextBound._measure = lambda *_: None  # type: ignore[method-assign]
