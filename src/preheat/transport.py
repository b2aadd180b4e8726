"""What carries messages between frontend and engine: in one process, or msgpack over ZeroMQ between two. Never pickle.

Engine side: ``take`` and ``put``. Front side: ``send`` and ``receive``. Messages of one direction keep their order.
"""

from __future__ import annotations

import shutil
import tempfile
from collections import deque
from collections.abc import Callable
from pathlib import Path

import msgspec
import zmq

from preheat.core import Delta, Died, FromEngine, Progress, Ready, Report, Request, ToEngine

_SCHEME = "ipc://"
_MAX_SOCKET_PATH = 100  # the kernel's limit is 108 bytes, on some systems 104
_RETRY_MS = 20  # between attempts to connect to an end that is not there yet
_LINGER_MS = 1000  # how long a closing end waits for its last message to leave


class InlineTransport:
    """Both ends in one process: nothing is copied, nothing waits. ``on_put`` sees what the engine puts, at once."""

    def __init__(self, on_put: Callable[[FromEngine], None] | None = None) -> None:
        self._on_put = on_put
        self._to_engine: deque[ToEngine] = deque()
        self._to_front: deque[FromEngine] = deque()

    def take(self, timeout: float | None) -> list[ToEngine]:
        """What was sent; returns at once whatever ``timeout``, since nothing can be sent while the engine waits."""
        messages = list(self._to_engine)
        self._to_engine.clear()
        return messages

    def put(self, message: FromEngine) -> None:
        self._to_front.append(message)
        if self._on_put is not None:
            self._on_put(message)

    def send(self, message: ToEngine) -> None:
        self._to_engine.append(message)

    def receive(self) -> list[FromEngine]:
        """What the engine has put since the last call."""
        messages = list(self._to_front)
        self._to_front.clear()
        return messages


class Taken(msgspec.Struct, tag="taken"):
    """The engine has taken ``count`` more requests: what the hand-over timeout waits for."""

    count: int


class EngineTransport:
    """The engine's end between two processes; ``address`` is that of the :class:`FrontendTransport`."""

    def __init__(self, address: str) -> None:
        self._context = zmq.Context()
        self._in = _socket(self._context, zmq.PULL)
        self._out = _socket(self._context, zmq.PUSH)
        self._in.bind(_to_engine(address))
        self._out.connect(_to_front(address))
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[ToEngine] = msgspec.msgpack.Decoder(ToEngine)

    def take(self, timeout: float | None) -> list[ToEngine]:
        """What was sent; waits up to ``timeout`` seconds for the first message (None: as long as it takes)."""
        frames = _frames(self._in)
        if not frames and timeout != 0 and self._in.poll(None if timeout is None else int(timeout * 1000)):
            frames = _frames(self._in)
        messages = [self._decoder.decode(frame) for frame in frames]
        if count := sum(isinstance(message, Request) for message in messages):
            self._out.send(self._encoder.encode(Taken(count)))
        return messages

    def put(self, message: FromEngine) -> None:
        """Send to the frontend."""
        self._out.send(self._encoder.encode(message))

    def close(self) -> None:
        """Leave, once the last message is on its way."""
        self._context.destroy(linger=_LINGER_MS)


class FrontendTransport:
    """The frontend's end. It owns the sockets' folder, which only this user can enter.

    ``untaken`` counts the requests sent which the engine has not taken yet.
    """

    def __init__(self) -> None:
        self.address = f"{_SCHEME}{_private_folder()}/"
        self._context = zmq.Context()
        self._in = _socket(self._context, zmq.PULL)
        self._out = _socket(self._context, zmq.PUSH)
        self._in.bind(_to_front(self.address))
        self._out.connect(_to_engine(self.address))  # this end connects, for then it keeps what is sent too early
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(Delta | Progress | Ready | Report | Died | Taken)
        self.untaken = 0

    def fileno(self) -> int:
        """Becomes readable when there may be something to ``receive``; edge-triggered, so receive until empty."""
        return int(self._in.FD)

    def send(self, message: ToEngine) -> None:
        """Never blocks; what an engine that has gone does not take is dropped in :meth:`close`."""
        self._out.send(self._encoder.encode(message), zmq.NOBLOCK)
        self.untaken += isinstance(message, Request)

    def receive(self) -> list[FromEngine]:
        """What the engine has put since the last call; never waits."""
        messages: list[FromEngine] = []
        for frame in _frames(self._in):
            message = self._decoder.decode(frame)
            if isinstance(message, Taken):
                self.untaken -= message.count
            else:
                messages.append(message)
        return messages

    def close(self) -> None:
        self._context.destroy(linger=0)
        remove_sockets(self.address)


def remove_sockets(address: str) -> None:
    """Remove the folder of sockets behind ``address``, once both processes have gone."""
    shutil.rmtree(address.removeprefix(_SCHEME), ignore_errors=True)


def _to_engine(address: str) -> str:
    return address + "requests"


def _to_front(address: str) -> str:
    return address + "deltas"


def _socket(context: zmq.Context[zmq.Socket[bytes]], kind: int) -> zmq.Socket[bytes]:
    socket = context.socket(kind)
    socket.set_hwm(0)  # the scheduler and the queue limit bound what is under way, not the socket
    socket.setsockopt(zmq.RECONNECT_IVL, _RETRY_MS)
    return socket


def _frames(socket: zmq.Socket[bytes]) -> list[bytes]:
    """Everything that has arrived."""
    frames: list[bytes] = []
    try:
        while True:
            frames.append(socket.recv(zmq.NOBLOCK))
    except zmq.Again:
        return frames


def _private_folder() -> Path:
    folder = Path(tempfile.mkdtemp(prefix="preheat-"))
    if len(str(folder)) > _MAX_SOCKET_PATH - len("/requests"):
        folder.rmdir()
        folder = Path(tempfile.mkdtemp(prefix="preheat-", dir="/tmp"))
    return folder
