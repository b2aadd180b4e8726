"""Errors name the fields that a client sent: the tables of the bodies, and the words of the messages."""

from __future__ import annotations

import typing

import msgspec
import pytest

from preheat.errors import ContextTooLong, GrammarFailed, InvalidRequest
from preheat.server import openapi
from preheat.server.anthropic.messages_schema import MessagesRequest
from preheat.server.http.field_names import names_in, respelled
from preheat.server.ollama.schema import OllamaChatRequest, OllamaGenerateRequest
from preheat.server.openai.responses_schema import ResponsesRequest
from preheat.server.openai.schema import ChatRequest, CompletionRequest, ForModel
from preheat.server.pooling.tei_schema import EmbedRequest, SimilarityRequest

BODIES = {
    kind for operation in (*openapi.OPERATIONS, *openapi.OLLAMA)
    for kind in (operation.body, *typing.get_args(operation.body))
    if isinstance(kind, type) and issubclass(kind, ForModel)
}  # fmt: skip


def has(hint: object, path: str) -> bool:
    """Return whether a field of this type may have a field at ``path``; a plain object may have any."""
    name, _, rest = path.replace("[]", "").partition(".")
    items = [each for kind in (hint, *typing.get_args(hint)) for each in typing.get_args(kind)]
    for kind in (hint, *typing.get_args(hint), *(items if typing.get_origin(hint) is not dict else ())):
        if typing.get_origin(kind) is dict:
            return True
        if isinstance(kind, type) and issubclass(kind, msgspec.Struct) and name in kind.__struct_fields__:
            return not rest or has(typing.get_type_hints(kind)[name], rest)
    return False


def test_every_name_is_a_field_of_its_body() -> None:
    assert {ChatRequest, ResponsesRequest, MessagesRequest, EmbedRequest} <= BODIES and OllamaChatRequest in BODIES
    for kind in BODIES:
        for field, paths in kind.spelled.items():
            for path in paths:
                assert has(kind, path), f"{kind.__name__} has no {path} for {field}"
    assert not has(ChatRequest, "max_output_tokens") and not has(MessagesRequest, "output_config.schema")


SAID = InvalidRequest("max_tokens must be between 1 and 9, got 0", param="max_tokens")
LONG = ContextTooLong("This model's maximum is 9. Shorten the prompt or reduce max_tokens.", param="max_tokens")
NESTED = InvalidRequest("prompt[1]: The prompt is empty", param="prompt[1]")
STOPS = InvalidRequest("stop may have at most 4 strings", param="stop")
BOTH = InvalidRequest("max_tokens and max_completion_tokens differ; give one of them", param="max_tokens")
LEAST = InvalidRequest("min_tokens (5) must not exceed max_tokens (3)", param="min_tokens")
QUOTED = InvalidRequest("The model 'max_tokens' is not served here", param="model")
IMAGE = InvalidRequest("The image cannot be decoded", param="messages")
GRAMMAR = GrammarFailed("The grammar refused a token", param="structured_outputs")
TOOL = InvalidRequest("tools[2].function.name is empty", param="tools[2].function.name")
CALL = InvalidRequest(
    "structured_outputs.json: type (at $.items.anyOf[1].properties.parameters.a)", param="structured_outputs.json"
)
TYPED = {"name": "f", "input_schema": {}}
USER = [{"role": "user", "content": "x"}]


@pytest.mark.parametrize(
    ("kind", "body", "error", "param", "message"),
    [
        (ChatRequest, {"max_completion_tokens": 0}, SAID, "max_completion_tokens", "max_completion_tokens must"),
        (ChatRequest, {"max_completion_tokens": 8}, LONG, "max_completion_tokens", "or reduce max_completion_tokens."),
        (ChatRequest, {"max_tokens": 8}, LONG, "max_tokens", "or reduce max_tokens."),
        (ChatRequest, {"max_completion_tokens": 8, "max_tokens": 9}, BOTH, "max_tokens", "max_tokens and max"),
        (ChatRequest, {"max_completion_tokens": 3}, LEAST, "min_tokens", "not exceed max_completion_tokens (3)"),
        (ChatRequest, {"max_completion_tokens": 3}, QUOTED, "model", "model 'max_tokens' is"),
        (ChatRequest, {"response_format": {"type": "json_object"}}, GRAMMAR, "response_format", "The grammar"),
        (CompletionRequest, {"prompt": "x", "guided_regex": "a"}, GRAMMAR, "guided_regex", "The grammar"),
        (ResponsesRequest, {"input": "x", "max_output_tokens": 0}, SAID, "max_output_tokens", "max_output_tokens must"),
        (MessagesRequest, {"max_tokens": 0}, SAID, "max_tokens", "max_tokens must"),
        (MessagesRequest, {"max_tokens": 1}, STOPS, "stop_sequences", "stop_sequences may have"),
        (OllamaGenerateRequest, {"options": {"num_predict": 0}}, SAID, "options.num_predict", "options.num"),
        (OllamaGenerateRequest, {"prompt": "x", "images": ["AA=="]}, IMAGE, "images", "The image"),
        (OllamaChatRequest, {}, STOPS, "options.stop", "options.stop may"),
        (MessagesRequest, {"max_tokens": 1}, TOOL, "tools[2].name", "tools[2].name is empty"),
        (MessagesRequest, {"max_tokens": 1, "tools": [TYPED]}, CALL, "tools", "type (at tools[1].input_schema.a)"),
        (ResponsesRequest, {"input": "x"}, TOOL, "tools[2].name", "tools[2].name is empty"),
        (ChatRequest, {"tools": [{}]}, TOOL, "tools[2].function.name", "tools[2].function.name is empty"),
        (ChatRequest, {"tools": [{}]}, CALL, "tools", "tools: type (at tools[1].function.parameters.a)"),
        (ChatRequest, {"response_format": {"type": "json_object"}}, CALL, "response_format", "response_format: type"),
        (EmbedRequest, {"inputs": ["a", ""]}, NESTED, "inputs[1]", "inputs[1]: The prompt is empty"),
    ],
)  # fmt: skip
def test_an_error_has_the_names_of_the_body(kind, body, error, param, message) -> None:
    given = body if kind not in (ChatRequest, MessagesRequest, OllamaChatRequest) else {"messages": USER, **body}
    found = respelled(error, names_in(msgspec.convert(given, kind)))
    assert type(found) is type(error) and found.param == param and message in found.message


def test_a_nested_field_is_named_with_its_place() -> None:
    body = {"inputs": {"source_sentence": "a", "sentences": ["b"]}, "parameters": {"truncate": True}}
    assert names_in(msgspec.convert(body, SimilarityRequest))["truncate_prompt_tokens"] == "parameters.truncate"
