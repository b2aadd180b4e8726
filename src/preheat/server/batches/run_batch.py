"""``preheat run-batch``: runs a file of requests through a private server.

The file has OpenAI's batch format.
"""

from __future__ import annotations

import dataclasses
import http.client
import json
import os
import signal
import socket
import sys
import tempfile
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, BinaryIO

import msgspec

from preheat.errors import PreheatError, SettingsError
from preheat.server.app import run_server
from preheat.server.batches.lines import BatchLine, answer_of, is_no_answer, read_lines
from preheat.server.batches.output import Answers
from preheat.server.replicas.process import ENGINE
from preheat.settings import OPTIONS, Settings
from preheat.utils.files import open_file, shown, why_unread

AT_ONCE = 256
"""Most requests in flight at once; the engine decides how many of them run."""

STOPPED = 1
"""The exit status of a batch that is stopped early.

Early means before its server is ready, or while something hangs.
"""

_NO_BATCHES: dict[str, Any] = {
    name: OPTIONS[name].default for name in ("batch_dir", "max_batch_file_bytes", "max_batch_files", "max_batches")
}  # the server of a run keeps no other batches

JOIN_SECONDS = 5.0
"""Seconds to write the last answers after the server has stopped."""


def read_batch(path: str) -> list[BatchLine]:
    """Read the requests in the file ``path``, or in standard input for "-".

    Raises SettingsError for an unreadable file or an invalid line.
    """
    try:
        if path == "-":
            return read_lines(_text(sys.stdin.buffer), "standard input")
        with open_file(path) as file:
            return read_lines(_text(file), path)
    except (OSError, UnicodeDecodeError) as error:
        text = f"the requests in {shown(path)} cannot be read: {why_unread(error)} (- is standard input)"
        raise SettingsError(text, param="input_file") from None


def _text(lines: BinaryIO) -> Iterator[str]:
    """Yield the lines as text, without the byte-order mark (BOM)."""
    for number, line in enumerate(lines):
        yield line.decode() if number else line.decode("utf-8-sig")


def run_batch(settings: Settings, lines: list[BatchLine], answers: Answers, entry: str = ENGINE) -> None:
    """Serve the ``lines`` without an answer yet, and write their ``answers`` in order.

    It ends with the last answer, or when the server is stopped. ``entry`` is passed to :func:`run_server`. Raises the
    error that kept the server from starting, or an answer from being written.
    """
    failure: list[BaseException] = []
    missing = [line for line in lines if line.custom_id not in answers.kept]
    with tempfile.TemporaryDirectory() as folder:
        settings = dataclasses.replace(settings, uds=os.path.join(folder, "socket"), **_NO_BATCHES)

        def run() -> None:
            try:
                stopped = _ask(settings, missing, answers)
            except BaseException as error:
                failure.append(error)
                stopped = False
            if not stopped:  # a second signal would cut off running requests
                os.kill(os.getpid(), signal.SIGTERM)

        def give_up(reason: str) -> None:
            failure.append(PreheatError(f"the engine takes no requests: {reason}"))
            os.kill(os.getpid(), signal.SIGTERM)

        asking = threading.Thread(target=run, daemon=True)
        if missing:
            run_server(settings, entry, lambda _: asking.start(), on_blocked=give_up, stopped=STOPPED)
        if asking.ident is not None:
            asking.join(JOIN_SECONDS)
    if failure:
        raise failure[0]


def _ask(settings: Settings, lines: list[BatchLine], answers: Answers) -> bool:
    """Send ``lines`` and write the answers in order. Return whether the server stopped before the last one."""
    pool = ThreadPoolExecutor(min(AT_ONCE, settings.max_concurrent_requests, len(lines)))
    try:
        for answer in pool.map(lambda line: _answer(settings, line), lines):
            if answer is None:
                return True
            answers.write(msgspec.json.encode(answer), refused=answer["response"]["status_code"] != 200)
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
    return False


def _answer(settings: Settings, line: BatchLine) -> dict[str, Any] | None:
    """Return the answer to a request; None if the server stopped before it."""
    connection = _Connection(str(settings.uds))
    headers = {"Content-Type": "application/json"}
    if settings.api_key:
        headers["Authorization"] = f"Bearer {settings.api_key[0]}"
    try:
        connection.request("POST", line.url, msgspec.json.encode(line.body), headers)
        answer = connection.getresponse()
        id, body = answer.getheader("x-request-id"), json.loads(answer.read())
    except (OSError, http.client.HTTPException, json.JSONDecodeError):  # the server has closed the connection
        return None
    finally:
        connection.close()
    return None if is_no_answer(answer.status, body) else answer_of(line, answer.status, id, body)


class _Connection(http.client.HTTPConnection):
    """HTTP over a Unix socket."""

    def __init__(self, path: str) -> None:
        super().__init__("localhost")
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.connect(self._path)
