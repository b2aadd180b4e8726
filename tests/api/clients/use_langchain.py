"""LangChain: langchain-openai, over chats and over responses."""

from __future__ import annotations

from asked import API, CALL, JSON, KEY, MODEL, SUNNY, TEXT, WEATHER, Weather, forecast, run
from langchain_core.messages import HumanMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI

models = [
    ChatOpenAI(model=MODEL, base_url=API, api_key=KEY, max_retries=0, stream_usage=True, use_responses_api=responses)
    for responses in (False, True)
]


def text() -> None:
    for model in models:
        answer = model.invoke(TEXT)
        assert answer.text == TEXT and answer.usage_metadata["output_tokens"] > 0


def stream() -> None:
    for model in models:
        chunks = list(model.stream(TEXT))
        assert "".join(chunk.text for chunk in chunks) == TEXT and len(chunks) > 3
        assert sum((chunk.usage_metadata or {}).get("output_tokens", 0) for chunk in chunks) > 3


def tools() -> None:
    for model in models:
        able = model.bind_tools([tool(forecast)])
        asked = able.invoke(CALL)
        (call,) = asked.tool_calls
        assert (call["name"], call["args"]) == ("forecast", {"city": "Oslo"})
        assert able.invoke([HumanMessage(CALL), asked, tool(forecast).invoke(call)]).text == SUNNY
        whole = None
        for chunk in able.stream(CALL):
            whole = chunk if whole is None else whole + chunk
        assert [call["args"] for call in whole.tool_calls] == [{"city": "Oslo"}]
        forced = model.bind_tools([tool(forecast)], tool_choice="forecast").invoke('{"city": "Rome"}')
        assert [call["args"] for call in forced.tool_calls] == [{"city": "Rome"}]


def json() -> None:
    for method in ("json_schema", "function_calling", "json_mode"):
        assert models[0].with_structured_output(Weather, method=method).invoke(JSON) == WEATHER
    assert models[1].with_structured_output(Weather, method="json_schema").invoke(JSON) == WEATHER


run(text, stream, tools, json)
