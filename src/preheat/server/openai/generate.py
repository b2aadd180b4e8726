"""POST /inference/v1/generate: tokens from tokens, without text.

A body in JSON has vLLM's form. A body of a front (:mod:`preheat.server.replicas.relay_wire`) is an engine's request as
the front has prepared it; its answer has the engine's results, unread.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import AsyncGenerator, Sequence
from functools import partial
from typing import Annotated, Any, ClassVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from preheat.core import SAMPLING_FIELDS, SamplingParams
from preheat.errors import InvalidRequest, OtherContract, PreheatError
from preheat.frontend.request_state import Choice, RequestState
from preheat.server.http.body import interpreted, read_body, read_request
from preheat.server.http.decoding import with_integers
from preheat.server.http.errors import error_body
from preheat.server.http.middleware import request_id
from preheat.server.http.running import RunningRequests
from preheat.server.http.service import Service
from preheat.server.http.stream import Writer, event_of
from preheat.server.http.turns import in_turn
from preheat.server.openai import kv_transfer
from preheat.server.openai.answers import PromptTokensDetails, Usage
from preheat.server.openai.params import TokenIds, chat_logprobs, prepared, prompt_logprobs_of
from preheat.server.openai.schema import ForModel, KvTransferParams, Spelled, StreamOptions, only
from preheat.server.replicas.relay_wire import BEAT_SECONDS, LOST, MEDIA, Hello, Sent, frame, framed
from preheat.utils.json_size import MOST_IDS

START = secrets.token_hex(8)
"""A name for this start of the process."""

_NAMES = frozenset(SAMPLING_FIELDS)
_sent = msgspec.msgpack.Decoder(Sent)


class GenerateRequest(ForModel, kw_only=True):
    """POST /inference/v1/generate, as vLLM's clients send it."""

    most_values: ClassVar[int] = MOST_IDS
    spelled: ClassVar[Spelled] = {
        **{name: (f"sampling_params.{name}",) for name in SAMPLING_FIELDS}, "prompt": ("token_ids",)
    }  # fmt: skip

    token_ids: list[int]
    sampling_params: dict[str, Any] = {}
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    cache_salt: str | None = None
    priority: int | None = None
    features: Annotated[Any, only(None)] = None
    kv_transfer_params: KvTransferParams | None = None


class GeneratedChoice(msgspec.Struct):
    """A choice: the tokens, and their log-probabilities if they were asked for."""

    index: int
    token_ids: list[int]
    finish_reason: str | None = None
    logprobs: Any = None


class Generated(msgspec.Struct, omit_defaults=True):
    """The answer to a :class:`GenerateRequest`; in a stream an event."""

    request_id: str
    choices: list[GeneratedChoice]
    prompt_logprobs: Any = None
    usage: Usage | None = None
    kv_transfer_params: dict[str, Any] | None = None


async def generate(request: Request) -> ASGIApp:
    """Generate token ids from token ids."""
    if request.headers.get("content-type", "").partition(";")[0] == MEDIA:
        return await _relayed(request)
    frontend, body = await read_request(request, GenerateRequest)
    frontend.tasks.check_generates("generate API")
    given = with_integers(body.sampling_params, SamplingParams)
    if unknown := sorted(given.keys() - _NAMES):
        raise InvalidRequest(f"sampling_params has an unknown field, {unknown[0]}", param="sampling_params")
    given["detokenize"] = bool(given.get("stop"))
    params = await interpreted(request, partial(frontend.input.params, **given))
    if body.stream and params.prompt_logprobs is not None:
        raise InvalidRequest("prompt_logprobs cannot be streamed: set stream to false", param="prompt_logprobs")
    states = await prepared(
        request, [body.token_ids], params, add_special_tokens=False, cache_salt=body.cache_salt or "",
        priority=body.priority or 0, cap_length="max_tokens" not in given,
    )  # fmt: skip
    kv_transfer.attach(request, body, states)
    return _TokensWriter(request, body, states)


class _TokensWriter(Writer):
    """The answer in vLLM's form."""

    def __init__(self, request: Request, body: GenerateRequest, states: Sequence[RequestState]) -> None:
        super().__init__(request, states, bool(body.stream))
        self._id, self._names = request_id(request), self._frontend.tokenizer
        self._transfer = partial(kv_transfer.offered, self._frontend, body, states)
        self._usage = body.stream_options is not None and body.stream_options.include_usage is not False

    def whole(self) -> Generated:
        (state,) = self._states
        shown = prompt_logprobs_of(state) if state.params.prompt_logprobs is not None else None
        choices = [self._choice(choice) for choice in state.choices]
        return Generated(self._id, choices, shown, self._total(), self._transfer())

    def event(self, first: int, choice: Choice) -> bytes:
        return event_of(Generated(self._id, [self._choice(choice)]))

    def closing(self, error: PreheatError | None) -> bytes:
        last = b""
        if error is not None:
            last = event_of(error_body(error))
        elif self._usage:
            last = event_of(Generated(self._id, [], usage=self._total()))
        return last + b"data: [DONE]\n\n"

    def _choice(self, choice: Choice) -> GeneratedChoice:
        delta = self.take(choice)
        names = self._names if self._names.speaks else TokenIds()
        logprobs = None if delta.logprobs is None else chat_logprobs(names, delta.logprobs)
        return GeneratedChoice(choice.index, delta.token_ids, choice.shown_end[0], logprobs)

    def _total(self) -> Usage:
        (state,) = self._states
        prompt, made = len(state.prompt_ids), sum(len(choice.token_ids) for choice in state.choices)
        return Usage(prompt, made, prompt + made, PromptTokensDetails(state.cached_tokens))


async def _relayed(request: Request) -> ASGIApp:
    """Return the answer to a front. Raises OtherContract if it expects another contract."""
    service: Service = request.app.state.service
    data = await read_body(request)
    sent = await in_turn(request, len(data), partial(read_sent, data))
    state = await in_turn(request, len(data), partial(relay_state, service, sent, request_id(request)))
    return _RelayWriter(service, state)


def read_sent(data: bytes) -> Sent:
    """Return the request of a front. Raises InvalidRequest."""
    try:
        return _sent.decode(data)
    except (msgspec.MsgspecError, ValueError) as error:
        raise InvalidRequest(f"The body is no request of a front: {error}") from error


def relay_state(service: Service, sent: Sent, id: str) -> RequestState:
    """Return the checked state of a front's request. Raises OtherContract, InvalidRequest, NotReady, EngineDead."""
    frontend = service.frontend
    if sent.contract != (mine := frontend.contract.id):
        raise OtherContract(f"The contract of this server is {mine}, the request is for {sent.contract}")
    if sent.request.source is not None:
        raise InvalidRequest("A front names no server to pull blocks from: leave the source out")
    service.adapter_of(sent.request.lora_name or None)
    return frontend.input.relayed(sent.request, id)


async def relayed(running: RunningRequests, state: RequestState) -> AsyncGenerator[bytes]:
    """Yield the results of each step in a frame, and signs of life between them."""
    assert state.relay is not None
    over = False
    while not over:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(BEAT_SECONDS):
                await running.change()
        if running.gone:
            return
        parts = state.relay.take()
        body = b"".join(map(frame, parts)) or frame()
        over = any(part.finished for part in parts)
        if state.error is not None and not over:  # this server failed, not the request
            body, over = body + framed(LOST), True
        yield body


class _RelayWriter:
    """The answer to a front."""

    def __init__(self, service: Service, state: RequestState) -> None:
        self._service, self._state = service, state

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._service.load += 1
        try:
            async with RunningRequests(self._service.frontend, [self._state], receive) as running:
                headers = [(b"content-type", MEDIA.encode())]
                await send({"type": "http.response.start", "status": 200, "headers": headers})
                async with contextlib.aclosing(relayed(running, self._state)) as parts:
                    async for body in parts:
                        await send({"type": "http.response.body", "body": body, "more_body": True})
                if not running.gone:
                    await send({"type": "http.response.body", "body": b""})
        finally:
            self._service.load -= 1


async def member(request: Request) -> Response:
    """Return limits and contract, for a front."""
    hello = hello_of(request.app.state.service, START)
    return Response(msgspec.msgpack.encode(hello), media_type="application/octet-stream")


def hello_of(service: Service, start: str) -> Hello:
    """Return limits and contract. Raises NotReady or EngineDead if requests are not taken."""
    if service.settings.pods:
        raise InvalidRequest("A front is no pod: name the servers behind it")
    service.check_ready()
    frontend = service.frontend
    ready = msgspec.structs.replace(frontend.limits(), contract=frontend.contract, digest=frontend.state.digest)
    return Hello(start, ready)
