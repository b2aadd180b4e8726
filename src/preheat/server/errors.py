"""Errors as HTTP answers in OpenAI's shape, with the status of their class."""

from __future__ import annotations

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from preheat.errors import InvalidRequest, PreheatError
from preheat.server.answers import encode
from preheat.server.schema import ErrorBody, ErrorResponse

RETRY = {"retry-after": "1"}
"""Tells clients after how many seconds to try again."""

_HEADERS = {401: {"www-authenticate": "Bearer"}, 408: {"connection": "close"}, 429: RETRY, 503: RETRY}


def error_body(error: PreheatError) -> ErrorResponse:
    """The body, which is also the last event of a stream that fails."""
    return ErrorResponse(ErrorBody(error.message, error.kind, error.param, error.code))


def error_response(error: PreheatError) -> Response:
    """The HTTP answer."""
    return Response(encode(error_body(error)), error.status, _HEADERS.get(error.status), "application/json")


async def _rejected(_: Request, error: PreheatError) -> Response:
    return error_response(error)


async def _not_found(request: Request, error: HTTPException) -> Response:
    """An unknown path, or a wrong method."""
    rejection = InvalidRequest(f"{error.detail}: {request.method} {request.url.path}")
    rejection.status = error.status_code
    response = error_response(rejection)
    response.headers.update(error.headers or {})
    return response


async def _gone(_: Request, __: ClientDisconnect) -> Response:
    return Response(status_code=400)  # the client has disconnected


async def _failed(_: Request, error: Exception) -> Response:
    """A bug of ours: the details are only in the server's log."""
    return error_response(PreheatError("The server failed to handle this request; its log says more"))


HANDLERS = {PreheatError: _rejected, HTTPException: _not_found, ClientDisconnect: _gone, Exception: _failed}
"""The handler of each class of exception that a route raises."""
