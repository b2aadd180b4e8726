"""Answers that are made while their clients do not wait (``background``)."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple, NoReturn

from preheat.errors import PreheatError
from preheat.frontend.frontend import Frontend
from preheat.frontend.request_state import RequestState
from preheat.server.http.running import RunningRequests

logger = logging.getLogger(__name__)


class _Running(NamedTuple):
    frontend: Frontend
    state: RequestState
    task: asyncio.Task[None]


class Background:
    """Requests that run in the background, by the ids of their answers.

    Their number is bounded as for clients that wait.
    """

    def __init__(self) -> None:
        self._running: dict[str, _Running] = {}

    async def start(
        self,
        id: str,
        frontend: Frontend,
        state: RequestState,
        *,
        begun: Callable[[], None],
        ended: Callable[[PreheatError | None], Awaitable[None]],
    ) -> None:
        """Run ``state``, and return once it has ``begun``. Raises the request's error if it cannot begin.

        ``ended`` is called at its end.
        """
        started: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        async def run() -> None:
            try:
                async with RunningRequests(frontend, [state], _connected) as running:
                    begun()
                    started.set_result(None)
                    while not running.finished:
                        await running.change()
                    await ended(state.error)
            except BaseException as error:
                if started.done():
                    logger.exception("An answer in the background was lost")
                    raise
                started.set_exception(error)
            finally:
                self._running.pop(id, None)

        self._running[id] = _Running(frontend, state, asyncio.create_task(run()))
        await started

    async def cancel(self, id: str) -> None:
        """End the request of this id, if it runs, and wait for its end."""
        if (running := self._running.get(id)) is not None:
            running.frontend.abort(running.state)
            await asyncio.wait([running.task])


async def _connected() -> NoReturn:
    """Wait forever, in place of a connection that is never lost."""
    future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
    await future
    raise AssertionError
