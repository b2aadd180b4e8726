"""HTTP/1.1 with limits on a client's data and silence.

The limits apply before the application sees a request.

uvicorn's protocol bounds neither the bytes of headers nor their time, and its parser joins the fragments of one header
over and over. This protocol bounds both before any check of a key, and trailers and chunk extensions too. Requests and
chunks may be tiny, so the data of one connection is parsed in slices, with other work between them. A client may send
many requests at once: while one waits for the answer to another, nothing behind it is parsed.
"""

from __future__ import annotations

import asyncio
import logging
import resource
from collections import deque
from dataclasses import dataclass
from typing import Any

import httptools
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from preheat.errors import HeadersTooLarge, PreheatError, SlowRequest
from preheat.server.http.errors import error_body
from preheat.server.openai.answers import encode

logger = logging.getLogger(__name__)

LINGER_SECONDS = 2.0
"""Seconds to read and drop the rest of a body after the answer.

A client that still sends may not read the answer.
"""

SLICE_BYTES = 1 << 16
"""Bytes of a body of known length that are parsed before others have their turn."""

CHUNKED_SLICE_BYTES = 1 << 13
"""The same for a body in chunks, each of which may be tiny."""

HEAD_SLICE_BYTES = 1 << 9
"""The same for a head. A head takes longest, and the bytes may hold many requests."""

MOST_UNPARSED = 1 << 16
"""Bytes of a connection that may wait to be parsed; beyond them, no more are read."""

_MOST_DESCRIPTORS = 65_536
_RESERVED_DESCRIPTORS = 64
"""File descriptors reserved for the rest of the process."""


@dataclass
class ConnectionLimits:
    """Limits: bytes of the headers, seconds until they are complete, and open connections."""

    header_bytes: int
    header_seconds: float
    connections: int
    _full: bool = False

    def admit(self, count: int) -> bool:
        """Return whether ``count`` connections may be open. Too many are logged once."""
        if count > self.connections and not self._full:
            logger.error(
                "%d connections are open, the most that the limit of file descriptors (ulimit -n) allows; new ones "
                "are closed at once",
                self.connections,
            )
        # In between, keep the state: the limit may soon be reached again.
        if count > self.connections or count < self.connections // 2:
            self._full = count > self.connections
        return count <= self.connections


def connections_allowed() -> int:
    """Return the number of connections that the descriptor limit allows.

    The soft limit is raised first.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = _MOST_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, _MOST_DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
        soft = most
    return max((_MOST_DESCRIPTORS if soft == resource.RLIM_INFINITY else soft) - _RESERVED_DESCRIPTORS, 1)


def limited_protocol(header_bytes: int, header_seconds: float) -> type[asyncio.Protocol]:
    """Return a protocol class for a server; all connections share the limits."""
    limits = ConnectionLimits(header_bytes, header_seconds, connections_allowed())

    class Protocol(LimitedProtocol):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(limits, *args, **kwargs)

    return Protocol


class PacedFlow(FlowControl):
    """Flow of a connection that also stops reading while the parser is behind."""

    def __init__(self, transport: asyncio.Transport) -> None:
        super().__init__(transport)
        self._held = self._behind = False

    def pause_reading(self) -> None:
        self._held = True
        super().pause_reading()

    def resume_reading(self) -> None:
        self._held = False
        if not self._behind:
            super().resume_reading()

    def pace(self, unparsed: int) -> None:
        """Read on unless ``unparsed`` bytes are too many."""
        self._behind = unparsed > MOST_UNPARSED
        if self._behind:
            super().pause_reading()
        elif not self._held:
            super().resume_reading()


class LimitedProtocol(HttpToolsProtocol):
    """One connection. A request line, headers and trailers may have ``limits.header_bytes`` together."""

    def __init__(self, limits: ConnectionLimits, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._limits = limits
        self._in_head = True  # of the first or the next request
        self._head = 0  # bytes of the complete request line, headers and trailers
        self._unparsed = 0  # bytes since the parser last produced anything
        self._body_left = 0  # bytes of the body, if its length is known
        self._rest = deque[memoryview]()  # data to parse later
        self._waiting = 0  # its bytes
        self._scheduled = False  # whether the loop is going to parse
        self._skips_head = False  # while a new parser reads a head that is known
        self._head_timer: asyncio.TimerHandle | None = None
        self._linger: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.flow = self._flow = PacedFlow(transport)
        if self._limits.admit(len(self.connections)):
            self._start_head_timer()
        else:
            transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._rest.clear()
        _cancel(self._head_timer, self._linger)

    def data_received(self, data: bytes) -> None:
        first = not self._rest
        self._rest.append(memoryview(data))
        self._waiting += len(data)
        if first and not self._scheduled:
            self._parse_slice()
        self._pace()

    def _parse_slice(self) -> None:
        """Parse the first slice of the data, and schedule the rest after other work."""
        self._scheduled = False
        if self.transport.is_closing():
            self._rest.clear()
            return
        if self._rest and not self.pipeline:  # else the answer to an earlier request comes first
            data, most = self._rest.popleft(), self._slice_bytes
            if len(data) > most:
                self._rest.appendleft(data[most:])
            self._waiting -= len(data[:most])
            self._parse(data[:most])
            self._schedule()
        self._pace()

    @property
    def _slice_bytes(self) -> int:
        """The most bytes to parse next; a slice of a body does not reach the next request."""
        if self._in_head:
            return HEAD_SLICE_BYTES
        return min(self._body_left, SLICE_BYTES) or CHUNKED_SLICE_BYTES

    def _pace(self) -> None:
        if not self.transport.is_closing():
            self._flow.pace(self._waiting)

    def _schedule(self) -> None:
        if self._rest and not self._scheduled:
            self._scheduled = True
            self.loop.call_soon(self._parse_slice)

    def _parse(self, data: memoryview) -> None:
        self._unparsed += len(data)
        if self._in_head:
            self._start_head_timer()
        self._unset_keepalive_if_required()
        try:
            self._feed(data)
        except httptools.HttpParserError:
            self.logger.warning("Invalid HTTP request received.")
            self.send_400_response("Invalid HTTP request received.")
        if self._unparsed > self._limits.header_bytes:
            self._refuse(self._too_large())

    def _feed(self, data: memoryview) -> None:
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            self._go_on(data[upgrade.args[0] :])

    def _go_on(self, rest: memoryview) -> None:
        """Parse the ``rest`` behind a head that offers another protocol, as Java's client does. The offer is declined.

        The parser stops at such a head, so another one reads on. It sees the length of the body in a head of its own.
        """
        self.parser = httptools.HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)
        if lengths := self._lengths():
            self._skips_head = True
            fields = b"".join(b"%b: %b\r\n" % each for each in lengths)
            self.parser.feed_data(b"POST / HTTP/1.1\r\n%b\r\n" % fields)
        if rest:
            self._rest.appendleft(rest)
            self._waiting += len(rest)

    def _lengths(self) -> list[tuple[bytes, bytes]]:
        """Return the headers that tell the length of the body."""
        return [each for each in self.headers if each[0] in (b"content-length", b"transfer-encoding")]

    def on_message_begin(self) -> None:
        if self._skips_head:
            return
        self._head, self._in_head = 0, True
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        if self._skips_head:
            return
        super().on_url(url)
        self._count(len(url))

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._skips_head:
            return
        super().on_header(name, value)
        self._count(len(name) + len(value) + len(": \r\n"))

    def on_headers_complete(self) -> None:
        if self._skips_head:
            self._skips_head = False
            return
        self._in_head, self._unparsed = False, 0
        self._body_left = next((int(value) for name, value in self.headers if name == b"content-length"), 0)
        _cancel(self._head_timer)
        self._head_timer = None
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._unparsed = 0
        self._body_left = max(self._body_left - len(body), 0)
        super().on_body(body)

    def on_message_complete(self) -> None:
        if self.parser.should_upgrade() and self._lengths():
            return  # the body follows
        self._in_head, self._unparsed = True, 0
        _cancel(self._linger)
        super().on_message_complete()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._schedule()
        if not self._in_head and not self.transport.is_closing():
            self._linger = self.loop.call_later(LINGER_SECONDS, self.transport.close)

    def send_400_response(self, msg: str) -> None:
        if self._head > self._limits.header_bytes:  # the reason why the parser stopped
            self._refuse(self._too_large())
        else:
            super().send_400_response(msg)

    def _count(self, size: int) -> None:
        """Count ``size`` bytes of the head. The error for too many stops the parser."""
        self._unparsed = 0
        self._head += size
        if self._head > self._limits.header_bytes:
            raise self._too_large()

    def _too_large(self) -> HeadersTooLarge:
        return HeadersTooLarge(f"The headers are larger than {self._limits.header_bytes} bytes (--max-header-bytes)")

    def _start_head_timer(self) -> None:
        """Start the timer of the head.

        It starts when the connection opens, or at the first byte of a later request.
        """
        if self._head_timer is None:
            self._head_timer = self.loop.call_later(self._limits.header_seconds, self._head_is_late)

    def _head_is_late(self) -> None:
        self._head_timer = None
        if self.cycle is not None and not self.cycle.response_complete:
            self._start_head_timer()  # the head waits for the answer to an earlier request
        elif self._head or self._unparsed:
            seconds = f"{self._limits.header_seconds:g} s (--timeout-headers)"
            self._refuse(SlowRequest(f"The headers did not arrive within {seconds}"))
        else:
            self.transport.close()

    def _refuse(self, error: PreheatError) -> None:
        """Answer with ``error`` unless another answer is under way, and close the connection."""
        if self.transport.is_closing():
            return
        if self.cycle is None or self.cycle.response_complete:
            body = encode(error_body(error))
            head = b"content-type: application/json\r\nconnection: close\r\ncontent-length: %d\r\n\r\n" % len(body)
            self.transport.write(STATUS_LINE[error.status] + head + body)
        self.transport.close()


def _cancel(*timers: asyncio.TimerHandle | None) -> None:
    for timer in timers:
        if timer is not None:
            timer.cancel()
