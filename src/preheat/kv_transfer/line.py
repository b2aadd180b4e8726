"""A TCP connection between two engines: frames of bounded size, and a proof of the key.

A size is compared with its limit before a byte of the contents is read. A read or write after the deadline fails, so a
silent peer holds a thread for a bounded time. Nothing is encrypted, and nothing is unpickled.
"""

from __future__ import annotations

import socket
import struct
import time
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from typing import cast

_SIZE = struct.Struct("!I")


class Line:
    """One end of a connection. ``until`` is the deadline in monotonic seconds. Its methods raise OSError."""

    def __init__(self, end: socket.socket, seconds: float) -> None:
        if end.family != socket.AF_UNIX:
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._end = end
        self.limit(seconds)

    @classmethod
    def to(cls, host: str, port: int, seconds: float) -> Line:
        """Return a connection to ``host``; all of its work together may take ``seconds``."""
        began = time.monotonic()
        end = socket.create_connection((host, port), timeout=seconds)
        return cls(end, seconds - (time.monotonic() - began))

    def limit(self, seconds: float) -> None:
        """Set the deadline to ``seconds`` from now."""
        self.until = time.monotonic() + seconds

    def prove(self, key: bytes, *, first: bool) -> None:
        """Check that the peer knows ``key``, and prove the same. The two ends differ in ``first``."""
        line = cast(Connection, self)  # the two functions only send and receive frames
        steps = (deliver_challenge, answer_challenge) if first else (answer_challenge, deliver_challenge)
        try:
            for step in steps:
                step(line, key)
        except (AuthenticationError, ValueError, AssertionError) as error:
            raise PermissionError("the two ends have different keys (--kv-transfer-key)") from error

    def send_bytes(self, data: bytes) -> None:
        """Send a frame."""
        self.send_raw(_SIZE.pack(len(data)) + data)

    def recv_bytes(self, maxlength: int) -> bytes:
        """Return the next frame, of at most ``maxlength`` bytes."""
        (size,) = _SIZE.unpack(self._read(_SIZE.size))
        if size > maxlength:
            raise OSError(f"a frame has {size} bytes, and at most {maxlength} are read")
        return bytes(self._read(size))

    def send_raw(self, data: bytes | memoryview) -> None:
        """Send bytes without a size."""
        self._wait()
        self._end.sendall(data)

    def receive_into(self, view: memoryview) -> None:
        """Fill ``view`` with the next bytes."""
        filled = 0
        while filled < len(view):
            self._wait()
            count = self._end.recv_into(view[filled:])
            if not count:
                raise ConnectionResetError("the peer closed the connection")
            filled += count

    def hang_up(self) -> None:
        """End the connection for both ends; any thread may call it."""
        try:
            self._end.shutdown(socket.SHUT_RDWR)
        except OSError:  # it has ended already
            return

    def close(self) -> None:
        self._end.close()

    def _read(self, size: int) -> bytearray:
        data = bytearray(size)
        self.receive_into(memoryview(data))
        return data

    def _wait(self) -> None:
        left = self.until - time.monotonic()
        if left <= 0:
            raise TimeoutError("the peer was too slow")
        self._end.settimeout(left)
