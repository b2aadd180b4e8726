"""An operator's endpoints: the clients that may reach them, and their effect on a real engine."""

from __future__ import annotations

import json
import os
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from benchmarks.common.ports import free_port
from preheat import WeightGroup
from preheat.errors import InvalidRequest, SettingsError
from preheat.model.files import BUNDLED_PATH
from preheat.server import openapi
from preheat.server.operations.control import (
    InitWeightTransferRequest,
    UpdateWeightsRequest,
    allowed_paths,
    check_settings,
)
from preheat.settings import Settings
from tests.api.conftest import Answer, Server, serving
from tests.waiting import until

KEY = {"Authorization": "Bearer operator"}
ASKED: dict[str, Any] = {"prompt": "def add(a, b):", "max_tokens": 24, "temperature": 0, "ignore_eos": True}
LONG: dict[str, Any] = ASKED | {"max_tokens": 900}
"""A request that still runs when the next command arrives."""
COMPLETIONS = "/v1/completions"
INFO: dict[str, Any] = {"names": ["a"], "dtype_names": ["float32"], "shapes": [[1]]}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write folders of weights, and beside them a folder that is not allowed."""
    outside = tmp_path_factory.mktemp("outside")
    root = outside / "root"
    tensors = load_file(BUNDLED_PATH / "model.safetensors")
    chance = torch.Generator().manual_seed(0)
    other = {name: (each.float() * (1 + 0.3 * torch.randn(each.shape, generator=chance))).to(each.dtype)
             for name, each in tensors.items()}  # fmt: skip
    for name, weights in {"same": tensors, "other": other}.items():
        (root / name).mkdir(parents=True)
        save_file(weights, root / name / "model.safetensors", {"format": "pt"})
    (root / "pickle").mkdir()
    torch.save(tensors, root / "pickle" / "pytorch_model.bin")
    shutil.copytree(root / "other", outside / "secret")
    (root / "link").symlink_to(outside / "secret")
    for name in ("fifo", "leak", "index", "endless"):
        (root / name).mkdir()
    os.mkfifo(root / "fifo" / "model.safetensors")
    (root / "endless" / "model.safetensors.index.json").symlink_to("/dev/zero")
    (root / "leak" / "model.safetensors").symlink_to(outside / "secret" / "model.safetensors")
    names = dict.fromkeys(other, "../../secret/model.safetensors")
    (root / "index" / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    return root


@pytest.fixture(scope="module")
def operated(root: Path) -> Iterator[Server]:
    options: dict[str, Any] = {"api_key": ["operator"], "server_dev_mode": True, "weights_root": str(root)}
    options |= {"max_model_len": 1024, "dtype": "float32", "num_threads": 1, "enable_sleep_mode": True}
    options |= {"weight_transfer_config": {"backend": "gloo"}, "enable_prompt_tokens_details": True}
    with serving("bundled", engine=None, **options) as server:
        yield server


def said(server: Server) -> str:
    return str(server.post(COMPLETIONS, ASKED, **KEY).json["choices"][0]["text"])


def told(server: Server, path: str, body: object = None, status: int = 200) -> Any:
    answer = server.post(path, b"" if body is None else body, **KEY)
    assert answer.status == status, answer.body
    return answer.json if answer.body else None


def test_only_operators_reach_them(operated: Server, scripted: Server) -> None:
    transfers = ("/init_weight_transfer_engine", "/start_weight_update", "/finish_weight_update")
    for path in ("/pause", "/resume", "/update_weights", "/sleep", "/wake_up", *transfers):
        assert operated.post(path, b"").status == 401
        answer = scripted.post(path, b"")
        assert answer.status == 404 and "--server-dev-mode" in answer.error["message"]
    with pytest.raises(SettingsError, match="give an api_key"):
        check_settings(Settings(server_dev_mode=True))
    check_settings(Settings(server_dev_mode=True, api_key=("x",)))


ROUTES = openapi.served(adapters=False)
COMMANDS = [row for row in ROUTES if row.operated]
BODIES: dict[Any, dict[str, Any]] = {
    UpdateWeightsRequest: {"path": "same"},
    InitWeightTransferRequest: {
        "init_info": {"master_address": "h", "master_port": 1, "rank_offset": 1, "world_size": 2}
    },
}
"""Fields that a command needs."""


def asked(server: Server, row: openapi.Operation, method: str, query: str = "", body: object = b"") -> Answer:
    """Ask the route ``row``, with ids that nothing has."""
    path = row.path.replace("{id}", "none").replace("{model:path}", "none")
    return (
        server.get(path + query, **KEY) if method == "get" else server.post(path + query, body, method.upper(), **KEY)
    )


def test_no_field_of_a_command_is_ignored(operated: Server) -> None:
    """Every command refuses an unknown field by name, in the query and in the body, and then does nothing."""
    assert len(COMMANDS) >= 12
    before = operated.get("/weight_info", **KEY).json
    for row in COMMANDS:
        (method,) = row.methods
        answer = asked(operated, row, method, "?unknown=1")
        assert (answer.status, answer.error["param"]) == (400, "unknown"), row.path
        for name in set(row.queries) - set(row.lists):
            answer = asked(operated, row, method, f"?{name}=1&{name}=1")
            assert (answer.status, answer.error["param"]) == (400, name), row.path
        if method == "post":
            answer = asked(operated, row, method, body=BODIES.get(row.body, {}) | {"unknown": 1})
            assert (answer.status, answer.error["param"]) == (400, "unknown"), row.path
            assert asked(operated, row, method, body={"model": "other"}).status in (400, 404), row.path
    for name in ("update_info", "init_info"):
        path = {"update_info": "/update_weights", "init_info": "/init_weight_transfer_engine"}[name]
        inner = {"update_info": INFO, "init_info": BODIES[InitWeightTransferRequest]["init_info"]}[name]
        assert f"{name}.ipc" in told(operated, path, {name: inner | {"ipc": 1}}, 400)["error"]["message"]
    assert operated.get("/weight_info", **KEY).json == before
    assert operated.get("/is_paused", **KEY).json == {"is_paused": False}
    assert operated.get("/is_sleeping", **KEY).json == {"is_sleeping": False}


def test_fields_that_a_route_lacks_are_reported(scripted: Server) -> None:
    """Every other route names the unknown fields of a query, and of a body where it takes none."""
    for row in (row for row in ROUTES if not row.operated):
        for method in row.methods:
            answer = asked(scripted, row, method, "?unknown=1")
            assert "unknown" in answer.headers["x-ignored-fields"], row.path
            if row.body is None and method != "get":
                answer = asked(scripted, row, method, body={"unknown": 1, "nothing": None})
                assert answer.headers["x-ignored-fields"] == "unknown", row.path
                assert asked(scripted, row, method, body=b"{").status == 400, row.path
    for path in ("/warmup?format=json", "/health?deep=0", "/v1/models"):
        assert "x-ignored-fields" not in scripted.get(path).headers


def test_queries_of_commands(operated: Server) -> None:
    """The fields of vLLM's queries do as they say, or are refused with the remedy."""
    wrong = {
        "/pause?clear_cache=perhaps": "clear_cache must be true or false",
        "/pause?mode=keep&wait_for_inflight_requests=true": "mode is keep, so",
        "/reset_prefix_cache?reset_external=2": "reset_external must be true or false",
        "/sleep?level=3": "level must be 1, 0, 2",
    }
    for path, message in wrong.items():
        assert message in told(operated, path, None, 400)["error"]["message"]
    said_where = told(operated, "/pause", {"mode": "keep"}, 400)["error"]["message"]
    assert "write it into the query, /pause?mode=..." in said_where
    assert operated.get("/get_world_size?include_dp=perhaps", **KEY).status == 400
    assert operated.get("/get_world_size?include_dp=false", **KEY).json == {"world_size": 1}
    prompt = ASKED | {"prompt": list(range(300, 700)), "max_tokens": 1}

    def cached() -> int:
        usage = operated.post(COMPLETIONS, prompt, **KEY).json["usage"]
        return int((usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0)

    cached()
    assert cached() > 0
    told(operated, "/pause?wait_for_inflight_requests=true&clear_cache=false")
    told(operated, "/resume", {})
    assert cached() > 0
    told(operated, "/pause?mode=wait&clear_cache=true")
    told(operated, "/resume")
    assert cached() == 0 and cached() > 0
    told(operated, "/reset_prefix_cache?reset_running_requests=true&reset_external=True", {})
    assert cached() == 0


def test_paths(root: Path) -> None:
    assert allowed_paths(str(root), "same") == allowed_paths(str(root), str(root / "same"))
    assert allowed_paths(str(root), "same") == (str(root / "same"), str(root))
    for path in ("..", "../secret", "link", "/etc", "same/../../secret"):
        with pytest.raises(InvalidRequest, match=r"--weights-root.*outside the folder"):
            allowed_paths(str(root), path)
    with pytest.raises(InvalidRequest, match="not a folder"):
        allowed_paths(str(root), "same/model.safetensors")
    for path in ("a\0b", "d/" * 4000, "n" * 300, "none"):
        with pytest.raises(InvalidRequest, match="cannot be read") as refused:
            allowed_paths(str(root), path)
        assert len(refused.value.message) < 400
    with pytest.raises(InvalidRequest, match="was started with --weights-root"):
        allowed_paths(None, "same")


def test_weights(operated: Server) -> None:
    boot, before = operated.get("/weight_info", **KEY).json, said(operated)
    assert boot["weight_version"] == "default"
    now = told(operated, "/update_weights", {"path": "other", "weight_version": "step-7"})
    assert now["weight_version"] == "step-7" and now["digest"]
    assert operated.get("/weight_info", **KEY).json == now
    assert operated.get("/ready").json["digest"] == now["digest"]
    assert said(operated) != before
    for body, message in (
        ({"path": "link"}, "outside the folder"),
        ({"path": "pickle"}, "holds no *.safetensors"),
        ({"path": "fifo"}, "it is a pipe"),
        ({"path": "endless"}, "index.json cannot be read: it is"),
        ({"path": "leak"}, "it is outside the folder"),
        ({"path": "index"}, "is not the name of a file beside it"),
        ({"path": "same\0"}, "cannot be a path"),
        ({"path": "n" * 300}, "File name too long"),
        ({"path": "other", "update_info": INFO}, "give either path"),
        ({"update_info": INFO | {"shapes": []}}, "0 shapes"),
        ({"update_info": INFO | {"packed": True}}, "update_info.packed is not supported"),
        ({"update_info": INFO}, "no group with a trainer"),
        ({}, "path"),
    ):
        assert message in told(operated, "/update_weights", body, 400)["error"]["message"]
    assert operated.get("/weight_info", **KEY).json == now
    assert told(operated, "/update_weights", {"path": "same"})["digest"] not in ("", now["digest"])
    assert said(operated) == before


def test_weights_of_a_trainer(operated: Server, root: Path) -> None:
    """A trainer updates the weights as with vLLM's server, but for the group.

    The weights come in two parts, while requests run.
    """
    by_files = told(operated, "/update_weights", {"path": "other"})["digest"]
    before, digest = told(operated, "/update_weights", {"path": "same"}), said(operated)
    tensors, port = list(load_file(root / "other" / "model.safetensors").items()), free_port()
    groups: list[WeightGroup] = []
    trainer = threading.Thread(
        target=lambda: groups.append(WeightGroup("127.0.0.1", port, rank=0, world_size=2, timeout=30)), daemon=True
    )
    trainer.start()
    world = 1 + operated.get("/get_world_size", **KEY).json["world_size"]
    info = {"master_address": "127.0.0.1", "master_port": port, "rank_offset": 1, "world_size": world, "timeout": 30}
    assert told(operated, "/init_weight_transfer_engine", {"init_info": info}) == {"status": "joined", "message": None}
    trainer.join()
    told(operated, "/start_weight_update", {"is_checkpoint_format": True})
    for part in (tensors[:5], tensors[5:]):
        sender = threading.Thread(target=groups[0].send, args=(part,), daemon=True)
        sender.start()
        told(operated, "/update_weights", {"update_info": groups[0].announce(part)})
        sender.join()
        assert said(operated) == digest
    now = told(operated, "/finish_weight_update", {"weight_version": "step-9"})
    assert now == {"weight_version": "step-9", "digest": by_files}
    assert said(operated) != digest
    groups[0].close()
    assert told(operated, "/update_weights", {"path": "same"})["digest"] == before["digest"]


def test_pause_and_resume(operated: Server) -> None:
    """A pause keeps the running requests and holds back new ones.

    After it both go on.
    """
    expected = operated.post(COMPLETIONS, LONG, **KEY).json["choices"][0]["text"]
    assert "wait" in told(operated, "/pause?mode=later", None, 400)["error"]["message"]
    answers: list[str] = []
    asking = [
        threading.Thread(
            target=lambda: answers.append(operated.post(COMPLETIONS, LONG, **KEY).json["choices"][0]["text"])
        )
        for _ in range(2)
    ]
    asking[0].start()
    assert until(lambda: operated.metric("num_requests_running") >= 1)
    assert told(operated, "/pause?mode=keep") == {"status": "paused", "message": None}
    asking[1].start()
    assert operated.get("/is_paused", **KEY).json == {"is_paused": True}
    assert not answers
    told(operated, "/resume")
    for each in asking:
        each.join(30)
    assert answers == [expected] * 2
    assert operated.get("/is_paused", **KEY).json == {"is_paused": False}


def test_abort(operated: Server) -> None:
    """A stream ends when the engine is paused, with the reason."""
    body = LONG | {"stream": True}
    ended: list[str] = []

    def ask() -> None:
        lines = operated.post(COMPLETIONS, body, **KEY).body.decode().split("\n\n")
        ended.append(json.loads(lines[-3].removeprefix("data: "))["choices"][0]["finish_reason"])

    asking = threading.Thread(target=ask)
    asking.start()
    assert until(lambda: operated.metric("num_requests_running") >= 1)
    told(operated, "/pause")
    asking.join(30)
    assert ended == ["abort"]
    told(operated, "/resume")
    assert said(operated)


def test_sleep(operated: Server) -> None:
    before = said(operated)
    assert operated.metric("engine_sleep_state", sleep_state="awake") == 1
    told(operated, "/sleep?level=1")
    assert operated.get("/is_sleeping", **KEY).json == {"is_sleeping": True}
    ready = operated.get("/ready")
    assert (ready.status, ready.json) == (503, {"level": 1, "state": "asleep"})
    assert operated.get("/health").status == 200
    refused = operated.post(COMPLETIONS, ASKED, **KEY)
    assert refused.status == 503 and refused.error["code"] == "asleep"
    assert operated.metric("engine_sleep_state", sleep_state="weights_offloaded") == 1
    told(operated, "/wake_up")
    assert operated.get("/ready").status == 200 and said(operated) == before
    told(operated, "/sleep?level=2")
    told(operated, "/wake_up", status=400)
    told(operated, "/update_weights", {"path": "same"})
    told(operated, "/wake_up?tags=weights&tags=kv_cache")
    assert said(operated) == before
