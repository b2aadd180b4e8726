"""An engine of another server, as the server in front of it sees it.

A :class:`Pod` has the interface of :class:`preheat.server.replicas.process.EngineProcess`, so that a member with a pod
is a member like any other: its requests are in the journal, and go on elsewhere when the pod dies, stalls or drains.
``Calls`` says how it is reached: over HTTP, or through Ray.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable
from typing import Protocol

import msgspec

from preheat.core import (
    AdapterReport,
    Ask,
    Cancel,
    Command,
    Declined,
    Delta,
    Drain,
    EngineState,
    Finish,
    FromEngine,
    Leaving,
    LoadAdapter,
    Outcome,
    Report,
    Request,
    ToEngine,
    UnloadAdapter,
)
from preheat.errors import Draining, InvalidRequest, PreheatError, WireError
from preheat.server.replicas.relay_wire import BEAT_SECONDS, Frames, Hello, LostError, Sent

RETRY_SECONDS = 0.3
"""Seconds between two attempts to reach a pod that is not ready."""

MOST_WAIT = 2.0
"""The longest wait for a pod that has no room, in seconds."""

SILENT_SECONDS = 30.0
"""Seconds without an answer until a pod is given up, though no other pod may be there."""

OVERLOADED, UNREADY, OTHER = 429, 503, 409

_encode = msgspec.msgpack.Encoder().encode
_hello = msgspec.msgpack.Decoder(Hello)


class RefusedCall(Exception):
    """The answer of a pod with another status than 200: ``status`` and the error in its ``body``."""

    def __init__(self, status: int, error: WireError) -> None:
        super().__init__(f"{status}: {error.message}")
        self.status, self.error = status, error


class Calls(Protocol):
    """The calls to the pods of one place. They raise OSError for a lost connection, and RefusedCall."""

    many: bool
    """Whether several engines are behind it, so that a stream that is cut says nothing of the others."""

    async def hello(self) -> bytes:
        """Return the pod's :class:`Hello`; claim a pod first."""
        ...

    def generate(self, body: bytes) -> AsyncGenerator[bytes]:
        """Yield the bytes of the answer to a :class:`Sent`."""
        ...

    def release(self) -> None:
        """Let go of the pod."""
        ...

    def __str__(self) -> str: ...


class Pod:
    """The engine behind ``calls``. It starts to look for the pod in :meth:`watch`."""

    def __init__(self, calls: Calls) -> None:
        self.transport, self.open, self._calls = self, True, calls
        self.untaken = deque[tuple[int, float]]()  # a pod takes a request at once, or declines it
        self.beat_at: float | None = None
        self.behind = False  # messages are taken all at once
        self._inbox: list[FromEngine] = []
        self._running: dict[int, asyncio.Task[None]] = {}
        self._hello: Hello | None = None
        self._declined, self._leaving, self._why = 0, False, ""
        self._watching: asyncio.Task[None] | None = None
        self._notified = False

    def said(self, code: int | None) -> str:
        """Return in words why the member ended."""
        return f"The pod {self._calls} is lost: {self._why or 'it was given up'}"

    def watch(self, on_message: Callable[[], None], on_exit: Callable[[int], None]) -> None:
        """Look for the pod. Call ``on_message`` when there are messages, ``on_exit`` when the pod is lost."""
        self._on_message, self._on_exit = on_message, on_exit
        self._loop = asyncio.get_running_loop()
        self._watching = self._loop.create_task(self._watch())

    def send(self, message: ToEngine) -> None:
        """Send a message; never blocks."""
        match message:
            case Request():
                self._begin(message)
            case Cancel() if task := self._running.get(message.id):
                task.cancel()
            case Drain():
                self._lose("it has ended")
            case Ask() if self._hello is not None:
                self._tell(Report(self._hello.ready.record))
            case Command():
                state = EngineState(contract=self._hello.ready.contract if self._hello else None)
                self._tell(Outcome(message.id, state, _elsewhere(message.name)))
            case LoadAdapter() | UnloadAdapter():
                self._tell(AdapterReport(message.name, message.id, _elsewhere("an adapter")))

    def _begin(self, request: Request) -> None:
        task = self._loop.create_task(self._run(request))
        self._running[request.id] = task

        def ended(_: asyncio.Task[None]) -> None:
            if self._running.get(request.id) is task:  # a declined request may run here again
                del self._running[request.id]

        task.add_done_callback(ended)

    def receive(self) -> list[FromEngine]:
        """Return the messages since the last call; never waits."""
        messages, self._inbox = self._inbox, []
        return messages

    def kill(self) -> None:
        """Give the pod up: nothing that it sends later counts."""
        self._lose("it was given up")

    def discard(self) -> None:
        """Let go of a pod that is lost."""
        self.open = False
        self._calls.release()

    async def stop(self, now: bool) -> None:
        """Let go of the pod; it goes on by itself."""
        if self.open:
            self._on_exit = lambda code: None
            self._lose("the front stops")
            self.discard()

    def _tell(self, message: FromEngine) -> None:
        self._inbox.append(message)
        if not self._notified:
            self._notified = True
            self._loop.call_soon(self._notify)

    def _notify(self) -> None:
        self._notified = False
        self._on_message()

    def _lose(self, why: str) -> None:
        """End all work with the pod, once."""
        if self._watching is None or self._why:
            return
        self._why = why
        self._watching.cancel()
        for task in list(self._running.values()):
            task.cancel()
        self._loop.call_soon(self._on_exit, 1)

    async def _watch(self) -> None:
        """Wait until the pod is ready, then ask it again and again."""
        while (found := await self._ask()) is None:
            await asyncio.sleep(RETRY_SECONDS)
        self._hello, self.beat_at = found, time.monotonic()
        self._tell(found.ready)
        while True:
            await asyncio.sleep(BEAT_SECONDS)
            try:
                hello = _hello.decode(await self._calls.hello())
            except TimeoutError:
                if time.monotonic() - self.beat_at > SILENT_SECONDS:
                    self._lose(f"it has not answered for {SILENT_SECONDS:g} s")
                continue  # members that are silent for a shorter time are noticed by their last beat
            except RefusedCall as error:
                self._refused(error)
                continue
            except (OSError, msgspec.MsgspecError) as error:
                self._lose(f"{type(error).__name__}: {error}")
                return
            self.beat_at = time.monotonic()
            if hello.start != found.start or hello.ready.contract != found.ready.contract:
                self._lose("it has started again, or has another contract")

    async def _ask(self) -> Hello | None:
        """Return what a pod that may not be ready says of itself."""
        with contextlib.suppress(OSError, TimeoutError, RefusedCall, msgspec.MsgspecError):
            return _hello.decode(await self._calls.hello())
        self._calls.release()
        return None

    def _refused(self, error: RefusedCall) -> None:
        """Note the status of a pod that takes no requests."""
        self.beat_at = time.monotonic()
        if error.status == UNREADY and isinstance(error.error.restore(), Draining):
            if not self._leaving:
                self._leaving = True
                self._tell(Leaving())
        elif error.status != OVERLOADED:
            self._lose(str(error))

    async def _run(self, request: Request) -> None:
        """Send a request, and tell of its results until its end."""
        assert self._hello is not None and self._hello.ready.contract is not None
        body, frames = _encode(Sent(self._hello.ready.contract.id, request)), Frames()
        try:
            async with contextlib.aclosing(self._calls.generate(body)) as answer:
                async for data in answer:
                    self.beat_at, self._declined = time.monotonic(), 0
                    for delta in frames.feed(data):
                        if delta is None:
                            continue
                        _check_owned(delta, request.id)
                        self._tell(delta)
                        if delta.finished:
                            return
            self._cut(request, "it ended a stream before its end")
        except RefusedCall as error:
            await self._decline(request, error)
        except (OSError, TimeoutError, LostError, ValueError, msgspec.MsgspecError) as error:
            self._cut(request, f"{type(error).__name__}: {error}")

    def _cut(self, request: Request, why: str) -> None:
        """Note that a stream was cut: the pod is lost, or the request alone if it is one of many engines."""
        if self._calls.many:
            self._tell(Declined(request.id, lost=True))
        else:
            self._lose(why)

    async def _decline(self, request: Request, error: RefusedCall) -> None:
        """Give a request back, or end it with the pod's error."""
        if error.status in (OVERLOADED, UNREADY):
            self._declined += 1
            await asyncio.sleep(min(0.02 * 2 ** min(self._declined, 10), MOST_WAIT))
            self._tell(Declined(request.id))
        elif error.status == OTHER:
            self._cut(request, str(error))
        else:
            self._tell(Delta(finished={request.id: Finish("error", error=error.error)}))


def _check_owned(delta: Delta, id: int) -> None:
    """Raise ValueError if a pod tells of another request than ``id``."""
    for ids in (delta.ids, delta.started, delta.finished, delta.prompt_logprobs, delta.pooled, delta.adapters):
        if any(each != id for each in ids):
            raise ValueError(f"the answer to request {id} tells of another request")


def _elsewhere(what: str) -> WireError:
    said = f"{what}: a front has no engine of its own: ask its pods"
    error: PreheatError = InvalidRequest(said)
    return WireError.of(error)
