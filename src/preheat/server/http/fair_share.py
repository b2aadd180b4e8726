"""A shared resource: waiting clients take turns, however much one of them asks for."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from starlette.requests import Request

Client = tuple[str, str]
"""Identity of a client: its address, and the key that it sent. Its requests wait for each other."""


def client_of(request: Request) -> Client:
    """Return the identity of the client that sent ``request``, as far as known."""
    return request.client.host if request.client else "", request.headers.get("authorization", "")


class FairShare:
    """A ``total`` that clients share, taking parts of it in turns."""

    def __init__(self, total: int) -> None:
        self._left = total
        self._waiting: dict[Client, deque[tuple[int, asyncio.Future[None]]]] = {}

    @asynccontextmanager
    async def of(self, client: Client, part: int) -> AsyncIterator[None]:
        """Hold ``part`` of the total inside the context; wait until it is free."""
        turn = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(client, deque()).append((part, turn))
        self._admit()
        try:
            await turn
            yield
        finally:
            if turn.done() and not turn.cancelled():
                self._left += part
            self._admit()

    def _admit(self) -> None:
        """Begin the next turns, client after client, while enough is left."""
        while self._waiting:
            client, queue = next(iter(self._waiting.items()))
            part, turn = queue[0]
            if not turn.cancelled():
                if part > self._left:
                    return
                self._left -= part
                turn.set_result(None)
            queue.popleft()
            del self._waiting[client]
            if queue:
                self._waiting[client] = queue  # behind the others
