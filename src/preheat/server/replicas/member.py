"""A member: one engine of a server, which may end and start again while its requests go on at other members."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from enum import StrEnum
from typing import Protocol

from preheat.core import FromEngine, Ready, ToEngine
from preheat.frontend.journal import Owner
from preheat.utils.contract import Contract


class Process(Protocol):
    """The place of an engine: a process of this machine, or a pod."""

    open: bool

    @property
    def transport(self) -> Transport:
        """The way of the messages."""
        ...

    def watch(self, on_message: Callable[[], None], on_exit: Callable[[int | None], None]) -> None:
        """Call ``on_message`` when there may be messages, ``on_exit`` with a status when the engine is gone.

        ``on_exit(None)`` may come before: the engine dies, and sends no more messages.
        """
        ...

    def said(self, code: int | None) -> str:
        """Return in words how the engine has ended, or that it dies."""
        ...

    def kill(self) -> None:
        """End the engine, or the work with it."""
        ...

    def discard(self) -> None:
        """Let go of an engine that is gone."""
        ...

    async def stop(self, now: bool) -> None:
        """End the engine after its requests, or at once if ``now``."""
        ...


class Transport(Protocol):
    """The way of the messages to and from an engine, see :class:`preheat.transport.FrontendTransport`."""

    untaken: deque[tuple[int, float]]
    beat_at: float | None

    @property
    def behind(self) -> bool:
        """Whether messages wait for the next :meth:`receive`."""
        ...

    def send(self, message: ToEngine) -> None:
        """Send a message; never blocks."""
        ...

    def receive(self) -> list[FromEngine]:
        """Return the messages since the last call; never waits."""
        ...


class State(StrEnum):
    """The state of a member's process."""

    STARTING = "starting"
    SERVING = "serving"
    LEAVING = "leaving"  # it ends its requests and gets no others
    DEAD = "dead"  # its requests have gone on elsewhere; its process ends, or has ended
    GONE = "gone"  # it will not start again


class EngineMember:
    """The engine ``number`` of a server, in a process that ``spawn`` starts, or in a pod that it finds."""

    def __init__(self, number: int, spawn: Callable[[], Process]) -> None:
        self.number, self._spawn = number, spawn
        self.epoch, self.state = 0, State.STARTING
        self.process = spawn()
        self.ready: Ready | None = None
        self.left_at: float | None = None
        self.owed = 0  # adapters that it loads before it takes requests

    @property
    def owner(self) -> Owner:
        return Owner(self.number, self.epoch)

    @property
    def alive(self) -> bool:
        return self.state in (State.SERVING, State.LEAVING)

    @property
    def contract(self) -> Contract | None:
        return None if self.ready is None else self.ready.contract

    def send(self, message: ToEngine) -> None:
        """Send a message; never blocks."""
        self.process.transport.send(message)

    def receive(self) -> list[FromEngine]:
        """Return the messages since the last call; never waits."""
        return self.process.transport.receive() if self.process.open else []

    @property
    def behind(self) -> bool:
        """Whether messages wait for the next :meth:`receive`."""
        return self.process.open and self.process.transport.behind

    def leave(self) -> None:
        """Note that the engine wants to end; it gets no more requests."""
        self.state, self.left_at = State.LEAVING, time.monotonic()

    def restart(self) -> None:
        """Start another process in place of one that has ended."""
        self.process.discard()
        self.epoch, self.state = self.epoch + 1, State.STARTING
        self.ready, self.left_at, self.owed = None, None, 0
        self.process = self._spawn()
