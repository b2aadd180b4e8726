"""The page at ``/`` for trying the model. It is one file, and calls the API like any client."""

from __future__ import annotations

import base64
import hashlib
import re
from functools import cache
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response

_FILE = Path(__file__).with_name("try_it.html")


async def try_it(_: Request) -> Response:
    """Answer with the page."""
    page, headers = _page()
    return Response(page, headers=headers, media_type="text/html")


@cache
def _page() -> tuple[bytes, dict[str, str]]:
    """Return the page, with headers for its security.

    The headers restrict it to its own script and style, and to calls of this server.
    """
    page = _FILE.read_bytes()
    policy = {
        "default-src": "'none'", "script-src": _hash(page, b"script"), "style-src": _hash(page, b"style"),
        "connect-src": "'self'", "img-src": "data:", "base-uri": "'none'", "form-action": "'none'",
        "frame-ancestors": "'none'",
    }  # fmt: skip
    return page, {
        "content-security-policy": "; ".join(f"{name} {value}" for name, value in policy.items()),
        "x-content-type-options": "nosniff",
        "referrer-policy": "no-referrer",
        "cache-control": "no-cache",
    }


def _hash(page: bytes, tag: bytes) -> str:
    """Return the hash of the page's only element ``tag``, for a Content-Security-Policy."""
    ((text,),) = [match.groups() for match in re.finditer(rb"<%b>(.*?)</%b>" % (tag, tag), page, re.DOTALL)]
    return f"'sha256-{base64.b64encode(hashlib.sha256(text).digest()).decode()}'"
