"""How answers leave: one JSON body at the end, or server-sent events as the text grows.

Both watch the client: when it goes away, its sequences are cancelled at once. Events are bytes that were encoded
once; a step costs a stream one wake-up and one write.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from types import TracebackType
from typing import Self

import msgspec
from starlette.types import Receive, Scope, Send

from preheat.errors import PreheatError
from preheat.frontend.frontdoor import FrontDoor
from preheat.frontend.request_state import Choice, Ticket
from preheat.server.answers import PromptTokensDetails, Usage
from preheat.server.schema import ErrorBody, ErrorResponse

encode = msgspec.json.Encoder().encode

_EVENTS = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]
DONE = b"data: [DONE]\n\n"


class Watch:
    """Starts tickets, tells when something changed, and ends them when the client is ``gone`` or the block is left."""

    def __init__(self, door: FrontDoor, tickets: Sequence[Ticket], receive: Receive) -> None:
        self._door, self._tickets = door, tickets
        self._changed = asyncio.Event()
        self._receive = receive
        self.gone = False

    async def __aenter__(self) -> Self:
        for ticket in self._tickets:
            ticket.on_change = self._changed.set
        self._door.start(self._tickets)
        self._listener = asyncio.create_task(self._listen())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._listener.cancel()
        self._abort()

    @property
    def finished(self) -> bool:
        return all(ticket.finished for ticket in self._tickets)

    async def change(self) -> None:
        """Wait until a ticket changed or the client left."""
        await self._changed.wait()
        self._changed.clear()

    def raise_error(self) -> None:
        """Raise the error of the first ticket that failed."""
        for ticket in self._tickets:
            if ticket.error is not None:
                raise ticket.error

    async def _listen(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self.gone = True
        self._abort()
        self._changed.set()

    def _abort(self) -> None:
        for ticket in self._tickets:
            if not ticket.finished:
                self._door.abort(ticket)


class Answer:
    """An ASGI response: what ``body`` gives, as JSON, once all tickets are finished."""

    def __init__(self, door: FrontDoor, tickets: Sequence[Ticket], body: Callable[[], msgspec.Struct]) -> None:
        self._door, self._tickets, self._body = door, tickets, body

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with Watch(self._door, self._tickets, receive) as watch:
            while not watch.finished:
                await watch.change()
            if watch.gone:
                return
            watch.raise_error()
            body = encode(self._body())
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body})


class Events:
    """An ASGI response: ``event`` gives the bytes for a choice with news, ``last`` those after all; [DONE] ends it.

    ``event`` also gets the index of the first choice of the choice's prompt.

    The status line waits for the first news, so that a request which fails before has its own status. A failure after
    that is an event.
    """

    def __init__(
        self,
        door: FrontDoor,
        tickets: Sequence[Ticket],
        event: Callable[[int, Choice], bytes],
        last: Callable[[], bytes],
    ) -> None:
        self._door, self._tickets, self._event, self._last = door, tickets, event, last
        for ticket in tickets:
            ticket.stream = True

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with Watch(self._door, self._tickets, receive) as watch:
            await watch.change()
            watch.raise_error()
            if watch.gone:
                return
            await send({"type": "http.response.start", "status": 200, "headers": _EVENTS})
            pending = [
                (t * ticket.params.n, choice) for t, ticket in enumerate(self._tickets) for choice in ticket.choices
            ]
            while True:
                body = b"".join([self._event(first, choice) for first, choice in pending if choice.has_news])
                pending = [(first, choice) for first, choice in pending if not (choice.told_end or choice.ticket.error)]
                if not pending or watch.gone:
                    break
                if body:
                    await send({"type": "http.response.body", "body": body, "more_body": True})
                await watch.change()
            error = next((ticket.error for ticket in self._tickets if ticket.error), None)
            body += self._last() if error is None else event_of(error_body(error))
            await send({"type": "http.response.body", "body": body + DONE})


def event_of(message: msgspec.Struct) -> bytes:
    """One server-sent event."""
    return b"data: %b\n\n" % encode(message)


def error_body(error: PreheatError) -> ErrorResponse:
    """``error`` in OpenAI's shape."""
    return ErrorResponse(ErrorBody(error.message, error.kind, error.param, error.code))


def usage_of(tickets: Iterable[Ticket]) -> Usage:
    """Tokens of all prompts and of all their choices."""
    tickets = list(tickets)
    prompt = sum(len(ticket.prompt_ids) for ticket in tickets)
    completion = sum(ticket.completion_tokens for ticket in tickets)
    cached = sum(ticket.cached_tokens for ticket in tickets)
    return Usage(prompt, completion, prompt + completion, PromptTokensDetails(cached))
