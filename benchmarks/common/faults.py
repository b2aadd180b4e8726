"""Faults of every kind against a front, its two pods and their clients, drawn from a seed.

Each round sends a mix of requests and commits one fault in their midst. Every answer that the fault does not end
by right must equal the uninterrupted one, every client must end, and no block is held and no process left at the end.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import urlopen

from benchmarks import chaos
from benchmarks.common.process import environment, flags
from benchmarks.common.report import save
from preheat.errors import PreheatError

ROUND_SECONDS, READY_SECONDS = 120.0, 120.0
FULL = "/dev/full"
"""The device that is a full disk: the front's access log goes there."""

REQUESTS, TOKENS = 12, 32


@dataclass
class Fleet:
    """A front and two pods, each in a process that can be killed and started again."""

    options: dict[str, Any]
    ports: list[int] = field(default_factory=lambda: free_ports(3))
    children: list[subprocess.Popen[bytes]] = field(default_factory=list)

    @property
    def port(self) -> int:
        """The front's port."""
        return self.ports[0]

    def start(self, place: int) -> None:
        """Start the front (place 0) or a pod."""
        module, stderr = "benchmarks.common.stepped", subprocess.DEVNULL
        with contextlib.ExitStack() as opened:
            if place:
                command = ["serve", f"--port={self.ports[place]}", *flags(self.options)]
            else:
                stderr = opened.enter_context(open(FULL, "wb")).fileno()
                urls = [f"http://127.0.0.1:{port}" for port in self.ports[1:]]
                more = {
                    "model": "bundled",
                    "access_log": "text",
                    "engine_heartbeat_timeout_s": 1.5,
                    "skip_warmup": True,
                }
                more |= {name: self.options[name] for name in ("enable_auto_tool_choice", "tool_call_parser")}
                command = ["front", *urls, f"--port={self.port}", *flags(more)]
            child = subprocess.Popen([sys.executable, "-m", module, *command], stderr=stderr, env=environment())
        self.children[place : place + 1] = [child]

    def restore(self) -> None:
        """Start all that has ended, and wait until the front has both pods."""
        for place, child in enumerate(self.children):
            if child.poll() is not None:
                self.start(place)
                continue
            for pid in (child.pid, *chaos.engines(child.pid)):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGCONT)
        end = time.monotonic() + READY_SECONDS
        while engines(self.port) < 2:
            for place, child in enumerate(self.children):
                if child.poll() is not None:
                    self.start(place)
            if time.monotonic() > end:
                raise PreheatError("the front did not get both pods back")
            time.sleep(0.1)

    def stop(self) -> None:
        """End all processes."""
        for child in reversed(self.children):
            child.send_signal(signal.SIGCONT)
            child.send_signal(signal.SIGINT)
        for child in self.children:
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(15)
            child.kill()
            child.wait()


def free_ports(count: int) -> list[int]:
    """Return free ports of this machine, each another one."""
    with contextlib.ExitStack() as opened:
        probes = [opened.enter_context(socket.socket()) for _ in range(count)]
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [int(probe.getsockname()[1]) for probe in probes]


def engines(port: int) -> int:
    """Return how many pods take requests, 0 if the server does not answer."""
    with (
        contextlib.suppress(HTTPError, OSError, ValueError),
        urlopen(f"http://127.0.0.1:{port}/ready", timeout=5) as page,
    ):
        return int(json.load(page)["engines"])
    return 0


@dataclass(frozen=True)
class Fault:
    """A fault: ``commit`` it at a fleet, with the place of a pod. ``ends``: clients may be cut by right."""

    commit: Callable[[Fleet, int], None]
    ends: bool = False


def _signal(number: int, *, front: bool = False) -> Callable[[Fleet, int], None]:
    return lambda fleet, pod: fleet.children[0 if front else pod].send_signal(number)


def _to_engine(number: int) -> Callable[[Fleet, int], None]:
    def commit(fleet: Fleet, pod: int) -> None:
        for pid in chaos.engines(fleet.children[pod].pid):
            os.kill(pid, number)

    return commit


def _nothing(fleet: Fleet, pod: int) -> None:
    """Leave the servers alone: clients are at fault."""


FAULTS: dict[str, Fault] = {
    "disconnect": Fault(_nothing), "slow reader": Fault(_nothing),
    "clock step": Fault(_signal(signal.SIGUSR2, front=True)),
    "clock step of a pod": Fault(_signal(signal.SIGUSR2)),
    "kill engine": Fault(_to_engine(signal.SIGKILL)), "stop engine": Fault(_to_engine(signal.SIGSTOP)),
    "end engine": Fault(_to_engine(signal.SIGTERM)),
    "kill pod": Fault(_signal(signal.SIGKILL)), "stop pod": Fault(_signal(signal.SIGSTOP)),
    "drain pod": Fault(_signal(signal.SIGTERM)),
    "kill front": Fault(_signal(signal.SIGKILL, front=True), ends=True),
}  # fmt: skip


async def _leave(port: int, asked: chaos.Asked) -> None:
    """Send a request, read a part of its answer, and close the connection."""
    data = json.dumps(asked.body | {"stream": True}).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(f"POST {asked.path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(data)}\r\n\r\n".encode() + data)
    with contextlib.suppress(OSError):
        await reader.read(200)
    writer.transport.abort()


async def _slow(port: int, asked: chaos.Asked, id: str) -> chaos.Answer:
    """Return an answer that is read a few bytes at a time."""
    data, found = json.dumps(asked.body).encode(), chaos.Answer()
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=64)
    head = f"POST {asked.path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nX-Request-Id: {id}\r\n"
    writer.write(head.encode() + b"Content-Length: %d\r\n\r\n%b" % (len(data), data))
    while more := await reader.read(256):
        found.raw += more
        await asyncio.sleep(0.001)
    writer.close()
    return found


async def _round(fleet: Fleet, asked: Sequence[chaos.Asked], name: str, *, after: int, pod: int) -> list[chaos.Answer]:
    """Return the answers to ``asked`` while the fault ``name`` happens after some parts of streams."""
    parts, done = 0, False

    def seen() -> None:
        nonlocal parts, done
        parts += 1
        if parts >= after and not done:
            done = True
            FAULTS[name].commit(fleet, pod)

    async def one(at: int, each: chaos.Asked) -> chaos.Answer:
        found = chaos.Answer()
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            if name == "slow reader" and at % 3 == 0:
                return await _slow(fleet.port, each, f"c{at}")
            return await chaos.answer(fleet.port, each, f"c{at}", seen, found=found)
        return found

    leavers = [_leave(fleet.port, each) for each in asked] if name == "disconnect" else []
    async with asyncio.timeout(ROUND_SECONDS):
        leaving = asyncio.gather(*leavers)
        answers = await asyncio.gather(*(one(at, each) for at, each in enumerate(asked)))
        await leaving
    return answers


def _held(fleet: Fleet) -> list[str]:
    """Return what is left over though nothing runs: sequences, blocks, processes."""
    end, found = time.monotonic() + 20, ["unknown"]
    while found and time.monotonic() < end:
        found = []
        for place, port in enumerate(fleet.ports):
            with contextlib.suppress(HTTPError, OSError):
                body = json.dumps({"prompt": "x", "max_tokens": 1}).encode()
                urlopen(f"http://127.0.0.1:{port}/v1/completions", body, timeout=10).read()  # brings the last counts
                for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"):
                    if (value := chaos.metric(port, name)) > 0:
                        found.append(f"server {place}: {name} {value:g}")
        for place in (1, 2):
            if (count := len(chaos.engines(fleet.children[place].pid))) != 1:
                found.append(f"pod {place} has {count} engines")
        time.sleep(0.2)
    return found


def run(count: int, seed: int, options: dict[str, Any]) -> None:
    """Commit ``count`` faults, print a line for each, and save the figures. Exit with 1 if anything is wrong."""
    draw, asked = random.Random(seed), chaos.mixed(REQUESTS, seed, None, TOKENS)
    fleet = Fleet({
        "model": "bundled", "num_threads": 1, "kv_cache_memory_bytes": 128 << 20, "engine_restarts": 10_000,
        "max_num_seqs": 32, "log_level": "error", "enable_auto_tool_choice": True, "tool_call_parser": "hermes",
        "shutdown_timeout": 2.0, "engine_heartbeat_timeout_s": 1.5, **options,
    })  # fmt: skip
    rounds: list[dict[str, Any]] = []
    names: list[str] = []
    pids: list[int] = []
    try:
        for place in range(3):
            fleet.start(place)
        fleet.restore()
        plain = asyncio.run(chaos.together(fleet.port, asked))
        expected = [chaos.normal(each) for each in plain]
        parts = sum(len(each.times) for each in plain)
        for number in range(count):
            if number % len(FAULTS) == 0:  # each kind once before any kind again
                names = draw.sample(list(FAULTS), len(FAULTS))
            name = names[number % len(FAULTS)]
            rounds.append(_one(fleet, asked, expected, draw, name=name, parts=parts) | {"number": number})
            print(_line(rounds[-1]), flush=True)
        pids = [pid for child in fleet.children for pid in (child.pid, *chaos.engines(child.pid))]
    finally:
        fleet.stop()
    end = time.monotonic() + 20
    while (left := [pid for pid in pids if Path(f"/proc/{pid}").exists()]) and time.monotonic() < end:
        time.sleep(0.1)
    _report(rounds, seed, left)


def _one(
    fleet: Fleet, asked: Sequence[chaos.Asked], expected: Sequence[dict[str, Any]], draw: random.Random, *,
    name: str, parts: int,
) -> dict[str, Any]:  # fmt: skip
    """Return the figures of one fault."""
    pod = draw.choice((1, 2))
    after, began = draw.randrange(1, max(parts * 8 // 10, 2)), time.monotonic()
    hung = False
    try:
        answers = asyncio.run(_round(fleet, asked, name, after=after, pod=pod))
    except TimeoutError:
        answers, hung = [], True
    differing, cut = 0, 0
    for want, got in zip(expected, answers, strict=False):
        if FAULTS[name].ends and (b"[DONE]" not in got.raw and not got.raw.endswith(b"}")):
            cut += 1
            continue
        with contextlib.suppress(ValueError, IndexError):
            if chaos.normal(got) == want:
                continue
        differing += 1
    fleet.restore()
    return {
        "fault": name, "pod": pod, "after": after, "answers": len(answers), "differing": differing,
        "cut": cut, "hung": hung, "held": _held(fleet), "seconds": round(time.monotonic() - began, 2),
    }  # fmt: skip


def _line(each: dict[str, Any]) -> str:
    return (
        f"{each['number']:>5}  {each['fault']:<20} {each['answers']:>7} {each['differing']:>6} {each['cut']:>4} "
        f"{'hung' if each['hung'] else '-':>5} {each['seconds']:>7.1f}  {'; '.join(each['held'])}"
    )


def _report(rounds: list[dict[str, Any]], seed: int, left: list[int]) -> None:
    wrong = sum(each["differing"] + each["hung"] + len(each["held"]) for each in rounds) + len(left)
    figures = {
        "seed": seed, "faults": len(rounds), "answers": sum(each["answers"] for each in rounds),
        "differing": sum(each["differing"] for each in rounds), "cut_by_a_killed_front": sum(e["cut"] for e in rounds),
        "hung": sum(each["hung"] for each in rounds), "held": sum(len(each["held"]) for each in rounds),
        "processes_left": len(left), "rounds": rounds,
        "by_fault": {name: sum(each["fault"] == name for each in rounds) for name in FAULTS},
    }  # fmt: skip
    print({name: value for name, value in figures.items() if name != "rounds"})
    print(save("chaos_faults", figures))
    if wrong:
        sys.exit(1)
