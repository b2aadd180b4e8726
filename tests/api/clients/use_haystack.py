"""Haystack: its generator of chats, with a tool invoker."""

from __future__ import annotations

import os

os.environ["HAYSTACK_TELEMETRY_ENABLED"] = "False"

from typing import Any

from asked import API, CALL, JSON, MODEL, SUNNY, TEXT, WEATHER, Weather, forecast, run
from haystack.components.agents import Agent
from haystack.components.generators.chat import OpenAIChatGenerator, OpenAIResponsesChatGenerator
from haystack.dataclasses import ChatMessage, StreamingChunk
from haystack.tools import create_tool_from_function

TOOL = create_tool_from_function(forecast)


def ask(*messages: ChatMessage, kind: Any = OpenAIChatGenerator, **options: Any) -> ChatMessage:
    (reply,) = kind(model=MODEL, api_base_url=API, max_retries=0, **options).run(list(messages))["replies"]
    return reply


def text() -> None:
    for kind in (OpenAIChatGenerator, OpenAIResponsesChatGenerator):
        assert ask(ChatMessage.from_user(TEXT), kind=kind).text == TEXT


def stream() -> None:
    for kind in (OpenAIChatGenerator, OpenAIResponsesChatGenerator):
        chunks: list[StreamingChunk] = []
        reply = ask(ChatMessage.from_user(TEXT), kind=kind, streaming_callback=chunks.append)
        assert reply.text == "".join(chunk.content for chunk in chunks) == TEXT and len(chunks) > 3


def tools() -> None:
    for kind in (OpenAIChatGenerator, OpenAIResponsesChatGenerator):
        agent = Agent(chat_generator=kind(model=MODEL, api_base_url=API, max_retries=0), tools=[TOOL])
        for callback in (None, lambda _: None):
            said = agent.run([ChatMessage.from_user(CALL)], streaming_callback=callback)
            assert said["last_message"].text == SUNNY


def json() -> None:
    schema = {"type": "json_schema", "json_schema": {"name": "weather", "schema": Weather.model_json_schema()}}
    for form in (Weather, schema):
        reply = ask(ChatMessage.from_user(JSON), generation_kwargs={"response_format": form})
        assert Weather.model_validate_json(reply.text) == WEATHER


run(text, stream, tools, json)
