"""TCP connections between an engine's processes on several nodes.

Both ends know the engine's key. No torch here. Messages of a connection may be pickled, so a caller is heard only after
it has proved that it knows the key. Nothing is encrypted.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import sys
from collections.abc import Callable
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge

Address = tuple[str, int]

_PROOF_SECONDS = 5
_LOOK_SECONDS = 0.1
_CONNECT_SECONDS = 10.0

# A silent node is noticed after this many seconds, whether or not there is data to send.
_IDLE, _INTERVAL, _PROBES = 3, 2, 3
_SILENT_MS = (_IDLE + _INTERVAL * _PROBES) * 1000


class Door:
    """A listening port of the address ``host``, where others reach this process."""

    def __init__(self, host: str, key: bytes) -> None:
        self._listening = socket.create_server((host, 0), backlog=64)
        self._listening.settimeout(_LOOK_SECONDS)
        self.key = key
        self.address: Address = self._listening.getsockname()

    def accept(self, check: Callable[[], None]) -> tuple[Connection, bytes]:
        """Return the next caller that knows the key, and its first message.

        ``check`` raises if none will come.
        """
        while True:
            check()
            with contextlib.suppress(TimeoutError):
                caller, _ = self._listening.accept()
                with contextlib.suppress(OSError, EOFError, AuthenticationError):  # a stranger is ignored
                    return self._heard(caller)

    def _heard(self, caller: socket.socket) -> tuple[Connection, bytes]:
        caller.setblocking(True)
        _set_up(caller)
        connection = Connection(caller.detach())
        _limit(connection, _PROOF_SECONDS)
        deliver_challenge(connection, self.key)
        answer_challenge(connection, self.key)
        hello = connection.recv_bytes()
        _limit(connection, 0)
        return connection, hello

    def close(self) -> None:
        self._listening.close()


def call(address: Address, key: bytes, hello: Callable[[str], bytes]) -> Connection:
    """Connect to the door at ``address``.

    ``hello`` makes the first message from the address of this host on that connection. Raises OSError and
    AuthenticationError.
    """
    caller = socket.create_connection(address, timeout=_CONNECT_SECONDS)
    caller.settimeout(None)
    _set_up(caller)
    own: str = caller.getsockname()[0]
    connection = Connection(caller.detach())
    answer_challenge(connection, key)
    deliver_challenge(connection, key)
    connection.send_bytes(hello(own))
    return connection


def hang_up(connection: Connection) -> None:
    """End a connection for both ends.

    This works whatever they wait for. It can still be closed.
    """
    with contextlib.suppress(OSError), _socket(connection) as end:
        end.shutdown(socket.SHUT_RDWR)


def _socket(connection: Connection) -> socket.socket:
    return socket.socket(fileno=os.dup(connection.fileno()))


def _set_up(caller: socket.socket) -> None:
    caller.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    caller.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if sys.platform == "darwin":
        caller.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPALIVE, _IDLE)
    else:
        caller.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _IDLE)
    caller.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _INTERVAL)
    caller.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _PROBES)
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        caller.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _SILENT_MS)


def _limit(connection: Connection, seconds: int) -> None:
    """Make reads fail after ``seconds``; 0: never."""
    with _socket(connection) as end:
        end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", seconds, 0))
