"""Servers that suffer faults: processes that are killed, stopped and started again, and the requests they answer."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import urlopen

from benchmarks.common import crowd
from benchmarks.common.adapter import write_adapter
from benchmarks.common.ports import free_ports
from benchmarks.common.process import environment, flags
from preheat.errors import PreheatError
from preheat.lora.adapter import adapted_modules
from preheat.model.families import read_spec
from preheat.model.files import BUNDLED_PATH, read_config

READY_SECONDS = 120.0
FULL = "/dev/full"
"""The device that is a full disk: the access log of the servers goes there."""

REQUESTS, TOKENS = 12, 32
POOLED = "/v1/embeddings"

ENGINE: dict[str, Any] = {
    "model": "bundled", "num_threads": 1, "kv_cache_memory_bytes": 128 << 20, "engine_restarts": 10_000,
    "max_num_seqs": 32, "log_level": "error", "engine_heartbeat_timeout_s": 1.5, "shutdown_timeout": 2.0,
    "access_log": "text", "skip_warmup": True,
}  # fmt: skip
TEXT: dict[str, Any] = {"enable_auto_tool_choice": True, "tool_call_parser": "hermes"}
DRAFTS = '{"method": "ngram", "num_speculative_tokens": 2}'


@dataclass(frozen=True)
class Ground:
    """The options of servers by place; clients talk to place 0, which runs ``engines`` engines or finds them.

    ``kinds`` makes the requests from a seed. Places that ``front`` others have no engine of their own.
    """

    places: tuple[dict[str, Any], ...]
    kinds: Callable[[int], list[crowd.Asked]]
    lora: bool = False
    fronts: bool = False
    engines: int = 2
    ranks: bool = False
    reads: bool = False  # place 1 reads the prompts for place 0


def _text(seed: int) -> list[crowd.Asked]:
    return crowd.mixed(REQUESTS, seed, None, TOKENS)


def _adapted(seed: int) -> list[crowd.Asked]:
    return crowd.mixed(REQUESTS, seed, crowd.ADAPTER, TOKENS)


def _long(seed: int) -> list[crowd.Asked]:
    from benchmarks.roles import longer

    return [longer(each, at) for at, each in enumerate(_adapted(seed))]


def _pooled(seed: int) -> list[crowd.Asked]:
    texts = [f"def f{at}(x):\n    return {seed}\n" * (1 + at) for at in range(REQUESTS)]
    return [crowd.Asked("pooling", POOLED, {"input": text}) for text in texts]


GROUNDS: dict[str, Ground] = {
    "front": Ground(({}, TEXT, TEXT), _adapted, lora=True, fronts=True),
    "replicas": Ground(
        (TEXT | {"data_parallel_size": 2, "speculative_config": DRAFTS, "kv_offloading_size": 0.1,
                 "kv_cache_memory_bytes": 8 << 20},),
        _adapted, lora=True),
    "ranks": Ground((TEXT | {"data_parallel_size": 2, "tensor_parallel_size": 2},), _text, ranks=True),
    "pooling": Ground(({"data_parallel_size": 2, "runner": "pooling"},), _pooled),
    "roles": Ground(
        (TEXT | {"role": "decode", "kv_offloading_size": 0.1}, TEXT | {"role": "prefill", "kv_offloading_size": 0.1}),
        _long, lora=True, engines=1, reads=True),
}  # fmt: skip


@dataclass
class Fleet:
    """The servers of a ground, each in a process that can be killed and started again."""

    ground: Ground
    folder: Path
    options: dict[str, Any]
    ports: list[int] = field(default_factory=list)
    children: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.ports = free_ports(len(self.ground.places))
        if self.ground.lora:
            modules = adapted_modules(read_spec(read_config(BUNDLED_PATH)))
            adapted = {name: size for name, size in modules.items() if name.endswith(("q_proj", "v_proj"))}
            write_adapter(self.folder, adapted)

    @property
    def port(self) -> int:
        """The port of the server that clients use."""
        return self.ports[0]

    def start(self, place: int) -> None:
        """Start the server of a place."""
        options = ENGINE | self.ground.places[place]
        if self.ground.lora:
            options |= {"enable_lora": True, "lora_modules": [f"{crowd.ADAPTER}={self.folder}"]}
        command = ["serve"]
        if self.ground.fronts and not place:
            kept = ("model", "access_log", "engine_heartbeat_timeout_s", "skip_warmup", "enable_lora", "lora_modules")
            options = {name: options[name] for name in kept} | TEXT
            command = ["front", *(f"http://127.0.0.1:{port}" for port in self.ports[1:])]
        options |= {name: value for name, value in self.options.items() if name in options or command == ["serve"]}
        command += [f"--port={self.ports[place]}", *flags(options)]
        with open(FULL, "wb") as full:
            child = subprocess.Popen(
                [sys.executable, "-m", "benchmarks.common.stepped", *command], stderr=full, env=environment()
            )
        self.children[place : place + 1] = [child]

    def victims(self) -> list[int]:
        """Return the processes of the engines, without their ranks."""
        places = self.children[1:] if self.ground.fronts else self.children
        return [pid for child in places for pid in engines_of(child.pid)]

    def wait_for_end(self, pid: int) -> None:
        """Wait until a process has ended. Raises PreheatError if it has not in time."""
        end = time.monotonic() + READY_SECONDS
        while Path(f"/proc/{pid}").exists():
            for child in self.children:
                child.poll()  # so that no process that has ended stays
            if time.monotonic() > end:
                raise PreheatError(f"process {pid} has not ended in time")
            time.sleep(0.02)

    def restore(self) -> None:
        """Start all that has ended, and wait until all engines take requests."""
        for child in self.children:
            for pid in (child.pid, *(found for each in engines_of(child.pid) for found in (each, *children(each)))):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGCONT)
        end = time.monotonic() + READY_SECONDS
        while not self._whole():
            if time.monotonic() > end:
                raise PreheatError("the engines were not back in time")
            time.sleep(0.05)

    def _whole(self) -> bool:
        """Start all servers that have ended, and return whether there were none and all engines take requests.

        A front counts an engine for a moment after its server has ended, so each server is asked.
        """
        ended = [place for place, child in enumerate(self.children) if child.poll() is not None]
        for place in ended:
            self.start(place)
        return not ended and all(map(engines, self.ports)) and engines(self.port) >= self.ground.engines

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

    async def prepared(self, asked: crowd.Asked) -> crowd.Asked:
        """Return ``asked`` as the client sends it; a server that reads prompts reads its prompt first."""
        if not self.ground.reads:
            return asked
        from benchmarks.roles import reading

        with contextlib.suppress(OSError, ValueError, asyncio.IncompleteReadError, KeyError, TimeoutError):
            async with asyncio.timeout(10):
                found = await crowd.answer(self.ports[1], reading(asked), "r", lambda: None)
            params = json.loads(found.raw.partition(b"\r\n\r\n")[2])["kv_transfer_params"]
            return replace(asked, body=asked.body | {"kv_transfer_params": params})
        return asked

    def held(self) -> list[str]:
        """Return what is left over though nothing runs: sequences, blocks, processes."""
        end, found = time.monotonic() + 20, ["unknown"]
        while found and time.monotonic() < end:
            found = []
            for place, port in enumerate(self.ports):
                with contextlib.suppress(HTTPError, OSError):
                    _ask(port, self.ground)  # brings the last counts
                    for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"):
                        if (value := crowd.metric(port, name)) > 0:
                            found.append(f"server {place}: {name} {value:g}")
            wanted = len(self.ground.places) - 1 if self.ground.fronts else self.ground.engines + self.ground.reads
            if (count := len(self.victims())) != wanted:
                found.append(f"{count} engines")
            if found:
                time.sleep(0.2)
        return found


def _ask(port: int, ground: Ground) -> None:
    pools = ground is GROUNDS["pooling"]
    path, body = (POOLED, {"input": "x"}) if pools else (crowd.COMPLETIONS, {"prompt": "x", "max_tokens": 1})
    urlopen(f"http://127.0.0.1:{port}{path}", json.dumps(body).encode(), timeout=10).read()


def engines_of(server: int) -> list[int]:
    """Return the processes of the engines of a server, none if it has ended."""
    with contextlib.suppress(OSError):
        return crowd.engines(server)
    return []


def children(process: int) -> list[int]:
    """Return the processes that ``process`` has started."""
    with contextlib.suppress(OSError):
        return [*map(int, Path(f"/proc/{process}/task/{process}/children").read_text(encoding="ascii").split())]
    return []


def engines(port: int) -> int:
    """Return how many engines take requests, 0 if the server does not answer."""
    with (
        contextlib.suppress(HTTPError, OSError, ValueError),
        urlopen(f"http://127.0.0.1:{port}/ready", timeout=5) as page,
    ):
        return int(json.load(page)["engines"])
    return 0


def requests(name: str, seed: int) -> Sequence[crowd.Asked]:
    """Return the requests of a ground."""
    return GROUNDS[name].kinds(seed)
