"""The reading of a request's body, with limits on size and time."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from functools import partial
from typing import TypeVar

import msgspec
from starlette.requests import Request

from preheat.errors import Encoded, InvalidRequest, SlowRequest, TooLarge
from preheat.frontend.frontend import Frontend
from preheat.server.http.decoding import decode
from preheat.server.http.field_names import note_names
from preheat.server.http.ignored import ignore, names_for
from preheat.server.http.middleware import name_request
from preheat.server.http.service import Service
from preheat.server.http.turns import in_turn
from preheat.server.openai.schema import ForModel

Body = TypeVar("Body", bound=ForModel)
Result = TypeVar("Result")

BODY_SECONDS = 30.0
"""Seconds that a client has to send its body."""

_KEPT = "preheat.body"

DISCARD_SECONDS = 0.5
"""Seconds that the server keeps reading a body that is too large."""


async def read_request(request: Request, kind: type[Body]) -> tuple[Frontend, Body]:
    """Return the frontend, and the decoded body. Raises ModelNotFound if the body names another model."""
    service: Service = request.app.state.service
    body = await read_json(request, kind)
    if body.request_id is not None:
        name_request(request, body.request_id)
    request.state.lora_name = service.adapter_of(body.model)
    return service.frontend, body


async def read_command(request: Request, kind: type[Body]) -> Body:
    """Decode the body of a command; an empty body has no fields. Raises ModelNotFound if it names another model.

    An adapter's name is refused too: a command is for the engine.
    """
    service: Service = request.app.state.service
    body = await read_json(request, kind, default=b"{}")
    if body.request_id is not None:
        name_request(request, body.request_id)
    if body.model is not None and service.adapter_of(body.model):
        raise InvalidRequest(f"{body.model!r} is an adapter: name the model, or leave model out", param="model")
    return body


async def read_json(request: Request, kind: type[Body], default: bytes = b"") -> Body:
    """Decode the body; an empty one counts as ``default``."""
    data = await read_body(request) or default
    request.state.body_size = len(data)
    ignored = names_for(request)
    body = await in_turn(request, len(data), partial(decode, data, kind, ignored))
    ignore(request, ignored or ())
    note_names(request.scope, body)
    return body


async def interpreted(request: Request, work: Callable[[], Result]) -> Result:
    """Return the result of ``work``. Its time grows with the values in the body."""
    return await in_turn(request, request.state.body_size, work)


def body_size(request: Request) -> int:
    """Return the size of the body, in bytes."""
    return int(request.state.body_size)


def keep_body(request: Request, data: bytes) -> None:
    """Keep the body ``data``, so that it can be read once more."""
    request.scope[_KEPT] = data


async def peeked(request: Request, kind: type[Result]) -> Result | None:
    """Return the fields of a body that tell its form, None if it is malformed. The body can be read once more."""
    data = await read_body(request)
    keep_body(request, data)
    return await in_turn(request, len(data), partial(_peeked, data, kind))


def _peeked(data: bytes, kind: type[Result]) -> Result | None:
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None


def check_encoding(request: Request) -> None:
    """Raise Encoded if the body is compressed."""
    for name, plain in (("content-encoding", "identity"), ("transfer-encoding", "chunked")):
        for encoding in ",".join(request.headers.getlist(name)).split(","):
            if encoding.strip().lower() not in ("", plain):
                raise Encoded(
                    f"The body is compressed ({name.title()}: {encoding.strip()[:40]}): send it as it is, without this "
                    "header",
                    param=name.title(),
                )


async def read_body(request: Request) -> bytes:
    """Read the body. Raises Encoded, TooLarge or SlowRequest as early as possible."""
    if (kept := request.scope.get(_KEPT)) is not None:
        return bytes(kept)
    check_encoding(request)
    service: Service = request.app.state.service
    limit = service.settings.max_body_bytes
    error = TooLarge(f"The body is larger than the {limit} bytes that --max-body-bytes allows")
    length = request.headers.get("content-length", "0")
    chunks, parts, size = request.stream(), list[bytes](), 0
    if not length.isdecimal() or int(length) > limit:
        await discard(chunks, 2 * limit)
        raise error
    try:
        async with asyncio.timeout(BODY_SECONDS):
            async for chunk in chunks:
                parts.append(chunk)
                size += len(chunk)
                if size > limit:
                    await discard(chunks, limit)
                    raise error
    except TimeoutError as slow:
        raise SlowRequest(f"The body did not arrive within {BODY_SECONDS:g} s") from slow
    return await service.turns.join(parts, size)


async def discard(chunks: AsyncIterator[bytes], most: int) -> None:
    """Read and drop up to ``most`` bytes.

    A client that still sends would not see the answer.
    """
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(DISCARD_SECONDS):
            async for chunk in chunks:
                most -= len(chunk)
                if most < 0:
                    return
