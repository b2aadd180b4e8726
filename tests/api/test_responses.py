"""/v1/responses through the official client, with an engine that repeats the last message."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from openai import BadRequestError, NotFoundError, OpenAI

from preheat.errors import NotFound
from preheat.frontend.tokenizer import Tokenizer
from preheat.server.openai.responses_store import ResponseStore, Stored
from tests.api.conftest import Server, serving
from tests.api.scripted import FAIL
from tests.waiting import until

TOOL = {"type": "function", "name": "weather", "parameters": {"type": "object", "properties": {}}, "strict": False}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
ALL = "<think>Well.</think>Let me see." + CALL + CALL.replace("Oslo", "Rome")


@pytest.fixture(scope="module")
def client(talker: Server) -> Iterator[OpenAI]:
    with OpenAI(base_url=talker.url + "/v1", api_key="none", max_retries=0, timeout=60) as client:
        yield client


def ask(client: OpenAI, given: Any, **options: Any) -> Any:
    return client.responses.create(model="m", input=given, **{"tools": [TOOL]} | options)


def shown(item: Any) -> tuple[Any, ...]:
    """Return the content of an output item, without its ids."""
    match item.type:
        case "message":
            return "message", item.content[0].text
        case "reasoning":
            return "reasoning", item.content[0].text
    return item.type, item.name, json.loads(item.arguments)


EXPECTED = [
    ("reasoning", "Well."), ("message", "Let me see."), ("function_call", "weather", {"city": "Oslo"}),
    ("function_call", "weather", {"city": "Rome"}),
]  # fmt: skip


def test_text(client: OpenAI) -> None:
    answer = ask(client, "Hi", instructions="Be brief.", metadata={"a": "b"}, temperature=0.5)
    assert (answer.output_text, answer.status, answer.error, answer.object) == ("Hi", "completed", None, "response")
    assert (answer.instructions, answer.metadata, answer.temperature) == ("Be brief.", {"a": "b"}, 0.5)
    assert answer.usage.total_tokens == answer.usage.input_tokens + answer.usage.output_tokens > 0
    cut = ask(client, "Hi there, you", max_output_tokens=2)
    assert (cut.status, cut.incomplete_details.reason, cut.usage.output_tokens) == (
        "incomplete",
        "max_output_tokens",
        2,
    )
    assert ask(client, " ").output[0].type == "message"


def test_reasoning_and_calls(client: OpenAI) -> None:
    answer = ask(client, ALL)
    assert [shown(item) for item in answer.output] == EXPECTED
    assert answer.usage.output_tokens_details.reasoning_tokens > 1
    assert len({item.id for item in answer.output}) == 4
    assert len({item.call_id for item in answer.output[2:]}) == 2
    assert len(ask(client, ALL, parallel_tool_calls=False).output) == 3
    assert [item.type for item in ask(client, CALL, tool_choice="none").output] == ["message"]


def test_events(client: OpenAI) -> None:
    """Events are numbered and in order, about the item that began last.

    The last event has the whole response.
    """
    events = list(ask(client, ALL, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert [event.type for event in events[:2]] == ["response.created", "response.in_progress"]
    final = events[-1].response
    assert events[-1].type == "response.completed" and [shown(item) for item in final.output] == EXPECTED
    began, ended, texts = [], [], {}
    for event in events[2:-1]:
        place = event.output_index
        kind = event.type.removeprefix("response.")
        if kind == "output_item.added":
            assert len(began) == len(ended) == place and event.item.status == "in_progress"
            began.append(event.item.id)
            texts[place] = ""
            continue
        assert place == len(began) - 1
        if kind.endswith(".delta"):
            texts[place] += event.delta
        elif kind in ("output_text.done", "reasoning_text.done"):
            assert event.text == texts[place]
        elif kind == "function_call_arguments.done":
            assert event.arguments == texts[place]
        elif kind == "output_item.done":
            ended.append(event.item.id)
        if kind != "output_item.done":
            assert event.item_id == began[place]
    assert began == ended == [item.id for item in final.output]
    assert list(texts.values())[:2] == ["Well.", "Let me see."]
    kinds = [event.type.removeprefix("response.") for event in events]
    assert kinds.index("content_part.added") < kinds.index("reasoning_text.delta") < kinds.index("content_part.done")


def test_the_clients_own_stream(client: OpenAI) -> None:
    with client.responses.stream(model="m", input=ALL, tools=[TOOL]) as stream:
        list(stream)
        assert [shown(item) for item in stream.get_final_response().output] == EXPECTED


def test_items_go_back_as_input(client: OpenAI) -> None:
    first = ask(client, ALL)
    result = {"type": "function_call_output", "call_id": first.output[2].call_id, "output": "sunny"}
    again = ask(client, [{"role": "user", "content": "?"}, *first.output, result, {"role": "user", "content": "Hi"}])
    assert again.output_text == "Hi" and again.usage.input_tokens > first.usage.input_tokens
    parts = [{"role": "user", "content": [{"type": "input_text", "text": "Yo"}]}]
    assert ask(client, parts).output_text == "Yo"


def test_stored_responses_can_be_retrieved_and_continued(client: OpenAI, talker: Server) -> None:
    first = ask(client, "One " + CALL)
    assert client.responses.retrieve(first.id).output == first.output
    second = ask(client, "Two", previous_response_id=first.id)
    assert second.previous_response_id == first.id and second.usage.input_tokens > first.usage.input_tokens
    cut = ask(client, CALL, max_output_tokens=35)
    assert ask(client, "Three", previous_response_id=cut.id).output_text == "Three"  # arguments that were cut are not
    client.responses.delete(first.id)
    unkept = ask(client, "x", store=False)
    for id in (first.id, unkept.id):
        with pytest.raises(NotFoundError):
            client.responses.retrieve(id)
    with pytest.raises(NotFoundError):
        ask(client, "Four", previous_response_id=first.id)


def test_an_answer_with_logprobs_is_kept(client: OpenAI) -> None:
    told: dict[str, Any] = {"include": ["message.output_text.logprobs"], "top_logprobs": 1}
    first = ask(client, "One", **told)
    assert first.output[0].content[0].logprobs and client.responses.retrieve(first.id).output == first.output
    assert ask(client, "Two", previous_response_id=first.id, **told).output_text == "Two"


def test_nothing_is_kept_unless_that_was_asked_for(scripted: Server) -> None:
    assert scripted.post("/v1/responses", {"input": "x", "store": True}).error["param"] == "store"
    body = {"input": "x", "previous_response_id": "resp_1"}
    assert "--enable-responses-store" in scripted.post("/v1/responses", body).error["message"]
    answer = scripted.post("/v1/responses", {"input": "x", "max_output_tokens": 2}).json
    assert answer["store"] is False and scripted.get(f"/v1/responses/{answer['id']}").status == 404


def test_the_store_is_bounded() -> None:
    store = ResponseStore(most=100)
    for id in "abc":
        store.put(id, Stored(b"x" * 40, []))
    assert store.get("c").json and store.get("b").json
    for gone in ("a", "d"):
        with pytest.raises(NotFound):
            store.get(gone)
    store.put("big", Stored(b"x" * 100, []))
    assert store.get("b")
    store.put("d", Stored(b"x" * 40, []))  # "c" was used before "b"
    with pytest.raises(NotFound):
        store.get("c")


@pytest.fixture(scope="module")
def slow_server(tools_folder: Path) -> Iterator[Server]:
    """Run a server that gives a token every 30 ms, and whose prompts are the message itself."""
    options: dict[str, Any] = {"enable_responses_store": True, "served_model_name": ["m"]}
    options |= {"engine": "tests.api.scripted:run_paced_engine", "chat_template": "{{ messages[-1].content }}"}
    with serving(str(tools_folder), **options) as running:
        yield running


@pytest.fixture(scope="module")
def slow(slow_server: Server) -> Iterator[OpenAI]:
    with OpenAI(base_url=slow_server.url + "/v1", api_key="none", max_retries=0, timeout=60) as client:
        yield client


def ended(client: OpenAI, id: str) -> Any:
    """Return the response of this id, when it has ended."""
    assert until(lambda: client.responses.retrieve(id).status not in ("queued", "in_progress"))
    return client.responses.retrieve(id)


def test_an_answer_in_the_background(slow: OpenAI) -> None:
    """A response in the background is fetched by its id.

    It equals a response that the client waits for.
    """
    asked: dict[str, Any] = {"model": "m", "input": "abcdefgh", "max_output_tokens": 60}
    whole = slow.responses.create(**asked)
    queued = slow.responses.create(**asked, background=True)
    assert (queued.status, queued.background, queued.output) == ("queued", True, [])
    assert until(lambda: slow.responses.retrieve(queued.id).status != "queued")
    running = slow.responses.retrieve(queued.id)
    assert (running.status, running.background, running.output) == ("in_progress", True, [])
    with pytest.raises(BadRequestError, match="has not ended"):
        slow.responses.create(model="m", input="x", previous_response_id=queued.id)
    done = ended(slow, queued.id)
    assert (done.status, done.output_text, done.usage) == ("incomplete", whole.output_text, whole.usage)
    assert slow.responses.cancel(queued.id).status == "incomplete"  # it has ended: nothing changes
    again = slow.responses.create(model="m", input="x", previous_response_id=queued.id, max_output_tokens=1)
    assert again.previous_response_id == queued.id


def test_an_answer_in_the_background_is_cancelled(slow: OpenAI, slow_server: Server) -> None:
    long = {"model": "m", "input": "abc", "max_output_tokens": 2000}
    made = slow_server.metric("generation_tokens_total")
    queued = slow.responses.create(**long, background=True)
    assert until(lambda: slow_server.metric("generation_tokens_total") > made)
    stopped = slow.responses.cancel(queued.id)
    assert stopped.status == "cancelled" and 0 < stopped.usage.output_tokens < 2000
    assert slow.responses.cancel(queued.id) == stopped == slow.responses.retrieve(queued.id)
    other = slow.responses.create(**long, background=True)
    slow.responses.delete(other.id)
    time.sleep(0.1)
    with pytest.raises(NotFoundError):
        slow.responses.retrieve(other.id)
    waited = slow.responses.create(model="m", input="abc", max_output_tokens=1)
    with pytest.raises(BadRequestError, match="background"):
        slow.responses.cancel(waited.id)
    with pytest.raises(NotFoundError):
        slow.responses.cancel("resp_x")


def test_an_answer_in_the_background_fails(slow: OpenAI, tools_folder: Path) -> None:
    """A later failure of the engine is told in the response.

    A request that cannot start is refused at once.
    """
    text = Tokenizer(tools_folder).decode([FAIL], skip_special_tokens=False)
    failed = ended(slow, slow.responses.create(model="m", input=text, background=True, max_output_tokens=5).id)
    assert failed.status == "failed" and failed.error.message
    with pytest.raises(BadRequestError):
        slow.responses.create(model="m", input="abc " * 9000, background=True)


def test_background_responses_need_a_store(scripted: Server) -> None:
    refused = scripted.post("/v1/responses", {"input": "x", "background": True})
    assert refused.error["param"] == "background" and "--enable-responses-store" in refused.error["message"]


def test_refusals(client: OpenAI) -> None:
    for options, param in (
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"), ({"tools": [{"type": "function"}]}, "tools[0].name"),
        ({"tools": [TOOL, {"type": "custom", "name": "f", "format": {"type": "text"}}]}, "tools[1].type"),
        ({"truncation": "auto"}, "truncation"), ({"background": True, "stream": True}, "stream"),
        ({"background": True, "store": False}, "store"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0]"),
        ({"input": [{"role": "user", "content": [{"type": "refusal"}]}]}, "input[0].content[0].refusal"),
        ({"input": [{"role": "user", "content": [{"type": "x", "text": ""}]}]}, "input[0].content[0].type"),
        ({"tools": [{"type": "function", "name": "f", "parameters": {"type": "string"}}]}, "tools[0].parameters.type"),
        ({"input": []}, "input"), ({"tool_choice": {"type": "function", "name": "other"}}, "tool_choice"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.schema"),
    ):  # fmt: skip
        with pytest.raises(BadRequestError) as refused:
            ask(client, **{"given": options.pop("input", "Hi")} | options)
        assert refused.value.param == param
