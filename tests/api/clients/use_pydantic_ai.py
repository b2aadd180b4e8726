"""Pydantic AI: agents over chats, responses and Anthropic's messages."""

from __future__ import annotations

from asked import API, CALL, JSON, KEY, MODEL, SUNNY, TEXT, URL, WEATHER, Weather, forecast, run
from pydantic_ai import Agent, NativeOutput, PromptedOutput, ToolOutput
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider

openai = OpenAIProvider(base_url=API, api_key=KEY)
MODELS = (
    OpenAIChatModel(MODEL, provider=openai),
    OpenAIResponsesModel(MODEL, provider=openai),
    AnthropicModel(MODEL, provider=AnthropicProvider(base_url=URL, api_key=KEY)),
)


async def text() -> None:
    for model in MODELS:
        answer = await Agent(model).run(TEXT)
        assert answer.output == TEXT and answer.usage.output_tokens > 3


async def stream() -> None:
    for model in MODELS:
        async with Agent(model).run_stream(TEXT) as answer:
            parts = [part async for part in answer.stream_text(delta=True, debounce_by=None)]
        assert "".join(parts) == TEXT and len(parts) > 3


async def tools() -> None:
    for model in MODELS:
        agent = Agent(model, tools=[forecast])
        assert (await agent.run(CALL)).output == SUNNY
        async with agent.run_stream(CALL) as answer:
            assert await answer.get_output() == SUNNY


async def json() -> None:
    for model in MODELS[:2]:
        for form in (NativeOutput(Weather), PromptedOutput(Weather)):
            assert (await Agent(model, output_type=form).run(JSON)).output == WEATHER
    call = f'<tool_call>\n{{"name": "final_result", "arguments": {JSON}}}\n</tool_call>'
    for model in MODELS:
        assert (await Agent(model, output_type=[str, ToolOutput(Weather)]).run(call)).output == WEATHER


run(text, stream, tools, json)
