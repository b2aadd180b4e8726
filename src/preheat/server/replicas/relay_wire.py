"""The messages between a front and the servers behind it.

A request is one :class:`Sent`. Its answer is a sequence of frames: four bytes of length, then a Delta in msgpack. An
empty frame is a sign of life. :data:`LOST` says that the server gives the request up, so that it goes on elsewhere.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

import msgspec

from preheat.core import Delta, Ready, Request

MEDIA = "application/vnd.preheat.relay+msgpack"
"""The media type of a request of a front, and of its answer."""

GENERATE, MEMBER = "/inference/v1/generate", "/inference/v1/member"
BEAT_SECONDS = 1.0
"""Seconds between two signs of life."""

MOST_FRAME = 2**28
LOST = b"\xc0"
_LENGTH = struct.Struct("<I")
_encode = msgspec.msgpack.Encoder().encode
_delta = msgspec.msgpack.Decoder(Delta)


class Sent(msgspec.Struct, array_like=True):
    """A request for an engine with the contract of this id."""

    contract: str
    request: Request


class Hello(msgspec.Struct, array_like=True):
    """The limits and the contract of a server. ``start`` names the start of its process."""

    start: str
    ready: Ready


def frame(delta: Delta | None = None) -> bytes:
    """Return the bytes of a frame; None is a sign of life."""
    return framed(b"" if delta is None else _encode(delta))


def framed(data: bytes) -> bytes:
    """Return ``data`` behind its length."""
    return _LENGTH.pack(len(data)) + data


class Frames:
    """The frames in a stream of bytes. Raises ValueError for a frame of more than :data:`MOST_FRAME` bytes."""

    def __init__(self) -> None:
        self._rest = bytearray()

    def feed(self, data: bytes) -> Iterator[Delta | None]:
        """Yield the frames that ``data`` completes; None for a sign of life. Raises Lost."""
        self._rest += data
        start, size = 0, len(self._rest)
        while size - start >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._rest, start)
            if length > MOST_FRAME:
                raise ValueError(f"a frame has {length} bytes, at most {MOST_FRAME} are read")
            end = start + _LENGTH.size + length
            if end > size:
                break
            body = bytes(self._rest[start + _LENGTH.size : end])
            start = end
            if body == LOST:
                raise LostError("the server gave the request up")
            yield _delta.decode(body) if body else None
        del self._rest[:start]


class LostError(Exception):
    """The server does not go on with a request."""
