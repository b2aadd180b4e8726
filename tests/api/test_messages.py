"""/v1/messages through Anthropic's client, with an engine that repeats the last message."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.api.conftest import Server, serving

if TYPE_CHECKING:
    import anthropic

TOOL = {"name": "weather", "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}}}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
ALL = "<think>Well.</think>Let me see." + CALL


@pytest.fixture(scope="module")
def client(talker: Server) -> Iterator[anthropic.Anthropic]:
    import anthropic  # here: it takes seconds, and most processes of a run need it never

    with anthropic.Anthropic(base_url=talker.url, api_key="none", max_retries=0, timeout=60) as client:
        yield client


def user(text: Any) -> list[Any]:
    return [{"role": "user", "content": text}]


def ask(client: anthropic.Anthropic, content: Any, call: str = "create", **options: Any) -> Any:
    messages = content if isinstance(content, list) else user(content)
    options = {"max_tokens": 200, "tools": [TOOL]} | options
    return getattr(client.messages, call)(model="m", messages=messages, **options)


def test_text(client: anthropic.Anthropic) -> None:
    answer = ask(client, "Hi", system="Be brief.")
    assert (answer.content[0].text, answer.stop_reason, answer.role) == ("Hi", "end_turn", "assistant")
    assert answer.usage.input_tokens > 0 and answer.usage.output_tokens > 1
    assert ask(client, "Hi there, you", max_tokens=2).stop_reason == "max_tokens"
    stopped = ask(client, "Hi there, you", stop_sequences=[" you"])
    assert (stopped.content[0].text, stopped.stop_reason, stopped.stop_sequence) == (
        "Hi there,",
        "stop_sequence",
        " you",
    )


def blocks(answer: Any) -> list[tuple[Any, ...]]:
    fields = {"text": "text", "thinking": "thinking", "tool_use": "input"}
    return [(block.type, getattr(block, fields[block.type])) for block in answer.content]


EXPECTED = [("thinking", "Well."), ("text", "Let me see."), ("tool_use", {"city": "Oslo"})]


def test_thinking_and_tools(client: anthropic.Anthropic) -> None:
    answer = ask(client, ALL)
    assert blocks(answer) == EXPECTED and answer.stop_reason == "tool_use"
    assert answer.content[2].name == "weather" and answer.content[2].id
    assert [block.type for block in ask(client, CALL, tool_choice={"type": "none"}).content] == ["text"]
    one = {"type": "auto", "disable_parallel_tool_use": True}
    assert len(ask(client, CALL + CALL, tool_choice=one).content) == 1


def test_the_stream_is_the_answer(client: anthropic.Anthropic) -> None:
    with ask(client, ALL, "stream") as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_message()
    whole = ask(client, ALL)
    assert blocks(final) == blocks(whole) == EXPECTED
    assert (final.stop_reason, final.usage.output_tokens) == ("tool_use", whole.usage.output_tokens)
    assert kinds[0] == "message_start" and kinds[-1] == "message_stop"
    assert kinds.count("content_block_start") == kinds.count("content_block_stop") == 3


def test_a_turn_goes_back(client: anthropic.Anthropic) -> None:
    first = ask(client, ALL)
    result = {"type": "tool_result", "tool_use_id": first.content[2].id, "content": [{"type": "text", "text": "sun"}]}
    talk = [
        *user("?"),
        {"role": "assistant", "content": first.content},
        *user([result, {"type": "text", "text": "Hi"}]),
    ]
    assert ask(client, talk).content[0].text == "Hi"
    counted = client.messages.count_tokens(model="m", messages=talk, tools=[TOOL]).input_tokens
    used = ask(client, talk).usage
    assert counted == used.input_tokens + used.cache_read_input_tokens


@pytest.mark.parametrize(
    "thinking",
    [{"type": "enabled", "budget_tokens": 1024}, {"type": "adaptive"}, {"type": "adaptive", "display": "summarized"}],
)
def test_thinking_is_switched_on(client: anthropic.Anthropic, thinking: Any) -> None:
    """The template begins the reasoning, and so the answer is within it."""
    assert blocks(ask(client, "Hm.</think>Hi", thinking=thinking)) == [("thinking", "Hm."), ("text", "Hi")]
    assert blocks(ask(client, "Hi", thinking={"type": "disabled"})) == [("text", "Hi")]


def test_the_clients_own_loop_of_tools(client: anthropic.Anthropic) -> None:
    import anthropic

    called = []

    @anthropic.beta_tool
    def weather(city: str) -> str:
        """The weather in a city."""
        called.append(city)
        return f"sun in {city}"

    for thinking in (anthropic.omit, {"type": "adaptive"}):
        text = f"Hm.</think>{CALL}" if thinking else CALL
        runner = client.beta.messages.tool_runner(
            model="m", max_tokens=200, tools=[weather], messages=user(text), thinking=thinking
        )
        turns = [[block.type for block in answer.content if block.type != "thinking"] for answer in runner]
        assert turns[0] == ["tool_use"] and called.pop() == "Oslo"
        assert len(turns) == 2


def test_an_answer_that_fills_the_context_says_so(tools_folder: Path) -> None:
    """max_tokens is cut to the room in the context.

    Clients send the max_tokens of their own models.
    """
    import anthropic

    engine = "tests.api.scripted:run_short_engine"
    with (
        serving(str(tools_folder), engine=engine, served_model_name=["m"]) as server,
        anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0) as client,
    ):
        told = "a" * 30
        for asked, reason, tokens in ((16384, "model_context_window_exceeded", 16), (16, "max_tokens", 16)):
            answer = ask(client, told, tools=[], max_tokens=asked)
            assert (answer.stop_reason, answer.usage.output_tokens) == (reason, tokens)
            with ask(client, told, "stream", tools=[], max_tokens=asked) as stream:
                assert stream.get_final_message().stop_reason == reason
        assert ask(client, "Hi", tools=[], max_tokens=16384).stop_reason == "end_turn"
        with pytest.raises(anthropic.BadRequestError, match="your prompt has 50 tokens"):
            ask(client, "a" * 48, tools=[], max_tokens=1)


def test_errors_have_its_shape(client: anthropic.Anthropic, folder: Path) -> None:
    import anthropic

    with pytest.raises(anthropic.BadRequestError) as error:
        ask(client, "x", extra_body={"top_k": -5})
    assert error.value.body["error"]["type"] == "invalid_request_error" and "top_k" in error.value.message
    with pytest.raises(anthropic.BadRequestError, match="stop_sequences must not contain"):
        ask(client, "x", stop_sequences=[""])
    for tool, said in (
        ({"type": "bash_20250124", "name": "bash"}, "runs no tools"),
        ({"name": "f"}, "tools.0..input_schema"),
        ({"name": "", "input_schema": {}}, "tools.0..name is"),
        ({"name": "f", "input_schema": {"type": "string"}}, "tools.0..input_schema.type must"),
    ):
        with pytest.raises(anthropic.BadRequestError, match=said):
            ask(client, "x", tools=[tool])
    with pytest.raises(anthropic.BadRequestError, match="'image' is not one of text, tool_use"):
        ask(client, [*user([{"type": "image", "source": {}}])])
    with serving(str(folder), api_key=["secret"], served_model_name=["m"]) as server:
        for key, refused in (("wrong", True), ("secret", False)):
            with anthropic.Anthropic(base_url=server.url, api_key=key, max_retries=0) as own:
                if refused:
                    with pytest.raises(anthropic.AuthenticationError):
                        ask(own, "x", tools=[])
                else:
                    assert ask(own, "x", tools=[], max_tokens=2).usage.output_tokens == 2
