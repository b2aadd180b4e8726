"""OpenAI's agents, over responses and over chats."""

from __future__ import annotations

from agents import (
    Agent,
    Model,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from asked import API, CALL, JSON, KEY, MODEL, SUNNY, TEXT, WEATHER, Weather, forecast, run
from openai import AsyncOpenAI


def models() -> tuple[Model, ...]:
    """Return a model of each kind; a client belongs to one event loop."""
    client = AsyncOpenAI(base_url=API, api_key=KEY, max_retries=0)
    return OpenAIResponsesModel(MODEL, client), OpenAIChatCompletionsModel(MODEL, client)


async def text() -> None:
    for model in models():
        answer = await Runner.run(Agent(name="a", instructions="Be brief.", model=model), TEXT)
        assert answer.final_output == TEXT


async def stream() -> None:
    for model in models():
        answer = Runner.run_streamed(Agent(name="a", model=model), TEXT)
        kinds = [event.data.type async for event in answer.stream_events() if event.type == "raw_response_event"]
        assert answer.final_output == TEXT
        assert kinds.count("response.output_text.delta") > 3


async def tools() -> None:
    for model in models():
        agent = Agent(name="a", model=model, tools=[function_tool(forecast)])
        assert (await Runner.run(agent, CALL)).final_output == SUNNY
        streamed = Runner.run_streamed(agent, CALL)
        kinds = {event.type async for event in streamed.stream_events()}
        assert streamed.final_output == SUNNY and "run_item_stream_event" in kinds


async def json() -> None:
    for model in models():
        answer = await Runner.run(Agent(name="a", model=model, output_type=Weather), JSON)
        assert answer.final_output == WEATHER


set_tracing_disabled(True)
run(text, stream, tools, json)
