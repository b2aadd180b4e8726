"""The journal: requests in flight, with the tokens that their clients have.

It has all that a sequence needs to go on elsewhere: the request as it was sent, and its output so far. The law of
:mod:`preheat.schedule.resume` gives the client the same answer.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from preheat.core import Delta, Request, Resume


class Journal:
    """Requests by id, from :meth:`sent` until :meth:`seen` sees their end, or :meth:`forget`."""

    def __init__(self) -> None:
        self._requests: dict[int, Request] = {}
        self._tokens: dict[int, list[int]] = {}
        self._adapters: dict[int, str] = {}

    def __len__(self) -> int:
        return len(self._requests)

    def sent(self, request: Request) -> None:
        """Note a request that an engine gets."""
        self._requests[request.id] = request
        self._tokens[request.id] = [*request.delivered]

    def seen(self, delta: Delta) -> None:
        """Note the tokens of a step, and forget the requests that end in it."""
        for id, token in zip(delta.ids, delta.tokens, strict=True):
            if id in self._tokens:
                self._tokens[id].append(token)
        for id in delta.started.keys() & self._requests.keys():
            self._adapters[id] = delta.adapters.get(id, "")
        for id in delta.finished:
            self.forget(id)

    def forget(self, id: int) -> None:
        """Forget a request; an unknown ``id`` is fine."""
        self._requests.pop(id, None)
        self._tokens.pop(id, None)
        self._adapters.pop(id, None)

    def resumed(self, ids: Iterable[int] | None = None) -> list[Request]:
        """Return the requests ``ids``, by default all, such that each goes on behind the tokens of its client.

        A request that has not started is returned as it was sent.
        """
        return [self._resumed(id) for id in (list(self._requests) if ids is None else ids)]

    def _resumed(self, id: int) -> Request:
        request = self._requests[id]
        if id not in self._adapters:
            return request
        return msgspec.structs.replace(request, resume=Resume(list(self._tokens[id]), self._adapters[id]))
