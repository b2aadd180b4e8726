"""A server that makes embeddings: the official client, vLLM's endpoints, and refusals by name."""

from __future__ import annotations

import base64
import json
import shutil
from collections.abc import Iterator

import numpy as np
import pytest
from openai import OpenAI

from preheat.model.files import BUNDLED_PATH
from tests.api.conftest import Server, serving

TEXTS = ["import os", "def add(a, b):", "the cat sat on the mat"]
POOLER = {"pooling_type": "MEAN", "normalize": True, "enable_chunked_processing": True, "max_embed_len": 700}
OPTIONS = {"runner": "pooling", "pooler_config": POOLER, "num_threads": 1, "max_model_len": 256, "dtype": "float32"}


@pytest.fixture(scope="module")
def embedder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Run a model with prompts of sentence-transformers."""
    folder = tmp_path_factory.mktemp("prompts") / "bundled"
    shutil.copytree(BUNDLED_PATH, folder)
    prompts = {"query": "search: ", "passage": "text: "}
    (folder / "config_sentence_transformers.json").write_text(json.dumps({"prompts": prompts}))
    options = OPTIONS | {"api": "ollama", "served_model_name": ["bundled"]}
    with serving(str(folder), engine=None, max_num_seqs=8, **options) as running:
        yield running


def vectors(server: Server, given: object, **more: object) -> list[list[float]]:
    answer = server.post("/v1/embeddings", {"input": given, **more})
    assert answer.status == 200, answer.body
    return [item["embedding"] for item in answer.json["data"]]


def test_the_official_client(embedder: Server) -> None:
    """The official client gets the same numbers in base64, its default, as in floats."""
    with OpenAI(base_url=embedder.url + "/v1", api_key="none", max_retries=0, timeout=60) as client:
        answer = client.embeddings.create(model="bundled", input=TEXTS)
        plain = client.embeddings.create(model="bundled", input=TEXTS[1], encoding_format="float")
        tokens = embedder.post("/tokenize", {"prompt": TEXTS[1]}).json["tokens"]
        by_ids = client.embeddings.create(model="bundled", input=tokens, encoding_format="float")
    assert [item.index for item in answer.data] == [0, 1, 2] and answer.object == "list"
    assert answer.data[1].embedding == plain.data[0].embedding == by_ids.data[0].embedding
    assert plain.usage.prompt_tokens == plain.usage.total_tokens == len(tokens)
    assert np.linalg.norm(plain.data[0].embedding) == pytest.approx(1, rel=1e-6)


def test_forms_of_the_input(embedder: Server) -> None:
    alone = [vectors(embedder, text)[0] for text in TEXTS]
    assert vectors(embedder, TEXTS) == alone
    ids = [embedder.post("/tokenize", {"prompt": text}).json["tokens"] for text in TEXTS]
    assert vectors(embedder, ids) == alone
    (text,) = vectors(embedder, TEXTS[0], encoding_format="base64")
    assert np.frombuffer(base64.b64decode(text), "<f4").tolist() == alone[0]
    raw = vectors(embedder, TEXTS[0], normalize=False)[0]
    assert np.allclose(np.array(raw) / np.linalg.norm(raw), alone[0], rtol=1e-6)
    pooled = embedder.post("/pooling", {"input": TEXTS[0], "task": "embed"}).json
    assert pooled["data"][0] == {"index": 0, "data": alone[0], "object": "pooling"}


def test_the_embed_endpoint_of_tei(embedder: Server) -> None:
    alone = [vectors(embedder, text)[0] for text in TEXTS]
    assert embedder.post("/embed", {"inputs": TEXTS}).json == alone
    assert embedder.post("/embed", {"inputs": TEXTS[0]}).json == alone[:1]
    assert embedder.post("/embed", {"inputs": TEXTS[0], "normalize": False}).json != alone[:1]
    long = {"inputs": "def add(a, b): " * 200}
    assert embedder.post("/embed", long).status == 400
    assert embedder.post("/embed", {**long, "truncate": True}).status == 200
    ids = [embedder.post("/tokenize", {"prompt": text}).json["tokens"] for text in TEXTS]
    assert embedder.post("/", {"inputs": TEXTS}).json == alone
    tokens = np.array(embedder.post("/embed_all", {"inputs": TEXTS[0]}).json[0])
    assert np.allclose(tokens.mean(0) / np.linalg.norm(tokens.mean(0)), alone[0], atol=1e-6)
    pooled = embedder.post("/pooling", {"input": TEXTS[0], "task": "token_embed", "normalize": False}).json
    assert pooled["data"][0]["data"] == tokens.tolist()
    compared = {"inputs": {"source_sentence": TEXTS[0], "sentences": TEXTS}}
    assert np.allclose(embedder.post("/similarity", compared).json, np.array(alone) @ alone[0], atol=1e-6)
    pieces = embedder.post("/tokenize", {"inputs": TEXTS}).json
    assert [[piece["id"] for piece in some] for some in pieces] == ids
    assert "".join(piece["text"] for piece in pieces[1] if not piece["special"]) == TEXTS[1]
    assert embedder.post("/decode", {"ids": ids}).json == TEXTS
    assert embedder.post("/decode", {"ids": ids[0]}).json == TEXTS[:1]
    for path, body, said in (
        ("/embed_sparse", {"inputs": "x"}, "no head for sparse vectors"),
        ("/decode", {"ids": [10**6]}, "ids must be in"),
        ("/similarity", {"inputs": {"source_sentence": "x", "sentences": []}}, "must not be empty"),
        ("/tokenize", {"inputs": []}, "1 to"), ("/pooling", {"input": "x", "task": "plugin"}, "task"),
    ):  # fmt: skip
        answer = embedder.post(path, body)
        assert answer.status == 400 and said in answer.error["message"], answer.body
    assert embedder.get("/info").json["model_type"] == {"embedding": {"pooling": "mean"}}


def test_long_texts_are_read_in_chunks(embedder: Server) -> None:
    """A text beyond the model's 256 tokens is the weighted mean of its chunks; beyond max_embed_len it is refused."""
    text = "def add(a, b): " * 60
    ids = embedder.post("/tokenize", {"prompt": text}).json["tokens"]
    chunks = [ids[start : start + 255] for start in range(0, len(ids), 255)]
    assert len(chunks) > 1
    parts = np.array(vectors(embedder, chunks))
    answer = embedder.post("/v1/embeddings", {"input": [TEXTS[0], text, ids]}).json
    short, found, same = (item["embedding"] for item in answer["data"])
    assert found == same and short == vectors(embedder, TEXTS[0])[0]
    assert np.allclose(found, np.average(parts, axis=0, weights=list(map(len, chunks))), atol=1e-7)
    few = embedder.post("/tokenize", {"prompt": TEXTS[0]}).json["tokens"]
    assert answer["usage"]["prompt_tokens"] == 2 * len(ids) + len(few)
    assert embedder.post("/embed", {"inputs": text}).json == [found]
    score = embedder.post("/score", {"text_1": text, "text_2": text}).json["data"][0]["score"]
    assert score == pytest.approx(1)
    assert embedder.get("/info").json["max_input_length"] == 700
    refused = embedder.post("/v1/embeddings", {"input": [1] * 701})
    assert refused.status == 400 and refused.error["code"] == "context_length_exceeded"
    assert "maximum embedding input length is 700 tokens" in refused.error["message"]


def test_scores_and_ranks(embedder: Server) -> None:
    one, *others = (np.array(vectors(embedder, text)[0], np.float64) for text in TEXTS)
    for path in ("/score", "/v1/score"):
        answer = embedder.post(path, {"text_1": TEXTS[0], "text_2": TEXTS[1:]}).json
        assert [item["score"] for item in answer["data"]] == pytest.approx([float(one @ other) for other in others])
    body = {"query": TEXTS[1], "documents": [TEXTS[0], TEXTS[1], TEXTS[2]], "top_n": 2}
    whole = embedder.post("/v2/rerank", body | {"max_tokens_per_doc": 4096}).json["results"]  # Haystack's default
    assert whole == embedder.post("/v2/rerank", body).json["results"]
    for most, count in ((0, 3), (9, 3), (None, 3), (1, 1)):
        assert len(embedder.post("/v2/rerank", body | {"top_n": most}).json["results"]) == count
    for path in ("/rerank", "/v1/rerank", "/v2/rerank"):
        results = embedder.post(path, body).json["results"]
        assert len(results) == 2
        assert results[0]["index"] == 1 and results[0]["document"] == {"text": TEXTS[1], "multi_modal": None}
        assert results[0]["relevance_score"] == pytest.approx(1)
        assert results[0]["relevance_score"] >= results[1]["relevance_score"]


def test_a_kind_of_text_has_the_prompt_of_the_model(embedder: Server) -> None:
    """``input_type`` puts the model's prompt of that kind before the text."""
    assert vectors(embedder, TEXTS[0]) != vectors(embedder, TEXTS[0], input_type="query")
    for kind, before in (("query", "search: "), ("search_query", "search: "), ("document", "text: ")):
        behind = [f"{before}{text}" for text in TEXTS]
        assert vectors(embedder, TEXTS, input_type=kind) == vectors(embedder, behind)
    for given, kind, said in (("x", "poem", "one of query, passage"), ([5, 6], "query", "give texts")):
        refused = embedder.post("/v1/embeddings", {"input": given, "input_type": kind})
        assert refused.status == 400 and refused.error["param"] == "input_type" and said in refused.error["message"]


REFUSED = [
    ("/v1/embeddings", {"input": "x", "dimensions": 4}, "dimensions", "matryoshka"),
    ("/v1/embeddings", {"input": []}, "input", "1 to"),
    ("/v1/embeddings", {"input": [1, "x"]}, "input", "not both"),
    ("/v1/embeddings", {"input": ["a", [10**6]]}, "input[1]", "ids must be in"),
    ("/pooling", {"input": [1] * 300, "task": "token_embed"}, "input", "maximum context length"),
    ("/v1/embeddings", {}, "input", "Missing"),
    ("/v1/embeddings", {"input": "x", "encoding_format": "int8"}, "encoding_format", "Invalid"),
    ("/v1/embeddings", {"input": "x", "messages": []}, "messages", "not supported"),
    ("/pooling", {"input": "x", "task": "classify"}, None, "no head for classes"),
    ("/classify", {"input": "x"}, None, "no head for classes"),
    ("/v1/score", {"text_1": ["a", "b"], "text_2": ["c"]}, "text_1", "cannot be paired"),
    ("/v1/rerank", {"query": "a", "documents": []}, "documents", "empty"),
    *(("/v1/embeddings", {"input": "x", "dimensions": size}, "dimensions", "dimensions") for size in (0, -1, 10**9)),
    *(
        ("/v1/embeddings", {"input": "x", "truncate_prompt_tokens": size}, "truncate_prompt_tokens", said)
        for size, said in ((0, "-1 or above 0"), (-2, "between -1 and"), (10**12, "between -1 and"), (701, "lower it"))
    ),
    ("/embed", {"inputs": ["x"] * 3000}, "inputs", "inputs must hold 1 to 2048"),
    ("/embed", {"inputs": ["x", [10**6]]}, "inputs[1]", "inputs[1] has token id"),
    ("/embed", {"inputs": "x", "prompt_name": "poem"}, "prompt_name", "prompt_name must be one of query, passage"),
    (
        "/similarity",
        {"inputs": {"source_sentence": "x", "sentences": ["x", "x " * 2000]}},
        "inputs.sentences[1]",
        "700",
    ),
    ("/score", {"text_1": "x", "text_2": ["x"] * 3000}, "text_2", "3001 texts, but at most 2048"),
    ("/score", {"queries": ["x", "x " * 2000], "documents": ["x", "y"]}, "queries[1]", "queries[1]: This model's"),
    ("/score", {"text_1": ["a"], "documents": ["b"]}, "text_1", "Give two sides"),
    ("/score", {"text_1": ["a", "b"], "text_2": ["c", "d", "e"]}, "text_1", "2 texts cannot be paired with 3"),
    ("/v2/rerank", {"query": "x", "documents": ["y"], "top_n": -1}, "top_n", "not be negative"),
    ("/v2/rerank", {"query": "x", "documents": ["y", "x " * 2000]}, "documents[1]", "documents[1]: This model's"),
    ("/v2/rerank", {"query": "x " * 2000, "documents": ["y"]}, "query", "query: This model's"),
    ("/v2/rerank", {"query": "x", "documents": [{"title": "y"}]}, "documents[0].text", "Missing"),
    ("/v2/rerank", {"query": "x", "documents": ["y"] * 3000}, "documents", "3001 texts"),
    ("/rerank", {"query": "x", "texts": ["y"]}, None, "it reads no pairs"),
    ("/predict", {"inputs": "x"}, None, "no head for classes"),
    ("/v1/completions", {"prompt": "x"}, None, "does not support Completions API"),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}, None, "Chat Completions API"),
    ("/v1/responses", {"input": "x"}, None, "Responses API"),
]


@pytest.mark.parametrize(("path", "body", "param", "message"), REFUSED, ids=[str(row[:2])[:60] for row in REFUSED])
def test_refusals(embedder: Server, path: str, body: object, param: str | None, message: str) -> None:
    answer = embedder.post(path, body)
    assert answer.status == 400, answer.body
    assert answer.error["param"] == param and message in answer.error["message"]


def test_a_server_that_generates_says_so(scripted: Server) -> None:
    for path, body, what in (
        ("/v1/embeddings", {"input": "x"}, "Embeddings API"), ("/pooling", {"input": "x"}, "Pooling API"),
        ("/v1/score", {"text_1": "x", "text_2": "y"}, "Score API"),
        ("/v1/rerank", {"query": "x", "documents": ["y"]}, "Rerank API"),
    ):  # fmt: skip
        answer = scripted.post(path, body)
        assert answer.status == 400 and f"The model does not support {what}" in answer.error["message"]


def test_ollamas_embeddings_are_the_same(embedder: Server) -> None:
    answer = embedder.post("/api/embed", {"model": "bundled", "input": TEXTS, "options": {"num_ctx": 1}})
    assert answer.json["embeddings"] == vectors(embedder, TEXTS) and answer.json["prompt_eval_count"] > len(TEXTS)
    assert answer.headers["x-ignored-fields"] == "options.num_ctx"
    one = embedder.post("/api/embed", {"input": TEXTS[0]}).json["embeddings"]
    assert one == answer.json["embeddings"][:1]
    assert embedder.post("/api/show", {"model": "bundled"}).json["capabilities"] == ["embedding"]
    assert "makes embeddings" in embedder.post("/api/generate", {"prompt": "x"}).json["error"]
