"""The journal: requests in flight, with the tokens that their clients have, and the member that runs each.

It has all that a sequence needs to go on elsewhere: the request as it was sent, and its output so far. The law of
:mod:`preheat.schedule.resume` gives the client the same answer. Nothing here waits or sends.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec

from preheat.core import Delta, Request, Resume

MOST_MOVES = 2
"""Moves of a request. A request whose members fall ill more often may be the reason, and ends."""


class Owner(NamedTuple):
    """A member that runs requests; its ``epoch`` grows with each start of its process."""

    member: int
    epoch: int


ALONE = Owner(0, 0)
"""The owner where there is a single member that never restarts."""


@dataclass(slots=True)
class _Entry:
    request: Request  # as it was sent first
    owner: Owner | None  # None: the request waits for a member
    tokens: list[int]
    adapter: str | None = None  # the digest of its adapter, once it has started
    moves: int = 0


@dataclass(slots=True)
class Lost:
    """The requests of a lost member: those that go on elsewhere, and the ids that have moved too often."""

    again: list[Request] = field(default_factory=list)
    ended: list[int] = field(default_factory=list)


class Journal:
    """Requests by id, from :meth:`sent` until :meth:`seen` sees their end, or :meth:`forget`.

    The fence: a delta counts only from the current owner of an id. A former owner that wakes up adds nothing.
    """

    def __init__(self) -> None:
        self._entries: dict[int, _Entry] = {}
        self._owned: dict[Owner | None, set[int]] = {}
        self.moving = set[int]()
        """Requests that were lost and have had no result since."""

    def __len__(self) -> int:
        return len(self._entries)

    def sent(self, request: Request, owner: Owner | None = ALONE) -> None:
        """Note that ``owner`` gets a request, new or resumed; None: it waits for an owner."""
        entry = self._entries.get(request.id)
        if entry is None:
            entry = self._entries[request.id] = _Entry(request, owner, [*request.delivered])
        else:
            self._owned[entry.owner].discard(request.id)
            entry.owner, entry.tokens = owner, [*request.delivered]
        self._owned.setdefault(owner, set()).add(request.id)

    def seen(self, delta: Delta, owner: Owner = ALONE) -> Delta:
        """Note the results of a step of ``owner``, and return the part that counts.

        Requests that end in it are forgotten.
        """
        owned = self._owned.get(owner, set())
        if not self._counts(delta, owned):
            delta = part(delta, owned)
        entries = self._entries
        for id, token in zip(delta.ids, delta.tokens, strict=True):
            entries[id].tokens.append(token)
        if self.moving:
            self.moving.difference_update(delta.ids)
        for id in delta.started:
            entries[id].adapter = delta.adapters.get(id, "")
        for id in delta.finished:
            self.forget(id)
        return delta

    def _counts(self, delta: Delta, owned: set[int]) -> bool:
        """Return whether all of ``delta`` counts from the owner of the ids ``owned``."""
        named = (delta.ids, delta.started, delta.finished, delta.prompt_logprobs)
        return all(owned.issuperset(ids) for ids in named)

    def forget(self, id: int) -> None:
        """Forget a request; an unknown ``id`` is fine."""
        if (entry := self._entries.pop(id, None)) is not None:
            self._owned[entry.owner].discard(id)
            self.moving.discard(id)

    def lost(self, owner: Owner) -> Lost:
        """Take all requests from ``owner``, in the order of their arrival; they wait for an owner then.

        Requests that would move more than :data:`MOST_MOVES` times wait for no other, and are forgotten.
        """
        found = Lost()
        for id in sorted(self._owned.pop(owner, ())):
            entry = self._entries[id]
            entry.owner, entry.moves = None, entry.moves + 1
            self._owned.setdefault(None, set()).add(id)
            if entry.moves > MOST_MOVES:
                found.ended.append(id)
                self.forget(id)
            else:
                self.moving.add(id)
                found.again.append(self._resumed(id))
        return found

    def again(self, id: int) -> Request | None:
        """Take a request from its owner, which has lost it alone, and return it as it goes on.

        Returns None, and forgets it, if it has moved too often.
        """
        entry = self._entries[id]
        entry.moves += 1
        if entry.moves > MOST_MOVES:
            self.forget(id)
            return None
        return self._resumed(id)

    def drop(self, owner: Owner) -> list[int]:
        """Forget all requests of ``owner``, whose results may be wrong, and return their ids."""
        ids = sorted(self._owned.get(owner, ()))
        for id in ids:
            self.forget(id)
        return ids

    def waiting(self) -> list[Request]:
        """Return the requests that wait for an owner, each as it goes on, in the order of their arrival."""
        return [self._resumed(id) for id in sorted(self._owned.get(None, ()))]

    def resumed(self, ids: Iterable[int] | None = None) -> list[Request]:
        """Return the requests ``ids``, by default all, such that each goes on behind the tokens of its client.

        A request that has not started is returned as it was sent.
        """
        return [self._resumed(id) for id in (list(self._entries) if ids is None else ids)]

    def _resumed(self, id: int) -> Request:
        entry = self._entries[id]
        if entry.adapter is None:
            return entry.request
        return msgspec.structs.replace(entry.request, resume=Resume([*entry.tokens], entry.adapter))


def part(delta: Delta, owned: set[int]) -> Delta:
    """Return the part of ``delta`` about the ids ``owned``, with its statistics."""
    kept = [place for place, id in enumerate(delta.ids) if id in owned]
    place_of = {old: new for new, old in enumerate(kept)}
    return Delta(
        ids=[delta.ids[place] for place in kept],
        tokens=[delta.tokens[place] for place in kept],
        finished={id: end for id, end in delta.finished.items() if id in owned},
        logprobs={place_of[at]: entry for at, entry in delta.logprobs.items() if at in place_of},
        prompt_logprobs={id: entries for id, entries in delta.prompt_logprobs.items() if id in owned},
        started={id: cached for id, cached in delta.started.items() if id in owned},
        stats=delta.stats,
        pooled={id: vector for id, vector in delta.pooled.items() if id in owned},
        adapters={id: digest for id, digest in delta.adapters.items() if id in owned},
        digests=b"".join(delta.digests[8 * place : 8 * place + 8] for place in kept),
    )
