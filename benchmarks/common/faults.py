"""Faults of every kind against servers and their clients, drawn from a seed.

Each round sends a mix of requests and commits many faults in their midst: clients leave, abort, send half a request or
read slowly, processes pause for a moment, clocks step. Each second round commits one fault that ends or freezes a
process. Every answer that no fault ends by right must equal the uninterrupted one, every client must end, and no block
is held and no process left at the end. The access logs are on a full disk all the time. A round is drawn from the seed
and its number alone, so that one round can be repeated.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.common import crowd
from benchmarks.common.grounds import GROUNDS, Fleet, children, engines_of, requests
from benchmarks.common.report import RESULTS, alone, save

ROUND_SECONDS = 120.0
CLIENTS, BLIPS, CLOCKS = 20, 4, 2
"""Faults of a round: of clients, pauses of processes, steps of clocks."""
HEAVY_EVERY, HELD_EVERY = 2, 4
STATES = ("sent", "waiting", "reading", "answering")
"""The state of a request when its client leaves: half of it was sent; sent just now; its prompt is read; answered."""


@dataclass(frozen=True)
class Fault:
    """A fault of a process: ``commit`` it with a number that draws the process, and return the process.

    ``ends``: clients may be cut. ``stays``: the process does not end.
    """

    commit: Callable[[Fleet, int], int | None]
    ends: bool = False
    stays: bool = False
    on: tuple[str, ...] = tuple(GROUNDS)


def _signal(number: int, place: int | None = None) -> Callable[[Fleet, int], int | None]:
    """Return a fault of the process of ``place``, by default of a drawn pod."""

    def commit(fleet: Fleet, drawn: int) -> int | None:
        child = fleet.children[1 + drawn % (len(fleet.children) - 1) if place is None else place]
        child.send_signal(number)
        return child.pid

    return commit


def _to(number: int, found: Callable[[Fleet], list[int]]) -> Callable[[Fleet, int], int | None]:
    """Return a fault of one of the processes that ``found`` finds."""

    def commit(fleet: Fleet, drawn: int) -> int | None:
        if not (pids := found(fleet)):
            return None
        os.kill(pid := pids[drawn % len(pids)], number)
        return pid

    return commit


def _ranks(fleet: Fleet) -> list[int]:
    return [pid for engine in fleet.victims() for pid in children(engine)]


HEAVY: dict[str, Fault] = {
    "kill engine": Fault(_to(signal.SIGKILL, Fleet.victims), on=("front", "replicas", "ranks", "pooling")),
    "stop engine": Fault(_to(signal.SIGSTOP, Fleet.victims), stays=True, on=("front", "replicas", "ranks", "pooling")),
    "end engine": Fault(_to(signal.SIGTERM, Fleet.victims), on=("front", "replicas", "ranks", "pooling")),
    "kill rank": Fault(_to(signal.SIGKILL, _ranks), on=("ranks",)),
    "kill pod": Fault(_signal(signal.SIGKILL), on=("front", "roles")),
    "stop pod": Fault(_signal(signal.SIGSTOP), stays=True, on=("front",)),
    "drain pod": Fault(_signal(signal.SIGTERM), on=("front", "roles")),
    "kill server": Fault(_signal(signal.SIGKILL, 0), ends=True),
}  # fmt: skip


@dataclass
class Round:
    """The faults and the outcome of one round."""

    number: int
    ground: str
    cells: Counter[str] = field(default_factory=Counter)
    heavy: str = ""
    answers: int = 0
    differing: list[dict[str, Any]] = field(default_factory=list)
    cut: int = 0
    hung: bool = False
    held: list[str] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def wrong(self) -> int:
        return len(self.differing) + self.hung + len(self.held)

    @property
    def faults(self) -> int:
        return sum(count for cell, count in self.cells.items() if not cell.startswith("open: "))


async def _leave(fleet: Fleet, asked: crowd.Asked, state: str, delay: float, reset: bool) -> None:
    """Send a request, and close the connection in ``state``; with ``reset`` without a farewell."""
    asked = await fleet.prepared(asked)
    data = json.dumps(asked.body).encode()
    head = f"POST {asked.path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(data)}\r\n\r\n".encode()
    with contextlib.suppress(OSError):
        reader, writer = await asyncio.open_connection("127.0.0.1", fleet.port)
        writer.write(head + (data[: len(data) // 2] if state == "sent" else data))
        if state == "reading":
            await asyncio.sleep(delay)
        elif state == "answering":
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(reader.read(200 + int(delay * 2e5)), 30)
        if reset:
            writer.transport.abort()
        else:
            writer.close()


async def _slow(fleet: Fleet, asked: crowd.Asked, found: crowd.Answer) -> None:
    """Read an answer a few bytes at a time, through a small buffer."""
    asked = await fleet.prepared(asked)
    data = json.dumps(asked.body).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", fleet.port, limit=64)
    head = f"POST {asked.path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nX-Request-Id: slow\r\n"
    writer.write(head.encode() + b"Content-Length: %d\r\n\r\n%b" % (len(data), data))
    while more := await reader.read(256):
        found.raw += more
        await asyncio.sleep(0.001)
    writer.close()


async def _blip(fleet: Fleet, drawn: random.Random, cells: Counter[str]) -> None:
    """Stop a process for a moment: an engine, or the server of a place."""
    engine = drawn.random() < 0.5
    found = fleet.victims() if engine else [child.pid for child in fleet.children]
    if not found:
        return
    pid = drawn.choice(found)
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGSTOP)
        await asyncio.sleep(drawn.uniform(0.002, 0.08))
        os.kill(pid, signal.SIGCONT)
        cells[f"pause of {'an engine' if engine else 'a server'}"] += 1


def _state(answer: crowd.Answer, asked: crowd.Asked) -> str:
    """Return the state of a survivor's request."""
    if not answer.raw:
        return "open" if not asked.body.get("stream") else "waiting or reading"
    return "ended" if b"[DONE]" in answer.raw else "answering"


class Scene:
    """One round: its requests, the faults in their midst, and the answers."""

    def __init__(self, fleet: Fleet, asked: Sequence[crowd.Asked], result: Round, draw: random.Random) -> None:
        self.fleet, self.asked, self.result, self.draw = fleet, asked, result, draw
        self.answers = [crowd.Answer() for _ in asked]
        self.slow = list[tuple[int, crowd.Answer]]()
        self.struck: int | None = None

    async def play(self, horizon: float) -> None:
        """Run the round; all faults come within ``horizon`` seconds."""
        others = [self._client(horizon) for _ in range(CLIENTS)]
        others += [self._later(horizon, self._blip()) for _ in range(BLIPS)]
        others += [self._later(horizon, self._clock()) for _ in range(CLOCKS)]
        others += [self._later(horizon, self._commit())] if self.result.heavy else []
        async with asyncio.timeout(ROUND_SECONDS):
            await asyncio.gather(*(self._survivor(at) for at in range(len(self.asked))), *others)

    async def _survivor(self, at: int) -> None:
        asked = await self.fleet.prepared(self.asked[at])
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            await crowd.answer(self.fleet.port, asked, f"c{at}", lambda: None, found=self.answers[at])

    async def _commit(self) -> None:
        """Commit the heavy fault, and note the open requests."""
        name = self.result.heavy
        self.result.cells[name] += 1
        for each, answer in zip(self.asked, self.answers, strict=True):
            self.result.cells[f"open: {name} | {each.kind} | {_state(answer, each)}"] += 1
        with contextlib.suppress(ProcessLookupError):
            self.struck = HEAVY[name].commit(self.fleet, self.draw.randrange(1000))

    async def _later(self, horizon: float, fault: Coroutine[Any, Any, None]) -> None:
        await asyncio.sleep(self.draw.uniform(0, horizon))
        await fault

    async def _client(self, horizon: float) -> None:
        """One fault of a client."""
        draw, at = self.draw, self.draw.randrange(len(self.asked))
        what = draw.choices(("disconnect", "abort", "slow reader"), (5, 4, 1))[0]
        state, delay = draw.choice(STATES), draw.uniform(0, 0.03)
        await asyncio.sleep(draw.uniform(0, horizon))
        asked = self.asked[at]
        if what == "slow reader":
            found = crowd.Answer()
            self.slow.append((at, found))
            self.result.cells[f"{what} | {asked.kind} | answering"] += 1
            with contextlib.suppress(OSError):
                await _slow(self.fleet, asked, found)
            return
        self.result.cells[f"{what} | {asked.kind} | {state}"] += 1
        await _leave(self.fleet, asked, state, delay, what == "abort")

    async def _blip(self) -> None:
        await _blip(self.fleet, self.draw, self.result.cells)

    async def _clock(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.draw.choice(self.fleet.children).send_signal(signal.SIGUSR2)
            self.result.cells["clock step"] += 1

    def compare(self, expected: Sequence[dict[str, Any]]) -> None:
        """Compare the answers that no fault has ended by right."""
        ends = self.result.heavy and HEAVY[self.result.heavy].ends
        for at, got in [*enumerate(self.answers), *self.slow]:
            self.result.answers += 1
            want, found = comparable(expected[at]), None
            with contextlib.suppress(ValueError, IndexError):
                found = comparable(crowd.normal(got))
            if ends and (found is None or not found["whole"]):
                self.result.cut += 1
                continue
            if found != want:
                kind = self.asked[at].kind
                self.result.differing.append({"kind": kind, "expected": want, "got": found or repr(got.raw[-400:])})


def comparable(found: dict[str, Any]) -> dict[str, Any]:
    """Return an answer without its id, which its client gives."""
    return {name: value for name, value in found.items() if name != "ids"}


def _one(fleet: Fleet, name: str, number: int, seed: int, plain: tuple[Sequence[crowd.Asked], Any, float]) -> Round:
    """Return the outcome of round ``number``."""
    asked, expected, horizon = plain
    draw, began = random.Random(f"{seed}/{name}/{number}"), time.monotonic()
    result = Round(number, name)
    if number % HEAVY_EVERY == HEAVY_EVERY - 1:
        allowed = [each for each, fault in HEAVY.items() if name in fault.on]
        result.heavy = allowed[number // HEAVY_EVERY % len(allowed)]
    scene = Scene(fleet, asked, result, draw)
    try:
        asyncio.run(scene.play(horizon))
    except TimeoutError:
        result.hung = True
    scene.compare(expected)
    if result.heavy:
        if scene.struck is not None and not HEAVY[result.heavy].stays:
            fleet.wait_for_end(scene.struck)
        fleet.restore()
    if result.heavy or number % HELD_EVERY == 0:
        result.held = fleet.held()
    result.seconds = time.monotonic() - began
    return result


def on_ground(
    name: str, until: int, seed: int, first: int, *, options: dict[str, Any], seconds: float
) -> tuple[list[Round], int]:
    """Commit at least ``until`` faults on a ground, or as many as ``seconds`` suffice for, in one round at least.

    Return the rounds and the number of processes left.
    """
    end_at = time.monotonic() + seconds
    rounds, pids = list[Round](), set[int]()
    with tempfile.TemporaryDirectory() as folder:
        fleet = Fleet(GROUNDS[name], Path(folder), options)
        try:
            for place in range(len(fleet.ground.places)):
                fleet.start(place)
            fleet.restore()
            asked = requests(name, seed)
            began = time.monotonic()
            plain = asyncio.run(crowd.together(fleet.port, asked))
            horizon = max(time.monotonic() - began, 0.2)
            expected = [crowd.normal(each) for each in plain]
            assert {each["status"] for each in expected} == {"200"}, [each.raw[-300:] for each in plain]
            while not rounds or (sum(each.faults for each in rounds) < until and time.monotonic() < end_at):
                rounds.append(_one(fleet, name, first + len(rounds), seed, (asked, expected, horizon)))
                print(_line(rounds[-1]), flush=True)
                pids |= {pid for child in fleet.children for pid in (child.pid, *engines_of(child.pid))}
        finally:
            fleet.stop()
    end = time.monotonic() + 20
    while (left := [pid for pid in pids if Path(f"/proc/{pid}").exists()]) and time.monotonic() < end:
        time.sleep(0.1)
    return rounds, len(left)


def run(
    count: int, seed: int, options: dict[str, Any], *, ground: str | None = None, first: int = 0, seconds: float
) -> None:
    """Commit ``count`` faults over all grounds, or on one, from round ``first`` on, and save the figures.

    They end after about ``seconds``. A run with the seed of the record adds to it, also beside others. Exit with 1 if
    anything is wrong.
    """
    names = list(GROUNDS) if ground is None else [ground]
    for name in names:
        figures = _record(seed)
        begun = first or figures["rounds"].get(name, 0)
        rounds, left = on_ground(
            name, -(-count // len(names)), seed, begun, options=options, seconds=seconds / len(names)
        )
        with alone("chaos_faults"):
            figures = _added(_record(seed), name, rounds, left)
            print(save("chaos_faults", figures))
    print({name: value for name, value in figures.items() if name not in ("cells", "failed")})
    if figures["failed"] or figures["processes_left"]:
        sys.exit(1)


def _record(seed: int) -> dict[str, Any]:
    """Return the figures so far of runs with ``seed``."""
    path = RESULTS / "chaos_faults.json"
    if path.exists():
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))["figures"]
        if found["seed"] == seed and "cells" in found:
            return found
    names = ("faults", "answers", "differing", "cut_by_a_killed_server", "hung", "held", "processes_left")
    return {"seed": seed, **dict.fromkeys(names, 0), "rounds": {}, "by_fault": {}, "cells": {}, "failed": []}


def _added(figures: dict[str, Any], name: str, rounds: Sequence[Round], left: int) -> dict[str, Any]:
    """Return ``figures`` with the rounds of a ground."""
    cells = Counter[str](figures["cells"])
    for each in rounds:
        cells.update({f"{name} | {cell}": count for cell, count in each.cells.items()})
    by = Counter[str]()
    for cell, count in cells.items():
        if "open: " not in cell:
            by[cell.split(" | ")[1]] += count
    sums = {
        "faults": sum(each.faults for each in rounds), "answers": sum(each.answers for each in rounds),
        "differing": sum(len(each.differing) for each in rounds),
        "cut_by_a_killed_server": sum(each.cut for each in rounds), "hung": sum(each.hung for each in rounds),
        "held": sum(len(each.held) for each in rounds), "processes_left": left,
    }  # fmt: skip
    failed = [
        {"ground": name, "round": each.number, "heavy": each.heavy, "held": each.held, "differing": each.differing}
        for each in rounds if each.wrong
    ]  # fmt: skip
    done = {**figures["rounds"], name: max(rounds[-1].number + 1, figures["rounds"].get(name, 0))}
    more = {key: figures[key] + value for key, value in sums.items()}
    cells_kept = dict(sorted(cells.items()))
    return figures | more | {
        "rounds": done, "by_fault": dict(by), "cells": cells_kept, "failed": figures["failed"] + failed,
    }  # fmt: skip


def _line(each: Round) -> str:
    return (
        f"{each.number:>5}  {each.ground:<9} {each.faults:>4} {each.heavy:<12} {each.answers:>7} "
        f"{len(each.differing):>6} {each.cut:>4} {'hung' if each.hung else '-':>5} {each.seconds:>7.1f}  "
        f"{'; '.join(each.held)}"
    )
