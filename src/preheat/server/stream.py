"""How answers are sent, as one JSON body or as server-sent events; completions and chat completions extend it."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from msgspec import Struct
from starlette.requests import Request
from starlette.types import Receive, Scope, Send

from preheat.frontend.request_state import Choice, RequestState
from preheat.server.answers import PromptTokensDetails, Usage, encode
from preheat.server.errors import error_body
from preheat.server.middleware import request_id
from preheat.server.running import RunningRequests
from preheat.server.schema import Sampling
from preheat.server.service import Service

_EVENTS = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]


def event_of(message: Struct | dict[str, Any]) -> bytes:
    """One server-sent event."""
    return b"data: %b\n\n" % encode(message)


class Writer(ABC):
    """The ASGI response to one body: runs ``states``, sends the whole answer or a stream of events.

    ``prefix`` begins the answer's id; ``event_object`` is the ``object`` field of events.
    """

    prefix: str
    event_object: str

    def __init__(self, request: Request, body: Sampling, states: Sequence[RequestState]) -> None:
        service: Service = request.app.state.service
        self._frontend, self._states = service.frontend, states
        self._return_token_ids, self._stream = body.return_token_ids, bool(body.stream)
        for state in states:
            state.stream = self._stream
        self._fields: dict[str, Any] = {
            "id": f"{self.prefix}-{request_id(request)}",
            "created": int(time.time()),
            "model": body.model or service.names[0],
        }
        self._event_fields = {**self._fields, "object": self.event_object}
        self._usage = bool(body.stream_options and body.stream_options.include_usage)
        self._head = b'data: %b,"choices":[' % encode(self._event_fields)[:-1]  # the same in each event
        self._tail = b'],"usage":null}\n\n' if self._usage else b"]}\n\n"

    @abstractmethod
    def whole(self) -> Struct:
        """The whole answer."""

    @abstractmethod
    def event(self, first: int, choice: Choice) -> bytes:
        """The events for what is new of ``choice``; its prompt's choices begin at index ``first``."""

    def event_with(self, choice: Struct) -> bytes:
        """One event with this choice."""
        return b"%b%b%b" % (self._head, encode(choice), self._tail)

    def usage(self) -> Usage:
        """Tokens of all prompts and of all their choices; a prompt counts once."""
        prompt = sum(len(state.prompt_ids) for state in self._states)
        completion = sum(state.completion_tokens for state in self._states)
        cached = sum(state.cached_tokens for state in self._states)
        return Usage(prompt, completion, prompt + completion, PromptTokensDetails(cached))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with RunningRequests(self._frontend, self._states, receive) as running:
            await (self._send_events(running, send) if self._stream else self._send_whole(running, send))

    async def _send_whole(self, running: RunningRequests, send: Send) -> None:
        while not running.finished:
            await running.change()
        if running.gone:
            return
        running.raise_error()
        body = encode(self.whole())
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    async def _send_events(self, running: RunningRequests, send: Send) -> None:
        """A step costs one wake-up and one write.

        The status line is sent with the first event, so that a request that fails before it gets its own status. A
        later failure is an event.
        """
        await running.change()
        running.raise_error()
        if running.gone:
            return
        await send({"type": "http.response.start", "status": 200, "headers": _EVENTS})
        pending = [(t * state.params.n, choice) for t, state in enumerate(self._states) for choice in state.choices]
        while True:
            body = b"".join([self.event(first, choice) for first, choice in pending if choice.has_delta])
            pending = [(first, choice) for first, choice in pending if not (choice.sent_end or choice.state.error)]
            if not pending or running.gone:
                break
            if body:
                await send({"type": "http.response.body", "body": body, "more_body": True})
            await running.change()
        error = next((state.error for state in self._states if state.error), None)
        if error is not None:
            body += event_of(error_body(error))
        elif self._usage:
            body += event_of({**self._event_fields, "choices": [], "usage": self.usage()})
        await send({"type": "http.response.body", "body": body + b"data: [DONE]\n\n"})
