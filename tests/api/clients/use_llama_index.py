"""LlamaIndex: llama-index-llms-openai-like."""

from __future__ import annotations

from asked import API, CALL, JSON, KEY, MODEL, SUNNY, TEXT, WEATHER, Weather, forecast, run
from llama_index.core.llms import ChatMessage
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike

model = OpenAILike(
    model=MODEL, api_base=API, api_key=KEY, is_chat_model=True, is_function_calling_model=True, max_retries=0
)
TOOL = FunctionTool.from_defaults(forecast)


def text() -> None:
    assert str(model.complete(TEXT)) == TEXT
    assert model.chat([ChatMessage(role="user", content=TEXT)]).message.content == TEXT
    words = OpenAILike(model=MODEL, api_base=API, api_key=KEY, is_chat_model=False, max_retries=0, max_tokens=4)
    assert str(words.complete("Hi there"))


def stream() -> None:
    parts = [part.delta for part in model.stream_complete(TEXT)]
    assert "".join(parts) == TEXT and len(parts) > 3


def tools() -> None:
    answer = model.predict_and_call([TOOL], user_msg=CALL)
    assert str(answer) == SUNNY
    *_, last = model.stream_chat_with_tools([TOOL], user_msg=CALL)
    (call,) = model.get_tool_calls_from_response(last)
    assert (call.tool_name, call.tool_kwargs) == ("forecast", {"city": "Oslo"})


def json() -> None:
    forced = f'[{{"name": "Weather", "parameters": {JSON}}}]'
    assert model.as_structured_llm(Weather).complete(forced).raw == WEATHER
    schema = OpenAILike(
        model=MODEL, api_base=API, api_key=KEY, is_chat_model=True, should_use_structured_outputs=True, max_retries=0
    )
    assert schema.as_structured_llm(Weather).complete(JSON).raw == WEATHER


run(text, stream, tools, json)
