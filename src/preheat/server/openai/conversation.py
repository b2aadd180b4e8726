"""Shared parts of the endpoints for conversations: prompts, tools, and the reading of answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import msgspec
from msgspec import to_builtins
from starlette.requests import Request

from preheat.core import SamplingParams
from preheat.errors import InvalidRequest
from preheat.frontend.answer_format import AnswerFormat, ToolChoice
from preheat.frontend.chat_template import ChatTemplate
from preheat.frontend.frontend import Frontend
from preheat.frontend.image_parts import take_images
from preheat.frontend.messages import chat_messages
from preheat.frontend.request_state import RequestState
from preheat.frontend.tools import Tool
from preheat.server.http.body import body_size
from preheat.server.http.decoding import invalid
from preheat.server.http.ignored import ignore, strict
from preheat.server.http.turns import Turns, in_turn
from preheat.server.openai.params import load_images, prepared
from preheat.server.openai.schema import Message, NamedToolChoice

_UNSEEN = "the chat template of this model does not look at {}: leave it out"


@dataclass
class Conversation:
    """The input of a chat template; see :meth:`ChatTemplate.render`.

    ``tools`` are in OpenAI's form for chats. ``hints`` maps fields of the request that a template may ignore to the
    template variables that they set. ``template`` replaces the template of the model.
    """

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None
    variables: dict[str, Any] = field(default_factory=dict)
    documents: list[dict[str, Any]] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    add_special_tokens: bool = False
    hints: dict[str, tuple[str, ...]] = field(default_factory=dict)
    template: str | None = None


async def rendered(request: Request, frontend: Frontend, talk: Conversation) -> tuple[str, list[str]]:
    """Return the prompt of a conversation, and the URLs of its images.

    Raises InvalidRequest for documents that the template does not use, for images if the model sees none, and with
    strict request fields for unused hints.
    """
    if not talk.messages:
        raise InvalidRequest("messages must not be empty", param="messages")
    template = _template(frontend, talk)
    if talk.documents and not template.uses("documents", talk.tools):
        raise InvalidRequest(_UNSEEN.format("documents"), param="documents")
    for field_name, variables in talk.hints.items():
        if any(template.uses(name, talk.tools) for name in variables):
            continue
        if strict(request):
            raise InvalidRequest(_UNSEEN.format(field_name), param=field_name)
        ignore(request, [field_name])
    turns: Turns = request.app.state.service.turns
    return await turns.render(request, partial(_render, frontend, template, talk))


def _template(frontend: Frontend, talk: Conversation) -> ChatTemplate:
    return frontend.template if talk.template is None else frontend.template.replaced(talk.template)


def _render(frontend: Frontend, template: ChatTemplate, talk: Conversation) -> tuple[str, list[str]]:
    messages, sources = take_images(talk.messages)
    frontend.input.check_images(len(sources))
    text = template.render(
        messages,
        add_generation_prompt=talk.add_generation_prompt,
        continue_final_message=talk.continue_final_message,
        tools=talk.tools,
        documents=talk.documents,
        variables=talk.variables,
    )
    return text, sources


async def prepared_talk(
    request: Request,
    frontend: Frontend,
    talk: Conversation,
    choice: ToolChoice,
    params: SamplingParams,
    *,
    cache_salt: str = "",
    priority: int = 0,
    cap_length: bool,
) -> tuple[RequestState, AnswerFormat]:
    """Return the checked request for a conversation, and the format of its answers."""
    if choice.mode == "none" and request.app.state.service.settings.exclude_tools_when_tool_choice_none:
        talk = replace(talk, tools=None)
    prompt, sources = await rendered(request, frontend, talk)
    frontend.input.check_length(prompt, params)
    size = max(body_size(request), len(prompt))
    form, params = await in_turn(request, size, partial(_formed, frontend, choice, prompt, talk, params))
    images = await load_images(request, sources)
    (state,) = await prepared(
        request, [prompt], params, add_special_tokens=talk.add_special_tokens, cache_salt=cache_salt, priority=priority,
        cap_length=cap_length, images=images,
    )  # fmt: skip
    state.marks, state.phase, state.call_ids = form.marks, form.phase, form.call_ids
    return state, form


def _formed(
    frontend: Frontend, choice: ToolChoice, prompt: str, talk: Conversation, params: SamplingParams
) -> tuple[AnswerFormat, SamplingParams]:
    """Return the format of the answers to ``prompt``, and ``params`` with the format's constraint."""
    form = frontend.formats.form(
        choice, prompt, params.structured_outputs, skip_special_tokens=params.skip_special_tokens,
        continued=_last_said(talk.messages), template=_template(frontend, talk).text(talk.tools),
    )  # fmt: skip
    if form.constraint is not params.structured_outputs:
        params = msgspec.structs.replace(params, structured_outputs=form.constraint)
    return form, params


def _last_said(messages: Sequence[Mapping[str, Any]]) -> str:
    """Return the text of the last message if the model wrote it, else ""."""
    said = messages[-1].get("content") if messages[-1].get("role") == "assistant" else None
    return said if isinstance(said, str) else ""


def plain_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Return ``messages`` in the form of chat templates."""
    return chat_messages(to_builtins(messages))


class _Function(msgspec.Struct):
    name: str
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class _ToolDefinition(msgspec.Struct):
    type: str
    function: _Function | None = None


def check_tool_kind(kind: str, param: str) -> None:
    """Raise InvalidRequest, with advice, for a tool that is no function."""
    if kind == "custom":
        raise InvalidRequest(
            f"{param} is a custom tool, with free text as its input. Models write calls as JSON: make it a function "
            "with one string parameter, or hold the whole answer to the grammar (structured_outputs).",
            param=f"{param}.type",
        )
    if kind != "function":
        raise InvalidRequest(
            f"{param} is of type {kind!r}, but only functions can be called: this server runs no tools",
            param=f"{param}.type",
        )


def allowed_tools(
    tools: list[dict[str, Any]] | None, asked: str | NamedToolChoice | None
) -> list[dict[str, Any]] | None:
    """Return the tools that the choice allows; the model sees no others. Raises InvalidRequest for unknown names."""
    if not isinstance(asked, NamedToolChoice) or asked.allowed_tools is None:
        return tools
    names = [tool.function.name for tool in asked.allowed_tools.tools]
    by_name = {_tool(tool, place).name: tool for place, tool in enumerate(tools or ())}
    if missing := [name for name in names if name not in by_name]:
        raise InvalidRequest(
            f"tool_choice names {missing[0]}, and tools has no function of that name", param="tool_choice"
        )
    return [by_name[name] for name in dict.fromkeys(names)]


def tool_choice(
    tools: Sequence[Mapping[str, Any]] | None,
    asked: str | NamedToolChoice | None,
    parallel: bool | None,
) -> ToolChoice:
    """Return the body's choice of tools, by default "auto" if there are tools.

    Raises InvalidRequest if the choice is invalid.
    """
    known = tuple(_tool(tool, place) for place, tool in enumerate(tools or ()))
    if isinstance(asked, NamedToolChoice) and asked.allowed_tools is not None:
        asked = asked.allowed_tools.mode
    if isinstance(asked, NamedToolChoice):
        if asked.function is None:
            raise InvalidRequest(f"tool_choice.{asked.type} is missing", param="tool_choice")
        named = tuple(tool for tool in known if tool.name == asked.function.name)[:1]
        if not named:
            raise InvalidRequest(
                f"tool_choice names {asked.function.name}, and tools has no function of that name", param="tool_choice"
            )
        return ToolChoice(named, "named", parallel=False)
    if asked == "required" and not known:
        raise InvalidRequest('tool_choice "required" needs tools', param="tool_choice")
    return ToolChoice(known, (asked or "auto") if known else "none", parallel is not False)


def _tool(definition: Mapping[str, Any], place: int) -> Tool:
    param = f"tools[{place}]"
    try:
        tool = msgspec.convert(definition, _ToolDefinition)
    except msgspec.ValidationError as error:
        raise invalid(error, _ToolDefinition, param) from error
    check_tool_kind(tool.type, param)
    if tool.function is None:
        raise InvalidRequest(f"{param}.function is missing", param=f"{param}.function")
    if not tool.function.name:
        raise InvalidRequest(
            f"{param}.function.name is empty: give the function a name", param=f"{param}.function.name"
        )
    kinds = (tool.function.parameters or {}).get("type")
    if kinds is not None and "object" not in (kinds if isinstance(kinds, list) else [kinds]):
        at = f"{param}.function.parameters.type"
        raise InvalidRequest(f"{at} must be object: the arguments of a call are a JSON object", param=at)
    return Tool(tool.function.name, tool.function.parameters or {}, bool(tool.function.strict))
