"""Fields of a request that change nothing, named in a header of the answer."""

from __future__ import annotations

from collections.abc import Iterable
from urllib.parse import quote

from starlette.requests import Request
from starlette.types import Scope

HEADER = "X-Ignored-Fields"
MOST_SHOWN, MOST_CHARS = 32, 64
"""Names in a header, and characters of a name: clients choose them."""

_SCOPE = "preheat.ignored"


def ignore(request: Request, names: Iterable[str]) -> None:
    """Tell the client that fields of these ``names`` change nothing."""
    request.scope.setdefault(_SCOPE, {}).update(dict.fromkeys(names))


def ignored_header(scope: Scope) -> list[tuple[bytes, bytes]]:
    """The header of an answer that names the fields; nothing, if there are none."""
    names = [quote(name[:MOST_CHARS], safe="[].$@+~", errors="replace") for name in scope.get(_SCOPE, ())]
    return [(HEADER.lower().encode(), ", ".join(names[:MOST_SHOWN]).encode())] if names else []
