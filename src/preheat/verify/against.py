"""``preheat verify --against URL``: the same comparison with any OpenAI-compatible server.

The token and its logprob are compared at every position. No torch here.
"""

from __future__ import annotations

import http.client
import json
import random
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from preheat.errors import PreheatError
from preheat.verify.compare import PathResult, Seen, compare
from preheat.verify.prompts import Prompt, Size, make_prompts

VOCAB_SIZE = 4_000
"""Ids below this exist in every tokenizer."""

MAX_MODEL_LEN = 2_048
"""The context length of a server that does not tell its own."""

TIMEOUT_SECONDS = 600.0
MOST = 64
"""The most requests at once."""

GROUPS = (1, 4, MOST)
SENT = ("temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty")


class Server:
    """The server at ``url``, with or without ``/v1``."""

    def __init__(self, url: str, api_key: str | None = None) -> None:
        self._base = url.rstrip("/").removesuffix("/v1") + "/v1"
        self._headers = {"content-type": "application/json"} | (
            {"authorization": f"Bearer {api_key}"} if api_key else {}
        )
        (model, *_) = self._call("/models")["data"]
        self.name: str = model["id"]
        self.max_model_len: int = model.get("max_model_len") or MAX_MODEL_LEN
        self._more: dict[str, Any] = {"return_token_ids": True}

    def run(self, prompts: Sequence[Prompt], at_once: int) -> list[Seen]:
        """Return the tokens and logprobs of ``prompts``, sent ``at_once`` at a time."""
        with ThreadPoolExecutor(at_once) as pool:
            return list(pool.map(self._ask, prompts))

    def _ask(self, prompt: Prompt) -> Seen:
        params = prompt.params
        body = {name: getattr(params, name) for name in SENT if getattr(params, name) not in _neutral(name)}
        body |= {"model": self.name, "prompt": prompt.tokens, "max_tokens": params.max_tokens, "seed": params.seed}
        body |= {"temperature": params.temperature, "logprobs": 1, "ignore_eos": True}
        try:
            answer = self._call("/completions", body | self._more)
        except urllib.error.HTTPError as error:
            if error.code != 400 or not self._more:
                raise
            self._more = {}  # the server cannot return token ids: compare their text
            answer = self._call("/completions", body)
        (choice,) = answer["choices"]
        found = choice["logprobs"]
        tokens = choice.get("token_ids") or found["tokens"]
        return Seen(list(zip(tokens, found["token_logprobs"], strict=True)), found["token_logprobs"])

    def _call(self, path: str, body: dict[str, Any] | None = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self._base + path, data, self._headers)
        with urllib.request.urlopen(request, timeout=TIMEOUT_SECONDS) as answer:
            return json.load(answer)


def _neutral(name: str) -> tuple[object, ...]:
    """Return the values of a field that need not be sent.

    Other servers may not know the field.
    """
    return {"top_k": (0, -1), "min_p": (0.0,), "repetition_penalty": (1.0,)}.get(name, ())


def verify_server(url: str, size: Size, prompts: Sequence[Prompt] | None, api_key: str | None) -> Iterator[PathResult]:
    """Yield the paths that a client can cause in a server.

    Raises PreheatError for unexpected answers.
    """
    try:
        server = Server(url, api_key)
        prompts = prompts or make_prompts(size, VOCAB_SIZE, server.max_model_len)
        first = server.run(prompts, MOST)
        yield compare("later runs", first, [server.run(prompts, MOST) for _ in range(size.runs - 1)])
        order = random.Random(1).sample(range(len(prompts)), len(prompts))
        seen = dict(zip(order, server.run([prompts[number] for number in order], MOST), strict=True))
        yield compare("shuffled arrivals", first, [[seen[number] for number in range(len(prompts))]])
        for at_once in GROUPS[:-1]:
            yield compare(f"{at_once} at once", first, [server.run(prompts, at_once)])
    except urllib.error.HTTPError as error:
        raise PreheatError(
            f"{url} answers with status {error.code}: {error.read(300).decode(errors='replace')}"
        ) from None
    except (OSError, ValueError, KeyError, TypeError, OverflowError, http.client.HTTPException) as error:
        raise PreheatError(f"{url} is not an OpenAI-compatible server that gives logprobs: {error!r}") from None
