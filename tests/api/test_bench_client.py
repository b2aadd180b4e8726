"""Requests and answers of `vllm bench serve`, with its backends ``openai`` and ``openai-chat``.

The client is rebuilt from vLLM's vllm/benchmarks/lib/endpoint_request_func.py: the bodies, the header with the
request's id, and the way to tell events apart. Its clock counts an event with choices as a token. It reads the usage
from an event without choices. The server is a real one.
"""

from __future__ import annotations

import json
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import pytest

from tests.api.conftest import Server

TOKENS = 12


@dataclass
class Measured:
    """Figures that the benchmark makes of one request."""

    text: str = ""
    first: float = 0.0
    gaps: list[float] = field(default_factory=list)
    output_tokens: int = 0
    prompt_tokens: int = 0
    ids: set[str] = field(default_factory=set)
    done: bool = False


def body_of(backend: str, model: str, prompt: Any, **extra: Any) -> tuple[str, dict[str, Any]]:
    """Return path and body of a request.

    Fields that the client does not set are null.
    """
    common = {"model": model, "stream": True, "stream_options": {"include_usage": True}}
    if backend == "openai":
        own = {"prompt": prompt, "repetition_penalty": 1.0, "max_tokens": TOKENS, "logprobs": None}
        return "/v1/completions", common | own | extra
    messages = [{"role": "user", "content": [{"type": "text", "text": prompt}]}]
    return "/v1/chat/completions", common | {"messages": messages, "max_completion_tokens": TOKENS} | extra


def events(chunks: Iterator[bytes]) -> Iterator[str]:
    """Yield the data of each event, however the bytes are cut.

    Comments are passed over.
    """
    rest = ""
    for chunk in chunks:
        *whole, rest = (rest + chunk.decode()).split("\n\n")
        yield from (event.strip().removeprefix("data: ") for event in whole if not event.startswith(":"))
    assert not rest.strip()


def measure(server: Server, backend: str, prompt: Any, request_id: str, **extra: Any) -> Measured:
    path, body = body_of(backend, server.model, prompt, **extra)
    found, before = Measured(), time.perf_counter()
    headers = {"x-request-id": request_id, "Authorization": "Bearer none", "Content-Type": "application/json"}
    request = urllib.request.Request(server.url + path, json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=120) as answer:
        assert answer.status == 200
        assert answer.headers["x-request-id"] == request_id
        for data in events(iter(lambda: answer.read1(65536), b"")):
            if data == "[DONE]":
                found.done = True
                continue
            now, event = time.perf_counter(), json.loads(data)
            found.ids.add(event["id"])
            if choices := event.get("choices"):
                text = choices[0].get("text") if backend == "openai" else choices[0]["delta"].get("content")
                found.text += text or ""
                if found.first:
                    found.gaps.append(now - before)
                else:
                    found.first = now - before
                before = now
            elif usage := event.get("usage"):
                found.output_tokens, found.prompt_tokens = usage["completion_tokens"], usage["prompt_tokens"]
    return found


@pytest.mark.parametrize("backend", ["openai", "openai-chat"])
def test_the_benchmark_gets_its_figures(server: Server, backend: str) -> None:
    """Every request succeeds with the tokens asked for.

    They come in events of one or a few tokens, then the usage.
    """
    (model,) = server.get("/v1/models").json["data"]
    assert model["id"] == server.model and model["root"]  # the client reads the tokenizer from there
    prompts = [f"def f{number}(a, b):" for number in range(8)]
    asked = {"ignore_eos": True, "temperature": 0.0}

    def one(number: int) -> Measured:
        return measure(server, backend, prompts[number], f"bench-{backend}-{number}", **asked)

    with ThreadPoolExecutor(len(prompts)) as pool:
        together = list(pool.map(one, range(len(prompts))))
    for number, found in enumerate(together):
        assert found.done and found.first > 0
        assert found.output_tokens == TOKENS and found.prompt_tokens > 3
        assert len(found.gaps) <= TOKENS + 1  # tokens that wait to be sent go together, at worst all of them
        assert all(id.endswith(f"bench-{backend}-{number}") for id in found.ids) and len(found.ids) == 1
        assert found.text == one(number).text


def test_prompts_of_token_ids(server: Server) -> None:
    """The benchmark may send its random prompts as token ids."""
    found = measure(server, "openai", [5, 6, 7, 8, 9], "ids", ignore_eos=True, temperature=0.0)
    assert (found.prompt_tokens, found.output_tokens) == (5, TOKENS)


def test_without_ignore_eos_and_with_sampling(server: Server) -> None:
    found = measure(server, "openai-chat", "Hi", "free", temperature=0.7, top_p=0.9, top_k=20)
    assert found.done and 1 <= found.output_tokens <= TOKENS
