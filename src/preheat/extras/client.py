"""Terminal clients of a server, ``preheat chat`` and ``preheat complete``, by the standard library alone."""

from __future__ import annotations

import http.client
import json
import os
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from typing import Any

from preheat.errors import PreheatError, SettingsError

Ask = Callable[[str], str]
"""Function that shows a prompt and reads a line; EOFError ends the input."""

Say = Callable[[str], None]
"""Function that shows text, without a line break of its own."""


class Client:
    """An OpenAI-compatible server at ``url``, such as http://localhost:8000/v1.

    ``model`` None is its first model. Raises PreheatError, with the server's reason, for failed requests.
    """

    def __init__(self, url: str, model: str | None = None, key: str | None = None) -> None:
        if not url.startswith(("http://", "https://")):
            raise SettingsError(f"--url {url!r} must begin with http:// or https://", param="url")
        self._url = url.rstrip("/")
        self._headers = {"Content-Type": "application/json"}
        if key := key or os.environ.get("PREHEAT_API_KEY") or os.environ.get("OPENAI_API_KEY"):
            self._headers["Authorization"] = f"Bearer {key}"
        self.model = model or self._first_model()

    def _first_model(self) -> str:
        with self._open("/models", None) as answer:
            return str(json.load(answer)["data"][0]["id"])

    def chat(self, messages: list[dict[str, str]]) -> Iterator[str]:
        """Yield the answer to a conversation, as it comes."""
        for choice in self._stream("/chat/completions", {"messages": messages}):
            yield choice["delta"].get("content") or ""

    def complete(self, prompt: str, max_tokens: int | None) -> Iterator[str]:
        """Yield the continuation of ``prompt``, as it comes."""
        body = {"prompt": prompt} if max_tokens is None else {"prompt": prompt, "max_tokens": max_tokens}
        for choice in self._stream("/completions", body):
            yield choice["text"]

    def _stream(self, path: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        with self._open(path, {"model": self.model, "stream": True, **body}) as answer:
            for line in answer:
                data = line.decode().removeprefix("data: ").strip()
                if not data or data == "[DONE]":
                    continue
                event = json.loads(data)
                if "error" in event:
                    raise PreheatError(event["error"]["message"])
                yield from event["choices"]

    def _open(self, path: str, body: dict[str, Any] | None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self._url + path, data, self._headers)
        try:
            return urllib.request.urlopen(request)
        except urllib.error.HTTPError as error:
            raise PreheatError(f"{self._url}{path} answered {error.code}: {_reason(error.read())}") from None
        except (OSError, ValueError, OverflowError, http.client.HTTPException) as error:  # also for an invalid port
            raise PreheatError(f"{self._url} cannot be reached: {getattr(error, 'reason', error)}") from None


def _reason(body: bytes) -> str:
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return body.decode(errors="replace")[:200]


def chat(client: Client, system: str | None, quick: str | None, ask: Ask, say: Say) -> None:
    """Talk until the input ends; with ``quick``, answer that message and no other."""
    messages = [] if system is None else [{"role": "system", "content": system}]
    for text in _inputs(quick, ask):
        messages.append({"role": "user", "content": text})
        answer = ""
        for piece in client.chat(messages):
            answer += piece
            say(piece)
        say("\n")
        messages.append({"role": "assistant", "content": answer})


def complete(client: Client, max_tokens: int | None, quick: str | None, ask: Ask, say: Say) -> None:
    """Complete prompts until the input ends; with ``quick``, that one and no other."""
    for text in _inputs(quick, ask):
        for piece in client.complete(text, max_tokens):
            say(piece)
        say("\n")


def _inputs(quick: str | None, ask: Ask) -> Iterator[str]:
    if quick is not None:
        yield quick
        return
    while True:
        try:
            text = ask("> ")
        except EOFError:
            return
        if text.strip():
            yield text
