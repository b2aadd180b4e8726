"""Writers of answers, as one JSON body or as server-sent events.

Each generating endpoint extends a writer.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

from msgspec import Struct
from starlette.requests import Request
from starlette.types import Receive, Scope, Send

from preheat.errors import PreheatError
from preheat.frontend.answer_format import AnswerFormat
from preheat.frontend.request_state import Choice, OutputDelta, RequestState
from preheat.server.http.errors import error_body
from preheat.server.http.field_names import names_of, respelled
from preheat.server.http.middleware import request_id
from preheat.server.http.running import RunningRequests
from preheat.server.http.service import Service
from preheat.server.http.turns import INLINE_VALUES, in_slices, slices
from preheat.server.openai.answers import CompletionTokensDetails, PromptTokensDetails, Usage, encode
from preheat.server.openai.kv_transfer import offered
from preheat.server.openai.params import TokenIds
from preheat.server.openai.schema import Sampling, StreamOptions

FLOAT_BYTES = 4

CHOICES_AT_ONCE = 512
"""Most choices of a request that are looked at in one step."""

_Numbered = tuple[int, Choice]
"""A choice, and the index of the first choice of its prompt."""

PIECE_BYTES = 1 << 18
"""Most bytes that are sent at once. Each piece waits for room behind the ones before it."""


async def send_pieces(body: bytes, send: Send, *, last: bool) -> None:
    """Send ``body``, in pieces; its ``last`` one ends the answer."""
    for first in range(0, max(len(body), last), PIECE_BYTES):
        piece = body if len(body) <= PIECE_BYTES else body[first : first + PIECE_BYTES]
        more = not last or first + PIECE_BYTES < len(body)
        await send({"type": "http.response.body", "body": piece, "more_body": more})


async def _chosen(pending: list[_Numbered], wanted: Callable[[Choice], object]) -> list[_Numbered]:
    """Return the ``wanted`` choices among ``pending``; many are looked at in slices of time."""
    parts = (pending[first : first + CHOICES_AT_ONCE] for first in range(0, len(pending), CHOICES_AT_ONCE))
    steps = ([each for each in part if wanted(each[1])] for part in parts)
    found = await in_slices(steps) if len(pending) > CHOICES_AT_ONCE else steps
    return [each for part in found for each in part]


def tokens_at_once(alternatives: int) -> int:
    """Return the most tokens of an event, each with so many ``alternatives``: one at least, or no stream would end."""
    return max(1, INLINE_VALUES // (1 + alternatives))


def event_of(message: Struct | dict[str, Any]) -> bytes:
    """Encode one server-sent event."""
    return b"data: %b\n\n" % encode(message)


class Long(NamedTuple):
    """An event of ``values`` values; ``encoded`` returns its bytes, and reads nothing that changes."""

    values: int
    encoded: Callable[[], bytes]


class WholeWriter(ABC):
    """The ASGI response to one body: runs ``states`` and sends the answer."""

    def __init__(self, request: Request, states: Sequence[RequestState]) -> None:
        self._service: Service = request.app.state.service
        self._frontend, self._states, self._names_sent = self._service.frontend, states, names_of(request.scope)

    @property
    def states(self) -> Sequence[RequestState]:
        """The requests that it runs."""
        return self._states

    def told(self, error: PreheatError) -> PreheatError:
        """Return ``error`` with the names of fields that the client sent."""
        return respelled(error, self._names_sent)

    @abstractmethod
    def whole(self) -> Struct | dict[str, Any] | list[Any]:
        """Return the whole answer."""

    def values(self, state: RequestState) -> int:
        """Return the number of values in the answer.

        Values are tokens, their alternatives, and numbers of an embedding.
        """
        generated = sum(len(choice.token_ids) for choice in state.choices) * (1 + (state.params.logprobs or 0))
        prompt = len(state.prompt_logprobs) * (1 + (state.params.prompt_logprobs or 0))
        return generated + prompt + sum(len(choice.pooled) for choice in state.choices) // FLOAT_BYTES

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._service.load += 1
        try:
            async with RunningRequests(self._frontend, self._states, receive) as running:
                await self._send(running, send)
        finally:
            self._service.load -= 1

    async def _send(self, running: RunningRequests, send: Send) -> None:
        while not (running.finished or running.gone):
            await running.change()
        if running.gone:
            return
        running.raise_error()
        values = sum(map(self.values, self._states))
        body = await self._service.turns.answer(values, lambda: encode(self.whole()))
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send_pieces(body, send, last=True)


class Writer(WholeWriter):
    """Writer of a whole answer, or of a ``stream`` of events.

    An event has ``interval`` tokens.

    The first and the last event may have another number of tokens. ``media`` is the media type of the stream, ``pause``
    are the bytes that a client gets and skips while no engine runs.
    """

    media = "text/event-stream; charset=utf-8"
    pause = b": an engine starts again, and this stream goes on\n\n"  # a comment, which clients skip

    def __init__(self, request: Request, states: Sequence[RequestState], stream: bool) -> None:
        super().__init__(request, states)
        self._stream, self.interval = stream, self._service.settings.stream_interval
        alternatives = max((state.params.logprobs or 0 for state in states), default=0)
        self._most = tokens_at_once(alternatives) if stream else None
        for state in states:
            state.stream = stream

    def take(self, choice: Choice) -> OutputDelta:
        """Return the next part of ``choice``: a bounded one in a stream, even if a slow client has let much pile up."""
        return choice.take_delta(self._most)

    async def read_prompt(self, state: RequestState) -> None:
        """Do the work that grows with a prompt's length.

        Called before the first event of its choices.
        """

    def opening(self) -> bytes:
        """Return the events before a choice's first event."""
        return b""

    @abstractmethod
    def event(self, first: int, choice: Choice) -> bytes | Long:
        """Return the events for the new part of ``choice``.

        The choices of its prompt begin at index ``first``. Events that show a whole prompt may be long.
        """

    @abstractmethod
    def closing(self, error: PreheatError | None) -> bytes:
        """Return the events at the end of a stream, perhaps ended by ``error``."""

    async def _send(self, running: RunningRequests, send: Send) -> None:
        await (self._send_events(running, send) if self._stream else super()._send(running, send))

    async def _send_events(self, running: RunningRequests, send: Send) -> None:
        """Send the events; a step costs one wake-up and one write.

        The status line is sent with the first event, so that an earlier failure gets its own status. A later failure is
        an event.
        """
        await running.change()
        running.raise_error()
        if running.gone:
            return
        headers = [(b"content-type", self.media.encode()), (b"cache-control", b"no-cache")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        pending = [(t * state.params.n, choice) for t, state in enumerate(self._states) for choice in state.choices]
        body, opened = self.opening(), set[int]()
        while True:
            due = await _chosen(pending, self._is_due)
            for first, choice in due:
                if first not in opened:
                    opened.add(first)
                    await self.read_prompt(choice.state)
            body = await self._write(body, due, send)
            pending = await _chosen(pending, lambda choice: not (choice.sent_end or choice.state.error))
            if not pending or running.gone:
                break
            if not body and self._service.waiting:
                body = self.pause
            await send_pieces(body, send, last=False)
            body = b""
            if not await _chosen([each for each in due if not each[1].sent_end], self._is_due):
                await running.change()
        error = next((self.told(state.error) for state in self._states if state.error), None)
        await send_pieces(body + self.closing(error), send, last=True)

    def _is_due(self, choice: Choice) -> bool:
        return choice.has_delta and choice.is_due(self.interval)

    async def _write(self, body: bytes, due: Sequence[tuple[int, Choice]], send: Send) -> bytes:
        """Add the events of ``due`` choices to ``body``, in slices of time; return the rest that was not sent.

        A long body is sent at once: a prompt that many choices repeat would else be held and copied many times.
        """
        events, size = [body], len(body)
        async for made in slices(self.event(first, choice) for first, choice in due if choice.has_delta):
            for each in made:
                event = each if isinstance(each, bytes) else await self._service.turns.answer(*each)
                if size + len(event) > PIECE_BYTES:
                    await send_pieces(b"".join(events), send, last=False)
                    events, size = [], 0
                if len(event) > PIECE_BYTES:
                    await send_pieces(event, send, last=False)
                else:
                    events.append(event)
                    size += len(event)
        return b"".join(events)


class CompletionsWriter(Writer):
    """Common base of completions and chat completions.

    ``prefix`` begins the answer's id; ``event_object`` is the ``object`` field of events. ``form`` is the format of the
    text, if it is not all content.
    """

    prefix: str
    event_object: str

    def __init__(
        self,
        request: Request,
        body: Sampling,
        states: Sequence[RequestState],
        form: AnswerFormat | None = None,
    ) -> None:
        super().__init__(request, states, bool(body.stream))
        self._return_token_ids, self._format = body.return_token_ids, form
        self.transfer = partial(offered, self._frontend, body, states)
        self._fields: dict[str, Any] = {
            "id": f"{self.prefix}-{request_id(request)}",
            "created": int(time.time()),
            "model": body.model or self._service.names[0],
        }
        self._event_fields = {**self._fields, "object": self.event_object}
        options, settings = body.stream_options or StreamOptions(include_usage=False), self._service.settings
        self._usage = options.include_usage is not False or settings.enable_force_include_usage
        self._continuous = self._usage and bool(options.continuous_usage_stats)
        self.interval = body.stream_interval or self.interval
        by_id = body.return_tokens_as_token_ids or settings.return_tokens_as_token_ids
        self.names = TokenIds() if by_id else self._frontend.tokenizer
        self._head = b'data: %b,"choices":[' % encode(self._event_fields)[:-1]  # the same in each event
        self._tail = b'],"usage":null}\n\n' if self._usage else b"]}\n\n"

    def closing(self, error: PreheatError | None) -> bytes:
        last = b""
        if error is not None:
            last = event_of(error_body(error))
        elif self._usage:
            last = event_of({**self._event_fields, "choices": [], "usage": self.usage()})
        return last + b"data: [DONE]\n\n"

    def event_with(self, choice: Choice, answer: Struct) -> bytes:
        """Encode one event with ``answer``, the new part of ``choice``."""
        return self._head + encode(answer) + self.tail(choice)

    def tail(self, choice: Choice) -> bytes:
        """Return the end of an event of ``choice``, with the usage of its stream so far if it is asked for."""
        if not self._continuous:
            return self._tail
        return b'],"usage":%b}\n\n' % encode(self.usage_of(choice, min(self.completion_tokens(choice), choice.sent)))

    def completion_tokens(self, choice: Choice) -> int:
        """Return the number of tokens of ``choice``, for the usage."""
        return len(choice.token_ids)

    def usage(self) -> Usage:
        """Return the usage of all prompts and all their choices; a prompt counts once."""
        choices = [choice for state in self._states for choice in state.choices]
        prompt = sum(len(state.prompt_ids) for state in self._states)
        cached = sum(state.cached_tokens for state in self._states)
        return self._usage_of(prompt, cached, sum(map(self.completion_tokens, choices)), choices)

    def usage_of(self, choice: Choice, completion: int) -> Usage:
        """Return the usage of one choice and its prompt, as in vLLM's events.

        ``completion`` is the number of tokens so far.
        """
        state = choice.state
        return self._usage_of(len(state.prompt_ids), state.cached_tokens, completion, [choice])

    def _usage_of(self, prompt: int, cached: int, completion: int, choices: Sequence[Choice]) -> Usage:
        usage = Usage(prompt, completion, prompt + completion, PromptTokensDetails(cached))
        if self._format is not None and self._format.reasoning is not None:
            usage.completion_tokens_details = CompletionTokensDetails(sum(map(self.reasoning_tokens, choices)))
        if choices and all(choice.state.answered_from_cache for choice in choices):
            usage.cached_answer = True
        return usage

    def reasoning_tokens(self, choice: Choice) -> int:
        """Return the number of reasoning tokens of ``choice``."""
        return 0
