"""Reports about the ignored fields of requests.

The names go to a header of the answer, once to the log, and to a metric.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable
from urllib.parse import quote

from starlette.requests import Request
from starlette.types import Scope

from preheat.server.http.decoding import Names

logger = logging.getLogger(__name__)

HEADER = "X-Ignored-Fields"
OTHERS = "others"
"""The metric's label for fields beyond the first ``MOST_COUNTED``."""

MOST_SHOWN = 32
"""Most names in a header."""

MOST_CHARS = 64
"""Most characters of a name, since clients choose the names."""

MOST_COUNTED = 256
"""Most different names that the log and the metric tell apart."""

_SCOPE = "preheat.ignored"
_STRICT = "preheat.strict"


def refuse_unknown(request: Request) -> None:
    """Refuse the unknown fields of ``request``, as a command to the engine must not do less than it says."""
    request.scope[_STRICT] = True


def strict(request: Request) -> bool:
    """Return whether unknown fields are refused: of a command always, else with ``--request-fields strict``."""
    return _STRICT in request.scope or bool(request.app.state.service.settings.request_fields == "strict")


def names_for(request: Request) -> Names | None:
    """Return a dict for unknown fields, or None if they are refused."""
    return None if strict(request) else {}


def ignore(request: Request, names: Iterable[str]) -> None:
    """Tell the client and the operator that fields of these ``names`` change nothing."""
    counts: Counter[str] = request.app.state.service.metrics.ignored
    told = request.scope.setdefault(_SCOPE, {})
    for name in map(_shown, names):
        if name not in told:
            told[name] = None
            _count(counts, name)


def _count(counts: Counter[str], name: str) -> None:
    """Count ``name``, and log it if it is new. The number of names is bounded, since clients choose them."""
    if name not in counts:
        if len(counts) >= MOST_COUNTED:
            name = OTHERS
        else:
            logger.warning("The request field %s is ignored; --request-fields strict refuses unknown ones", name)
    counts[name] += 1


def ignored_header(scope: Scope) -> list[tuple[bytes, bytes]]:
    """Return the header that names the ignored fields, if any."""
    names = list(scope.get(_SCOPE, ()))
    if not names:
        return []
    more = [f"{len(names) - MOST_SHOWN}%20more"] * (len(names) > MOST_SHOWN)
    return [(HEADER.lower().encode(), ", ".join([*names[:MOST_SHOWN], *more]).encode())]


def _shown(name: str) -> str:
    """Return ``name`` in characters that a header and a log line may have."""
    short = name if len(name) <= MOST_CHARS else f"{name[:MOST_CHARS]}..."
    return quote(short, safe="[].$@+~", errors="replace")
