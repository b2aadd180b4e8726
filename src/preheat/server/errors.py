"""Errors as HTTP answers, in OpenAI's shape; each has the status of its class."""

from __future__ import annotations

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from preheat.errors import InvalidRequest, PreheatError
from preheat.server.answers import encode
from preheat.server.schema import ErrorBody, ErrorResponse

RETRY = {"retry-after": "1"}
"""How long a client should wait, in seconds, before it asks again."""

_HEADERS = {401: {"www-authenticate": "Bearer"}, 408: {"connection": "close"}, 429: RETRY, 503: RETRY}


def error_body(error: PreheatError) -> ErrorResponse:
    """The body, which is also what a stream sends when it fails half-way."""
    return ErrorResponse(ErrorBody(error.message, error.kind, error.param, error.code))


def error_response(error: PreheatError) -> Response:
    """The whole answer."""
    return Response(encode(error_body(error)), error.status, _HEADERS.get(error.status), "application/json")


async def _refused(_: Request, error: PreheatError) -> Response:
    return error_response(error)


async def _not_found(request: Request, error: HTTPException) -> Response:
    """No such path, or not with this method."""
    refusal = InvalidRequest(f"{error.detail}: {request.method} {request.url.path}")
    refusal.status = error.status_code
    response = error_response(refusal)
    response.headers.update(error.headers or {})
    return response


async def _gone(_: Request, __: ClientDisconnect) -> Response:
    return Response(status_code=400)  # the client has disconnected


async def _failed(_: Request, error: Exception) -> Response:
    """A bug of ours: the server logs it; the client learns no more than that."""
    return error_response(PreheatError("The server failed to handle this request; its log says more"))


HANDLERS = {PreheatError: _refused, HTTPException: _not_found, ClientDisconnect: _gone, Exception: _failed}
"""What answers for each class of exception that a route raises."""
