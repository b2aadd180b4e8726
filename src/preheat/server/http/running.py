"""Running requests of a client, cancelled at once when the client disconnects."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from types import TracebackType
from typing import Self

from starlette.types import Receive

from preheat.frontend.frontend import Frontend
from preheat.frontend.request_state import RequestState
from preheat.server.http.turns import in_slices


class RunningRequests:
    """A context for a client's requests. They end on exit or when the client disconnects (``gone``).

    After the exit nothing is left of them.
    """

    def __init__(self, frontend: Frontend, states: Sequence[RequestState], receive: Receive) -> None:
        self._frontend, self._states = frontend, states
        self._changed = asyncio.Event()
        self._receive = receive
        self.gone = False

    async def __aenter__(self) -> Self:
        for state in self._states:
            state.on_change = self._changed.set
        try:
            await in_slices(self._frontend.starting(self._states))
        except BaseException:
            await self._abort()
            raise
        self._listener = asyncio.create_task(self._listen())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._listener.cancel()
        await self._abort()
        await in_slices(step for state in self._states for step in state.forgetting())

    @property
    def finished(self) -> bool:
        return all(state.finished for state in self._states)

    async def change(self) -> None:
        """Wait until a request changes or the client disconnects."""
        await self._changed.wait()
        self._changed.clear()

    def raise_error(self) -> None:
        """Raise the error of the first request that failed."""
        for state in self._states:
            if state.error is not None:
                raise state.error

    async def _listen(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self.gone = True
        self._changed.set()

    async def _abort(self) -> None:
        """End the requests that run, in slices of time; if that is cancelled, the rest at once."""
        running = (state for state in self._states if not state.finished)
        try:
            await in_slices(map(self._frontend.abort, running))
        except BaseException:
            for state in running:
                self._frontend.abort(state)
            raise
