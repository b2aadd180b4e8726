"""LiteLLM: its provider for vLLM, the OpenAI one, and Anthropic's messages."""

from __future__ import annotations

import os

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # in place of a file from the net

from typing import Any

import litellm
from asked import API, CALL, JSON, KEY, MODEL, SUNNY, TEXT, URL, WEATHER, Weather, run

litellm.suppress_debug_info = True
PROVIDERS: tuple[dict[str, Any], ...] = (
    {"model": f"hosted_vllm/{MODEL}", "api_base": API},
    {"model": f"openai/{MODEL}", "api_base": API},
    {"model": f"anthropic/{MODEL}", "api_base": URL, "max_tokens": 200},
)
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS = [{"type": "function", "function": {"name": "forecast", "parameters": PARAMETERS}}]


def ask(provider: dict[str, Any], *messages: Any, **options: Any) -> Any:
    talk = [{"role": "user", "content": each} if isinstance(each, str) else each for each in messages]
    return litellm.completion(messages=talk, api_key=KEY, num_retries=0, **provider, **options)


def text() -> None:
    for provider in PROVIDERS:
        assert ask(provider, TEXT).choices[0].message.content == TEXT


def stream() -> None:
    for provider in PROVIDERS:
        chunks = list(ask(provider, TEXT, stream=True, stream_options={"include_usage": True}))
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == TEXT
        assert litellm.stream_chunk_builder(chunks).usage.completion_tokens > 3


def tools() -> None:
    for provider in PROVIDERS:
        message = ask(provider, CALL, tools=TOOLS).choices[0].message
        (call,) = message.tool_calls
        assert (call.function.name, call.function.arguments.replace(" ", "")) == ("forecast", '{"city":"Oslo"}')
        result = {"role": "tool", "tool_call_id": call.id, "content": SUNNY}
        assert ask(provider, CALL, message, result, tools=TOOLS).choices[0].message.content == SUNNY
        whole = litellm.stream_chunk_builder(list(ask(provider, CALL, tools=TOOLS, stream=True)))
        assert whole.choices[0].message.tool_calls[0].function.name == "forecast"


def json() -> None:
    for provider in PROVIDERS[:2]:
        for form in (Weather, {"type": "json_object"}):
            answer = ask(provider, JSON, response_format=form).choices[0].message.content
            assert Weather.model_validate_json(answer) == WEATHER


run(text, stream, tools, json)
