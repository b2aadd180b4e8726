"""Items of a conversation of /v1/responses, as messages of a chat."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from preheat.errors import InvalidRequest
from preheat.frontend.messages import call_of, thoughts
from preheat.server.http.decoding import Names, converted
from preheat.server.openai.responses_schema import (
    ITEMS,
    FunctionCallItem,
    FunctionOutputItem,
    Item,
    MessageItem,
    ReasoningItem,
    TextPart,
)


def messages_of(given: str | Sequence[dict[str, Any]], ignored: Names | None = None) -> list[dict[str, Any]]:
    """Return the input as messages for a chat template.

    Reasoning and calls join the assistant's message.
    """
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    if not given:
        raise InvalidRequest("input must not be empty", param="input")
    messages: list[dict[str, Any]] = []
    for place, raw in enumerate(given):
        item = _item(raw, f"input[{place}]", ignored)
        if isinstance(item, FunctionOutputItem):
            content = _text(item.output, f"input[{place}].output")
            messages.append({"role": "tool", "tool_call_id": item.call_id, "content": content})
        elif isinstance(item, MessageItem) and item.role != "assistant":
            messages.append({"role": item.role, "content": _text(item.content, f"input[{place}].content")})
        else:
            _add_to_turn(messages, item, f"input[{place}]")
    return [message | thoughts(message, message.get("reasoning")) for message in messages]


def _item(raw: dict[str, Any], param: str, ignored: Names | None) -> Item:
    kind = raw.get("type") or "message"
    if kind not in ITEMS:
        raise InvalidRequest(f"{param}: the type {kind!r} is not supported", param=param)
    given = {name: value for name, value in raw.items() if value is not None}
    return converted(given, ITEMS[kind], ignored, "input[]", param)


def _text(content: str | Sequence[TextPart], param: str) -> str:
    """Return the text of a ``content``, which errors call ``param``."""
    if isinstance(content, str):
        return content
    return "\n".join(_text_of(part, f"{param}[{place}]") for place, part in enumerate(content))


def _text_of(part: TextPart, param: str) -> str:
    name = "refusal" if part.type == "refusal" else "text"
    text: str | None = getattr(part, name)
    if text is None:
        raise InvalidRequest(f"Missing required parameter: {param}.{name}", param=f"{param}.{name}")
    return text


def _add_to_turn(messages: list[dict[str, Any]], item: Item, param: str) -> None:
    """Add a message, reasoning or call of the model to its turn.

    A new turn begins if the last message is not the model's, or is complete.
    """
    if not messages or messages[-1]["role"] != "assistant" or (isinstance(item, MessageItem) and _said(messages[-1])):
        messages.append({"role": "assistant", "content": ""})
    turn = messages[-1]
    match item:
        case MessageItem():
            turn["content"] = _text(item.content, f"{param}.content")
        case FunctionCallItem():
            call = call_of(item.call_id, item.name, item.arguments, param)
            turn["tool_calls"] = [*turn.get("tool_calls", ()), call]
        case ReasoningItem():
            thought = "\n".join(part.text for part in item.content or ())
            turn |= {"reasoning": thought} if thought else {}


def _said(message: dict[str, Any]) -> bool:
    """Return whether an assistant's message is complete before further text."""
    return bool(message["content"] or message.get("tool_calls"))
