"""Recent responses for later requests (``--enable-responses-store``), in bounded memory."""

from __future__ import annotations

import threading
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

from preheat.errors import NotFound
from preheat.server.openai.answers import encode

MOST_BYTES = 64 * 2**20
"""Most bytes of all stored responses, as JSON."""


@dataclass
class Stored:
    """A response as ``json``, with its conversation.

    ``messages`` are the conversation up to the response's end, for a chat template.

    ``ended`` is false while it runs. ``background`` says whether the request asked for the background.
    """

    json: bytes
    messages: list[dict[str, Any]]
    ended: bool = True
    background: bool = False


class ResponseStore:
    """Responses by id; beyond ``most`` bytes the least recently used are dropped."""

    def __init__(self, most: int = MOST_BYTES) -> None:
        self._lock = threading.RLock()  # long answers are written in threads
        self._most, self._bytes = most, 0
        self._kept: OrderedDict[str, tuple[Stored, int]] = OrderedDict()

    def get(self, id: str) -> Stored:
        """Return the response of this id. Raises NotFound if it was never stored, or was dropped."""
        with self._lock:
            if id not in self._kept:
                raise NotFound(f"There is no response {id!r}: only the last responses are kept", param="response_id")
            self._kept.move_to_end(id)
            return self._kept[id][0]

    def put(self, id: str, stored: Stored) -> None:
        """Store a response, unless it alone exceeds the limit."""
        size = len(stored.json) + len(encode(stored.messages))
        with self._lock:
            self.delete(id)
            if size > self._most:
                return
            self._kept[id] = stored, size
            self._bytes += size
            while self._bytes > self._most:
                self.delete(next(iter(self._kept)))

    def delete(self, id: str) -> None:
        """Delete a response, if it is stored."""
        with self._lock:
            if id in self._kept:
                self._bytes -= self._kept.pop(id)[1]
