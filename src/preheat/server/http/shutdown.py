"""The shutdown of the server.

The first signal drains: new requests are rejected, running ones have ``--shutdown-timeout`` seconds to finish. After
that time, or at a second signal, the remaining requests end with an error and the process exits. ``POST /drain`` does
the same, but the process stays until a signal, so that readers of metrics and probes see a drained server.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import time
from collections.abc import Iterator, Sequence

import uvicorn

from preheat.errors import NotReady
from preheat.server.http.service import Service
from preheat.utils.log import exit_after

logger = logging.getLogger(__name__)

CLOSE_SECONDS = 2.0
"""Seconds for clients to read their last bytes after the last request."""

_HASTE_SECONDS = 0.3  # the same, when the process must exit soon
_CANCEL_SECONDS = 0.5  # between closed connections and the end of their tasks
_LAST_SECONDS = 1.5  # for a hasty exit; then the process exits even if something hangs


class Server(uvicorn.Server):
    """Server that leaves signals to :class:`Shutdown`, and closes lasting connections.

    Connections are closed if they stay open too long after the last request.
    """

    close_seconds = CLOSE_SECONDS

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self.config.timeout_graceful_shutdown = self.close_seconds + _CANCEL_SECONDS  # type: ignore[assignment]
        closing = asyncio.get_running_loop().call_later(self.close_seconds, self._close_connections)
        await super().shutdown(sockets)
        closing.cancel()

    def _close_connections(self) -> None:
        """Close all connections. A request then ends by itself, without the traceback of a cancellation."""
        for connection in list(self.server_state.connections):
            if (transport := connection.transport) is not None:
                transport.abort()


class Shutdown:
    """The stop of ``server``, once all ``services`` are idle or after ``seconds``.

    ``hasty`` is set when engines must not be waited for. ``unready`` is the signal that stopped a server before it was
    ready. ``status`` is the exit status if something hangs.
    """

    def __init__(self, services: Sequence[Service], server: Server, seconds: float, status: int = 0) -> None:
        self._services, self._server, self._seconds, self._status = services, server, seconds, status
        self.hasty = self._leaving = False
        self.unready: int | None = None
        self._draining: asyncio.Task[None] | None = None
        for service in services:
            service.drain = self.drain

    def signalled(self, number: int) -> None:
        """Handle the stop signal ``number``, the first or a later one. A server that is not ready stops at once."""
        if any(service.max_model_len is None for service in self._services):
            self.unready, self.hasty = number, True
            self._server.should_exit = self._server.force_exit = True
            return
        if self._leaving:
            self._leave("A second signal stopped the server before this request was finished")
            return
        self._leaving = True
        if self.drain().done():
            self._server.should_exit = True

    def drain(self) -> asyncio.Task[None]:
        """Take no more requests; the task ends when the running ones have. The process stays until a signal."""
        if self._draining is None:
            logger.info("Draining: running requests have %g s to finish, new ones are rejected", self._seconds)
            for service in self._services:
                service.draining = True
            self._draining = asyncio.get_running_loop().create_task(self._drain())
        return self._draining

    @property
    def _busy(self) -> bool:
        return any(service.busy for service in self._services)

    async def _drain(self) -> None:
        end, said = time.monotonic() + self._seconds, f"this request did not finish in {self._seconds:g} s"
        while self._busy and time.monotonic() < end:
            await asyncio.sleep(0.05)
        if not self._busy:
            self._server.should_exit = self._server.should_exit or self._leaving
        elif self._leaving:
            self._leave(f"The server stopped: {said}")
        else:
            self._end(f"The server was drained: {said}")

    def _end(self, reason: str) -> None:
        if self._busy:
            logger.warning("%s", reason)
        for service in self._services:
            service.end_all(NotReady(reason))

    def _leave(self, reason: str) -> None:
        if self.hasty:
            return
        self.hasty = True
        self._end(reason)
        self._server.close_seconds = _HASTE_SECONDS
        self._server.should_exit = True
        exit_after(_LAST_SECONDS + _HASTE_SECONDS, self._status)
