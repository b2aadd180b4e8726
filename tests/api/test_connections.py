"""Bounds on headers, time and connections, before the application hears of a request."""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import uvicorn
from starlette.types import ASGIApp, Receive, Scope, Send

from preheat.server.http import protocol as protocol_module
from preheat.server.http.protocol import (
    HEAD_SLICE_BYTES,
    MOST_UNPARSED,
    SLICE_BYTES,
    ConnectionLimits,
    LimitedProtocol,
    _cancel,
)
from tests.api.conftest import Server, serving
from tests.waiting import until_in_loop

HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n"
STREAM = b'{"prompt": "x", "max_tokens": 1500, "stream": true}'
ENDLESS = {
    "one header": (HEAD + b"X-Long: ", b"x" * 4096),
    "many headers": (HEAD, b"X-Many: 1\r\n" * 400),
    "a path": (b"GET /", b"x" * 4096),
    "a chunk extension": (HEAD + b"Transfer-Encoding: chunked\r\n\r\n1;", b"x" * 4096),
    "a trailer": (HEAD + b"Transfer-Encoding: chunked\r\n\r\n1\r\n{\r\n0\r\nX-Long: ", b"x" * 4096),
}


@pytest.fixture(scope="module")
def guarded(folder: Path) -> Iterator[Server]:
    limits = {"timeout_headers": 0.5, "timeout_keep_alive": 1, "max_header_bytes": 16_384}
    with serving(str(folder), api_key=["secret"], **limits) as server:
        yield server


def connect(server: Server) -> socket.socket:
    client = socket.create_connection(("127.0.0.1", server.port))
    client.settimeout(10)
    return client


def read_all(client: socket.socket) -> bytes:
    """Return all bytes until the server closes the connection."""
    received = b""
    try:
        while chunk := client.recv(65536):
            received += chunk
    except ConnectionResetError:
        pass  # the server closed while the client was sending
    return received


def is_cut_off(client: socket.socket, more: bytes, pause: float = 0.1, seconds: float = 10) -> bool:
    """Return whether the server closes a connection before ``more`` has been sent 1,000 times."""
    end = time.monotonic() + seconds
    try:
        for _ in range(1000):
            client.sendall(more)
            time.sleep(pause)
            if time.monotonic() > end:
                break
    except OSError:
        return True
    return False


@pytest.mark.parametrize("what", ENDLESS)
def test_endless_headers_are_refused_before_the_key(guarded: Server, what: str) -> None:
    start, more = ENDLESS[what]
    with connect(guarded) as client:
        client.sendall(start)
        assert is_cut_off(client, more, pause=0.001, seconds=20)
    assert guarded.get("/health").status == 200


def test_large_headers_get_an_answer(guarded: Server) -> None:
    for headers, status in ((b"X-Long: " + b"x" * 8000, b"401"), (b"X-Long: " + b"x" * 17_000, b"431")):
        with connect(guarded) as client:
            client.sendall(HEAD + headers + b"\r\nContent-Length: 2\r\nConnection: close\r\n\r\n{}")
            answer = read_all(client)
            assert answer.startswith(b"HTTP/1.1 " + status), answer
    assert b"--max-header-bytes" in answer


def test_slow_headers_end(guarded: Server) -> None:
    with connect(guarded) as client:
        client.sendall(HEAD)
        assert is_cut_off(client, b"X")  # a byte now and then does not help
    with connect(guarded) as client:
        client.sendall(HEAD)
        assert read_all(client).startswith(b"HTTP/1.1 408")


def test_idle_connections_close(guarded: Server) -> None:
    with connect(guarded) as silent:
        assert read_all(silent) == b""
    with connect(guarded) as client:
        client.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        assert read_all(client).startswith(b"HTTP/1.1 200")
    with connect(guarded) as client:  # line ends between requests are no sign of life
        client.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        assert is_cut_off(client, b"\r\n")


def test_a_running_stream_is_not_idle(guarded: Server) -> None:
    """Control: a running stream outlasts both limits, even if the client has begun another request behind it."""
    with connect(guarded) as client:
        length = b"Content-Length: %d\r\nAuthorization: Bearer secret\r\n\r\n" % len(STREAM)
        client.sendall(HEAD + length + STREAM)
        started = time.monotonic()
        assert client.recv(100).startswith(b"HTTP/1.1 200")
        client.sendall(b"GET /he")
        received = read_all(client)
        assert b"[DONE]" in received and time.monotonic() - started > 2


def test_a_body_that_nobody_reads_ends(guarded: Server) -> None:
    with connect(guarded) as client:
        client.sendall(HEAD + b"Content-Length: 1000000000\r\n\r\n")
        assert client.recv(100).startswith(b"HTTP/1.1 401")
        assert is_cut_off(client, b"x" * 1000)


def test_exhausted_descriptors_are_logged_once(folder: Path, tmp_path: Path) -> None:
    log = tmp_path / "log"
    with serving(str(folder), log=log, descriptors=150) as server:
        clients = [connect(server) for _ in range(200)]
        end = time.monotonic() + 5
        while b"file descriptors" not in log.read_bytes() and time.monotonic() < end:
            time.sleep(0.05)
        for client in clients:
            client.close()
        server.wait_until_open(10)
        assert log.read_text().count("file descriptors") == 1, log.read_text()


def test_a_full_server_is_logged_once_each_time(caplog: pytest.LogCaptureFixture) -> None:
    limits = ConnectionLimits(100, 1, 10)
    with caplog.at_level(logging.ERROR):
        assert [limits.admit(count) for count in (10, 11, 12, 9, 11)] == [True, False, False, True, False]
        assert len(caplog.records) == 1
        assert limits.admit(4) and not limits.admit(11)
        assert len(caplog.records) == 2


class Wire(asyncio.Transport):
    """Transport without a network. It keeps the bytes that were written."""

    def __init__(self) -> None:
        super().__init__()
        self.written, self.reads = bytearray(), True

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.written += data

    def is_closing(self) -> bool:
        return False

    def close(self) -> None:
        pass

    def pause_reading(self) -> None:
        self.reads = False

    def resume_reading(self) -> None:
        self.reads = True


class Parsing(LimitedProtocol):
    """Protocol that keeps the sizes of the slices that it parses, and the most requests in one."""

    def __init__(self, app: ASGIApp) -> None:
        config = uvicorn.Config(app, http="httptools", ws="none", lifespan="off", log_config=None)
        config.load()
        limits = ConnectionLimits(1 << 16, 60, 10)
        super().__init__(limits, config, uvicorn.server.ServerState(), {}, asyncio.get_running_loop())
        self.sizes, self.begun, self.most = list[int](), 0, 0
        self.wire = Wire()
        self.connection_made(self.wire)

    def _parse(self, data: memoryview) -> None:
        before = self.begun
        super()._parse(data)
        self.sizes.append(len(data))
        self.most = max(self.most, self.begun - before)

    def on_message_begin(self) -> None:
        self.begun += 1
        super().on_message_begin()

    def end(self) -> None:
        self.connection_lost(None)
        _cancel(self.timeout_keep_alive_task)


async def body_size(scope: Scope, receive: Receive, send: Send) -> None:
    """Answer with the number of bytes in the body."""
    size, more = 0, True
    while more:
        message = await receive()
        size, more = size + len(message["body"]), message["more_body"]
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"8")]})
    await send({"type": "http.response.body", "body": b"%8d" % size})


@pytest.mark.parametrize(
    ("cut", "size"), [(1, 10), (40_000, 200_000), (SLICE_BYTES + 7, 150_000), (600, 0), (10**6, 3 * SLICE_BYTES)]
)
def test_received_bytes_are_parsed_in_slices(cut: int, size: int) -> None:
    """A turn of the loop parses one slice, however the bytes of a request arrive."""

    async def scenario() -> None:
        protocol = Parsing(body_size)
        data = HEAD + b"Content-Length: %d\r\n\r\n" % size + b"x" * size
        while data:
            before = len(protocol.sizes)
            protocol.data_received(data[:cut])
            assert len(protocol.sizes) - before <= 1
            data = data[cut:]
        assert await until_in_loop(lambda: protocol.wire.written.endswith(b"%8d" % size))
        assert max(protocol.sizes[1:], default=0) <= SLICE_BYTES and protocol.sizes[0] <= HEAD_SLICE_BYTES
        assert protocol.wire.reads
        protocol.end()

    asyncio.run(scenario())


OFFER = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAEAAEAAAAIAAAAA\r\n"
BODIES = {
    "length": (b"Content-Length: 700\r\n\r\n" + b"x" * 700, 700),
    "chunks": (b"Transfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n4;e=1\r\nabcd\r\n0\r\n\r\n", 7),
    "nothing": (b"\r\n", 0),
}


@pytest.mark.parametrize("cut", [1, 90, 10**6])
@pytest.mark.parametrize("kind", BODIES)
def test_an_offer_of_another_protocol_is_declined(kind: str, cut: int) -> None:
    """Java's client offers HTTP/2 with its first request; the body and the next requests are read all the same."""

    async def scenario() -> None:
        protocol = Parsing(body_size)
        (body, size), last = BODIES[kind], HEAD + b"Content-Length: 2\r\n\r\n{}"
        data = (HEAD + OFFER + body) * 2 + last
        for at in range(0, len(data), cut):
            protocol.data_received(data[at : at + cut])
        assert await until_in_loop(lambda: protocol.wire.written.count(b"HTTP/1.1 200") == 3)
        answers = [int(each[-8:]) for each in protocol.wire.written.split(b"HTTP/1.1 200")[1:]]
        assert answers == [size, size, 2] and b"400" not in protocol.wire.written
        protocol.end()

    asyncio.run(scenario())


GET = b"GET / HTTP/1.1\r\n\r\n"


@pytest.mark.parametrize("bounded", [True, False])
def test_requests_behind_each_other_are_not_parsed_at_once(bounded: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Few of a client's many requests are held, and no more bytes are read; all are answered in the end.

    The control parses larger slices, and so holds all requests.
    """
    if not bounded:
        monkeypatch.setattr(protocol_module, "HEAD_SLICE_BYTES", 1 << 20)
    count, gate = MOST_UNPARSED // len(GET) + 1_000, asyncio.Event()

    async def waits(scope: Scope, receive: Receive, send: Send) -> None:
        await gate.wait()
        await body_size(scope, receive, send)

    async def scenario() -> None:
        protocol = Parsing(waits)
        protocol.data_received(GET * count)
        for _ in range(10):
            await asyncio.sleep(0)
        held = len(protocol.pipeline) + 1
        assert (held <= HEAD_SLICE_BYTES // len(GET) + 1 and not protocol.wire.reads) == bounded
        gate.set()
        assert await until_in_loop(lambda: protocol.wire.written.count(b"HTTP/1.1 200") == count)
        assert protocol.wire.reads and (protocol.most <= HEAD_SLICE_BYTES // len(GET) + 1) == bounded
        protocol.end()

    asyncio.run(scenario())
