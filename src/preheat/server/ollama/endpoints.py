"""Ollama's API for desktop tools (``--api ollama``): /api/chat, /api/generate, /api/embed."""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from functools import partial
from typing import Any, TypeVar

from msgspec import UNSET, Struct
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from preheat.core import SamplingParams, StructuredOutputsParams
from preheat.errors import InvalidRequest, PreheatError
from preheat.frontend.answer_format import AnswerFormat
from preheat.frontend.answer_parser import Block
from preheat.frontend.frontend import Frontend
from preheat.frontend.messages import call_of, chat_messages
from preheat.frontend.request_state import RequestState
from preheat.server.http.body import interpreted, read_json
from preheat.server.http.decoding import with_integers
from preheat.server.http.errors import ollama_error
from preheat.server.http.ignored import ignore
from preheat.server.ollama.models import served_name
from preheat.server.ollama.schema import (
    SAMPLING_OPTIONS,
    OllamaAnswerMessage,
    OllamaChatAnswer,
    OllamaChatRequest,
    OllamaDone,
    OllamaEmbedAnswer,
    OllamaEmbedRequest,
    OllamaFunction,
    OllamaGenerateAnswer,
    OllamaGenerateRequest,
    OllamaGenerating,
    OllamaMessage,
    OllamaRequest,
    OllamaToolCall,
)
from preheat.server.openai.answers import encode
from preheat.server.openai.blocks import BlocksWriter, call_arguments
from preheat.server.openai.conversation import Conversation, prepared_talk, tool_choice
from preheat.server.openai.params import prepared
from preheat.server.openai.structured import converted
from preheat.server.pooling.embeddings import PooledWriter, embedded_states
from preheat.server.pooling.embeddings_schema import EmbeddingRequest

Body = TypeVar("Body", bound=OllamaRequest)

_IDLE = {"mirostat": 0, "typical_p": 1, "tfs_z": 1}
"""Options for unsupported sampling methods, with the values that switch each off."""

_NANOSECONDS = 1e9


async def chat(request: Request) -> ASGIApp:
    """Answer a conversation, in Ollama's form."""
    frontend, body = await _read(request, OllamaChatRequest)
    frontend.tasks.check_generates("Ollama chat API")
    if not body.messages:
        return _loaded(body, partial(OllamaChatAnswer, message=OllamaAnswerMessage()))
    params = _params(request, frontend, body)
    messages = await interpreted(request, partial(_plain, body.messages))
    talk = Conversation(messages, body.tools, _variables(frontend, body, body.tools), hints=_hints(body))
    return _ChatWriter(request, body, *await _prepared(request, frontend, talk, params))


async def generate(request: Request) -> ASGIApp:
    """Answer a prompt, in Ollama's form."""
    frontend, body = await _read(request, OllamaGenerateRequest)
    frontend.tasks.check_generates("Ollama generate API")
    if not body.prompt:
        return _loaded(body, partial(OllamaGenerateAnswer, response=""))
    params = _params(request, frontend, body)
    if body.raw:
        if given := next((name for name in ("system", "images", "think") if getattr(body, name)), None):
            raise InvalidRequest(f"{given} has no meaning with raw: a raw prompt has no template", param=given)
        (state,) = await prepared(
            request, [body.prompt], params, add_special_tokens=True, cache_salt="", cap_length=params.max_tokens is None
        )
        return _GenerateWriter(request, body, state, AnswerFormat())
    system = [OllamaMessage("system", body.system)] if body.system else []
    said = [*system, OllamaMessage("user", body.prompt, images=body.images)]
    plain = await interpreted(request, partial(_plain, said))
    talk = Conversation(plain, None, _variables(frontend, body, None), hints=_hints(body))
    return _GenerateWriter(request, body, *await _prepared(request, frontend, talk, params))


async def embed(request: Request) -> ASGIApp:
    """Make embeddings of texts, in Ollama's form."""
    frontend, body = await _read(request, OllamaEmbedRequest)
    frontend.tasks.embedding_of("Ollama embed API")
    ignore(request, [f"options.{name}" for name in body.options or ()])
    if body.truncate:
        ignore(request, ["truncate"])  # a text that is too long is refused
    texts: list[str | int | list[int]] = [body.input] if isinstance(body.input, str) else [*body.input]
    asked = EmbeddingRequest(input=texts, dimensions=body.dimensions, model=body.model)
    return _EmbedWriter(request, asked, await embedded_states(request, frontend, asked, asked.input))


async def _read(request: Request, kind: type[Body]) -> tuple[Frontend, Body]:
    """Return the frontend, and the decoded body. Raises ModelNotFound if the body names another model."""
    service = request.app.state.service
    body = await read_json(request, kind)
    request.state.lora_name = service.adapter_of(served_name(service, body.model))
    if body.keep_alive is not None:
        ignore(request, ["keep_alive"])
    return service.frontend, body


async def _prepared(
    request: Request, frontend: Frontend, talk: Conversation, params: SamplingParams
) -> tuple[RequestState, AnswerFormat]:
    choice = await interpreted(request, partial(tool_choice, talk.tools, None, None))
    return await prepared_talk(request, frontend, talk, choice, params, cap_length=params.max_tokens is None)


def _params(request: Request, frontend: Frontend, body: OllamaGenerating) -> SamplingParams:
    """Return the sampling parameters of a body. Options without a meaning here are ignored and reported."""
    options = {name: value for name, value in (body.options or {}).items() if value is not None}
    for name, idle in _IDLE.items():
        if options.pop(name, idle) != idle:
            raise InvalidRequest(f"options.{name} is not supported: leave it out", param=f"options.{name}")
    ignore(request, [f"options.{name}" for name in options if name not in SAMPLING_OPTIONS])
    given = {field: options[name] for name, field in SAMPLING_OPTIONS.items() if name in options}
    given = with_integers(given, SamplingParams)
    if isinstance(given.get("max_tokens"), int) and given["max_tokens"] < 0:
        del given["max_tokens"]  # no limit but the model's length
    return frontend.input.params(**given, structured_outputs=_format(body.format))


def _format(asked: str | dict[str, Any] | None) -> StructuredOutputsParams | None:
    if asked is None or asked == "":
        return None
    if asked == "json":
        return StructuredOutputsParams(json_object=True)
    if isinstance(asked, str):
        raise InvalidRequest('format must be "json" or a JSON schema', param="format")
    return converted({"json": asked}, "format")


def _variables(frontend: Frontend, body: OllamaGenerating, tools: object) -> dict[str, Any]:
    """Return the template variables for ``think``; templates have several names for it."""
    if body.think is None:
        return {}
    if isinstance(body.think, str):
        return {"reasoning_effort": body.think}
    switches = [name for name in ("enable_thinking", "thinking") if frontend.template.uses(name, tools)]
    if body.think and not switches and frontend.formats.reasoning is None:
        raise InvalidRequest("This model does not support thinking: leave think out", param="think")
    return dict.fromkeys(switches, body.think)


def _hints(body: OllamaGenerating) -> dict[str, tuple[str, ...]]:
    """Return the fields that a template may not look at, with their variables."""
    return {"think": ("reasoning_effort",)} if isinstance(body.think, str) else {}


def _plain(messages: Sequence[OllamaMessage]) -> list[dict[str, Any]]:
    """Return ``messages`` in the form of chat templates."""
    return chat_messages([_message(message, f"messages[{place}]") for place, message in enumerate(messages)])


def _message(message: OllamaMessage, at: str) -> Mapping[str, Any]:
    content: Any = message.content
    if message.images:
        urls = [{"url": f"data:image/png;base64,{data}"} for data in message.images]  # the type is read from the data
        images = [{"type": "image_url", "image_url": url} for url in urls]
        content = [*images, {"type": "text", "text": message.content or ""}]
    calls = [
        call_of(call.id, call.function.name, call.function.arguments, f"{at}.tool_calls[{place}]")
        for place, call in enumerate(message.tool_calls or ())
    ]
    return {
        "role": message.role, "content": "" if content is None else content, "reasoning": message.thinking,
        "tool_calls": calls, "name": message.tool_name, "tool_call_id": message.tool_call_id,
    }  # fmt: skip


def _loaded(body: OllamaGenerating, answer: Any) -> Response:
    """Answer a request without a prompt. It asks to load the model, and the model is loaded."""
    done = answer(model=body.model or "", created_at=_now(), done=True, done_reason="load")
    return Response(encode(done), media_type="application/json")


def _now() -> str:
    return datetime.now(UTC).isoformat()


class _OllamaWriter(BlocksWriter):
    """Writer of an answer as one object, or as lines with one object each."""

    media = "application/x-ndjson"
    pause = b"\n"  # an empty line
    kind: type[OllamaDone]

    def __init__(self, request: Request, body: OllamaGenerating, state: RequestState, form: AnswerFormat) -> None:
        super().__init__(request, state, form, body.stream is not False)
        self._model = body.model or self._service.names[0]

    @abstractmethod
    def fields(self, content: str = "", thinking: str = "", calls: Sequence[OllamaToolCall] = ()) -> dict[str, Any]:
        """Return the fields of an answer, or of one line, with content."""

    def whole(self) -> Struct:
        self.read_all()
        calls = [_call(block, place) for place, block in enumerate(self.answer.calls)]
        said = self.fields(self.answer.text("content"), self.answer.text("reasoning"), calls)
        return self._object(said, self._done())

    def begin(self, block: Block) -> bytes:
        return b""

    def extend(self, block: Block, text: str) -> bytes:
        if block.kind == "call" or not text:
            return b""  # a call is sent whole at its end
        return self._line(self.fields(thinking=text) if block.kind == "reasoning" else self.fields(text))

    def end(self, block: Block) -> bytes:
        if block.kind != "call":
            return b""
        return self._line(self.fields(calls=[_call(block, len(self.answer.calls) - 1)]))

    def last(self, error: PreheatError | None) -> bytes:
        if error is not None:
            return encode(ollama_error(error)) + b"\n"
        return self._line(self.fields(), self._done())

    def _line(self, said: dict[str, Any], done: dict[str, Any] | None = None) -> bytes:
        return encode(self._object(said, done)) + b"\n"

    def _object(self, said: dict[str, Any], done: dict[str, Any] | None = None) -> Struct:
        return self.kind(model=self._model, created_at=_now(), done=done is not None, **said, **(done or {}))  # type: ignore[call-arg]

    def _done(self) -> dict[str, Any]:
        """Return the reason why the answer ended, counts, and times."""
        state, now = self.state, time.monotonic()
        first = state.first_token_at or now
        spans = {"total": now - state.arrived_at, "prompt_eval": first - state.arrived_at, "eval": now - first}
        return {
            "done_reason": "length" if self.choice.finish_reason == "length" else "stop",
            "load_duration": 0,
            "prompt_eval_count": len(state.prompt_ids),
            "eval_count": self.completion_tokens,
            **{f"{name}_duration": int(seconds * _NANOSECONDS) for name, seconds in spans.items()},
        }


class _ChatWriter(_OllamaWriter):
    kind = OllamaChatAnswer

    def fields(self, content: str = "", thinking: str = "", calls: Sequence[OllamaToolCall] = ()) -> dict[str, Any]:
        return {"message": OllamaAnswerMessage(content, thinking or UNSET, list(calls) or UNSET)}


class _GenerateWriter(_OllamaWriter):
    kind = OllamaGenerateAnswer

    def fields(self, content: str = "", thinking: str = "", calls: Sequence[OllamaToolCall] = ()) -> dict[str, Any]:
        return {"response": content, "thinking": thinking or UNSET}


def _call(block: Block, index: int) -> OllamaToolCall:
    return OllamaToolCall(OllamaFunction(block.name, call_arguments(block.text), index), block.id)


class _EmbedWriter(PooledWriter):
    prefix = "embd"

    def whole(self) -> OllamaEmbedAnswer:
        taken = time.monotonic() - min(state.arrived_at for state in self._states)
        return OllamaEmbedAnswer(
            model=self._fields["model"], embeddings=[vector.tolist() for vector in self.vectors(True)],
            total_duration=int(taken * _NANOSECONDS), prompt_eval_count=self.usage().prompt_tokens,
        )  # fmt: skip
