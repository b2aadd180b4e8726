"""The official client drives every endpoint of a real server with the bundled model."""

from __future__ import annotations

import json
import math
from typing import Literal

import pytest
from openai import APIConnectionError, BadRequestError, NotFoundError, OpenAI, pydantic_function_tool
from pydantic import BaseModel, Field

from preheat.core import MAX_STOP_IDS
from tests.api.conftest import Server

PROMPT = "def add(a, b):"
CHAT = [{"role": "user", "content": "What is a list?"}]


@pytest.fixture(scope="module")
def client(server: Server):
    with OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0, timeout=120) as client:
        yield client


def complete(client: OpenAI, prompt: object = PROMPT, **options):
    return client.completions.create(model="bundled", prompt=prompt, **{"temperature": 0, "max_tokens": 8} | options)


def chat(client: OpenAI, **options):
    return client.chat.completions.create(
        model="bundled", messages=CHAT, **{"temperature": 0, "max_completion_tokens": 8} | options
    )


def test_models(client: OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["bundled"]
    assert client.models.retrieve("bundled").id == "bundled"
    with pytest.raises(NotFoundError):
        client.models.retrieve("other")


def test_completion(client: OpenAI) -> None:
    answer = complete(client, max_tokens=64)
    choice = answer.choices[0]
    assert answer.object == "text_completion" and choice.text.startswith("\n    return a + b") and choice.index == 0
    assert choice.finish_reason == "stop" and answer.usage.completion_tokens > 3
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    assert complete(client, max_tokens=3).choices[0].finish_reason == "length"


def test_streamed_text_is_the_text(client: OpenAI) -> None:
    options = {"max_tokens": 40, "temperature": 0.8, "seed": 5, "n": 2, "prompt": [PROMPT, "import os"]}
    whole = [choice.text for choice in complete(client, **options).choices]
    assert len(whole) == 4 and len(set(whole)) > 1
    texts, reasons = [""] * 4, [None] * 4
    for event in complete(client, stream=True, **options):
        for choice in event.choices:
            assert reasons[choice.index] is None
            texts[choice.index] += choice.text
            reasons[choice.index] = choice.finish_reason
    assert texts == whole and set(reasons) <= {"stop", "length"}


def test_streamed_usage_comes_last(client: OpenAI) -> None:
    events = list(complete(client, stream=True, stream_options={"include_usage": True}))
    assert all(event.usage is None for event in events[:-1]) and events[-1].choices == []
    assert events[-1].usage == complete(client).usage
    assert all(event.usage is None for event in complete(client, stream=True))


def test_prompt_forms(client: OpenAI, server: Server) -> None:
    text = complete(client).choices[0].text
    tokens = server.post("/tokenize", {"prompt": PROMPT}).json["tokens"]
    for prompt in (tokens, [tokens], [PROMPT], [PROMPT, PROMPT], [tokens, tokens]):
        assert {choice.text for choice in complete(client, prompt).choices} == {text}


def test_stop_strings_cut_where_they_are(client: OpenAI) -> None:
    text = complete(client, max_tokens=64).choices[0].text
    for stop in ("return", " a +", "n a"):
        choice = complete(client, max_tokens=64, stop=[stop, "never"]).choices[0]
        assert choice.text == text[: text.index(stop)] and choice.finish_reason == "stop"
        kept = complete(client, max_tokens=64, stop=stop, extra_body={"include_stop_str_in_output": True}).choices[0]
        assert kept.text == text[: text.index(stop)] + stop and kept.stop_reason == stop
        streamed = "".join(e.choices[0].text for e in complete(client, max_tokens=64, stop=stop, stream=True))
        assert streamed == choice.text


def test_seeds(client: OpenAI) -> None:
    def draw(seed: int | None) -> str:
        return complete(client, "The", seed=seed, temperature=1.0, max_tokens=16).choices[0].text

    assert draw(1) == draw(1) and len({draw(1), draw(2), draw(None), draw(None)}) > 2


def test_logprobs_and_echo(client: OpenAI) -> None:
    answer = complete(client, logprobs=3, echo=True, max_tokens=4).choices[0]
    logprobs = answer.logprobs
    assert answer.text.startswith(PROMPT) and "".join(logprobs.tokens[1:]) == answer.text
    assert logprobs.token_logprobs[0] is None and all(value <= 0 for value in logprobs.token_logprobs[1:])
    assert all(3 <= len(top) <= 4 for top in logprobs.top_logprobs[1:])
    assert logprobs.text_offset == [sum(map(len, logprobs.tokens[:i])) for i in range(len(logprobs.tokens))]
    scored = complete(client, logprobs=0, echo=True, max_tokens=0)
    assert scored.choices[0].text == PROMPT and scored.usage.completion_tokens == 0
    count = len(scored.choices[0].logprobs.tokens)
    assert scored.choices[0].logprobs.token_logprobs[1:] == pytest.approx(logprobs.token_logprobs[1:count], abs=1e-4)


def test_streamed_logprobs_are_the_logprobs(client: OpenAI) -> None:
    whole = complete(client, logprobs=2, echo=True).choices[0].logprobs
    parts = [event.choices[0].logprobs for event in complete(client, logprobs=2, echo=True, stream=True)]
    for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        assert [value for part in parts for value in getattr(part, name)] == getattr(whole, name)


def test_chat(client: OpenAI) -> None:
    answer = chat(client)
    choice = answer.choices[0]
    assert choice.message.role == "assistant" and choice.message.content and answer.object == "chat.completion"


def test_text_parts_are_text(client: OpenAI) -> None:
    parts = [{"role": "user", "content": [{"type": "text", "text": CHAT[0]["content"]}]}]
    options = {"model": "bundled", "temperature": 0, "max_tokens": 8}
    told = [client.chat.completions.create(messages=m, **options).choices[0].message.content for m in (CHAT, parts)]
    assert told[0] == told[1]


def test_streamed_chat(client: OpenAI) -> None:
    whole = chat(client, n=2, seed=3, temperature=0.9)
    events = list(chat(client, n=2, seed=3, temperature=0.9, stream=True, stream_options={"include_usage": True}))
    contents = {0: "", 1: ""}
    for event in events[:-1]:
        choice = event.choices[0]
        contents[choice.index] += choice.delta.content or ""
    assert contents == {choice.index: choice.message.content for choice in whole.choices}
    assert events[0].choices[0].delta.role == "assistant" and events[-1].usage.completion_tokens > 0
    reasons = {e.choices[0].index: e.choices[0].finish_reason for e in events[:-1] if e.choices[0].finish_reason}
    assert reasons == {choice.index: choice.finish_reason for choice in whole.choices}


def test_stop_ids_have_a_limit(client: OpenAI) -> None:
    """The model's own stop ids count towards the limit.

    An id given twice counts once.
    """
    ids = [*range(100, 100 + MAX_STOP_IDS)]
    assert complete(client, max_tokens=1, extra_body={"stop_token_ids": ids[:1000] * 2}).choices
    assert complete(client, max_tokens=1, extra_body={"stop_token_ids": ids, "ignore_eos": True}).choices
    with pytest.raises(BadRequestError, match=r"1,02\d together, but at most 1,024 .* give fewer stop_token_ids"):
        complete(client, extra_body={"stop_token_ids": ids})


def test_chat_logprobs(client: OpenAI) -> None:
    content = chat(client, logprobs=True, top_logprobs=2).choices[0].logprobs.content
    assert len(content) == 8 and all(len(entry.top_logprobs) == 2 for entry in content)
    assert all(math.isclose(entry.logprob, entry.top_logprobs[0].logprob) for entry in content)  # it is greedy
    text = chat(client).choices[0].message.content
    assert b"".join(bytes(entry.bytes) for entry in content).decode() == text
    streamed = [entry for event in chat(client, logprobs=True, top_logprobs=2, stream=True)
                for entry in (event.choices[0].logprobs.content if event.choices[0].logprobs else [])]  # fmt: skip
    assert streamed == content


def test_extra_fields(client: OpenAI) -> None:
    extra = {"top_k": 1, "min_p": 0.0, "repetition_penalty": 1.0, "min_tokens": 2, "ignore_eos": True,
             "return_token_ids": True, "prompt_logprobs": 1, "cache_salt": "x"}  # fmt: skip
    answer = complete(client, temperature=1.0, max_tokens=30, extra_body=extra)
    choice = answer.choices[0].model_extra
    assert len(choice["token_ids"]) == 30 and answer.choices[0].finish_reason == "length"
    assert len(choice["prompt_logprobs"]) == len(choice["prompt_token_ids"]) == answer.usage.prompt_tokens
    stopped = complete(client, extra_body={"stop_token_ids": choice["token_ids"][1:2]}).choices[0]
    assert stopped.stop_reason == choice["token_ids"][1] and stopped.finish_reason == "stop"


def test_the_prefix_cache_is_reset(client: OpenAI, server: Server) -> None:
    def cached() -> int:
        return complete(client, list(range(300, 700)), max_tokens=1).usage.prompt_tokens_details.cached_tokens

    cached()
    assert cached() > 0
    answer = server.post("/reset_prefix_cache", b"")
    assert (answer.status, answer.body) == (200, b"")
    assert cached() == 0
    assert cached() > 0


def test_inert_fields_pass(client: OpenAI) -> None:
    inert = {"user": "u", "metadata": {"a": "b"}, "store": False, "service_tier": "auto", "n": 1}
    answer = chat(client, **inert, tools=[], response_format={"type": "text"}, parallel_tool_calls=True)
    assert answer.choices[0].message.content == chat(client).choices[0].message.content


def test_refusals(client: OpenAI) -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": {}}}
    for options, param in (({"tools": [tool]}, "tool_choice"), ({"temperature": 3000}, "temperature")):
        with pytest.raises(BadRequestError) as refused:
            chat(client, **options)
        assert refused.value.param == param and refused.value.type == "invalid_request_error"
    with pytest.raises(BadRequestError) as refused:
        complete(client, "word " * 3000)
    assert refused.value.code == "context_length_exceeded" and "2048" in refused.value.message
    with pytest.raises(NotFoundError) as unknown:
        client.completions.create(model="gpt-5", prompt="x")
    assert unknown.value.code == "model_not_found"
    with pytest.raises(APIConnectionError):
        OpenAI(base_url="http://127.0.0.1:9/v1", api_key="x", max_retries=0).models.list()  # the control: it can fail


class Weather(BaseModel):
    city: Literal["Oslo", "Rome"]
    days: int = Field(ge=0, le=9)


WEATHER = pydantic_function_tool(Weather, name="weather")
FLAG = {"type": "object", "properties": {"n": {"type": "boolean"}}, "required": ["n"], "additionalProperties": False}
OTHER = {"type": "function", "function": {"name": "other", "parameters": FLAG}}


def test_forced_calls_have_valid_arguments(client: OpenAI) -> None:
    """The grammar makes valid calls, since the bundled model knows no tools."""
    forced = {"tools": [WEATHER, OTHER], "tool_choice": "required", "max_completion_tokens": 200, "temperature": 1.5}
    for seed in range(3):
        choice = chat(client, **forced, seed=seed, parallel_tool_calls=False).choices[0]
        (call,) = choice.message.tool_calls
        given = json.loads(call.function.arguments)
        assert (choice.finish_reason, choice.message.content) == ("tool_calls", None)
        assert Weather.model_validate(given) if call.function.name == "weather" else given.keys() == {"n"}
    named = {"type": "function", "function": {"name": "weather"}}
    choice = chat(client, **forced | {"tool_choice": named}, seed=1).choices[0]
    arguments = choice.message.tool_calls[0].function.arguments
    assert choice.finish_reason == "stop" and Weather.model_validate_json(arguments)
    events = chat(client, **forced | {"tool_choice": named}, seed=1, stream=True)
    deltas = [call for event in events for call in event.choices[0].delta.tool_calls or []]
    assert "".join(d.function.arguments for d in deltas) == arguments
    answer = client.responses.create(
        model="bundled", input="Hi", tools=[{"type": "function", **OTHER["function"]}], tool_choice="required"
    )
    assert json.loads(answer.output[0].arguments).keys() == {"n"}


def test_parsed_answers(client: OpenAI) -> None:
    options = {"model": "bundled", "temperature": 0}
    parsed = client.chat.completions.parse(messages=CHAT, response_format=Weather, **options).choices[0].message.parsed
    assert isinstance(parsed, Weather)
    assert isinstance(client.responses.parse(input="Hi", text_format=Weather, **options).output_parsed, Weather)
    tools = client.chat.completions.parse(messages=CHAT, tools=[WEATHER], tool_choice="required", **options)
    assert isinstance(tools.choices[0].message.tool_calls[0].function.parsed_arguments, Weather)


def test_logprobs_of_given_tokens(client: OpenAI) -> None:
    """vLLM's ``logprob_token_ids`` gives the sampled token and exactly these ids, with logprobs over the vocabulary."""
    ids = [5, 300, 41]
    body = {"logprob_token_ids": ids, "return_token_ids": True}
    choice = complete(client, logprobs=1, max_tokens=3, extra_body=body).choices[0]
    tops = choice.logprobs.top_logprobs
    assert len(tops) == 3 and all(len(top) == 4 for top in tops)
    usual = complete(client, logprobs=1, max_tokens=3).choices[0].logprobs
    assert choice.logprobs.token_logprobs == usual.token_logprobs
    found = chat(client, logprobs=True, extra_body=body).choices[0].logprobs.content
    assert all(len(entry.top_logprobs) == 3 for entry in found)
    assert [entry.logprob for entry in found] == [
        entry.logprob for entry in chat(client, logprobs=True).choices[0].logprobs.content
    ]
    free = complete(client, logprobs=1, max_tokens=3, extra_body={"logprob_token_ids": []}).choices[0]
    assert free.logprobs.top_logprobs == usual.top_logprobs
    refusals = [{"logprob_token_ids": ids}, {"logprob_token_ids": [-1], "logprobs": 0}]
    refusals += [{"logprob_token_ids": list(range(129)), "logprobs": 0}]
    refusals += [{"logprob_token_ids": ids, "logprobs": 1, "echo": True, "max_tokens": 0}]
    refusals += [{"logprob_token_ids": ids, "logprobs": 1, "use_beam_search": True}]
    for refused in refusals:
        with pytest.raises(BadRequestError, match="logprob_token_ids"):
            complete(client, max_tokens=3, extra_body=refused)
