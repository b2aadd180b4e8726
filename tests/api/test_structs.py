"""Every struct is described before a request is read.

Two threads that describe a struct at once end the process.
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

from preheat.utils.structs import describe_structs
from tests.api.abuse import ROWS, abused
from tests.api.test_abuse import BODY_BYTES, status_of

SMALL_BYTES = 20_000


def described_late(tmp_path: Path, engine: str) -> set[str]:
    """Send a small body to each endpoint, and return the types described after the server was ready."""
    log = tmp_path / "log"
    with abused("plain", engine=engine, log=log, max_body_bytes=BODY_BYTES) as server:
        ready = log.stat().st_size
        for row in {row.path: row for row in ROWS.values()}.values():
            status_of(server, row.payload(SMALL_BYTES))
        said = log.read_bytes()[ready:].decode().splitlines()
        own = f"described {server.process.pid} "  # see tests/api/watched.py, which only servers import
    return {line.removeprefix(own) for line in said if line.startswith(own)}


def test_nothing_is_described_for_a_request(tmp_path: Path) -> None:
    assert described_late(tmp_path, "tests.api.watched:run_engine") == set()


def test_a_server_that_prepares_nothing_is_found(tmp_path: Path) -> None:
    late = described_late(tmp_path, "tests.api.watched_late:run_engine")
    assert "preheat.server.openai.schema.ChatRequest" in late


def test_structs_of_all_modules_can_be_described() -> None:
    """Also where a module has structs that are only encoded."""
    import_module("preheat.backends.cuda.matmul.tables")
    names = {kind.__name__ for kind in describe_structs()}
    assert {"ChatRequest", "MessagesRequest", "SamplingParams", "Ready"} <= names
