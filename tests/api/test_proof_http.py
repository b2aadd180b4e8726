"""The proof over HTTP.

The digest is told, a failed check keeps requests out, and any server can be verified.
"""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from preheat.cli.main import main
from preheat.verify import command
from preheat.verify.prompts import Size
from preheat.warmup.record import Record
from tests.api.conftest import Server, serving

COMPLETIONS = "/v1/completions"


def test_verify_prints_the_digest(scripted: Server) -> None:
    assert scripted.get("/ready").json["digest"] == "d16e57"
    assert scripted.metric("numeric_info", digest="d16e57") == 1
    assert Record.from_json(scripted.get("/warmup").body).proof.digest == "d16e57"


def test_a_failed_check_keeps_requests_out(folder: Path) -> None:
    with serving(str(folder), engine="tests.api.scripted:run_unproved_engine", wait=False) as server:
        server.wait_until_open()
        end = time.monotonic() + 20
        while "check at boot" not in (said := server.get("/ready").body.decode()):
            assert time.monotonic() < end, said
            time.sleep(0.05)
        for answer in (server.get("/ready"), server.get("/health"), server.post(COMPLETIONS, {"prompt": "x"})):
            assert answer.status == 503
            assert answer.headers["retry-after"] == "1"
            assert answer.error["code"] == "not_ready"
            assert "chunked: other bits" in answer.error["message"]
        assert server.get("/live").status == 200
        assert Record.from_json(server.get("/warmup").body).states["failed"] == 1
        assert server.metric("warmup_items", outcome="failed") == 1


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "REDUCED", Size(prompts=8, runs=2, outputs=5, longest=20))
    monkeypatch.setattr("preheat.verify.against.VOCAB_SIZE", 200)


def test_an_even_server_is_verified(few: None, scripted: Server, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", "--reduced", "--json", "--against", scripted.url]) == 0
    paths = json.loads(capsys.readouterr().out)["paths"]
    assert [path["path"] for path in paths] == ["later runs", "shuffled arrivals", "1 at once", "4 at once"]
    assert {path["identical"] for path in paths} == {8}


def test_verify_finds_a_server_that_depends_on_its_batch(
    few: None, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with serving(str(folder), engine="tests.api.scripted:run_changing_engine") as server:
        assert main(["verify", "--reduced", "--against", f"{server.url}/v1"]) == 1
    line = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("1 at once"))
    assert "output token 3, apart by" in line


def test_verify_reports_an_unreachable_server(capsys: pytest.CaptureFixture[str], scripted: Server) -> None:
    assert main(["verify", "--against", "http://127.0.0.1:1"]) == 1
    assert "not an OpenAI-compatible server" in capsys.readouterr().err
    assert main(["verify", "--against", f"{scripted.url}/nowhere"]) == 1
    assert "status 404" in capsys.readouterr().err
