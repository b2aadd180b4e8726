"""``preheat`` that kills its own engines at chosen tokens, and notes where each request was, and where its pause went.

The journal of the server tells how many tokens each request has when its engine is lost. SIGUSR1 arms one kill:
SIGKILL for the engine once enough open requests are at positions that no kill has met. Enough is a share of the most
that any moment of recent rounds would have met, or any moment of the last round, if that was without a kill. Each
round is a line of JSON in the file ``PREHEAT_WITNESS``, with times of ``time.monotonic``, empty without a kill. A file
beside it, with the suffix ``.lengths``, has the tokens of each choice, and the positions that earlier runs have met.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from preheat.core import Delta, FromEngine, Request
from preheat.frontend.journal import ALONE, Journal, Lost, Owner
from preheat.server.replicas.replicas import Moved, Replicas
from preheat.transport import RECEIVE_SECONDS, FrontendTransport

Key = tuple[int, int]
"""The seed and the choice of a sequence: its name in every round."""

SHARE = 0.75
"""The share of the most new positions of recent moments that a kill waits for."""

RECENT = 120
"""Recent moments, each behind a step: those of two or three rounds."""


@dataclass
class Pause:
    """The times of the parts of one pause, by the id of each moved sequence."""

    lost: float
    tokens: int  # of the moved texts
    open: set[int]
    cpu: float = 0.0  # of the processes that take over, before
    sent: float = 0.0
    taken: dict[int, float] = field(default_factory=dict)
    began: dict[int, float] = field(default_factory=dict)  # the step that read the text
    token: dict[int, float] = field(default_factory=dict)
    grammar: float = 0.0

    def parts(self) -> dict[str, list[float]]:
        """Return the seconds of each part, sorted."""
        ids = [id for id in self.token if id in self.taken]
        return {
            "take_s": sorted(self.taken[id] - self.sent for id in ids),
            "queue_s": sorted(max(self.began[id] - self.taken[id], 0.0) for id in ids),
            "read_s": sorted(self.token[id] - max(self.began[id], self.taken[id]) for id in ids),
            "next_s": sorted(self.token[id] - self.lost for id in ids),
        }


@dataclass
class Witness:
    """The positions where requests were lost, and the kills to come."""

    lengths: dict[Key, int] = field(default_factory=dict)
    met: set[tuple[Key, int]] = field(default_factory=set)
    seen: set[tuple[Key, int]] = field(default_factory=set)  # positions that any journal has had
    scenes: deque[set[tuple[Key, int]]] = field(default_factory=lambda: deque(maxlen=RECENT))
    armed: bool = False
    least: float = 1
    best: int = 0  # new positions of the best moment since the kill was armed
    turn: int = 0
    kill: dict[str, Any] | None = None
    pause: Pause | None = None
    first: list[float] = field(default_factory=list)  # seconds from arrival to the first token, before any kill
    steps: list[float] = field(default_factory=list)
    began: dict[int, float] = field(default_factory=dict)
    prompts: int = 0  # tokens of the undisturbed round

    def arm(self, *_: object) -> None:
        """Choose the worth of the next kill."""
        if not self.lengths:
            told = json.loads(Path(os.environ["PREHEAT_WITNESS"] + ".lengths").read_text(encoding="utf-8"))
            self.lengths = {(seed, choice): length for seed, choice, length in told["lengths"]}
            self.met = {((seed, choice), k) for seed, choice, k in told["met"]}
        most = max(map(self.worth, self.scenes), default=1)
        self.least = max(SHARE * (self.best if self.armed else most), 1)
        self.best = 0
        self.turn += 1
        self.armed, self.pause = True, None

    def worth(self, scene: set[tuple[Key, int]]) -> int:
        """Return how many positions a kill would meet for the first time."""
        return sum(k < self.lengths.get(key, 0) for key, k in scene - self.met)

    def look(self, scene: set[tuple[Key, int]]) -> bool:
        """Note the positions of all open requests. Return whether to kill now."""
        self.seen |= scene
        if not self.armed:
            return False
        self.best = max(self.best, worth := self.worth(scene))
        return worth >= self.least

    def missing(self) -> list[str]:
        """Return seed, choice and tokens of each position that no kill has met, and 1 if a journal has had it."""
        return [
            f"{key[0]} {key[1]} {k} {int((key, k) in self.seen)}"
            for key, length in self.lengths.items() for k in range(length) if (key, k) not in self.met
        ]  # fmt: skip

    def write(self) -> None:
        """Write the line of the round."""
        if self.kill is None:
            self.tell({})
            return
        total, missing = sum(self.lengths.values()), self.missing()
        self.kill |= {"met": total - len(missing), "of": total, "missing": missing}
        if self.pause is not None:
            parts = self.pause.parts() | {"resend_s": [self.pause.sent - self.pause.lost]}
            self.kill |= parts | {"tokens": self.pause.tokens, "grammar_s": self.pause.grammar, "cpu_s": self.pause.cpu}
        self.tell(self.kill)
        self.kill = None

    def tell(self, line: dict[str, Any]) -> None:
        """Add a line to the file."""
        with open(os.environ["PREHEAT_WITNESS"], "a", encoding="utf-8") as out:
            out.write(json.dumps(line) + "\n")


WITNESS = Witness()


def _scene(journal: Journal, owner: Owner | None) -> set[tuple[Key, int]]:
    """Return the positions of the sequences that ``owner`` runs."""
    entries = (journal._entries[id] for id in journal._owned.get(owner, ()))
    return {((entry.request.params.seed or 0, entry.request.choice), len(entry.tokens)) for entry in entries}


def _cpu(replicas: Replicas, but: int) -> float:
    """Return the seconds of the processor that the engines have had, without one of them."""
    found = 0
    for member in replicas.members:
        process: Any = member.process
        if member.number != but:
            words = Path(f"/proc/{process._child.pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
            found += int(words[11]) + int(words[12])
    return found / os.sysconf("SC_CLK_TCK")


def _kill(replicas: Replicas, member: int, count: int) -> None:
    WITNESS.armed = False
    process: Any = replicas.members[member].process
    WITNESS.kill = {"killed": time.monotonic(), "open": count, "member": member, "least": WITNESS.least}
    os.kill(process._child.pid, signal.SIGKILL)


def install_receipts() -> None:
    """Wrap the moves and the transports of this process: note when moved requests are sent and taken."""
    lose, receive = Replicas.lose, FrontendTransport.receive

    def on_lose(self: Replicas, replica: int, *, trusted: bool) -> Moved:
        moved = lose(self, replica, trusted=trusted)
        if WITNESS.pause is not None and not WITNESS.pause.sent:
            WITNESS.pause.sent = time.monotonic()
        return moved

    def on_receive(self: FrontendTransport, seconds: float = RECEIVE_SECONDS) -> list[FromEngine]:
        before = [id for id, _ in self.untaken]
        found = receive(self, seconds)
        if before and (pause := WITNESS.pause) is not None:
            left = {id for id, _ in self.untaken}
            pause.taken |= {id: time.monotonic() for id in before if id not in left and id not in pause.taken}
        return found

    Replicas.lose = on_lose  # type: ignore[method-assign]
    FrontendTransport.receive = on_receive  # type: ignore[method-assign]


def install() -> None:
    """Wrap the journal and the replicas of this process: note positions, and kill."""
    sent, seen, lost, built = Journal.sent, Journal.seen, Journal.lost, Replicas.__init__
    own, last = list[Replicas](), dict[int, float]()  # the time of each member's last step

    def begin(self: Replicas, *args: Any, **kwargs: Any) -> None:
        built(self, *args, **kwargs)
        own.append(self)

    def look(journal: Journal, owner: Owner | None) -> None:
        scene = _scene(journal, owner)
        if owner is not None and WITNESS.look(scene):
            _kill(own[0], owner.member, len(scene))

    def on_sent(self: Journal, request: Request, owner: Owner | None = ALONE) -> None:
        sent(self, request, owner)
        if request.id not in WITNESS.began:
            WITNESS.began[request.id] = time.monotonic()
            WITNESS.prompts += len(request.prompt) if not WITNESS.turn else 0
            look(self, owner)

    def on_seen(self: Journal, delta: Delta, owner: Owner = ALONE) -> Delta:
        delta = seen(self, delta, owner)
        now, pause = time.monotonic(), WITNESS.pause
        if not WITNESS.turn:
            WITNESS.first += [now - WITNESS.began[id] for id in delta.started if id in WITNESS.began]
            WITNESS.steps += [now] if delta.ids else []
        elif pause is not None and (new := pause.open.intersection(delta.ids)):
            pause.open -= new
            pause.token |= dict.fromkeys(new, now)
            pause.began |= dict.fromkeys(new, max(last.get(owner.member, 0.0), pause.sent))
            if delta.stats is not None and delta.stats.grammars is not None:
                pause.grammar = delta.stats.grammars.compile_seconds
            if not pause.open:
                pause.cpu = _cpu(own[0], WITNESS.kill["member"]) - pause.cpu if WITNESS.kill else 0.0
        last[owner.member] = now
        WITNESS.scenes.append(_scene(self, owner))
        look(self, owner)
        return delta

    def on_lost(self: Journal, owner: Owner) -> Lost:
        entries = {id: self._entries[id] for id in self._owned.get(owner, ())}
        if (killing := WITNESS.kill) is not None and "lost" not in killing:
            killing |= {"lost": time.monotonic(), "lost_requests": len(entries)}
            WITNESS.met |= _scene(self, owner)
            tokens = sum(len(each.request.prompt) + len(each.tokens) for each in entries.values())
            WITNESS.pause = Pause(killing["lost"], tokens, set(entries), _cpu(own[0], owner.member))
        return lost(self, owner)

    Journal.sent, Journal.seen, Journal.lost = on_sent, on_seen, on_lost  # type: ignore[method-assign]
    Replicas.__init__ = begin  # type: ignore[method-assign]


def note(*_: object) -> None:
    """Write the line of the round, or the times of the undisturbed round before any kill."""
    if WITNESS.turn:
        WITNESS.write()
        return
    steps = sorted(later - earlier for earlier, later in zip(WITNESS.steps, WITNESS.steps[1:], strict=False))
    plain = {
        "first_token_s": sorted(WITNESS.first), "step_s": steps[len(steps) // 2] if steps else 0.0,
        "prompts": WITNESS.prompts,
    }  # fmt: skip
    WITNESS.tell({"plain": plain})


def forget(*_: object) -> None:
    """Forget the times so far: the next round has found no first use."""
    WITNESS.first.clear()
    WITNESS.steps.clear()
    WITNESS.scenes.clear()
    WITNESS.prompts = 0


def main() -> int:
    """Run the command line of preheat under the witness."""
    install()
    install_receipts()
    signal.signal(signal.SIGUSR1, WITNESS.arm)
    signal.signal(signal.SIGUSR2, note)
    signal.signal(signal.SIGHUP, forget)
    from preheat.cli.main import main as command

    return command(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
