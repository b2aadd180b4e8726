"""Tools and reasoning in chats, through the official client, with an engine that repeats the last message."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from openai import BadRequestError, OpenAI

from preheat.frontend.tokenizer import Tokenizer
from tests.api.conftest import Server

TOOL = {"type": "function", "function": {"name": "weather", "description": "It.", "parameters": {
    "type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}}}  # fmt: skip
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Grüße <to"}}\n</tool_call>'
TWO = "Two calls:" + CALL + CALL.replace("Grüße <to", "Oslo")


@pytest.fixture(scope="module")
def client(talker: Server) -> Iterator[OpenAI]:
    with OpenAI(base_url=talker.url + "/v1", api_key="none", max_retries=0, timeout=60) as client:
        yield client


def user(text: str) -> list[Any]:
    return [{"role": "user", "content": text}]


def ask(client: OpenAI, text: str | list[Any], **options: Any) -> Any:
    messages = user(text) if isinstance(text, str) else text
    return client.chat.completions.create(model="m", messages=messages, **{"tools": [TOOL]} | options)


def joined(events: Any) -> tuple[str, str, list[list[str]], str]:
    """Return content, reasoning, calls and finish reason of a stream, after a check of the deltas' shape."""
    content, thought, calls, reason = "", "", [], ""
    for event in events:
        (choice,) = event.choices
        delta = choice.delta
        content += delta.content or ""
        thought += getattr(delta, "reasoning", None) or ""
        assert getattr(delta, "reasoning_content", None) == getattr(delta, "reasoning", None)
        for call in delta.tool_calls or []:
            if call.index == len(calls):
                assert call.id and call.type == "function"
                calls.append([call.function.name, ""])
            else:
                assert call.id is None and call.type is None and call.function.name is None
            calls[call.index][1] += call.function.arguments
        assert not reason
        reason = choice.finish_reason or ""
    return content, thought, calls, reason


def test_calls(client: OpenAI) -> None:
    choice = ask(client, TWO).choices[0]
    first, second = choice.message.tool_calls
    assert (choice.message.content, choice.finish_reason) == ("Two calls:", "tool_calls")
    assert (first.type, first.function.name) == ("function", "weather") and first.id != second.id
    assert [json.loads(call.function.arguments) for call in (first, second)] == [
        {"city": "Grüße <to"}, {"city": "Oslo"}
    ]  # fmt: skip
    assert ask(client, CALL).choices[0].message.content is None
    plain = ask(client, "Hi").choices[0]
    assert (plain.message.content, plain.message.tool_calls, plain.finish_reason) == ("Hi", None, "stop")


def test_streamed_calls_are_the_calls(client: OpenAI) -> None:
    for text in (TWO, CALL, "Hi", "<tool_call>no"):
        choice = ask(client, text).choices[0]
        calls = [[call.function.name, call.function.arguments] for call in choice.message.tool_calls or []]
        whole = choice.message.content or "", "", calls, choice.finish_reason
        assert joined(ask(client, text, stream=True)) == whole
    arguments = [call.function.arguments for event in ask(client, CALL, stream=True)
                 for call in event.choices[0].delta.tool_calls or []]  # fmt: skip
    assert len(arguments) > 3  # as they arrive


def test_streamed_calls_are_accumulated_by_the_client(client: OpenAI) -> None:
    with client.chat.completions.stream(model="m", messages=user(TWO), tools=[TOOL]) as stream:
        kinds = {event.type for event in stream}
        message = stream.get_final_completion().choices[0].message
    assert "tool_calls.function.arguments.done" in kinds
    assert [json.loads(call.function.arguments)["city"] for call in message.tool_calls] == ["Grüße <to", "Oslo"]


def test_one_call_at_a_time(client: OpenAI) -> None:
    assert len(ask(client, TWO, parallel_tool_calls=False).choices[0].message.tool_calls) == 1
    _, _, calls, _ = joined(ask(client, TWO, parallel_tool_calls=False, stream=True))
    assert len(calls) == 1


def test_none_means_text(client: OpenAI) -> None:
    choice = ask(client, CALL, tool_choice="none").choices[0]
    assert (choice.message.tool_calls, choice.finish_reason) == (None, "stop")
    assert "weather" in choice.message.content


def test_a_cut_call_has_the_written_part_of_its_arguments(client: OpenAI) -> None:
    for budget in range(20, 60, 8):
        choice = ask(client, CALL, max_tokens=budget).choices[0]
        assert choice.finish_reason == "length"
        streamed = joined(ask(client, CALL, max_tokens=budget, stream=True))
        calls = [[call.function.name, call.function.arguments] for call in choice.message.tool_calls or []]
        assert streamed == (choice.message.content or "", "", calls, "length")


def test_calls_and_results_go_through_the_template(client: OpenAI, tools_folder: Path) -> None:
    answer = ask(client, "<think>Hm.</think>" + CALL).choices[0].message
    result = {"role": "tool", "tool_call_id": answer.tool_calls[0].id, "content": "sunny"}
    told = ask(client, [*user("?"), answer, result, *user("Hi")], extra_body={"return_token_ids": True})
    shown = Tokenizer(tools_folder).decode(told.prompt_token_ids, skip_special_tokens=False)
    call = f'{answer.tool_calls[0].id} weather {{"city": "Grüße <to"}}'
    assert f"(assistant {call}Hm.)(tool sunny{answer.tool_calls[0].id})" in shown
    assert shown.endswith(json.dumps([TOOL]))
    broken = answer.model_dump() | {"tool_calls": [{"type": "function", "function": {"name": "f", "arguments": "{"}}]}
    assert refused(client, [*user("?"), broken, *user("Hi")]).param == "messages[1].tool_calls[0]"


def test_special_tokens_are_in_no_text(client: OpenAI) -> None:
    """The marks of calls are special tokens too: they are found, and no other special token is shown."""
    odd = "<|im_start|>"
    text = f"<think>a{odd}b</think>c{odd}d" + CALL.replace("Grüße", f"Gr{odd}üße") + odd
    for stream in (False, True):
        for skip, content, thought, city in (
            (True, "cd", "ab", "Grüße <to"), (False, f"c{odd}d", f"a{odd}b", f"Gr{odd}üße <to")
        ):  # fmt: skip
            answer = ask(client, text, stream=stream, extra_body={"skip_special_tokens": skip})
            if stream:
                said, reasoning, (call,), _ = joined(answer)
            else:
                message = answer.choices[0].message
                said, reasoning = message.content, message.reasoning
                call = [each.function.arguments for each in message.tool_calls]
            assert (said.removesuffix(odd), reasoning) == (content, thought)
            assert json.loads(call[-1]) == {"city": city}


def test_a_call_ends_the_reasoning(client: OpenAI) -> None:
    for text, thought in (("<think>Well.\n" + CALL, "Well.\n"), ("<think>" + CALL, "")):
        choice = (answer := ask(client, text)).choices[0]
        assert (getattr(choice.message, "reasoning", None) or "", choice.finish_reason) == (thought, "tool_calls")
        assert choice.message.content is None and len(choice.message.tool_calls) == 1
        assert answer.usage.completion_tokens_details.reasoning_tokens < 8
        content, reasoning, calls, reason = joined(ask(client, text, stream=True))
        assert (content, reasoning, len(calls), reason) == ("", thought, 1, "tool_calls")


def refused(client: OpenAI, text: str | list[Any] = "Hi", **options: Any) -> BadRequestError:
    with pytest.raises(BadRequestError) as error:
        ask(client, text, **options)
    return error.value


def test_refusals(client: OpenAI) -> None:
    assert refused(client, tools=[{"type": "web_search"}]).param == "tools[0].type"
    assert refused(client, tools=[{"type": "function", "function": {}}]).param == "tools[0].function.name"
    assert refused(client, tools=[], tool_choice="required").param == "tool_choice"
    other = {"type": "function", "function": {"name": "other"}}
    assert "other" in refused(client, tool_choice=other).message


def test_documents_go_through_a_template_that_wants_them(client: OpenAI, tools_folder: Path) -> None:
    documents = [{"title": "One", "text": "Two"}]
    body = {"documents": documents, "return_token_ids": True}
    told = client.chat.completions.create(model="m", messages=user("Hi"), extra_body=body)
    assert Tokenizer(tools_folder).decode(told.prompt_token_ids).endswith(json.dumps(documents))


def test_reasoning(client: OpenAI) -> None:
    text = "<think>\nWell, <b>\n</think>\n\nYes." + CALL
    message = (choice := (answer := ask(client, text)).choices[0]).message
    assert (message.reasoning, message.content) == ("Well, <b>\n", "Yes.")
    assert message.reasoning_content == message.reasoning and len(message.tool_calls) == 1
    assert choice.finish_reason == "tool_calls"
    thought, total = answer.usage.completion_tokens_details.reasoning_tokens, answer.usage.completion_tokens
    assert 3 < thought < total - 20
    content, reasoning, calls, _ = joined(ask(client, text, stream=True))
    assert (content, reasoning, len(calls)) == ("Yes.", "Well, <b>\n", 1)
    hidden = ask(client, text, extra_body={"include_reasoning": False}).choices[0].message
    assert hidden.reasoning is None and hidden.content == "Yes."
    assert ask(client, "Yes.").usage.completion_tokens_details.reasoning_tokens == 0


def test_a_prompt_may_open_the_reasoning(client: OpenAI) -> None:
    for thinking, thought, said in ((True, "Hm.", "Yes."), (False, None, "Hm.</think>Yes.")):
        body = {"chat_template_kwargs": {"thinking": thinking}}
        answer = client.chat.completions.create(model="m", messages=user("Hm.</think>Yes."), extra_body=body)
        message = answer.choices[0].message
        assert (getattr(message, "reasoning", None), message.content) == (thought, said)
        assert bool(answer.usage.completion_tokens_details.reasoning_tokens) == thinking


@pytest.mark.parametrize(
    ("tool", "param", "said"),
    [
        ({"type": "custom", "custom": {"name": "f", "format": {"type": "text"}}}, "type", "one string parameter"),
        ({"type": "web_search_preview"}, "type", "runs no tools"),
        ({"type": "function"}, "function", "missing"),
    ],
)
def test_tools_that_are_no_functions_are_refused_with_a_reason(
    client: OpenAI, tool: dict[str, Any], param: str, said: str
) -> None:
    with pytest.raises(BadRequestError, match=said) as refused:
        ask(client, "Hi", tools=[TOOL, tool])
    assert refused.value.param == f"tools[1].{param}"


def test_a_server_without_parsers_names_the_missing_option(scripted: Server) -> None:
    tool = {"messages": user("Hi"), "tools": [TOOL]}
    error = scripted.post("/v1/chat/completions", tool).error
    assert error["param"] == "tool_choice" and "--enable-auto-tool-choice" in error["message"]
