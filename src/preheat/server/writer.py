"""What the answers of completions and chat completions have in common: their head, their usage, how they are sent."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from msgspec import Struct
from starlette.requests import Request
from starlette.types import ASGIApp

from preheat.frontend.request_state import Choice, RequestState
from preheat.server.answers import PromptTokensDetails, Usage, encode
from preheat.server.middleware import request_id
from preheat.server.schema import Sampling
from preheat.server.service import Service
from preheat.server.stream import EventStream, FullResponse, event_of


class Writer(ABC):
    """Writes the answer to one body, whole or event by event. ``prefix`` begins its id; ``event_object`` its type."""

    prefix: str
    event_object: str

    def __init__(self, request: Request, body: Sampling, states: Sequence[RequestState]) -> None:
        service: Service = request.app.state.service
        self._frontend, self._states = service.frontend, states
        self._stream, self._return_token_ids = body.stream, body.return_token_ids
        self._usage = bool(body.stream_options and body.stream_options.include_usage)
        self._fields: dict[str, Any] = {
            "id": f"{self.prefix}-{request_id(request)}",
            "created": int(time.time()),
            "model": body.model or service.names[0],
        }
        self._event_fields = {**self._fields, "object": self.event_object}
        self._head = b'data: %b,"choices":[' % encode(self._event_fields)[:-1]  # the same in each event
        self._tail = b'],"usage":null}\n\n' if self._usage else b"]}\n\n"

    def response(self) -> ASGIApp:
        """Runs the requests and sends the answer in the form that the body asks for."""
        if self._stream:
            return EventStream(self._frontend, self._states, self.event, self.last_event)
        return FullResponse(self._frontend, self._states, self.whole)

    @abstractmethod
    def whole(self) -> Struct:
        """The whole answer."""

    @abstractmethod
    def event(self, first: int, choice: Choice) -> bytes:
        """The events for what is new of ``choice``; its prompt's choices begin at index ``first``."""

    def event_with(self, choice: Struct) -> bytes:
        """One event with this choice."""
        return b"%b%b%b" % (self._head, encode(choice), self._tail)

    def last_event(self) -> bytes:
        """The usage, where it is asked for."""
        return event_of({**self._event_fields, "choices": [], "usage": self.usage()}) if self._usage else b""

    def usage(self) -> Usage:
        """Tokens of all prompts and of all their choices."""
        prompt = sum(len(state.prompt_ids) for state in self._states)
        completion = sum(state.completion_tokens for state in self._states)
        cached = sum(state.cached_tokens for state in self._states)
        return Usage(prompt, completion, prompt + completion, PromptTokensDetails(cached))
