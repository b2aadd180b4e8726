"""/health answers while clients send large or hostile requests to every endpoint."""

from __future__ import annotations

import contextlib
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from preheat.server.openapi import OPERATIONS
from tests.api.abuse import ROWS, SERVERS, HealthProbe, Row, abused, http, text
from tests.api.conftest import Server

BOUND_MS = 1000.0
"""Bound for a busy machine, ten times the wanted one.

`python -m benchmarks overload` has the figures of a quiet machine.
"""

BODY_BYTES = 4 * 2**20

MOST_MIB = 400
"""Bound on the growth of the server's memory while it is abused, in MiB."""


def status_of(server: Server, payload: bytes) -> int:
    """Return the status that answers ``payload``.

    It may come before the whole payload is sent.
    """
    with socket.create_connection(("127.0.0.1", server.port), 60) as connection:

        def send() -> None:
            with contextlib.suppress(OSError):  # refused before the payload was sent
                connection.sendall(payload)

        sender = threading.Thread(target=send)
        sender.start()
        with connection.makefile("rb") as answer:
            line = answer.readline()
        with contextlib.suppress(OSError):
            connection.shutdown(socket.SHUT_RDWR)
        sender.join()
    return int(line.split()[1])


def resident(server: Server) -> int:
    """Return the resident memory of the server, in MiB."""
    pages = int(Path(f"/proc/{server.process.pid}/statm").read_text().split()[1])
    return pages * 4096 >> 20


@pytest.mark.parametrize("name", SERVERS)
def test_health_answers_whatever_comes(name: str, tmp_path: Path) -> None:
    """A slow answer counts if it comes three times: a busy machine may hold the server or the probe for a second.

    The event loop itself reads and writes no long JSON, and works on no files.
    """
    rows, notes = {what: row for what, row in ROWS.items() if row.server == name}, tmp_path / "notes"
    with abused(name, max_body_bytes=BODY_BYTES, watch=notes) as server:
        before, slow = resident(server), []
        while len(slow) < 3:
            with HealthProbe(server.port) as probe:
                assert not _wrong(server, rows)
            if probe.times[-1] < BOUND_MS:
                break
            slow.append(probe.figures())
        grown = resident(server) - before
    print(f"{name}: {probe.figures()}, {grown} MiB more")
    assert len(slow) < 3 and grown < MOST_MIB, (slow, grown)
    assert not set(notes.read_text().splitlines())


def _wrong(server: Server, rows: dict[str, Row]) -> dict[str, int]:
    """Return the statuses that the rows do not allow."""
    with ThreadPoolExecutor(2) as clients:
        found = clients.map(lambda row: status_of(server, row.payload(BODY_BYTES)), rows.values())
        statuses = dict(zip(rows, found, strict=True))
    return {what: status for what, status in statuses.items() if status not in rows[what].statuses}


def test_work_in_the_event_loop_is_found(tmp_path: Path) -> None:
    """Control: a server that encodes a text in its event loop breaks the bound, and its long JSON is noted."""
    engine, notes = "tests.api.planted_inline:run_engine", tmp_path / "notes"
    with abused("plain", engine=engine, watch=notes) as server, HealthProbe(server.port) as probe:
        payload = http("/v1/messages/count_tokens", _said(text(BODY_BYTES)))
        assert status_of(server, payload) in (200, 400)
    assert probe.times[-1] > BOUND_MS
    assert "bytes of decode: body.py" in notes.read_text() or "bytes of decode: turns.py" in notes.read_text()


def _said(content: str) -> bytes:
    return b'{"messages":[{"role":"user","content":"%b"}]}' % content.encode()


def test_every_endpoint_that_takes_a_body_is_abused() -> None:
    """Every endpoint with a body has a row.

    Aliases count once, and bodies with only a name need none.
    """
    taken = {operation.path for operation in OPERATIONS if operation.body}
    small = {"/v1/unload_lora_adapter", "/init_weight_transfer_engine"}
    small |= {"/start_weight_update", "/finish_weight_update"}
    alike = {"/v1/score": "/score", "/v1/rerank": "/rerank", "/v2/rerank": "/rerank", "/pooling": "/v1/embeddings"}
    alike |= {"/invocations": "/v1/completions", "/v1/chat/completions/render": "/v1/chat/completions"}
    sent = {row.path for row in ROWS.values()}
    assert {alike.get(path, path) for path in taken - small} <= sent
