"""The check of a request against its row in the table of routes.

A field that the route does not have is refused by name where an operator commands the engine. Elsewhere it is reported
as an unknown field of a body is (:mod:`preheat.server.http.ignored`).
"""

from __future__ import annotations

from collections import Counter
from functools import wraps

from starlette.requests import Request
from starlette.types import ASGIApp

from preheat.errors import InvalidRequest, NotFound
from preheat.server.http.body import read_command
from preheat.server.http.ignored import ignore, refuse_unknown, strict
from preheat.server.openai.schema import ForModel
from preheat.server.openapi import Endpoint, Operation

_BODILESS = ("GET", "HEAD")
"""Methods with bodies that have no meaning in HTTP."""


def checked(operation: Operation, endpoint: Endpoint, *also: str) -> Endpoint:
    """Return ``endpoint`` behind the check of its query, and of a body where ``operation`` has none.

    ``also`` names further fields of the query.
    """
    known = {*operation.queries, *also, *(("format",) if operation.formats else ())}

    @wraps(endpoint)
    async def check_first(request: Request) -> ASGIApp:
        if operation.operated:
            if not request.app.state.service.settings.server_dev_mode:
                raise NotFound("This endpoint needs a server that was started with --server-dev-mode")
            refuse_unknown(request)
        _check_query(request, known, operation.lists)
        if operation.body is None and request.method not in _BODILESS and has_body(request):
            await _read_nothing(request, operation)
        return await endpoint(request)

    return check_first


async def _read_nothing(request: Request, operation: Operation) -> None:
    """Read the body of a route that takes none. Raises InvalidRequest for its fields, if these are refused."""
    try:
        await read_command(request, ForModel)
    except InvalidRequest as error:
        if error.param in operation.queries:
            said = f"{error.param} is no field of the body: write it into the query, {operation.path}?{error.param}=..."
            raise InvalidRequest(said, param=error.param) from None
        raise


def has_body(request: Request) -> bool:
    """Return whether the head of ``request`` announces a body."""
    return request.headers.get("content-length", "0") != "0" or "transfer-encoding" in request.headers


def _check_query(request: Request, known: set[str], lists: tuple[str, ...]) -> None:
    """Raise InvalidRequest for a known field that comes twice, and for an unknown one if these are refused."""
    counts = Counter(name for name, _ in request.query_params.multi_items())
    unknown = [name for name in counts if name not in known]
    if unknown and strict(request):
        raise InvalidRequest(f"Unrecognized field of the query: {unknown[0]}", param=unknown[0])
    ignore(request, unknown)
    if twice := next((name for name in counts if name in known and counts[name] > 1 and name not in lists), None):
        raise InvalidRequest(f"{twice} is in the query {counts[twice]} times: give it once", param=twice)
