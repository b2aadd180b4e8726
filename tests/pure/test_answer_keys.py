# ruff: noqa: ISC004
"""Answers have the keys that OpenAI requires and the keys that are null in vLLM's."""

from __future__ import annotations

import json
from typing import Any

import pytest
from openai.types import Completion as OpenAICompletion
from openai.types import CompletionChoice as OpenAIChoice
from openai.types import CreateEmbeddingResponse
from openai.types.chat import ChatCompletion as OpenAIChat
from openai.types.chat import ChatCompletionMessage
from openai.types.responses import Response

from preheat.server.anthropic.messages_schema import OutputText
from preheat.server.openai.answers import (
    ChatChoice,
    ChatChunkChoice,
    ChatCompletion,
    ChatDelta,
    ChatMessage,
    Completion,
    CompletionChoice,
    CompletionChunkChoice,
    encode,
)
from preheat.server.openai.responses_schema import ResponseObject
from preheat.server.pooling.embeddings_schema import EmbeddingList

HEAD: dict[str, Any] = {"id": "a", "created": 1, "model": "m"}
WHOLE = "service_tier system_fingerprint usage kv_transfer_params"
ANSWERS: list[tuple[Any, Any, str]] = [
    (ChatCompletion(**HEAD, choices=[]), OpenAIChat, f"{WHOLE} prompt_logprobs prompt_token_ids"),
    (ChatChoice(0, ChatMessage("x")), None, "index message logprobs finish_reason stop_reason token_ids"),
    (ChatMessage("x"), ChatCompletionMessage, "role content refusal annotations audio function_call reasoning"),
    (ChatChunkChoice(0, ChatDelta()), None, "index delta logprobs finish_reason token_ids"),
    (Completion(**HEAD, choices=[]), OpenAICompletion, WHOLE),
    (CompletionChoice(0, "x"), OpenAIChoice,
     "index text logprobs finish_reason stop_reason prompt_logprobs prompt_token_ids token_ids"),
    (CompletionChunkChoice(0, "x"), OpenAIChoice, "index text logprobs finish_reason stop_reason token_ids"),
    (EmbeddingList(**HEAD, data=[], usage=None), CreateEmbeddingResponse, "id object created model data usage"),  # type: ignore[arg-type]
    (ResponseObject(id="a", created_at=1, model="m"), Response,
     "background incomplete_details instructions max_output_tokens max_tool_calls previous_response_id prompt "
     "reasoning service_tier status top_logprobs truncation usage user kv_transfer_params"),
]  # fmt: skip


@pytest.mark.parametrize(("answer", "openai", "vllm"), ANSWERS, ids=[type(answer).__name__ for answer, _, _ in ANSWERS])
def test_keys(answer: Any, openai: Any, vllm: str) -> None:
    keys = json.loads(encode(answer)).keys()
    assert set(vllm.split()) <= keys
    if openai is not None:
        assert {name for name, field in openai.model_fields.items() if field.is_required()} <= keys


def test_a_text_without_citations_does_not_say_null() -> None:
    assert json.loads(encode(OutputText("x"))).keys() == {"type", "text"}
