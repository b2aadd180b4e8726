"""POST /invocations: SageMaker's entry to the endpoint that fits the body."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial

import msgspec
from msgspec import UNSET, Raw, Struct, UnsetType
from starlette.requests import Request
from starlette.types import ASGIApp

from preheat.errors import InvalidRequest
from preheat.server.http.body import keep_body, read_body
from preheat.server.http.turns import in_turn
from preheat.server.openai import chat, completions
from preheat.server.pooling import embeddings, scoring

Endpoint = Callable[[Request], Awaitable[ASGIApp]]


class InvocationRequest(Struct):
    """The fields that identify a kind of body; the first present one counts."""

    messages: Raw | UnsetType = UNSET
    prompt: Raw | UnsetType = UNSET
    prompt_embeds: Raw | UnsetType = UNSET
    input: Raw | UnsetType = UNSET
    query: Raw | UnsetType = UNSET
    text_1: Raw | UnsetType = UNSET
    queries: Raw | UnsetType = UNSET
    data_1: Raw | UnsetType = UNSET


_ENDPOINTS: dict[str, Endpoint] = {
    "messages": chat.chat,
    "prompt": completions.completions,
    "prompt_embeds": completions.completions,
    "input": embeddings.embeddings,
    "query": scoring.rerank,
    **dict.fromkeys(("text_1", "queries", "data_1"), scoring.score),
}


async def invocations(request: Request) -> ASGIApp:
    """Answer as the endpoint that fits the body."""
    data = await read_body(request)
    asked = await in_turn(request, len(data), partial(_asked, data))
    name = next((name for name in _ENDPOINTS if getattr(asked, name) is not UNSET), None)
    if name is None:
        raise InvalidRequest(f"The body has none of {', '.join(_ENDPOINTS)}, so it fits no endpoint: add one of them")
    keep_body(request, data)
    return await _ENDPOINTS[name](request)


def _asked(data: bytes) -> InvocationRequest:
    try:
        return msgspec.json.decode(data, type=InvocationRequest)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidRequest(f"The body is not a JSON object: {error}") from error
