"""How answers are sent: one JSON body at the end, or server-sent events as the text grows.

Both watch the client: when it disconnects, its sequences are cancelled at once. A step costs a stream one wake-up and
one write.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from types import TracebackType
from typing import Self

import msgspec
from starlette.types import Receive, Scope, Send

from preheat.frontend.frontend import Frontend
from preheat.frontend.request_state import Choice, RequestState
from preheat.server.answers import PromptTokensDetails, Usage, encode
from preheat.server.errors import error_body

_EVENTS = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]
DONE = b"data: [DONE]\n\n"


class RunningRequests:
    """A context in which a client's requests run: started on entry, ended on exit or when the client is ``gone``."""

    def __init__(self, frontend: Frontend, states: Sequence[RequestState], receive: Receive) -> None:
        self._frontend, self._states = frontend, states
        self._changed = asyncio.Event()
        self._receive = receive
        self.gone = False

    async def __aenter__(self) -> Self:
        for state in self._states:
            state.on_change = self._changed.set
        self._frontend.start(self._states)
        self._listener = asyncio.create_task(self._listen())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._listener.cancel()
        self._abort()

    @property
    def finished(self) -> bool:
        return all(state.finished for state in self._states)

    async def change(self) -> None:
        """Wait until a request changed or the client left."""
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
        self._abort()
        self._changed.set()

    def _abort(self) -> None:
        for state in self._states:
            if not state.finished:
                self._frontend.abort(state)


class FullResponse:
    """An ASGI response: what ``body`` gives, as JSON, once all requests are finished."""

    def __init__(self, frontend: Frontend, states: Sequence[RequestState], body: Callable[[], msgspec.Struct]) -> None:
        self._frontend, self._states, self._body = frontend, states, body

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with RunningRequests(self._frontend, self._states, receive) as watch:
            while not watch.finished:
                await watch.change()
            if watch.gone:
                return
            watch.raise_error()
            body = encode(self._body())
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body})


class EventStream:
    """An ASGI response: ``event`` gives the bytes for what is new of a choice, ``last`` the last ones, before [DONE].

    ``event`` also gets the index of the first choice of the choice's prompt.

    The status line waits until there is something to send, so that a request which fails before that has its own
    status. A later failure is an event.
    """

    def __init__(
        self,
        frontend: Frontend,
        states: Sequence[RequestState],
        event: Callable[[int, Choice], bytes],
        last: Callable[[], bytes],
    ) -> None:
        self._frontend, self._states, self._event, self._last = frontend, states, event, last
        for state in states:
            state.stream = True

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with RunningRequests(self._frontend, self._states, receive) as watch:
            await watch.change()
            watch.raise_error()
            if watch.gone:
                return
            await send({"type": "http.response.start", "status": 200, "headers": _EVENTS})
            pending = [(t * state.params.n, choice) for t, state in enumerate(self._states) for choice in state.choices]
            while True:
                body = b"".join([self._event(first, choice) for first, choice in pending if choice.has_delta])
                pending = [(first, choice) for first, choice in pending if not (choice.told_end or choice.state.error)]
                if not pending or watch.gone:
                    break
                if body:
                    await send({"type": "http.response.body", "body": body, "more_body": True})
                await watch.change()
            error = next((state.error for state in self._states if state.error), None)
            body += self._last() if error is None else event_of(error_body(error))
            await send({"type": "http.response.body", "body": body + DONE})


def event_of(message: msgspec.Struct) -> bytes:
    """One server-sent event."""
    return b"data: %b\n\n" % encode(message)


def usage_of(states: Iterable[RequestState]) -> Usage:
    """Tokens of all prompts and of all their choices."""
    states = list(states)
    prompt = sum(len(state.prompt_ids) for state in states)
    completion = sum(state.completion_tokens for state in states)
    cached = sum(state.cached_tokens for state in states)
    return Usage(prompt, completion, prompt + completion, PromptTokensDetails(cached))
