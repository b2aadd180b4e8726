"""A body with unknown fields anywhere is read as without them."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from preheat.errors import InvalidRequest
from preheat.server.anthropic.messages_schema import MessagesRequest
from preheat.server.http.decoding import decode
from preheat.server.openai.responses_schema import ResponsesRequest
from preheat.server.openai.schema import BatchChatRequest, ChatRequest, CompletionRequest, ForModel

FUNCTION = {"name": "f", "arguments": "{}"}
CALL = {"id": "1", "type": "function", "function": FUNCTION}
BODIES: list[tuple[type[ForModel], dict[str, Any]]] = [
    (CompletionRequest, {"prompt": [1, 2], "temperature": 0.1, "stop": ["a"], "stream_options": {}}),
    (
        ChatRequest,
        {
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": "a"}]},
                {"role": "assistant", "content": "b", "tool_calls": [CALL]},
            ],
            "tool_choice": {"type": "function", "function": {"name": "f"}},
            "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"a": 0.1}}},
        },
    ),
    (BatchChatRequest, {"messages": [[{"role": "user", "content": "a"}], [{"role": "user", "content": "b"}]]}),
    (
        MessagesRequest,
        {
            "max_tokens": 3,
            "system": [{"type": "text", "text": "s"}],
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": "a"}]},
                {"role": "assistant", "content": [{"type": "tool_use", "id": "1", "name": "f", "input": {"n": 1}},
                                                  {"type": "thinking", "thinking": "t", "signature": ""}]},
                {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1",
                                              "content": [{"type": "text", "text": "r"}]}]},
            ],
            "tools": [{"name": "f", "input_schema": {"x": 1}}],
            "tool_choice": {"type": "tool", "name": "f"},
        },
    ),
    (ResponsesRequest, {"input": "a", "text": {"format": {"type": "text"}}, "reasoning": {"effort": "low"},
                        "tools": [{"type": "function", "name": "f", "parameters": {"x": 1}}]}),
]  # fmt: skip
FREE = {"schema", "input_schema", "parameters", "input"}  # objects of the client's own


def objects(value: Any, at: str = "") -> list[tuple[str, dict[str, Any]]]:
    """Yield the objects in ``value`` that have fields, and their names."""
    if isinstance(value, list):
        return [found for item in value for found in objects(item, f"{at}[]")]
    if not isinstance(value, dict):
        return []
    inner = [found for name, item in value.items() if name not in FREE
             for found in objects(item, f"{at}.{name}".lstrip("."))]  # fmt: skip
    return [(at, value), *inner]


@pytest.mark.parametrize(("kind", "body"), BODIES, ids=[kind.__name__ for kind, _ in BODIES])
@given(data=st.data())
def test_unknown_fields_change_nothing_and_are_named(
    kind: type[ForModel], body: dict[str, Any], data: st.DataObject
) -> None:
    plain = decode(json.dumps(body).encode(), kind)
    changed = json.loads(json.dumps(body))
    places = objects(changed)
    chosen = data.draw(st.lists(st.sampled_from(range(len(places))), min_size=1, unique=True))
    wanted = set()
    for place in chosen:
        at, found = places[place]
        found["x-unknown"] = data.draw(st.sampled_from([0, 0.1, "a", [], {"type": "text"}]))
        wanted.add(f"{at}.x-unknown".lstrip("."))
    text, ignored = json.dumps(changed).encode(), dict[str, None]()
    assert decode(text, kind, ignored) == plain
    assert ignored.keys() == wanted
    with pytest.raises(InvalidRequest, match="x-unknown"):
        decode(text, kind)


def test_a_null_is_no_field() -> None:
    text, ignored = b'{"prompt": "a", "b": null}', dict[str, None]()
    assert decode(text, CompletionRequest, ignored) == decode(text, CompletionRequest)
    assert not ignored


def test_other_errors_stay() -> None:
    for text, param in ((b'{"a": 1, "prompt": 5}', "prompt"), (b'{"a": 1, "prompt": "x", "suffix": "y"}', "suffix")):
        with pytest.raises(InvalidRequest) as error:
            decode(text, CompletionRequest, {})
        assert error.value.param == param
