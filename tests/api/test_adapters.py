"""Adapters over HTTP: served as models, loaded and unloaded while the server runs."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.api.conftest import Answer, Server, serving
from tests.api.test_http import CHAT, COMPLETIONS, MESSAGES, events
from tests.waiting import until

LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
PROMPT = {"prompt": "abc", "max_tokens": 3, "add_special_tokens": False}
FORWARD, BACKWARD = "bca", "bac"


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a folder of adapters, with ways out of the folder."""
    folder = tmp_path_factory.mktemp("adapters")
    outside = tmp_path_factory.mktemp("outside")
    for name in ("sql", "chat", "more"):
        (folder / name).mkdir()
    (folder / "link").symlink_to(folder / "sql")
    (folder / "out").symlink_to(outside)
    (folder / "sly").mkdir()
    (outside / "weights").write_text("")
    (folder / "sly" / "adapter_model.safetensors").symlink_to(outside / "weights")
    (folder / "round").symlink_to(folder / "round")
    return folder


@pytest.fixture(scope="module")
def adapted(folder: Path, root: Path) -> Iterator[Server]:
    options = {"enable_lora": True, "max_cpu_loras": 8, "max_loras": 2, "allow_runtime_lora_updating": True}
    named = json.dumps({"name": "talk", "path": str(root / "chat"), "base_model_name": "tiny-chat"})
    modules = [f"sql={root / 'sql'}", named]
    with serving(
        str(folder), served_model_name=["tiny", "alias"], api_key=["k"], lora_root=str(root), lora_modules=modules,
        **options,
    ) as server:  # fmt: skip
        yield server


def post(server: Server, path: str, body: dict[str, Any]) -> Answer:
    return server.post(path, body, Authorization="Bearer k")


def load(server: Server, name: str, path: object, **more: Any) -> Answer:
    return post(server, LOAD, {"lora_name": name, "lora_path": str(path), **more})


def unload(server: Server, name: str) -> Answer:
    return post(server, UNLOAD, {"lora_name": name})


def said(server: Server, model: str | None) -> str:
    return str(post(server, COMPLETIONS, {**PROMPT, "model": model}).json["choices"][0]["text"])


def cards(server: Server) -> dict[str, tuple[str, str | None]]:
    listed = server.get("/v1/models", Authorization="Bearer k").json["data"]
    return {card["id"]: (card["root"], card["parent"]) for card in listed}


def test_an_adapter_is_the_model_of_a_request(adapted: Server) -> None:
    assert [said(adapted, name) for name in (None, "tiny", "alias", "sql", "talk")] == [FORWARD] * 3 + [BACKWARD] * 2
    assert post(adapted, COMPLETIONS, {**PROMPT, "model": "sql"}).json["model"] == "sql"
    streamed = events(post(adapted, COMPLETIONS, {**PROMPT, "model": "sql", "stream": True}).body)
    assert {event["model"] for event in streamed} == {"sql"}
    assert "".join(event["choices"][0]["text"] for event in streamed) == BACKWARD
    answer = post(adapted, COMPLETIONS, {**PROMPT, "model": "other"})
    assert answer.status == 404 and answer.error["code"] == "model_not_found"
    assert "tiny, alias, sql, talk" in answer.error["message"]


ENDPOINTS = [
    (CHAT, {"messages": MESSAGES, "max_tokens": 4}, lambda body: body["choices"][0]["message"]["content"]),
    ("/v1/responses", {"input": "hi", "max_output_tokens": 4}, lambda body: body["output"][0]["content"][0]["text"]),
    ("/v1/messages", {"messages": MESSAGES, "max_tokens": 4}, lambda body: body["content"][0]["text"]),
]


@pytest.mark.parametrize(("path", "body", "text"), ENDPOINTS, ids=[path for path, _, _ in ENDPOINTS])
def test_every_endpoint_takes_adapters(adapted: Server, path: str, body: dict[str, Any], text: Any) -> None:
    plain, tuned = (post(adapted, path, {**body, "model": name}).json for name in ("tiny", "sql"))
    assert text(plain) != text(tuned)
    assert tuned["model"] == "sql"
    assert post(adapted, path, {**body, "model": "other"}).status == 404


def test_models_lists_adapters(adapted: Server, folder: Path, root: Path) -> None:
    assert cards(adapted) == {
        "tiny": (str(folder), None), "alias": (str(folder), None),
        "sql": (str(root / "sql"), "tiny"), "talk": (str(root / "chat"), "tiny-chat"),
    }  # fmt: skip
    assert adapted.get("/v1/models/talk", Authorization="Bearer k").json["parent"] == "tiny-chat"


def test_an_adapter_comes_and_goes(adapted: Server, root: Path) -> None:
    answer = load(adapted, "more", root / "more")
    assert (answer.status, answer.body) == (200, b"Success: LoRA adapter 'more' added successfully.")
    assert said(adapted, "more") == BACKWARD and cards(adapted)["more"] == (str(root / "more"), "tiny")
    assert load(adapted, "more", root / "sql").status == 409
    assert load(adapted, "more", "link", load_inplace=True).status == 200
    assert cards(adapted)["more"][0] == str(root / "sql")
    answer = unload(adapted, "more")
    assert (answer.status, answer.body) == (200, b"Success: LoRA adapter 'more' removed successfully.")
    assert "more" not in cards(adapted) and post(adapted, COMPLETIONS, {**PROMPT, "model": "more"}).status == 404
    assert unload(adapted, "more").status == 404


@pytest.mark.parametrize("path", ["/etc", "..", "../outside", "sql/../..", "out", "sly", "round", "\0", "n" * 300])
def test_adapters_lie_below_the_root(adapted: Server, path: str) -> None:
    answer = load(adapted, "sneaky", path)
    assert answer.status == 400 and answer.error["param"] == "lora_path"
    assert "cannot be read (--lora-root)" in answer.error["message"]
    assert "sneaky" not in cards(adapted)


def test_refusals(adapted: Server, root: Path) -> None:
    missing = load(adapted, "none", root / "none")
    assert missing.status == 400 and missing.error["code"] == "invalid_adapter" and "none" not in cards(adapted)
    assert load(adapted, "alias", root / "sql").status == 409
    named = {"lora_name": "a", "lora_path": "sql"}
    for body in ({"lora_name": "a"}, {**named, "lora_name": ""}):
        assert post(adapted, LOAD, body).status == 400
    assert load(adapted, "a", "sql", is_3d_lora_weight=True).error["param"] == "is_3d_lora_weight"
    for path in (LOAD, UNLOAD):
        assert adapted.post(path, {"lora_name": "sql", "lora_path": "sql"}).status == 401
    assert "sql" in cards(adapted)


def test_unloading_waits_for_running_requests(adapted: Server) -> None:
    """While an unload waits, neither new requests nor another adapter of that name are taken."""
    load(adapted, "long", "more")
    body = json.dumps({"prompt": "abc", "max_tokens": 4000, "model": "long", "stream": True}).encode()
    request = urllib.request.Request(adapted.url + COMPLETIONS, body, {"Authorization": "Bearer k"})
    gone: list[Answer] = []
    unloading = threading.Thread(target=lambda: gone.append(unload(adapted, "long")))
    with urllib.request.urlopen(request, timeout=30):  # this request runs for as long as the test likes
        assert until(lambda: 'running_lora_adapters="long"' in adapted.get("/metrics").body.decode())
        unloading.start()
        while "long" in cards(adapted):
            time.sleep(0.01)
        assert post(adapted, COMPLETIONS, {**PROMPT, "model": "long"}).status == 404
        for answer in (load(adapted, "long", "more"), unload(adapted, "long")):
            assert answer.status == 409 and "being unloaded" in answer.error["message"]
        assert not gone
    unloading.join()
    assert gone[0].status == 200
    assert load(adapted, "long", "more").status == unload(adapted, "long").status == 200


def test_the_metric_of_adapters(adapted: Server) -> None:
    line = next(line for line in adapted.get("/metrics").body.decode().splitlines() if "lora_requests_info{" in line)
    assert 'max_lora="2",running_lora_adapters="",waiting_lora_adapters=""' in line
    assert abs(float(line.split()[-1]) - time.time()) < 60


def test_without_permission_there_are_no_endpoints(scripted: Server) -> None:
    answer = scripted.post(LOAD, {"lora_name": "a", "lora_path": "b"})
    assert answer.status == 404 and "VLLM_ALLOW_RUNTIME_LORA_UPDATING" in answer.error["message"]
    assert LOAD not in scripted.get("/openapi.json").json["paths"]
    assert "lora_requests_info" not in scripted.get("/metrics").body.decode()


def test_the_document_describes_them(adapted: Server) -> None:
    paths = adapted.get("/openapi.json").json["paths"]
    assert {"200", "400", "401", "404", "409"} <= paths[LOAD]["post"]["responses"].keys()
    assert UNLOAD in paths


def test_an_engine_that_starts_again_reads_the_adapters_loaded_meanwhile(adapted: Server, root: Path) -> None:
    assert load(adapted, "kept", root / "more").status == 200
    os.kill(adapted.engine_pids[0], signal.SIGKILL)
    assert until(lambda: adapted.get("/ready", Authorization="Bearer k").status != 200)
    assert until(lambda: adapted.get("/ready", Authorization="Bearer k").status == 200)
    assert post(adapted, COMPLETIONS, {**PROMPT, "model": "kept"}).json["choices"][0]["text"] == BACKWARD
    assert unload(adapted, "kept").status == 200
