"""Reasoning over HTTP with an engine that computes: grammars beside a reasoning parser, and budgets."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.api.conftest import Server, serving
from tests.cpu.structured import write_thinker

PLAIN, OPEN = "{{ messages[-1].content }}", "{{ messages[-1].content }}<think>"
SPEAKS = "{% if thinks %}<think>{% endif %}{{ messages[-1].content }}"
USER = [{"role": "user", "content": "Which?"}]
CHAT, RESPONSES = "/v1/chat/completions", "/v1/responses"
ASKED = {
    "choice": {"structured_outputs": {"choice": ["yes", "yea"]}},
    "regex": {"structured_outputs": {"regex": "ye[sa]"}},
    "grammar": {"structured_outputs": {"grammar": 'start: "yes" | "yea"'}},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_thinker(tmp_path_factory.mktemp("thinker"))


def thinker(folder: Path, template: str) -> Any:
    options = {"load_format": "dummy", "num_threads": 1, "max_model_len": 128, "reasoning_parser": "qwen3"}
    options |= {
        "skip_warmup": True,
        "boot_check": "off",
        "chat_template": template,
        "trust_request_chat_template": True,
    }
    return serving(str(folder), engine=None, served_model_name=["m"], **options)


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Server]:
    with thinker(folder, PLAIN) as running:
        yield running


@pytest.fixture(scope="module")
def start(folder: Path) -> int:
    tokens = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))["added_tokens"]
    return next(token["id"] for token in tokens if token["content"] == "<think>")


def said(server: Server, path: str, body: dict[str, Any], stream: bool) -> tuple[str, str]:
    """Return reasoning and content of an answer."""
    common = {"messages": USER, "max_tokens": 12} if path == CHAT else {"input": "Which?", "max_output_tokens": 12}
    answer = server.post(path, {"model": "m", "temperature": 0, "stream": stream, **common, **body})
    assert answer.status == 200, answer.body
    if not stream:
        if path == CHAT:
            message = answer.json["choices"][0]["message"]
            return message["reasoning"] or "", message["content"] or ""
        found = {item["type"]: item["content"][0]["text"] for item in answer.json["output"]}
        return found.get("reasoning", ""), found.get("message", "")
    lines = answer.body.decode().splitlines()
    events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    if path == CHAT:
        deltas = [choice["delta"] for event in events for choice in event["choices"]]
        thought, content = ([delta.get(key) or "" for delta in deltas] for key in ("reasoning", "content"))
    else:
        kinds = ("response.reasoning_text.delta", "response.output_text.delta")
        thought, content = ([event["delta"] for event in events if event["type"] == kind] for kind in kinds)
    return "".join(thought), "".join(content)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", [CHAT, RESPONSES])
@pytest.mark.parametrize("asked", ASKED)
def test_a_forced_answer_has_no_reasoning(server: Server, start: int, path: str, asked: str, stream: bool) -> None:
    """A forced answer has no reasoning.

    That holds even if the start token is by far the best token of the model.
    """
    for bias in ({}, {str(start): 100.0}):
        thought, content = said(server, path, {**ASKED[asked], "logit_bias": bias}, stream)
        assert thought == "" and content in ("yes", "yea")


def test_where_a_template_speaks_of_reasoning_there_may_be_some(server: Server, start: int) -> None:
    """Control: if the template speaks of reasoning, the mask allows the start token."""
    body = {**ASKED["choice"], "logit_bias": {str(start): 100.0}}
    assert said(server, CHAT, {**body, "chat_template": SPEAKS}, False)[1] == ""
    assert said(server, CHAT, {**body, "chat_template": PLAIN}, False)[1] in ("yes", "yea")


@pytest.mark.parametrize("stream", [False, True])
def test_a_budget_ends_the_reasoning(server: Server, stream: bool) -> None:
    """The budget ends the reasoning.

    Then the answer follows, or the forced text.
    """
    for budget in (0, 3, 7):
        body = {"chat_template": OPEN, "thinking_token_budget": budget, "ignore_eos": True}
        if stream:
            body["stream_options"] = {"include_usage": True}
        asked = {"messages": USER, "temperature": 0, "max_tokens": 12, "stream": stream}
        lines = server.post(CHAT, asked | body).body.decode().splitlines()
        (told,) = (json.loads(line.removeprefix("data: ")) for line in lines if '"usage":{' in line)
        assert told["usage"]["completion_tokens_details"]["reasoning_tokens"] == budget
        thought, content = said(server, CHAT, {**body, **ASKED["choice"], "ignore_eos": False}, stream)
        assert content in ("yes", "yea") and bool(thought) == bool(budget)


def test_responses_have_budgets_too(folder: Path) -> None:
    with thinker(folder, OPEN) as running:
        for budget in (2, 5):
            body = {"input": "Which?", "max_output_tokens": 12, "temperature": 0, "thinking_token_budget": budget}
            usage = running.post(RESPONSES, body | {"ignore_eos": True}).json["usage"]
            assert usage["output_tokens_details"]["reasoning_tokens"] == budget
        refused = running.post("/v1/completions", {"prompt": "x", "thinking_token_budget": -2})
        assert refused.status == 400 and refused.error["param"] == "thinking_token_budget"


def test_a_budget_needs_a_parser(folder: Path) -> None:
    with serving(str(folder), chat_template=PLAIN) as plain:  # the engine repeats the prompt
        refused = plain.post(CHAT, {"messages": USER, "thinking_token_budget": 5})
        assert refused.error["param"] == "thinking_token_budget" and "--reasoning-parser" in refused.error["message"]
        assert plain.post(CHAT, {"messages": USER, "thinking_token_budget": -1, "max_tokens": 1}).status == 200
