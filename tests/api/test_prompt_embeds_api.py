"""Prompts that are embeddings, over HTTP: OpenAI's client sends them as in vLLM's documentation."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator
from typing import Any

import openai
import pytest
import torch
from safetensors.torch import load_file

from preheat.model.files import BUNDLED_PATH
from tests.api.conftest import Server, serving

LINES = ["def add(a, b):", "class Point:\n    def __init__(self, x, y):"]


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serving(
        "bundled", engine=None, max_num_seqs=4, max_model_len=128, max_num_batched_tokens=64, enable_prompt_embeds=True
    ) as server:
        yield server


@pytest.fixture(scope="module")
def client(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none")


def embedded(server: Server, text: str, dtype: torch.dtype = torch.bfloat16) -> str:
    """Return the embedding rows of a text's tokens, as a client makes them."""
    ids = server.post("/tokenize", {"prompt": text}).json["tokens"]
    table = next(each for name, each in load_file(BUNDLED_PATH / "model.safetensors").items() if "embed" in name)
    file = io.BytesIO()
    torch.save(table[ids].to(dtype), file)
    return base64.b64encode(file.getvalue()).decode()


def texts(client: openai.OpenAI, prompt: Any, **more: Any) -> list[str]:
    done = client.completions.create(
        model="bundled", prompt=prompt, max_tokens=8, temperature=0.7, seed=5, extra_body=more
    )
    return [choice.text for choice in done.choices]


def test_rows_of_the_table_get_the_answers_of_their_tokens(server: Server, client: openai.OpenAI) -> None:
    """Rows of the embedding table give the answer of their tokens: one, several, beside texts, in each dtype."""
    right = texts(client, LINES)
    first, second = (embedded(server, line) for line in LINES)
    assert texts(client, "", prompt_embeds=first) == right[:1]
    assert texts(client, "", prompt_embeds=[first, second]) == right
    assert texts(client, LINES[1], prompt_embeds=[second, first]) == [right[1], right[0], right[1]]
    assert texts(client, "", prompt_embeds=embedded(server, LINES[0], torch.float32)) == right[:1]


def test_a_stream_with_prompt_embeds_reports_its_usage(server: Server, client: openai.OpenAI) -> None:
    (right,) = texts(client, LINES[0])
    body = {"prompt_embeds": embedded(server, LINES[0]), "max_tokens": 8, "temperature": 0.7, "seed": 5}
    whole = server.post("/v1/completions", body | {"return_token_ids": True}).json
    assert whole["choices"][0]["text"] == right
    assert whole["choices"][0]["prompt_token_ids"] == []
    assert whole["usage"]["prompt_tokens"] == len(server.post("/tokenize", {"prompt": LINES[0]}).json["tokens"])
    stream = client.completions.create(
        model="bundled", prompt="", stream=True, max_tokens=8, temperature=0.7, seed=5,
        extra_body={"prompt_embeds": body["prompt_embeds"]},
    )  # fmt: skip
    assert "".join(event.choices[0].text for event in stream) == right


@pytest.mark.parametrize(
    ("given", "param", "message"),
    [
        ({"prompt_embeds": "AAAA"}, "prompt_embeds", "not a file of torch.save"),
        ({"prompt_embeds": []}, "prompt_embeds", "must hold 1 to"),
        ({"prompt_embeds": 3}, "prompt_embeds", "Invalid value"),
        ({}, "prompt", "Missing required parameter: prompt"),
        ({"prompt_embeds": None, "echo": True, "logprobs": 1}, "echo", "have no tokens"),
        ({"prompt_embeds": None, "echo": True}, "echo", "have no tokens"),
    ],
    ids=str,
)
def test_refused(server: Server, given: dict[str, Any], param: str, message: str) -> None:
    if "echo" in given:
        given = given | {"prompt_embeds": embedded(server, LINES[0])}
    answer = server.post("/v1/completions", given)
    assert answer.status == 400
    assert answer.error["param"] == param
    assert message in answer.error["message"]


def test_off_by_default() -> None:
    with serving("bundled", max_num_seqs=4) as server:
        answer = server.post("/v1/completions", {"prompt": "", "prompt_embeds": "AAAA"})
        assert answer.status == 400
        assert "--enable-prompt-embeds" in answer.error["message"]
