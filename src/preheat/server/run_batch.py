"""``preheat run-batch``: the requests in a file, in the format of OpenAI's batches, through a server of our own."""

from __future__ import annotations

import dataclasses
import http.client
import json
import os
import signal
import socket
import tempfile
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec

from preheat.errors import SettingsError
from preheat.server.app import run_server
from preheat.server.process import ENGINE
from preheat.settings import Settings

ENDPOINTS = ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages")
"""What a line may call."""

AT_ONCE = 256
"""Requests that are on their way at once, at most; the engine decides how many of them run."""


class BatchLine(msgspec.Struct):
    """One request. ``custom_id`` is how its answer is found."""

    custom_id: str
    url: str
    body: dict[str, Any]
    method: str = "POST"


def read_lines(lines: Iterable[str], name: str) -> list[BatchLine]:
    """The requests in ``lines`` of the file ``name``. Raises SettingsError, naming the line, for one that is none."""
    found: dict[str, BatchLine] = {}
    for number, text in enumerate(lines, 1):
        if not text.strip():
            continue
        where = f"{name}, line {number}"
        try:
            line = msgspec.json.decode(text, type=BatchLine)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise SettingsError(f"{where}: {error}") from None
        if line.url not in ENDPOINTS or line.method != "POST":
            raise SettingsError(f"{where}: {line.method} {line.url} is not one of POST {', '.join(ENDPOINTS)}")
        if line.body.get("stream"):
            raise SettingsError(f"{where}: a batch has no streams: leave stream out")
        if line.custom_id in found:
            raise SettingsError(f"{where}: the custom_id {line.custom_id!r} occurs twice")
        found[line.custom_id] = line
    if not found:
        raise SettingsError(f"{name} has no requests")
    return list(found.values())


def run_batch(
    settings: Settings, lines: list[BatchLine], write: Callable[[dict[str, Any]], None], entry: str = ENGINE
) -> int:
    """Serve ``lines`` and ``write`` their answers, in order; how many failed. ``entry``: see :func:`run_server`."""
    failed: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        settings = dataclasses.replace(settings, uds=os.path.join(folder, "socket"))

        def run() -> None:
            try:
                with ThreadPoolExecutor(min(AT_ONCE, len(lines))) as pool:
                    for answer in pool.map(lambda line: _answer(settings, line), lines):
                        if answer["response"]["status_code"] != 200:
                            failed.append(answer["custom_id"])
                        write(answer)
            finally:
                os.kill(os.getpid(), signal.SIGTERM)

        status = run_server(settings, entry, lambda _: threading.Thread(target=run, daemon=True).start())
    return len(failed) if status == 0 else len(lines)


def _answer(settings: Settings, line: BatchLine) -> dict[str, Any]:
    connection = _Connection(str(settings.uds))
    headers = {"Content-Type": "application/json"}
    if settings.api_key:
        headers["Authorization"] = f"Bearer {settings.api_key[0]}"
    connection.request("POST", line.url, msgspec.json.encode(line.body), headers)
    answer = connection.getresponse()
    id, body = answer.getheader("x-request-id"), json.loads(answer.read())
    connection.close()
    return {
        "id": f"batch_req_{id}",
        "custom_id": line.custom_id,
        "response": {"status_code": answer.status, "request_id": id, "body": body},
        "error": None,
    }


class _Connection(http.client.HTTPConnection):
    """HTTP over a Unix socket."""

    def __init__(self, path: str) -> None:
        super().__init__("localhost")
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.connect(self._path)
