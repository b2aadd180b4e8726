"""Requests of all kinds at once: what clients ask, what they got, and when. Benchmarks of faults share them."""

from __future__ import annotations

import asyncio
import json
import random
import re
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import urlopen

from benchmarks.common.adapter import write_adapter
from benchmarks.common.process import ServerProcess, environment, serving
from preheat.lora.adapter import adapted_modules
from preheat.model.families import read_spec
from preheat.model.files import BUNDLED_PATH, read_config

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
ADAPTER = "adapter"
SECONDS = 120.0
"""The longest time for all answers of a round, and for an engine to be back."""

_PROMPTS = ("def f(x):", "import os\n", "class Stack:\n    def push", "for line in open(", "# The sum of two numbers\n")
_TOOL = {
    "type": "function",
    "function": {
        "name": "look_up",
        "parameters": {"type": "object", "properties": {"key": {"enum": ["a", "b", "c"]}}, "required": ["key"]},
    },
}
_SCHEMA = {
    "type": "object",
    "properties": {"n": {"type": "integer"}, "ok": {"type": "boolean"}},
    "required": ["n", "ok"],
}


@dataclass(frozen=True)
class Asked:
    """One request: its kind, its path and its body."""

    kind: str
    path: str
    body: dict[str, Any]


@dataclass
class Answer:
    """The bytes of an answer, with the times when they came."""

    raw: bytes = b""
    times: list[float] = field(default_factory=list)


def kinds(adapter: str | None = None) -> dict[str, tuple[str, dict[str, Any]]]:
    """Return path and fields of each kind of request."""
    message = {"messages": [{"role": "user", "content": "Say something."}]}
    found: dict[str, tuple[str, dict[str, Any]]] = {
        "greedy": (COMPLETIONS, {"temperature": 0, "logprobs": 2}),
        "seeded": (COMPLETIONS, {"temperature": 1, "logprobs": 1}),
        "penalties": (COMPLETIONS, {"temperature": 1, "presence_penalty": 1.5, "frequency_penalty": 1.0}),
        "repetition": (COMPLETIONS, {"temperature": 0, "repetition_penalty": 1.4, "prompt_logprobs": 1}),
        "filtered": (COMPLETIONS, {"temperature": 1.3, "top_k": 40, "top_p": 0.9, "min_tokens": 20}),
        "stop": (COMPLETIONS, {"temperature": 1, "stop": ["return", "\n\n\n"], "include_stop_str_in_output": True}),
        "pattern": (COMPLETIONS, {"temperature": 1, "structured_outputs": {"regex": "([0-9]{2}[a-f]){12}"}}),
        "several": (COMPLETIONS, {"temperature": 1, "n": 4, "logprobs": 0}),
        "json": (CHAT, message | {"temperature": 1, "response_format": {
            "type": "json_schema", "json_schema": {"name": "n", "schema": _SCHEMA}}}),
        "tool": (CHAT, message | {"temperature": 1, "tools": [_TOOL], "tool_choice": "required"}),
        "chat": (CHAT, message | {"temperature": 0.8, "logprobs": True, "top_logprobs": 2, "ignore_eos": True}),
    }  # fmt: skip
    if adapter is not None:
        found["adapter"] = (COMPLETIONS, {"model": adapter, "temperature": 0, "logprobs": 1})
    return found


def mixed(count: int, seed: int = 0, adapter: str | None = None, tokens: int = 48) -> list[Asked]:
    """Return ``count`` requests of all kinds in turn, streams and not, each with a seed of its own."""
    draw, table, asked = random.Random(seed), list(kinds(adapter).items()), []
    for number in range(count):
        kind, (path, fields) = table[number % len(table)]
        body = {"seed": draw.randrange(2**40), "max_tokens": tokens, "return_token_ids": True, **fields}
        if "min_tokens" in body:
            body["min_tokens"] = min(body["min_tokens"], tokens)
        if path == COMPLETIONS:
            body["prompt"] = draw.choice(_PROMPTS) + f"  # {draw.randrange(100)}\n"
            body["ignore_eos"] = kind not in ("stop", "pattern")
        if (number + number // len(table)) % 2 == 0:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
            body.pop("prompt_logprobs", None)  # only whole answers have them
        asked.append(Asked(kind, path, body))
    return asked


async def answer(
    port: int,
    asked: Asked,
    id: str,
    seen: Callable[[], None],
    *,
    found: Answer | None = None,
    rank: int | None = None,
    key: str = "",
) -> Answer:
    """Return the answer to ``asked``, also as ``found`` while it comes; ``seen`` is called with each part of it.

    ``rank`` is the engine to begin at, ``key`` the server's key.
    """
    data, found = json.dumps(asked.body).encode(), found or Answer()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = f"POST {asked.path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nX-Request-Id: {id}\r\n"
    head += f"Authorization: Bearer {key}\r\n" if key else ""
    head += "" if rank is None else f"X-data-parallel-rank: {rank}\r\n"
    writer.write(head.encode() + b"Content-Length: %d\r\n\r\n%b" % (len(data), data))
    while more := await reader.read(1 << 16):
        found.raw += more
        found.times.append(time.monotonic())
        seen()
    writer.close()
    return found


async def together(
    port: int,
    asked: Sequence[Asked],
    after: int = 0,
    then: Callable[[list[Answer]], None] | None = None,
    rank: int | None = None,
    *,
    key: str = "",
) -> list[Answer]:
    """Return the answers to all requests, sent at once; call ``then`` once ``after`` parts of streams have come.

    ``then`` gets the answers so far. ``rank`` is the engine where all begin.
    """
    parts, found = 0, [Answer() for _ in asked]

    def seen() -> None:
        nonlocal parts
        parts += 1
        if parts == after and then is not None:
            then(found)

    async with asyncio.timeout(SECONDS):
        each = zip(asked, found, strict=True)
        return await asyncio.gather(
            *(answer(port, one, f"c{at}", seen, found=got, rank=rank, key=key) for at, (one, got) in enumerate(each))
        )


def normal(answer: Answer) -> dict[str, Any]:
    """Return all that two answers to one request must share, the same for streams and for whole answers.

    The ids of tool calls are drawn at random, and cached tokens depend on the cache: both are left out.
    """
    head, _, body = answer.raw.partition(b"\r\n\r\n")
    if b"text/event-stream" in head:
        events = [json.loads(line[6:]) for line in body.split(b"\n") if line.startswith(b"data: {")]
        whole = b"data: [DONE]" in body
    else:
        events, whole = [json.loads(body)], True
    choices: dict[int, dict[str, Any]] = {}
    found: dict[str, Any] = {"status": head.split()[1].decode(), "whole": whole, "choices": choices}
    found["ids"] = sorted({str(event.get("id")) for event in events})
    found["times of creation"] = len({event.get("created") for event in events})
    for event in events:
        found |= {name: event[name] for name in ("error", "data") if name in event}
        if usage := event.get("usage"):
            found["usage"] = {name: value for name, value in usage.items() if name != "prompt_tokens_details"}
        for choice in event.get("choices", ()):
            _add(choices.setdefault(choice["index"], {}), choice)
    return found


def _add(to: dict[str, Any], choice: dict[str, Any]) -> None:
    """Add the part of a choice that one event has."""
    message = choice.get("delta") or choice.get("message") or {}
    text = choice.get("text") or message.get("content") or ""
    to["text"] = to.get("text", "") + text
    to.setdefault("token_ids", []).extend(choice.get("token_ids") or [])
    for name, values in (choice.get("logprobs") or {}).items():
        to.setdefault(f"logprobs.{name}", []).extend(values or [])
    for at, call in enumerate(message.get("tool_calls") or ()):
        kept = to.setdefault("calls", {}).setdefault(call.get("index", at), {"name": "", "arguments": ""})
        for name in kept:
            kept[name] += call["function"].get(name) or ""
    for name in ("finish_reason", "stop_reason"):
        to[name] = choice.get(name) or to.get(name)
    if receipt := choice.get("receipt"):
        to["receipt"] = receipt["chain"]


def blanked(answer: Answer) -> bytes:
    """Return the bytes of an answer's body without chunk sizes, pauses, times, cached tokens and ids of tool calls."""
    body = answer.raw.partition(b"\r\n\r\n")[2]
    body = re.sub(rb"(^|\r\n)[0-9a-f]+\r\n", b"", body).replace(b"\r\n", b"")
    body = re.sub(rb": an engine starts again[^\n]*\n\n", b"", body)
    body = re.sub(rb'"(created|cached_tokens)":[0-9]+', rb'"\1":0', body)
    return re.sub(rb'"chatcmpl-tool-[0-9a-f]+"|"call_[0-9A-Za-z]+"', b'"call"', body)


def pauses(answer: Answer, at: float) -> float:
    """Return the longest time between two parts of an answer that lies behind the time ``at``."""
    gaps = (later - earlier for earlier, later in pairwise(answer.times) if later > at)
    return max(gaps, default=0.0)


def engines(server: int) -> list[int]:
    """Return the processes of the engines of the process ``server``."""
    children = Path(f"/proc/{server}/task/{server}/children").read_text(encoding="ascii").split()
    found = []
    for pid in map(int, children):
        with suppress(OSError):
            if b"preheat.server.replicas.process" in Path(f"/proc/{pid}/cmdline").read_bytes():
                found.append(pid)
    return found


def wait_for_engines(port: int, count: int) -> float:
    """Return the seconds until ``count`` engines take requests."""
    started = time.monotonic()
    while time.monotonic() - started < SECONDS:
        with suppress(HTTPError, OSError), urlopen(f"http://127.0.0.1:{port}/ready", timeout=10) as ready:
            if json.load(ready)["engines"] == count:
                return time.monotonic() - started
        time.sleep(0.1)
    raise TimeoutError(f"no {count} engines within {SECONDS:g} s")


def metric(port: int, name: str) -> float:
    """Return the sum of a metric over its labels."""
    with urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as page:
        lines = page.read().decode().splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(f"preheat:{name}{{"))


@contextmanager
def replicas(options: dict[str, Any], module: str = "preheat", **variables: str) -> Iterator[ServerProcess]:
    """Yield a server with two replicas and an adapter that is ready."""
    fixed = {
        "model": "bundled", "data_parallel_size": 2, "num_threads": 1, "kv_cache_memory_bytes": 256 << 20,
        "engine_restarts": 10_000, "max_num_seqs": 64, "log_level": "error", "enable_auto_tool_choice": True,
        "tool_call_parser": "hermes",
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        modules = adapted_modules(read_spec(read_config(BUNDLED_PATH)))
        write_adapter(
            Path(folder), {name: size for name, size in modules.items() if name.endswith(("q_proj", "v_proj"))}
        )
        fixed |= {"enable_lora": True, "lora_modules": [f"{ADAPTER}={folder}"]}
        own = environment(**variables)
        with serving(fixed | options, module=module, env=own, stderr=subprocess.DEVNULL) as server:
            server.wait_for("/ready")
            yield server
