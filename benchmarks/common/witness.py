"""``preheat`` that kills its own engines at chosen tokens, and notes where each request was.

The journal of the server tells how many tokens each request has when its engine is lost. SIGUSR1 arms one kill: the
position with the most requests that no kill has met there yet. The kill is SIGKILL for the engine, once half of these
requests have come near it, or fewer if no round has so many. Each kill is a line of JSON in the file
``PREHEAT_WITNESS``, with times of ``time.monotonic``. A file beside it, with the suffix ``.lengths``, has the tokens of
each choice.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from preheat.core import Delta, Request
from preheat.frontend.journal import ALONE, Journal, Lost, Owner
from preheat.server.replicas import Replicas

Key = tuple[int, int]
"""The seed and the choice of a sequence: its name in every round."""


@dataclass
class Witness:
    """The positions where requests were lost, and the kills to come."""

    lengths: dict[Key, int] = field(default_factory=dict)
    met: set[tuple[Key, int]] = field(default_factory=set)
    armed: bool = False
    share: float = 0.5  # of the wanted requests that must have come near
    turn: int = 0
    target: int = 0
    wanted: set[Key] = field(default_factory=set)
    kill: dict[str, Any] | None = None
    first: list[float] = field(default_factory=list)  # seconds from arrival to the first token, before any kill
    steps: list[float] = field(default_factory=list)
    began: dict[int, float] = field(default_factory=dict)
    moved: dict[int, float] = field(default_factory=dict)

    def arm(self, *_: object) -> None:
        """Choose the position of the next kill."""
        self.write()
        if not self.lengths:
            with open(os.environ["PREHEAT_WITNESS"] + ".lengths", encoding="utf-8") as told:
                self.lengths = {(seed, choice): length for seed, choice, length in json.load(told)}
        left = Counter(k for key, length in self.lengths.items() for k in range(length) if (key, k) not in self.met)
        self.target = max(left, key=lambda k: (left[k], -k), default=0)
        self.wanted = {key for key, length in self.lengths.items() if length > self.target} - {
            key for key, k in self.met if k == self.target
        }
        self.share = self.share / 2 if self.armed else min(self.share * 2, 0.5)
        self.turn += 1
        self.armed, self.moved = True, {}

    def due(self, places: dict[Key, int]) -> bool:
        """Return whether to kill now, with the open requests at ``places``. Tokens on their way come first."""
        if not self.armed:
            return False
        near = self.target - self.turn % 3
        return sum(places.get(key, -1) >= near for key in self.wanted) >= max(len(self.wanted) * self.share, 1)

    def write(self) -> None:
        """Write the line of the last kill."""
        if self.kill is None:
            return
        known = {(key, k) for key, k in self.met if k < self.lengths.get(key, 0)}
        total = sum(self.lengths.values())
        self.kill |= {"met": len(known), "of": total, "back_s": sorted(self.moved.values())}
        with open(os.environ["PREHEAT_WITNESS"], "a", encoding="utf-8") as out:
            out.write(json.dumps(self.kill) + "\n")
        self.kill = None


WITNESS = Witness()


def _key(request: Request) -> Key:
    return (request.params.seed or 0, request.choice)


def install() -> None:
    """Wrap the journal and the replicas of this process."""
    sent, seen, lost, built = Journal.sent, Journal.seen, Journal.lost, Replicas.__init__
    own: list[Replicas] = []

    def begin(self: Replicas, *args: Any, **kwargs: Any) -> None:
        built(self, *args, **kwargs)
        own.append(self)

    def on_sent(self: Journal, request: Request, owner: Owner | None = ALONE) -> None:
        sent(self, request, owner)
        WITNESS.began.setdefault(request.id, time.monotonic())

    def on_seen(self: Journal, delta: Delta, owner: Owner = ALONE) -> Delta:
        delta = seen(self, delta, owner)
        now, killing = time.monotonic(), WITNESS.kill
        if not WITNESS.turn:
            WITNESS.first += [now - WITNESS.began[id] for id in delta.started if id in WITNESS.began]
            WITNESS.steps.append(now)
        elif killing is not None:
            for id in delta.ids:
                if id in WITNESS.moved and WITNESS.moved[id] < 0:
                    WITNESS.moved[id] = now - killing["lost"]
        if WITNESS.armed:
            owned = self._owned.get(owner, set())
            places = {_key(self._entries[id].request): len(self._entries[id].tokens) for id in owned}
            if WITNESS.due(places):
                WITNESS.armed = False
                process: Any = own[0].members[owner.member].process
                WITNESS.kill = {"target": WITNESS.target, "killed": time.monotonic(), "open": len(places)}
                os.kill(process._child.pid, signal.SIGKILL)
        return delta

    def on_lost(self: Journal, owner: Owner) -> Lost:
        entries = {id: self._entries[id] for id in self._owned.get(owner, ())}
        if WITNESS.kill is not None and "lost" not in WITNESS.kill:
            WITNESS.kill |= {"lost": time.monotonic(), "lost_requests": len(entries)}
            WITNESS.met |= {(_key(entry.request), len(entry.tokens)) for entry in entries.values()}
            WITNESS.moved = dict.fromkeys(entries, -1.0)
        return lost(self, owner)

    Journal.sent, Journal.seen, Journal.lost = on_sent, on_seen, on_lost  # type: ignore[method-assign]
    Replicas.__init__ = begin  # type: ignore[method-assign]


def note(*_: object) -> None:
    """Write the last kill's line, or the times of the undisturbed round before any kill."""
    if WITNESS.turn:
        WITNESS.write()
        return
    steps = sorted(later - earlier for earlier, later in zip(WITNESS.steps, WITNESS.steps[1:], strict=False))
    plain = {
        "first_token_s": sorted(WITNESS.first), "step_s": steps[len(steps) // 2] if steps else 0.0,
    }  # fmt: skip
    with open(os.environ["PREHEAT_WITNESS"], "a", encoding="utf-8") as out:
        out.write(json.dumps({"plain": plain}) + "\n")


def main() -> int:
    """Run the command line of preheat under the witness."""
    install()
    signal.signal(signal.SIGUSR1, WITNESS.arm)
    signal.signal(signal.SIGUSR2, note)
    from preheat.cli.main import main as command

    return command(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
