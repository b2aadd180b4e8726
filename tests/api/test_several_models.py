"""Several models behind one port.

Each answers as on a server of its own, and is named in all output.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ollama
import openai
import pytest

from preheat.cli.main import main
from preheat.errors import SettingsError
from preheat.server.replicas.models import each_model
from preheat.settings import Settings
from preheat.settings.combinations import traits_of
from tests.adapters import write_adapter
from tests.api.conftest import Server, serving, write_model
from tests.qwen_vl import save_model_and_tokenizer

SMALL: dict[str, Any] = {
    "num_threads": 1, "max_num_seqs": 4, "max_model_len": 512, "max_num_batched_tokens": 64, "boot_check": "off",
    "num_gpu_blocks_override": 32,
}  # fmt: skip
ASKED: dict[str, Any] = {"prompt": "def add(a, b):", "max_tokens": 12, "temperature": 0, "seed": 1, "logprobs": 1}
TEXTS = ["import os", "x = [1, 2]"]


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_adapter(tmp_path_factory.mktemp("adapter") / "a", 1))


@pytest.fixture(scope="module")
def both(adapter: str) -> Iterator[Server]:
    """Run a model that chats, with an adapter, and a model that makes embeddings."""
    lora = {"enable_lora": True, "max_lora_rank": 4, "lora_modules": [f"small={adapter}"]}
    options = {"chat": lora, "embed": {"runner": "pooling"}}
    with serving(
        "bundled", engine=None, models=["chat=bundled", "embed=bundled"], model_options=options, api="ollama",
        enable_responses_store=True, **SMALL,
    ) as server:  # fmt: skip
        yield server


@contextlib.contextmanager
def client_of(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="x", max_retries=0) as client:
        yield client


def shown(server: Server, model: str) -> Any:
    answer = server.post("/v1/completions", {**ASKED, "model": model}).json
    return answer["choices"]


def vectors(server: Server, model: str) -> list[Any]:
    answer = server.post("/v1/embeddings", {"input": TEXTS, "model": model}).json
    return [each["embedding"] for each in answer["data"]]


def test_each_has_the_bits_of_a_server_of_its_own(both: Server, adapter: str) -> None:
    found = [shown(both, "chat"), shown(both, "small"), vectors(both, "embed")]
    lora = {"enable_lora": True, "max_lora_rank": 4, "lora_modules": [f"small={adapter}"]}
    with serving("bundled", engine=None, served_model_name=["chat"], **SMALL, **lora) as alone:
        assert [shown(alone, "chat"), shown(alone, "small")] == found[:2]
    with serving("bundled", engine=None, served_model_name=["embed"], **SMALL, runner="pooling") as alone:
        assert vectors(alone, "embed") == found[2]
    assert found[0] != found[1]


def test_a_model_with_states_beside_another(tmp_path: Path) -> None:
    folder, own = str(tmp_path), SMALL | {"execution_mode": "eager"}
    save_model_and_tokenizer(tmp_path, family="Qwen3_5")
    with serving(folder, engine=None, served_model_name=["states"], **own) as alone:
        right = shown(alone, "states")
    with serving("bundled", engine=None, models=[f"states={folder}", "chat=bundled"], **own) as server:
        assert shown(server, "states") == right != shown(server, "chat")


def test_a_kind_of_text_is_ignored_without_prompts(both: Server) -> None:
    """``input_type`` changes nothing where the model has no prompts, and the answer names the field."""
    answer = both.post("/v1/embeddings", {"input": TEXTS, "model": "embed", "input_type": "query"})
    assert [each["embedding"] for each in answer.json["data"]] == vectors(both, "embed")
    assert answer.headers["x-ignored-fields"] == "input_type"


def test_clients_see_both(both: Server) -> None:
    with client_of(both) as client:
        assert [model.id for model in client.models.list()] == ["chat", "small", "embed"]
        assert client.models.retrieve("embed").id == "embed"
        talk: Any = [{"role": "user", "content": "Hi"}]
        assert client.chat.completions.create(model="chat", messages=talk, max_tokens=4).model == "chat"
        streamed = client.chat.completions.create(model="chat", messages=talk, max_tokens=4, stream=True)
        assert {chunk.model for chunk in streamed} == {"chat"}
        assert len(client.embeddings.create(model="embed", input=TEXTS).data) == 2
        for ask in (lambda: client.models.retrieve("x"), lambda: client.embeddings.create(model="x", input="y")):
            with pytest.raises(openai.NotFoundError, match="'x' is not served here"):
                ask()
        for ask in (
            lambda: client.embeddings.create(model="chat", input="y"),
            lambda: client.completions.create(model="embed", prompt="y"),
        ):
            with pytest.raises(openai.BadRequestError, match="does not support"):
                ask()
        first = client.responses.create(model="chat", input="Hi", max_output_tokens=16)
        assert client.responses.retrieve(first.id).id == first.id
        assert both.post("/tokenize", {"model": "embed", "prompt": "a b"}).json["count"] > 0
        assert both.get("/tokenizer_info?model=embed").status == 200 == both.get("/tokenizer_info").status
        assert both.post("/v1/completions", {"prompt": "x", "max_tokens": 1}).json["model"] == "chat"  # the first
        assert both.post("/v1/completions", b"{").status == 400 and both.post("/reset_prefix_cache", {}).status == 200


def test_ollamas_client_sees_both(both: Server) -> None:
    client = ollama.Client(both.url)
    assert [model.model for model in client.list().models] == ["chat", "small", "embed"]
    assert client.chat("chat:latest", [{"role": "user", "content": "Hi"}], options={"num_predict": 3}).done
    assert len(client.embed("embed", TEXTS).embeddings) == 2
    assert client.show("embed:latest").capabilities == ["embedding"]
    client._client.close()


def test_each_model_has_its_own_record_and_metrics(both: Server) -> None:
    assert both.get("/health").status == 200
    ready = both.get("/ready").json
    assert ready["status"] == "ready" and ready["models"].keys() == {"chat", "embed"}
    assert all(each["status"] == "ready" and each["items"] for each in ready["models"].values())
    records = both.get("/warmup?format=json").json["models"]
    planned = {name: json.dumps(record["entries"]) for name, record in records.items()}
    assert "pooler" in planned["embed"] and "pooler" not in planned["chat"]
    assert both.get("/warmup?format=json&model=embed").json["entries"] == records["embed"]["entries"]
    assert both.get("/warmup?format=html&model=embed").body.startswith(b"<!")
    page = both.get("/metrics").body.decode()
    helps = [text for text in page.splitlines() if text.startswith("# HELP")]
    assert len(helps) == len(set(helps))
    samples = [text.rpartition(" ")[0] for text in page.splitlines() if text and not text.startswith("#")]
    assert len(samples) == len(set(samples))
    for name in ("chat", "embed"):
        assert both.metric("warmup_seconds", model_name=name) == pytest.approx(records[name]["seconds"])
    before = [both.metric("prompt_tokens_total", model_name=name) for name in ("chat", "embed")]
    vectors(both, "embed")
    after = [both.metric("prompt_tokens_total", model_name=name) for name in ("chat", "embed")]
    assert before[0] == after[0] and before[1] < after[1]
    assert 'http_requests_total{handler="/ready",method="GET",status="200"}' in page


def test_not_ready_until_both_are(tmp_path: Path) -> None:
    """The server is ready when both models are.

    The second engine begins after the first is ready.
    """
    folders = []
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        folders.append(write_model(tmp_path / name))
    models = [f"{folder.name}={folder}" for folder in folders]
    with serving("bundled", engine="tests.api.scripted:run_waiting_engine", wait=False, models=models) as server:
        server.wait_until_open()
        for folder in folders:
            for path in ("/health", "/ready"):
                assert server.get(path).status == 503 and server.get("/live").status == 200
            assert server.post("/v1/completions", {"model": "two", "prompt": "x"}).status == 503
            (folder / "go").touch()
        server.wait_until_ready()
        assert server.get("/health").status == 200
        os.kill(server.engine_pids[1], signal.SIGKILL)
        assert server.process.wait(60) == 1


def test_batches_are_routed(folder: Path, tmp_path: Path) -> None:
    models = [f"one={folder}", f"two={folder}"]
    with serving("bundled", models=models, batch_dir=str(tmp_path)) as server, client_of(server) as client:
        lines = [
            {"custom_id": name, "url": "/v1/completions", "body": {"model": name, "prompt": "x", "max_tokens": 2}}
            for name in ("one", "two", "three")
        ]
        file = client.files.create(file="\n".join(map(json.dumps, lines)).encode(), purpose="batch")
        batch = client.batches.create(
            input_file_id=file.id, endpoint="/v1/completions", completion_window="24h"
        )  # fmt: skip
        while (batch := client.batches.retrieve(batch.id)).status not in ("completed", "failed"):
            time.sleep(0.05)
        found = [json.loads(text) for text in client.files.content(batch.output_file_id or "").text.splitlines()]
        assert {each["custom_id"]: each["response"]["body"]["model"] for each in found} == {
            "one": "one",
            "two": "two",
        }


def test_each_has_its_options_and_its_share() -> None:
    given = Settings.load({
        "model": ["a=x", "b=y", "c=z"], "max_num_seqs": 8, "gpu_memory_utilization": 0.9,
        "model_options": {"b": {"runner": "pooling", "max-num-seqs": 4}, "c": {"gpu_memory_utilization": 0.5}},
    }, env={})  # fmt: skip
    a, b, c = each_model(given)
    assert [(each.model, each.served_model_name) for each in (a, b, c)] == [("x", ("a",)), ("y", ("b",)), ("z", ("c",))]
    assert [each.gpu_memory_utilization for each in (a, b, c)] == [pytest.approx(0.3), pytest.approx(0.45), 0.5]
    assert [each.max_num_seqs for each in (a, b, c)] == [8, 4, 8] and (a.runner, b.runner) == ("auto", "pooling")
    assert all("several_models" in traits_of(each) for each in (a, b, c))
    one = Settings.load({"model": ["a=x"]}, env={})
    (only,) = each_model(one)
    assert (only.model, only.served_model_name) == ("x", ("a",)) and "several_models" not in traits_of(only)
    assert Settings.load({"model": ["./a=x"]}, env={}).model == "./a=x"
    assert each_model(Settings()) == [Settings()]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"models": ["x", "a=y"]}, "'x' is not NAME=PATH"),
        ({"models": ["a=x", "a=y"]}, "same name"),
        ({"models": ["a=x", "b=y"], "served_model_name": ["c"]}, "served_model_name"),
        ({"models": ["a=x", "b=y"], "model_options": {"c": {}}}, "'c' is not one of a, b"),
        ({"models": ["a=x", "b=y"], "model_options": {"a": {"port": 1}}}, "port is an option of the whole server"),
        ({"models": ["a=x", "b=y"], "model_options": {"a": {"prot": 1}}}, "unknown option in model_options of a"),
        ({"models": ["a=x", "b=y"], "enable_lora": True, "lora_modules": ["z=p"]}, "'z' is the name of two"),
        ({"models": ["a=x", "b=y"], "data_parallel_size": 2}, "several models"),
        ({"model_options": {"a": {}}}, "model_options needs models"),
    ],
)
def test_options_that_several_models_lack_are_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        each_model(Settings.load(given, env={}))


@pytest.mark.parametrize("command", ["plan", "warm", "generate", "doctor"])
def test_other_commands_take_one_model(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    prompt = ["--prompt", "x"] if command == "generate" else []
    assert main([command, "--model", "a=x", "--model", "b=y", *prompt]) == 2
    assert "preheat serve" in capsys.readouterr().err
