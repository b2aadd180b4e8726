"""/v1/responses: checks the body, writes the answer, and stores it on request."""

from __future__ import annotations

from decimal import Decimal
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from preheat.core import SamplingParams, StructuredOutputsParams
from preheat.errors import InvalidRequest, NotFound
from preheat.frontend.answer_format import ToolChoice
from preheat.frontend.frontend import Frontend
from preheat.server.http.body import interpreted, read_request
from preheat.server.http.decoding import Names
from preheat.server.http.ignored import ignore, names_for
from preheat.server.openai.answers import encode
from preheat.server.openai.conversation import Conversation, allowed_tools, check_tool_kind, prepared_talk, tool_choice
from preheat.server.openai.params import sampling_fields
from preheat.server.openai.responses_items import messages_of
from preheat.server.openai.responses_schema import LOGPROBS, Deleted, FunctionChoice, ResponsesRequest, TextFormat
from preheat.server.openai.responses_store import ResponseStore, Stored
from preheat.server.openai.responses_writer import BackgroundWriter, ResponsesWriter
from preheat.server.openai.schema import USUAL_VERBOSITY, AllowedTool, AllowedTools, FunctionName, NamedToolChoice
from preheat.server.openai.structured import converted as constraint
from preheat.server.openai.structured import the_one


async def responses(request: Request) -> ASGIApp:
    """Answer a conversation."""
    frontend, body = await read_request(request, ResponsesRequest)
    frontend.tasks.check_generates("Responses API")
    store = _store(request)
    _check_kept(store, body)
    previous = _said_before(store, body.previous_response_id) if store and body.previous_response_id else []

    ignored = names_for(request)

    def asked() -> tuple[Conversation, ToolChoice, SamplingParams]:
        talk = _talk(body, [*previous, *messages_of(body.input, ignored)])
        asked = _asked_choice(body)
        talk.tools = allowed_tools(talk.tools, asked)
        return talk, tool_choice(talk.tools, asked, body.parallel_tool_calls), _params(frontend, body, ignored)

    talk, choice, params = await interpreted(request, asked)
    ignore(request, ignored or ())
    messages = talk.messages[1:] if body.instructions else talk.messages
    state, form = await prepared_talk(
        request, frontend, talk, choice, params,
        cache_salt=body.cache_salt or "", priority=body.priority or 0, cap_length=body.max_output_tokens is None,
    )  # fmt: skip
    kept = store if body.store is not False else None
    kind = BackgroundWriter if body.background else ResponsesWriter
    return kind(request, body, state, form, messages=messages, store=kept)


def _check_kept(store: ResponseStore | None, body: ResponsesRequest) -> None:
    """Raise InvalidRequest if the body needs a store that is missing.

    ``background`` with ``store`` false, or with ``stream``, is invalid too.
    """
    asked = {"background": body.background, "store": body.store, "previous_response_id": body.previous_response_id}
    param = next((name for name, value in asked.items() if value), None)
    if store is None and param is not None:
        raise InvalidRequest(
            "this server keeps no responses: send the whole conversation as input, and wait for the answer, or start "
            "it with --enable-responses-store",
            param=param,
        )
    if body.background and body.store is False:
        raise InvalidRequest("background keeps the answer until it is fetched: leave store out", param="store")
    if body.background and body.stream:
        raise InvalidRequest(
            "an answer in the background is not streamed: leave stream out, and fetch it by its id", param="stream"
        )


def _said_before(store: ResponseStore, id: str) -> list[dict[str, Any]]:
    """Return the conversation up to the end of a stored response.

    Raises NotFound for an unknown id, and InvalidRequest if the response has not ended.
    """
    try:
        kept = store.get(id)
    except NotFound as error:
        raise NotFound(error.message, param="previous_response_id") from error
    if not kept.ended:
        raise InvalidRequest(f"the response {id!r} has not ended yet: try again later", param="previous_response_id")
    return kept.messages


def _talk(body: ResponsesRequest, messages: list[dict[str, Any]]) -> Conversation:
    told = [{"role": "system", "content": body.instructions}, *messages] if body.instructions else messages
    variables, hints = dict(body.chat_template_kwargs or {}), dict[str, tuple[str, ...]]()
    if body.reasoning is not None and body.reasoning.effort is not None:
        variables["reasoning_effort"], hints["reasoning.effort"] = body.reasoning.effort, ("reasoning_effort",)
    if body.text is not None and body.text.verbosity is not None:
        variables["verbosity"] = body.text.verbosity
        hints |= {} if body.text.verbosity == USUAL_VERBOSITY else {"text.verbosity": ("verbosity",)}
    for place, tool in enumerate(body.tools or ()):
        check_tool_kind(tool.type, f"tools[{place}]")
        if not tool.name:
            raise InvalidRequest(f"tools[{place}].name is missing", param=f"tools[{place}].name")
    tools = [_nested(tool) for tool in msgspec.to_builtins(body.tools or [], builtin_types=(Decimal,))]
    return Conversation(told, tools, variables, hints=hints)


def _asked_choice(body: ResponsesRequest) -> str | NamedToolChoice | None:
    """Return the choice of tools in the form of chats. Raises InvalidRequest if a part is missing."""
    asked = body.tool_choice
    if not isinstance(asked, FunctionChoice):
        return asked
    if asked.type == "allowed_tools":
        tools = [AllowedTool(FunctionName(tool.name)) for tool in asked.tools or ()]
        return NamedToolChoice(type=asked.type, allowed_tools=AllowedTools(asked.mode or "auto", tools))
    if asked.name is None:
        raise InvalidRequest("tool_choice.name is missing", param="tool_choice.name")
    return NamedToolChoice(FunctionName(asked.name))


async def response(request: Request) -> Response:
    """Return a stored response."""
    return Response(_known(request).json, media_type="application/json")


async def cancel_response(request: Request) -> Response:
    """Cancel a background response, if it has not ended."""
    if not _known(request).background:
        raise InvalidRequest("only a response in the background can be cancelled", param="response_id")
    await request.app.state.service.background.cancel(request.path_params["id"])
    return Response(_known(request).json, media_type="application/json")


async def delete_response(request: Request) -> Response:
    """Delete a response; one in progress is cancelled."""
    _known(request)
    id = request.path_params["id"]
    await request.app.state.service.background.cancel(id)
    store = _store(request)
    if store is not None:
        store.delete(id)
    return Response(encode(Deleted(id)), media_type="application/json")


def _store(request: Request) -> ResponseStore | None:
    store: ResponseStore | None = request.app.state.service.responses
    return store


def _known(request: Request) -> Stored:
    store = _store(request)
    if store is None:
        raise NotFound("This server keeps no responses: start it with --enable-responses-store")
    return store.get(request.path_params["id"])


def _nested(tool: dict[str, Any]) -> dict[str, Any]:
    """Return a tool in the form of chats, for chat templates."""
    function = {name: value for name, value in tool.items() if name != "type" and value is not None}
    return {"type": "function", "function": function}


def _params(frontend: Frontend, body: ResponsesRequest, ignored: Names | None) -> SamplingParams:
    given = sampling_fields(body)
    asked = _structured(body.text.format) if body.text and body.text.format else None
    given["structured_outputs"] = the_one({"text.format": asked, "structured_outputs": given["structured_outputs"]})
    if LOGPROBS in (body.include or ()):
        frontend.input.checker.check_logprobs(body.top_logprobs, "top_logprobs")
        given["logprobs"] = body.top_logprobs or 0
    elif body.top_logprobs and ignored is None:
        raise InvalidRequest(f'top_logprobs needs "{LOGPROBS}" in include', param="top_logprobs")
    elif body.top_logprobs and ignored is not None:
        ignored["top_logprobs"] = None
    return frontend.input.params(**given, max_tokens=body.max_output_tokens)


def _structured(asked: TextFormat) -> StructuredOutputsParams | None:
    if asked.type == "text":
        return None
    if asked.type == "json_object":
        return StructuredOutputsParams(json_object=True)
    if asked.schema is None:
        raise InvalidRequest("text.format.schema is missing", param="text.format.schema")
    return constraint({"json": asked.schema}, "text.format.schema")
