"""The server's report of the warm-up.

It is given while the warm-up lasts, afterwards, and when the engine has no time to answer.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from preheat.warmup.record import Record
from tests.api.conftest import Server, serving, write_model
from tests.api.scripted import FAIL, HANG

COMPLETIONS = "/v1/completions"


@pytest.fixture
def waiting(tmp_path: Path) -> Iterator[Server]:
    """Run a server with an engine in its warm-up until ``waiting.model`` has a file named go."""
    with serving(str(write_model(tmp_path)), engine="tests.api.scripted:run_waiting_engine", wait=False) as server:
        server.wait_until_open()
        yield server


def record_of(server: Server) -> Record:
    answer = server.get("/warmup")
    assert answer.status == 200 and answer.headers["content-type"] == "application/json"
    return Record.from_json(answer.body)


def test_ready_and_record_during_warm_up(waiting: Server) -> None:
    end = time.monotonic() + 20
    while (ready := waiting.get("/ready")).json["done"] == 0:  # before the engine has said anything, and at its start
        assert ready.json["total"] in (0, 40) and time.monotonic() < end
    assert ready.status == 503 and ready.headers["retry-after"] == "1"
    assert ready.json == {"done": 12, "total": 40, "current": "(decode, 8)", "eta_s": 2.5}
    warmup = waiting.get("/warmup")
    assert warmup.status == 200 and warmup.json == {"state": "starting", "progress": ready.json}
    assert b"12</b> of 40" in waiting.get("/warmup?format=html").body
    for health in (waiting.get("/health"), waiting.get("/ping")):
        assert health.status == 503 and health.headers["retry-after"] == "1" and health.json == ready.json
    assert waiting.get("/live").status == 200 and waiting.get("/metrics").status == 200
    assert waiting.metric("warmup_seconds") == 0
    chat = {"messages": [{"role": "user", "content": "x"}]}
    bodies = {COMPLETIONS: {"prompt": "x"}, "/v1/chat/completions": chat, "/tokenize": {"prompt": "x"}}
    for path, body in bodies.items():
        refused = waiting.post(path, body)
        assert refused.status == 503 and refused.error["code"] == "not_ready" and refused.headers["retry-after"] == "1"
    Path(waiting.model, "go").touch()
    waiting.wait_until_ready()
    assert waiting.get("/health").status == 200
    assert waiting.post(COMPLETIONS, {"prompt": "x"}).status == 200


def test_ready_and_record_after_warm_up(scripted: Server) -> None:
    record = record_of(scripted)
    ready = scripted.get("/ready")
    assert ready.status == 200
    said = ready.json
    assert len(said.pop("contract_id")) == 32 and said.pop("contract")["tokenizer"]
    assert said.pop("engines") == 1
    assert said == {"status": "ready", **record.summary()}
    assert scripted.metric("warmup_items", outcome="ready") == record.states["ready"]
    assert scripted.metric("warmup_items", outcome="reused") == record.states["reused"]
    assert scripted.metric("warmup_seconds") == pytest.approx(record.seconds)
    assert scripted.metric("plan_misses_total") == 0


def test_the_record_counts_hits_live(scripted: Server) -> None:
    before = record_of(scripted)
    assert scripted.post(COMPLETIONS, {"prompt": "x", "max_tokens": 7, "ignore_eos": True}).status == 200
    assert scripted.post(COMPLETIONS, {"prompt": [FAIL, 5]}).status == 500
    answer = scripted.get("/warmup")
    after = Record.from_json(answer.body)
    assert answer.headers["age"] == "0"
    assert after.entries[0].hits >= before.entries[0].hits + 8
    assert after.cold["script"] == before.cold.get("script", 0) + 1
    assert scripted.metric("cold_events_total", source="script") == after.cold["script"]
    assert scripted.get("/ready").json["cold_events"] == sum(after.cold.values())


def test_an_engine_in_the_middle_of_a_step_is_not_waited_for(folder: Path) -> None:
    with serving(str(folder)) as server:
        known = record_of(server)

        def hang() -> None:
            with contextlib.suppress(OSError):  # it ends with the server
                server.post(COMPLETIONS, {"prompt": [HANG, 5]})

        threading.Thread(target=hang, daemon=True).start()
        while server.metric("num_requests_waiting") + server.metric("num_requests_running") == 0:
            time.sleep(0.02)
        time.sleep(0.1)
        answer = server.get("/warmup")
        assert int(answer.headers["age"]) >= 1  # the header tells the answer's age
        assert Record.from_json(answer.body) == known
        assert server.get("/ready").status == 200


@pytest.mark.parametrize(
    ("query", "accept", "kind"),
    [
        ("", "*/*", "application/json"),
        ("", "application/json", "application/json"),
        ("", "text/html,application/xhtml+xml,*/*;q=0.8", "text/html; charset=utf-8"),
        ("?format=json", "text/html", "application/json"),
        ("?format=html", "*/*", "text/html; charset=utf-8"),
    ],
)
def test_json_for_programs_and_a_page_for_people(scripted: Server, query: str, accept: str, kind: str) -> None:
    answer = scripted.get(f"/warmup{query}", accept=accept)
    assert (answer.status, answer.headers["content-type"]) == (200, kind)
    assert "accept" in answer.headers["vary"]


@pytest.mark.parametrize("query", ["format=xml", "format=", "format=json&format=html"])
def test_other_formats_are_refused(scripted: Server, query: str) -> None:
    answer = scripted.get(f"/warmup?{query}")
    assert answer.status == 400 and answer.error["param"] == "format"


def test_the_real_engines_record(server: Server) -> None:
    record = record_of(server)
    assert record.model == "bundled" and record.platform == "cpu" and record.policy == "unified"
    kinds = {entry.kind for entry in record.entries}
    assert {"mixed", "decode", "sampler"} <= kinds
    assert b"<svg" in server.get("/warmup?format=html").body
    before = sum(entry.hits for entry in record.entries if entry.kind == "decode")
    body = {"prompt": "x", "max_tokens": 9, "ignore_eos": True}
    assert server.post(COMPLETIONS, body).status == 200
    assert sum(entry.hits for entry in record_of(server).entries if entry.kind == "decode") >= before + 8


def test_no_key_is_asked_for(folder: Path) -> None:
    with serving(str(folder), api_key=["secret"]) as server:
        assert server.get("/warmup").status == 200
        assert server.post(COMPLETIONS, {"prompt": "x"}).status == 401
