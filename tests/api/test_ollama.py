"""Ollama's API through its client, with an engine that repeats the last message."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.api.conftest import Server, serving
from tests.api.test_messages import ALL, CALL, TOOL, user

ollama = pytest.importorskip("ollama")

FUNCTION = {"name": "weather", "description": "Tell the weather.", "parameters": TOOL["input_schema"]}
TOOLS = [{"type": "function", "function": FUNCTION}]


@pytest.fixture(scope="module")
def door(tools_folder: Path) -> Iterator[Server]:
    options: dict[str, Any] = {"enable_auto_tool_choice": True, "tool_call_parser": "hermes"}
    with serving(str(tools_folder), served_model_name=["m"], api="ollama", reasoning_parser="qwen3", **options) as it:
        yield it


@pytest.fixture(scope="module")
def client(door: Server) -> Iterator[Any]:
    with ollama.Client(host=door.url) as client:
        yield client


def test_a_chat_whole_and_as_lines(client: Any) -> None:
    answer = client.chat("m", user("Hi"))
    assert (answer.message.content, answer.message.role, answer.done, answer.done_reason) == (
        "Hi", "assistant", True, "stop"
    )  # fmt: skip
    assert answer.eval_count > 1 and answer.prompt_eval_count > 0 and answer.total_duration >= answer.eval_duration
    lines = list(client.chat("m:latest", user("Hi"), stream=True, keep_alive="5m"))
    assert "".join(line.message.content for line in lines) == "Hi" and len(lines) > 1
    assert [line.done for line in lines] == [False] * (len(lines) - 1) + [True]
    assert lines[-1].eval_count == answer.eval_count and lines[-1].model == "m:latest"


def test_thinking_and_calls(client: Any) -> None:
    whole = client.chat("m", user(ALL), tools=TOOLS).message
    assert (whole.thinking, whole.content) == ("Well.", "Let me see.")
    assert [(call.function.name, call.function.arguments) for call in whole.tool_calls] == [
        ("weather", {"city": "Oslo"})
    ]
    lines = [line.message for line in client.chat("m", user(ALL), tools=TOOLS, stream=True)]
    assert "".join(line.thinking or "" for line in lines) == whole.thinking
    assert "".join(line.content for line in lines) == whole.content
    assert [call for line in lines for call in line.tool_calls or ()] == list(whole.tool_calls)
    talk = [*user("?"), whole, {"role": "tool", "tool_name": "weather", "content": "sun"}, *user("Thanks")]
    assert client.chat("m", talk, tools=TOOLS).message.content.startswith("Thanks")


def test_options_are_sampling_fields(client: Any, door: Server) -> None:
    cut = client.generate("m", "Hi there, you", options={"num_predict": 2, "seed": 1, "temperature": 0.5})
    assert (cut.eval_count, cut.done_reason) == (2, "length")
    assert client.generate("m", "Hi there, you", options={"num_predict": 2.0}).eval_count == 2
    assert client.generate("m", "Hi there, you", options={"stop": [" you"], "num_predict": -1}).response == "Hi there,"
    body = {"model": "m", "prompt": "Hi", "stream": False, "keep_alive": 0, "options": {"num_ctx": 99, "odd": 1}}
    answer = door.post("/api/generate", body | {"template": "", "think": "high"})
    assert answer.status == 200
    assert answer.headers["x-ignored-fields"] == "keep_alive, options.num_ctx, options.odd, think"
    assert "x-ignored-fields" not in door.post("/api/generate", {"model": "m", "prompt": "Hi"}).headers
    for options, said in (
        ({"top_p": 7}, "^options.top_p must"), ({"mirostat": 1}, "options.mirostat"), ({"seed": "x"}, "^options.seed"),
        ({"num_predict": 0}, "^options.num_predict must be between"), ({"stop": [""]}, "^options.stop must"),
    ):  # fmt: skip
        with pytest.raises(ollama.ResponseError, match=said) as error:
            client.generate("m", "Hi", options=options)
        assert error.value.status_code == 400


def test_a_prompt_with_a_system_message_or_raw(client: Any) -> None:
    assert client.generate("m", "Hi", system="Be brief.").response == "Hi"
    raw = client.generate("m", "<s>Hi</s>", raw=True)
    assert raw.response == "Hi" and raw.prompt_eval_count < client.generate("m", "Hi", system="x").prompt_eval_count
    assert "".join(line.response for line in client.generate("m", "Hi", stream=True)) == "Hi"
    assert client.generate("m").done_reason == "load"
    with pytest.raises(ollama.ResponseError, match="system has no meaning with raw"):
        client.generate("m", "Hi", system="x", raw=True)


def test_think_is_for_models_that_can(client: Any) -> None:
    assert client.chat("m", user("Well.</think>Hi"), think=True).message.thinking == "Well."
    assert client.chat("m", user("Hi"), think=False).message.content == "Hi"
    assert client.chat("m", user("Hi"), think="high").message.content == "Hi"  # ignored: no template looks at it


def test_models_are_listed_with_their_digest(client: Any, door: Server) -> None:
    (model,) = client.list().models
    assert model.model == "m" and len(model.digest) == 64
    assert client.ps().models[0].model == "m"
    shown = client.show("m")
    assert shown.capabilities == ["completion", "tools", "thinking"]
    assert shown.modelinfo["preheat.context_length"] > 0 and "messages" in shown.template
    assert door.get("/api/version").json["version"].count(".") == 2
    assert door.post("/v1/chat/completions", {"messages": user("Hi")}).status == 200  # the other API stays
    assert "/api/chat" in door.get("/openapi.json").json["paths"]


def test_errors_have_its_shape(client: Any, door: Server, scripted: Server) -> None:
    with pytest.raises(ollama.ResponseError, match="not served here") as error:
        client.chat("other", user("Hi"))
    assert error.value.status_code == 404
    assert set(door.post("/api/chat", {"messages": 7}).json) == {"error"}
    assert "chat, generate, embed" in door.post("/api/pull", {"model": "m"}).json["error"]
    with pytest.raises(ollama.ResponseError, match="start the engine with --runner pooling"):
        client.embed("m", "x")
    refused = scripted.post("/api/chat", {"messages": user("Hi")})
    assert refused.status == 404 and "--api ollama" in refused.json["error"]


def test_a_call_that_is_cut_off_is_an_object(door: Server) -> None:
    body = {"model": "m", "messages": user(CALL), "tools": TOOLS, "options": {"num_predict": 40}}
    lines = [json.loads(line) for line in door.post("/api/chat", body).body.splitlines()]
    calls = [call for line in lines for call in line["message"].get("tool_calls", ())]
    assert all(isinstance(call["function"]["arguments"], dict) for call in calls)
    assert lines[-1]["done_reason"] == "length"


@pytest.mark.parametrize(
    "asked", ["json", {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}]
)
def test_format_is_a_constraint_of_the_text(asked: Any) -> None:
    from preheat.server.ollama.endpoints import _format

    found = _format(asked)
    assert found is not None and (found.json_object if asked == "json" else found.json == asked)
    assert _format("") is _format(None) is None
