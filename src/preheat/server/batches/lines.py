"""The lines of a batch: requests in OpenAI's format, and their answers."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import msgspec

from preheat.errors import EngineDead, NotReady, SettingsError, TooManyRequests, TooManyServed

ENDPOINTS = (
    "/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages", "/v1/embeddings", "/v1/score",
    "/v1/rerank", "/score", "/rerank", "/v2/rerank",
)  # fmt: skip
"""The endpoints that a line may call."""


class BatchLine(msgspec.Struct):
    """One request. ``custom_id`` identifies its answer."""

    custom_id: str
    url: str
    body: dict[str, Any]
    method: str = "POST"


class BadLine(Exception):
    """An error for an invalid line: OpenAI's ``code``, and the wrong field ``param``."""

    def __init__(self, code: str, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.code, self.message, self.param = code, message, param


def read_line(text: str | bytes, seen: Collection[str], endpoints: Collection[str] = ENDPOINTS) -> BatchLine:
    """Parse a line. Raises BadLine if it calls none of ``endpoints``, or its custom_id is in ``seen``."""
    try:
        line = msgspec.json.decode(text, type=BatchLine)
    except msgspec.ValidationError as error:
        raise BadLine("invalid_request", str(error)) from None
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise BadLine("invalid_json_line", str(error)) from None
    if line.url not in endpoints or line.method != "POST":
        text = f"{line.method} {line.url} is not one of POST {', '.join(endpoints)}"
        raise BadLine("invalid_method" if line.url in endpoints else "invalid_url", text, "url")
    if line.body.get("stream"):
        raise BadLine("invalid_request", "a batch has no streams: leave stream out", "body.stream")
    if line.custom_id in seen:
        raise BadLine("duplicate_custom_id", f"the custom_id {line.custom_id!r} occurs twice", "custom_id")
    return line


def read_lines(lines: Iterable[str], name: str) -> list[BatchLine]:
    """Parse the ``lines`` of the file ``name``. Raises SettingsError, naming the line, for an invalid one."""
    found: dict[str, BatchLine] = {}
    for number, text in enumerate(lines, 1):
        if not text.strip():
            continue
        try:
            line = read_line(text, found)
        except BadLine as error:
            raise SettingsError(f"{name}, line {number}: {error}") from None
        found[line.custom_id] = line
    if not found:
        raise SettingsError(f"{name} has no requests")
    return list(found.values())


def answer_of(line: BatchLine, status: int, id: str | None, body: Any) -> dict[str, Any]:
    """Return the answer line for ``line``: the server's response to the request ``id``."""
    return {
        "id": f"batch_req_{id}",
        "custom_id": line.custom_id,
        "response": {"status_code": status, "request_id": id, "body": body},
        "error": None,
    }


def is_full(status: int, body: Any) -> bool:
    """Return whether the server refused because it has too many requests."""
    codes = TooManyRequests.code, TooManyServed.code
    return status == TooManyRequests.status and _error(body).get("code") in codes


def is_no_answer(status: int, body: Any) -> bool:
    """Return whether a server is starting, stopping or dying.

    The request must then be sent again.
    """
    return status == NotReady.status or _error(body).get("type") == EngineDead.kind


def _error(body: Any) -> dict[str, Any]:
    """Return the error object of an answer, or an empty dict."""
    error = body.get("error") if isinstance(body, dict) else None
    return error if isinstance(error, dict) else {}
