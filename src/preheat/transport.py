"""Transports of messages between frontend and engine.

They work inside one process, or as msgpack over ZeroMQ between two.

The engine calls ``take`` and ``put``, the frontend ``send`` and ``receive``. Messages stay in order.
"""

from __future__ import annotations

import shutil
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import msgspec
import zmq

from preheat.core import Delta, Died, FromEngine, Leaving, Request, ToEngine, TokenLogprobs, Wake
from preheat.errors import PreheatError, WireError
from preheat.utils.heartbeat import Heartbeat
from preheat.utils.lifeline import Lifeline

_SCHEME = "ipc://"
_REQUESTS, _DELTAS = "requests", "deltas"  # the names of the two sockets
_LIFELINE = "lifeline"  # the name of a file beside them
_MAX_SOCKET_PATH = 100  # the kernel's limit is 108 bytes, on some systems 104
_RETRY_MS = 20  # between attempts to connect to an end that does not exist yet
_LINGER_MS = 1000  # for the last message to leave before an end closes

PART_ENTRIES = 1_000
"""Most log-probabilities of a prompt in one message. Decoding holds Python's lock, about 2 ms for so many."""

RECEIVE_SECONDS = 0.001
"""After so long the frontend leaves further messages for its next call, so that its event loop turns.

Results take several times as long to process as to decode.
"""


class InlineTransport:
    """Both ends in one process: copies nothing, never waits. ``on_put`` is called with each message of the engine."""

    def __init__(self, on_put: Callable[[FromEngine], None] | None = None) -> None:
        self.on_put = on_put
        self._to_engine: deque[ToEngine] = deque()
        self._to_front: deque[FromEngine] = deque()

    def take(self, timeout: float | None) -> list[ToEngine]:
        """Return all messages to the engine.

        ``timeout`` is ignored, since nothing can arrive while the engine waits.
        """
        messages = list(self._to_engine)
        self._to_engine.clear()
        return messages

    def put(self, message: FromEngine) -> None:
        self._to_front.append(message)
        if self.on_put is not None:
            self.on_put(message)

    def waker(self) -> Callable[[], None]:
        """Return a function that does nothing, since :meth:`take` never waits."""
        return lambda: None

    def send(self, message: ToEngine) -> None:
        self._to_engine.append(message)

    def receive(self) -> list[FromEngine]:
        """Return all messages of the engine since the last call."""
        messages = list(self._to_front)
        self._to_front.clear()
        return messages


class Taken(msgspec.Struct, tag="taken"):
    """The engine has taken ``count`` more requests; the hand-over timeout waits for this."""

    count: int


class Beat(msgspec.Struct, tag="beat"):
    """The engine is alive."""


class Part(msgspec.Struct, tag="part"):
    """Further ``entries`` of the prompt of sequence ``id``; the last ones come with the delta that has the others."""

    id: int
    entries: list[TokenLogprobs | None]


class _End:
    """One of two processes, with its two sockets.

    It binds the socket for incoming messages, and connects the one for outgoing messages.
    """

    def __init__(self, incoming: str, outgoing: str) -> None:
        self._context = zmq.Context()
        self._in, self._out = _socket(self._context, zmq.PULL), _socket(self._context, zmq.PUSH)
        self._in.bind(incoming)
        self._out.connect(outgoing)  # a connecting sender keeps messages that are sent too early
        self._encoder = msgspec.msgpack.Encoder()


class EngineTransport(_End):
    """The engine's end; ``address`` is the address of the :class:`FrontendTransport`."""

    def __init__(self, address: str) -> None:
        super().__init__(address + _REQUESTS, address + _DELTAS)
        self._address = address
        self._decoder: msgspec.msgpack.Decoder[ToEngine] = msgspec.msgpack.Decoder(ToEngine)
        self._heartbeat: Heartbeat | None = None
        self._lifeline: Lifeline | None = None

    def start_heartbeat(self, alive: Callable[[], bool] = lambda: True) -> None:
        """Send heartbeats to the frontend from now on, while ``alive()`` is true, and let it notice a death."""
        self._lifeline = Lifeline.hold(_lifeline(self._address))
        socket = _socket(self._context, zmq.PUSH)  # a socket belongs to one thread
        socket.connect(self._address + _DELTAS)
        beat = self._encoder.encode(Beat())
        self._heartbeat = Heartbeat(lambda: socket.send(beat), alive)

    def take(self, timeout: float | None) -> list[ToEngine]:
        """Return all messages to the engine.

        Waits up to ``timeout`` seconds for the first one (None: forever).
        """
        frames = [*_frames(self._in)]
        if not frames and timeout != 0 and self._in.poll(None if timeout is None else int(timeout * 1000)):
            frames = [*_frames(self._in)]
        messages = [self._decoder.decode(frame) for frame in frames]
        if count := sum(isinstance(message, Request) for message in messages):
            self._out.send(self._encoder.encode(Taken(count)))
        return messages

    def put(self, message: FromEngine) -> None:
        """Send a message to the frontend. Long lists of a prompt's log-probabilities go ahead of it, in parts."""
        if isinstance(message, Delta) and message.prompt_logprobs:
            message = self._put_parts(message)
        self._out.send(self._encoder.encode(message))

    def _put_parts(self, delta: Delta) -> Delta:
        """Send all but the last part of each list, and return the delta with the last parts."""
        rest = dict[int, list[TokenLogprobs | None]]()
        for id, entries in delta.prompt_logprobs.items():
            last = max(len(entries) - 1, 0) // PART_ENTRIES * PART_ENTRIES
            for first in range(0, last, PART_ENTRIES):
                self._out.send(self._encoder.encode(Part(id, entries[first : first + PART_ENTRIES])))
            rest[id] = entries[last:]
        return msgspec.structs.replace(delta, prompt_logprobs=rest)

    def waker(self) -> Callable[[], None]:
        """Return a function that ends a wait in :meth:`take`; any thread may call it."""
        socket, turn = _socket(self._context, zmq.PUSH), threading.Lock()
        socket.connect(self._address + _REQUESTS)
        message = self._encoder.encode(Wake())

        def wake() -> None:
            with turn, suppress(zmq.ZMQError):  # the engine has left
                socket.send(message, zmq.NOBLOCK)

        return wake

    def report_death(self, error: PreheatError) -> None:
        """Report the engine's death to the frontend.

        Any thread may call it, as the loop may be waiting for requests.
        """
        self._let_go()
        with suppress(zmq.ZMQError):  # the engine has left by itself
            socket = _socket(self._context, zmq.PUSH)  # a socket belongs to one thread
            socket.connect(self._address + _DELTAS)
            socket.send(msgspec.msgpack.encode(Died(WireError.of(error))))
            socket.close(_LINGER_MS)

    def _let_go(self) -> None:
        """Release the lifeline, so that the frontend reads the last messages before it notices an end."""
        if self._lifeline is not None:
            self._lifeline.release()

    def close(self) -> None:
        """Close, after the last message was sent."""
        self._let_go()
        if self._heartbeat is not None:
            self._heartbeat.stop()
        self._context.destroy(linger=_LINGER_MS)


class FrontendTransport(_End):
    """The frontend's end. It owns the sockets' folder, accessible to this user only.

    ``untaken`` has the ids of the requests that the engine has not taken yet, with the time when each was sent, in
    order. ``behind`` tells that :meth:`receive` may have left messages for its next call. ``beat_at`` is the time of
    the last heartbeat, or None before the first. Times are monotonic seconds. ``lifeline`` tells of the engine's death,
    where the system allows it.
    """

    def __init__(self) -> None:
        self.address = f"{_SCHEME}{_private_folder()}/"
        super().__init__(self.address + _DELTAS, self.address + _REQUESTS)
        self._decoder = msgspec.msgpack.Decoder(FromEngine | Taken | Beat | Part)
        self.behind = False
        self._parts = dict[int, list[TokenLogprobs | None]]()  # by sequence, until their delta comes
        self.untaken: deque[tuple[int, float]] = deque()
        self.beat_at: float | None = None
        self.lifeline = Lifeline.create(_lifeline(self.address))

    def fileno(self) -> int:
        """Return a descriptor that is readable when there may be messages.

        It is edge-triggered, so receive until no messages are left.
        """
        return int(self._in.FD)

    def send(self, message: ToEngine) -> None:
        """Send a message; never blocks. Messages that the engine never takes are dropped in :meth:`close`."""
        self._out.send(self._encoder.encode(message), zmq.NOBLOCK)
        if isinstance(message, Request):
            self.untaken.append((message.id, time.monotonic()))

    def receive(self, seconds: float = RECEIVE_SECONDS) -> list[FromEngine]:
        """Return messages of the engine since the last call, as many as ``seconds`` suffice for; never waits.

        Reading a message gives Python's lock away, and a thread that works keeps it for a millisecond or more. So the
        time bounds the reading too.
        """
        messages, end = list[FromEngine](), time.monotonic() + seconds
        self.behind = False
        for frame in _frames(self._in):
            message = self._decoder.decode(frame)
            match message:
                case Taken():
                    for _ in range(message.count):
                        self.untaken.popleft()
                case Beat():
                    if self.beat_at is None and self.lifeline is not None:
                        self.lifeline.note_held()
                    self.beat_at = time.monotonic()
                case Part():
                    self._parts.setdefault(message.id, []).extend(message.entries)
                case Delta():
                    messages.append(self._joined(message))
                case _:
                    messages.append(message)
            if time.monotonic() > end:
                self.behind = True
                break
        return messages

    def _joined(self, delta: Delta) -> Delta:
        """Put the parts that came before ``delta`` ahead of its last ones."""
        if self._parts:
            for id, entries in delta.prompt_logprobs.items():
                delta.prompt_logprobs[id] = [*self._parts.pop(id, ()), *entries]
        return delta

    def close(self) -> None:
        if self.lifeline is not None:
            self.lifeline.close()
        self._context.destroy(linger=0)
        remove_sockets(self.address)


def announce_leaving(address: str) -> None:
    """Tell the frontend that the engine at ``address`` wants to end; a handler of signals may call it."""
    context = zmq.Context[zmq.Socket[bytes]]()
    socket = _socket(context, zmq.PUSH)
    socket.connect(address + _DELTAS)
    socket.send(msgspec.msgpack.encode(Leaving()))
    context.destroy(linger=_LINGER_MS)


def _lifeline(address: str) -> Path:
    return Path(address.removeprefix(_SCHEME)) / _LIFELINE


def remove_sockets(address: str) -> None:
    """Remove the folder of sockets behind ``address``."""
    shutil.rmtree(address.removeprefix(_SCHEME), ignore_errors=True)


def _socket(context: zmq.Context[zmq.Socket[bytes]], kind: int) -> zmq.Socket[bytes]:
    socket = context.socket(kind)
    socket.set_hwm(0)  # the scheduler and the queue limit bound the messages, not the socket
    socket.setsockopt(zmq.RECONNECT_IVL, _RETRY_MS)
    return socket


def _frames(socket: zmq.Socket[bytes]) -> Iterator[bytes]:
    """Yield the frames that have arrived."""
    with suppress(zmq.Again):
        while True:
            yield socket.recv(zmq.NOBLOCK)


def _private_folder() -> Path:
    folder = Path(tempfile.mkdtemp(prefix="preheat-"))
    if len(str(folder)) > _MAX_SOCKET_PATH - len("/requests"):
        folder.rmdir()
        folder = Path(tempfile.mkdtemp(prefix="preheat-", dir="/tmp"))
    return folder
