"""Messages of a conversation as chat templates expect them, from any client."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from preheat.errors import InvalidRequest
from preheat.utils.json_size import check_size


def _finite(text: str) -> float:
    """Return the number in ``text``. Raises ValueError for one that JSON or a double does not have."""
    if not math.isfinite(number := float(text)):
        raise ValueError(f"{text[:20]} is no finite number")
    return number


_ARGUMENTS = json.JSONDecoder(parse_float=_finite, parse_constant=_finite)


def chat_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return ``messages`` in OpenAI's form for chats.

    Empty fields are left out, and the arguments of calls become objects. An empty list means the same as null, but some
    templates only ask whether the field exists.
    """
    return [_chat_message(message, f"messages[{place}]") for place, message in enumerate(messages)]


def _chat_message(message: Mapping[str, Any], at: str) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise InvalidRequest(f"{at} must be an object with role and content", param="messages")
    plain = {name: value for name, value in message.items() if value not in (None, [])}
    if refusal := plain.pop("refusal", None):
        plain["content"] = _with_refusal(plain.get("content"), refusal)
    plain |= thoughts(plain, plain.get("reasoning") or plain.get("reasoning_content"))
    if calls := plain.get("tool_calls"):
        plain["tool_calls"] = [_call(call, f"{at}.tool_calls[{place}]") for place, call in enumerate(calls)]
    return plain


def _with_refusal(content: Any, refusal: str) -> Any:
    """Return the ``content`` of a message with its ``refusal``, one text more."""
    if isinstance(content, list):
        return [*content, {"type": "refusal", "refusal": refusal}]
    return f"{content}\n{refusal}" if content else refusal


def thoughts(message: Mapping[str, Any], thought: object) -> dict[str, object]:
    """Return an assistant's reasoning under each name that templates look at.

    The template of gpt-oss reads ``thinking``, but refuses it in a message with both a text and calls.
    """
    if not thought:
        return {}
    both = message.get("tool_calls") and message.get("content")
    return {"reasoning": thought, "reasoning_content": thought} | ({} if both else {"thinking": thought})


def _call(call: object, param: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(call, Mapping) or not isinstance(function, Mapping) or "name" not in function:
        raise InvalidRequest(f"{param} must be an object with the name and the arguments of a function", param=param)
    return call_of(call.get("id"), function["name"], function.get("arguments") or "", param)


def call_of(id: str | None, name: str, arguments: str | dict[str, Any], param: str) -> dict[str, Any]:
    """Return a call of the conversation's history in the form of chat templates.

    Arguments that are ``null`` count as none. Raises InvalidRequest for any other text than a JSON object.
    """
    if isinstance(arguments, str):
        check_size(arguments.encode(errors="replace"), f"{param}: the JSON of the arguments", param=param)
        try:
            arguments = _ARGUMENTS.decode(arguments or "{}") or {}
        except (ValueError, RecursionError) as error:
            raise InvalidRequest(f"{param}: the arguments are not valid JSON: {error}", param=param) from error
    if not isinstance(arguments, dict):
        raise InvalidRequest(
            f"{param}: the arguments are a {type(arguments).__name__}: send a JSON object, with a name for each",
            param=param,
        )
    function = {"name": name, "arguments": arguments}
    return {**({} if id is None else {"id": id}), "type": "function", "function": function}
