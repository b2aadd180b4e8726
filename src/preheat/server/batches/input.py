"""The input of a batch.

It is checked once as a whole, then read in slices to bound memory.
"""

from __future__ import annotations

import asyncio
import codecs
from collections.abc import AsyncIterator, Collection, Iterator
from itertools import islice
from typing import BinaryIO

from preheat.errors import InvalidRequest
from preheat.server.batches.lines import BadLine, BatchLine, read_line
from preheat.server.batches.schema import BatchError
from preheat.utils.json_size import MOST_IDS, check_size

MOST_LINES = 50_000
"""Most requests of a batch, as at OpenAI."""

MOST_ERRORS = 100
"""Most errors that are reported for a batch."""

SLICE = 64
"""Lines read at once."""


def check_input(file: BinaryIO, endpoint: str, most_bytes: int) -> tuple[int, list[BatchError]]:
    """Return the number of requests in a file, and the errors in its lines.

    A line has at most ``most_bytes`` bytes.
    """
    seen, errors, number = set[str](), list[BatchError](), 0
    for number, text in _numbered(file, most_bytes):
        try:
            if len(text) > most_bytes:
                raise BadLine("line_too_long", f"the line has over {most_bytes} bytes (--max-body-bytes)")
            if len(seen) >= MOST_LINES:
                raise BadLine("too_many_requests", f"a batch has at most {MOST_LINES} requests: make several")
            seen.add(_read_line(text, seen, endpoint).custom_id)
        except BadLine as error:
            errors.append(BatchError(error.code, error.message, error.param, number))
            if len(errors) == MOST_ERRORS or error.code in ("line_too_long", "too_many_requests"):
                break
    if not seen and not errors:
        errors.append(BatchError("empty_file", "the file has no requests"))
    return len(seen), errors


def _read_line(text: bytes, seen: Collection[str], endpoint: str) -> BatchLine:
    try:
        check_size(text, "the line", MOST_IDS)  # decoding holds Python's lock
    except InvalidRequest as error:
        raise BadLine("invalid_request", str(error)) from None
    return read_line(text, seen, (endpoint,))


async def missing_lines(
    file: BinaryIO, endpoint: str, most_bytes: int, done: Collection[str]
) -> AsyncIterator[BatchLine]:
    """Yield the requests of a checked file that are not ``done``."""
    lines = _numbered(file, most_bytes)

    def more() -> list[BatchLine]:
        return [read_line(text, (), (endpoint,)) for _, text in islice(lines, SLICE)]

    while found := await asyncio.to_thread(more):
        for line in found:
            if line.custom_id not in done:
                yield line


def _numbered(file: BinaryIO, most_bytes: int) -> Iterator[tuple[int, bytes]]:
    """Yield the nonempty lines with their numbers.

    Line ends and the byte-order mark (BOM) are removed.
    """
    number = 0
    while text := file.readline(most_bytes + 2):
        number += 1
        text = text.removeprefix(codecs.BOM_UTF8) if number == 1 else text
        if text.strip():
            yield number, text.rstrip(b"\r\n")
