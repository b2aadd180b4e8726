"""The upload of a form with one file, written as it arrives.

Nothing of the file is kept in memory.
"""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from typing import BinaryIO

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header
from starlette.requests import Request

from preheat.errors import InvalidRequest, SlowRequest, TooLarge
from preheat.server.http.body import BODY_SECONDS, check_encoding, discard

MOST_FIELDS = 16
"""Most fields of a form beside its file."""

FIELD_BYTES = 1024
"""Most bytes of a name, a value, or the file's name."""

SLOWEST = 64 * 1024
"""Bytes a second that a client must send on average."""


class Form:
    """A form that arrives in parts.

    It has ``fields``, and the name of its file. The file is written to ``sink``.

    Raises InvalidRequest for a body that is no such form, and TooLarge if the file has over ``most`` bytes.
    """

    def __init__(self, content_type: str, sink: BinaryIO, most: int) -> None:
        kind, options = parse_options_header(content_type)
        if kind != b"multipart/form-data" or b"boundary" not in options:
            raise InvalidRequest("The body must be a form (multipart/form-data) with the fields file and purpose")
        self.fields: dict[str, str] = {}
        self.filename: str | None = None
        self.size = 0
        self._sink, self._most, self._ended = sink, most, False
        self._header, self._value, self._disposition = bytearray(), bytearray(), bytearray()
        self._name, self._in_file = "", False
        callbacks = {
            "on_part_begin": self._begin, "on_part_data": self._data, "on_part_end": self._end,
            "on_header_field": self._header_name, "on_header_value": self._header_value,
            "on_header_end": self._header_end, "on_headers_finished": self._headers_end, "on_end": self._all,
        }  # fmt: skip
        try:
            self._parser = MultipartParser(options[b"boundary"], callbacks)  # type: ignore[arg-type]
        except FormParserError as error:
            raise InvalidRequest(f"The body is not a form: {error}") from None

    def feed(self, data: bytes) -> None:
        """Parse the next bytes of the body."""
        try:
            self._parser.write(data)
        except FormParserError as error:
            raise InvalidRequest(f"The body is not a form: {error}") from None

    def finish(self) -> None:
        """End the body. Raises InvalidRequest if the form is incomplete."""
        if not self._ended:
            raise InvalidRequest("The form ends before its last boundary")
        if self.filename is None:
            raise InvalidRequest("Missing required parameter: 'file'", param="file")

    def _begin(self) -> None:
        self._disposition.clear()
        self._value.clear()
        self._name, self._in_file = "", False

    def _header_name(self, data: bytes, start: int, end: int) -> None:
        self._header += data[start:end]

    def _header_value(self, data: bytes, start: int, end: int) -> None:
        self._value += data[start:end]

    def _header_end(self) -> None:
        if self._header.lower() == b"content-disposition":
            self._disposition[:] = self._value
        self._header.clear()
        self._value.clear()

    def _headers_end(self) -> None:
        _, options = parse_options_header(bytes(self._disposition))
        self._name = _text(options.get(b"name", b""))
        if self._name == "file":
            if self.filename is not None:
                raise InvalidRequest("The form has two files: send one", param="file")
            self.filename, self._in_file = _text(options.get(b"filename", b"")) or "file", True
        elif len(self.fields) >= MOST_FIELDS:
            raise InvalidRequest(f"The form has more than {MOST_FIELDS} fields")

    def _data(self, data: bytes, start: int, end: int) -> None:
        if not self._in_file:
            self._value += data[start:end]
            if len(self._value) > FIELD_BYTES:
                raise InvalidRequest(f"{self._name} has more than {FIELD_BYTES} bytes", param=self._name)
            return
        self.size += end - start
        if self.size > self._most:
            raise TooLarge(f"The file is larger than the {self._most} bytes that --max-batch-file-bytes allows")
        left = memoryview(data)[start:end]
        while left:
            left = left[self._sink.write(left) :]

    def _end(self) -> None:
        if not self._in_file:
            self.fields[self._name] = _text(bytes(self._value))

    def _all(self) -> None:
        self._ended = True


def _text(value: bytes) -> str:
    if len(value) > FIELD_BYTES:
        raise InvalidRequest(f"A name in the form has more than {FIELD_BYTES} bytes")
    return value.decode(errors="replace")


async def receive(request: Request, sink: BinaryIO, most: int) -> Form:
    """Read the form in the body of ``request``, with its file in ``sink``.

    Raises InvalidRequest, Encoded, TooLarge or SlowRequest.
    """
    check_encoding(request)
    form = Form(request.headers.get("content-type", ""), sink, most)
    seconds = BODY_SECONDS + most / SLOWEST
    try:
        async with asyncio.timeout(seconds), aclosing(request.stream()) as chunks:
            try:
                async for chunk in chunks:
                    await asyncio.to_thread(form.feed, chunk)
            except TooLarge:
                await discard(chunks, most)
                raise
    except TimeoutError:
        raise SlowRequest(f"The body did not arrive within {seconds:g} s") from None
    form.finish()
    return form
