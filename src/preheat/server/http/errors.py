"""Errors as HTTP answers in OpenAI's shape, with the status of their class."""

from __future__ import annotations

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from preheat.errors import InvalidRequest, PreheatError
from preheat.server.http.field_names import names_of, respelled
from preheat.server.openai.answers import encode
from preheat.server.openai.schema import ErrorBody, ErrorResponse

RETRY = {"retry-after": "1"}
"""Header with the seconds until clients should try again."""

_HEADERS = {401: {"www-authenticate": "Bearer"}, 408: {"connection": "close"}, 429: RETRY, 503: RETRY}


MOST_CHARS = 4_000
"""Most characters of an error's message, and of its field name.

Clients may choose parts of both.
"""


def _short(text: str) -> str:
    return text if len(text) <= MOST_CHARS else f"{text[:MOST_CHARS]} ..."


def error_body(error: PreheatError) -> ErrorResponse:
    """Return the body of an error.

    It is also the last event of a failed stream.
    """
    return ErrorResponse(ErrorBody(_short(error.message), error.kind, error.param and _short(error.param), error.code))


ANTHROPIC = "/v1/messages"
"""Prefix of the paths for Anthropic's clients, where errors have another shape."""

_KINDS = {
    400: "invalid_request_error", 401: "authentication_error", 404: "not_found_error", 413: "request_too_large",
    429: "rate_limit_error", 503: "overloaded_error", 504: "timeout_error",
}  # fmt: skip


def anthropic_error(error: PreheatError) -> dict[str, str]:
    """Return Anthropic's error object; it names no field."""
    return {"type": _KINDS.get(error.status, "api_error"), "message": _short(error.message)}


OLLAMA = "/api/"
"""Prefix of the paths for Ollama's clients, where an error is a text."""


def ollama_error(error: PreheatError) -> dict[str, str]:
    """Return Ollama's error object, also used as the last line of a failed stream."""
    return {"error": _short(error.message)}


def error_response(error: PreheatError, path: str = "") -> Response:
    """Return the HTTP answer, in the error shape of clients of ``path``."""
    if path.startswith(ANTHROPIC):
        body = encode({"type": "error", "error": anthropic_error(error)})
    elif path.startswith(OLLAMA):
        body = encode(ollama_error(error))
    else:
        body = encode(error_body(error))
    return Response(body, error.status, _HEADERS.get(error.status), "application/json")


async def _rejected(request: Request, error: PreheatError) -> Response:
    return error_response(respelled(error, names_of(request.scope)), request.url.path)


_NOT_SERVED = {
    "/v1/audio": "preheat runs models of text; it neither hears nor speaks",
    "/v1/images": "preheat runs models of text; it draws no images",
    "/api/": "of Ollama's API there are, with --api ollama, chat, generate, embed, tags, ps, show and version",
    **dict.fromkeys(
        ("/v1/load_lora_adapter", "/v1/unload_lora_adapter"),
        "adapters can be changed with --enable-lora and VLLM_ALLOW_RUNTIME_LORA_UPDATING=1",
    ),
}
"""Missing endpoints of the supported APIs: prefixes of their paths, and reasons."""


async def _not_found(request: Request, error: HTTPException) -> Response:
    """Answer an unknown path or a wrong method."""
    path = request.url.path
    known = next((why for begin, why in _NOT_SERVED.items() if path.startswith(begin)), "")
    rejection = InvalidRequest(f"{error.detail}: {request.method} {path}{known and f': {known}'}")
    rejection.status = error.status_code
    response = error_response(rejection, request.url.path)
    response.headers.update(error.headers or {})
    return response


async def _gone(_: Request, __: ClientDisconnect) -> Response:
    return Response(status_code=400)  # the client has left


async def _failed(request: Request, error: Exception) -> Response:
    """Answer after a bug of the server; only its log has the details."""
    return error_response(PreheatError("The server failed to handle this request; its log says more"), request.url.path)


HANDLERS = {PreheatError: _rejected, HTTPException: _not_found, ClientDisconnect: _gone, Exception: _failed}
"""The handler of each class of exception that a route raises."""
