"""Bounds on headers, time and connections, before the application hears of a request."""

from __future__ import annotations

import logging
import socket
import time
import types
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from preheat.server.protocol import SLICE_BYTES, ConnectionLimits, LimitedProtocol
from tests.api.conftest import Server, serving

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


class Parsing(LimitedProtocol):
    """Protocol that keeps the slices that it has parsed, and the calls that its loop is to make."""

    def __init__(self) -> None:
        self.parsed, self.calls = list[bytes](), list[Callable[[], None]]()
        self._rest = deque[memoryview]()
        self.transport = types.SimpleNamespace(is_closing=lambda: False)  # type: ignore[assignment]
        self.loop = types.SimpleNamespace(call_soon=self.calls.append)  # type: ignore[assignment]

    def _parse(self, data: memoryview) -> None:
        self.parsed.append(bytes(data))


@given(sizes=st.lists(st.integers(1, 4 * SLICE_BYTES), min_size=1, max_size=6), late=st.data())
def test_received_bytes_are_parsed_in_slices(sizes: list[int], late: st.DataObject) -> None:
    """Bytes are parsed in order, one slice for each turn of the loop, whenever more arrive."""
    protocol, sent = Parsing(), [bytes([place]) * size for place, size in enumerate(sizes)]
    for data in sent:
        before = len(protocol.parsed)
        protocol.data_received(data)
        assert len(protocol.parsed) - before <= 1
        while protocol.calls and late.draw(st.booleans()):
            protocol.calls.pop()()
    while protocol.calls:
        protocol.calls.pop()()
    assert b"".join(protocol.parsed) == b"".join(sent)
    assert max(map(len, protocol.parsed)) <= SLICE_BYTES
