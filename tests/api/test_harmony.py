"""Answers of gpt-oss over HTTP, whole and streamed, from an engine that repeats the last message."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
from openai import OpenAI
from tokenizers import AddedToken

from preheat.frontend.tools.harmony import HarmonyParser
from tests.api.conftest import Server, serving
from tests.api.test_messages import TOOL as CLAUDES
from tests.api.test_messages import blocks
from tests.api.test_tools import TOOL, joined, user
from tests.tokenizers import byte_level

THOUGHT = "<|channel|>analysis<|message|>Well, the weather.<|end|>"
CALL = (
    '<|start|>assistant<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{"city": "Oslo"}<|call|>'
)
SAID = f"{THOUGHT}<|start|>assistant<|channel|>commentary<|message|>I look.<|end|>{CALL}"
TALKER = "<s>{{ messages[-1].content }}</s>{% for m in messages[:-1] %}{{ m.thinking }}{% endfor %}<|start|>assistant"


@pytest.fixture(scope="module")
def harmony(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Run a server with the marks as special tokens.

    The options name only the parser of calls.
    """
    backend, folder = byte_level(), tmp_path_factory.mktemp("harmony")
    backend.add_special_tokens([AddedToken(mark, special=True, normalized=False) for mark in HarmonyParser.MARKS])
    backend.post_processor = None
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>", "chat_template": TALKER}))
    (folder / "config.json").write_text(json.dumps({"vocab_size": backend.get_vocab_size() + 2}))
    options = {"enable_auto_tool_choice": True, "tool_call_parser": "openai", "served_model_name": ["m"]}
    with serving(str(folder), **options) as running:
        yield running


@pytest.fixture(scope="module")
def client(harmony: Server) -> Iterator[OpenAI]:
    with OpenAI(base_url=harmony.url + "/v1", api_key="none", max_retries=0, timeout=60) as client:
        yield client


def test_a_chat(client: OpenAI, harmony: Server) -> None:
    prompt = {"prompt": "Well, the weather.", "add_special_tokens": False}
    thought_tokens = harmony.post("/tokenize", prompt).json["count"]
    answer = client.chat.completions.create(model="m", messages=user(SAID), tools=[TOOL])
    message, calls = answer.choices[0].message, answer.choices[0].message.tool_calls
    assert (message.content, message.reasoning, answer.choices[0].finish_reason) == (
        "I look.", "Well, the weather.", "tool_calls"
    )  # fmt: skip
    assert [(call.function.name, json.loads(call.function.arguments)) for call in calls] == [
        ("weather", {"city": "Oslo"})
    ]
    assert answer.usage.completion_tokens_details.reasoning_tokens == thought_tokens
    stream = client.chat.completions.create(model="m", messages=user(SAID), tools=[TOOL], stream=True)
    assert joined(stream) == ("I look.", "Well, the weather.", [["weather", '{"city": "Oslo"}']], "tool_calls")


def test_a_chat_without_tools(client: OpenAI) -> None:
    said = f"{THOUGHT}<|start|>assistant<|channel|>final<|message|>Sun.<|return|>"
    message = client.chat.completions.create(model="m", messages=user(said)).choices[0].message
    assert (message.content, message.reasoning, message.tool_calls) == ("Sun.", "Well, the weather.", None)


def test_responses_and_messages(client: OpenAI, harmony: Server) -> None:
    import anthropic  # here: it takes seconds, and most processes of a run need it never

    tool = {"type": "function", **TOOL["function"]}
    items = client.responses.create(model="m", input=SAID, tools=[tool]).output
    assert [item.type for item in items] == ["reasoning", "message", "function_call"]
    assert json.loads(items[2].arguments) == {"city": "Oslo"}
    with anthropic.Anthropic(base_url=harmony.url, api_key="none", max_retries=0, timeout=60) as other:
        answer = other.messages.create(model="m", max_tokens=400, messages=user(SAID), tools=[CLAUDES])
        assert blocks(answer) == [
            ("thinking", "Well, the weather."), ("text", "I look."), ("tool_use", {"city": "Oslo"})
        ]  # fmt: skip
        back = [*user("?"), {"role": "assistant", "content": answer.content[:2]}, *user("Hi")]
        counted = other.messages.count_tokens(model="m", messages=back).input_tokens
    shown = harmony.post("/v1/chat/completions/render", {"model": "m", "messages": [
        *user("?"), {"role": "assistant", "content": "I look.", "reasoning": "Well, the weather."}, *user("Hi")
    ]})  # fmt: skip
    assert shown.status == 200 and counted == len(shown.json["token_ids"])  # the thoughts went to the template
