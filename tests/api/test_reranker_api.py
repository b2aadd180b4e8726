"""A server of a cross-encoder: scores, rankings and classes over HTTP."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from preheat.server.http.middleware import is_open
from tests.api.conftest import Server, serving
from tests.encoders import logits_of, save_encoder, save_wordpiece

pytestmark = pytest.mark.filterwarnings("ignore")  # warnings of the libraries that write the checkpoints

QUERY, DOCUMENTS = "the cat?", ["a mat", "the cat sat", "z z z z z z z z"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("reranker")


@pytest.fixture(scope="module")
def right(folder: Path) -> list[float]:
    """The sigmoids of transformers' numbers."""
    model = save_encoder("Bert", folder, "ForSequenceClassification", id2label={0: "fits"})
    tokenizer = save_wordpiece(folder)
    return [float(logits_of(model, tokenizer, QUERY, document).sigmoid()) for document in DOCUMENTS]


@pytest.fixture(scope="module")
def server(folder: Path, right: list[float]) -> Iterator[Server]:
    with serving(str(folder), engine=None, max_num_seqs=8, num_threads=1, dtype="float32", max_model_len=64) as found:
        yield found


def test_scores_and_ranks(server: Server, right: list[float]) -> None:
    """vLLM's, Cohere's and Jina's forms have the numbers of transformers."""
    for path, names in (("/score", ("text_1", "text_2")), ("/v1/score", ("queries", "documents"))):
        answer = server.post(path, dict(zip(names, (QUERY, DOCUMENTS), strict=True))).json
        assert [item["score"] for item in answer["data"]] == pytest.approx(right, abs=1e-6)
        assert answer["usage"]["prompt_tokens"] == answer["usage"]["total_tokens"] > 0
    best = sorted(range(3), key=lambda place: -right[place])
    jina: list[Any] = [{"text": text} for text in DOCUMENTS]
    for path, documents in (("/rerank", DOCUMENTS), ("/v1/rerank", jina), ("/v2/rerank", DOCUMENTS)):
        answer = server.post(path, {"query": QUERY, "documents": documents, "top_n": 2, "model": "x"} | {"model": None})
        results = answer.json["results"]
        assert [each["index"] for each in results] == best[:2]
        assert [each["relevance_score"] for each in results] == pytest.approx([right[n] for n in best[:2]], abs=1e-6)
        assert results[0]["document"]["text"] == DOCUMENTS[best[0]]
    raw = server.post("/score", {"text_1": QUERY, "text_2": DOCUMENTS[0], "use_activation": False}).json
    assert raw["data"][0]["score"] != pytest.approx(right[0], abs=1e-3)


def test_classes(server: Server) -> None:
    answer = server.post("/classify", {"input": DOCUMENTS}).json
    assert [(item["label"], item["num_classes"]) for item in answer["data"]] == [("fits", 1)] * 3
    pooled = server.post("/pooling", {"input": DOCUMENTS[0], "task": "classify"}).json
    assert pooled["data"][0]["data"] == answer["data"][0]["probs"]


LONG = "a " * 100
REFUSED = [
    ("/v1/embeddings", {"input": "x"}, "it classifies texts"),
    ("/pooling", {"input": "x", "task": "embed"}, "it classifies texts"),
    ("/score", {"text_1": "a", "text_2": LONG}, "maximum context length is 64"),
    ("/score", {"text_1": "a", "text_2": "b", "dimensions": 3}, "no meaning for pairs"),
    ("/rerank", {"query": "a", "documents": []}, "must not be empty"),
    ("/rerank", {"query": "a", "texts": ["b", LONG]}, "texts[1]: This model's"),
    ("/rerank", {"query": "a", "texts": ["b"] * 3000}, "3000 pairs"),
    ("/v2/rerank", {"query": "a", "documents": ["b", LONG]}, "documents[1]: This model's"),
    ("/score", {"text_1": "a", "text_2": "b", "truncate_prompt_tokens": 0}, "-1 or above 0"),
    ("/score", {"text_1": "a", "text_2": "b", "truncate_prompt_tokens": 65}, "context length is 64"),
    ("/score", {"text_1": ["a", "b"], "text_2": ["c", "d", "e"]}, "2 texts cannot be paired with 3"),
    ("/classify", {"input": "a", "truncate_prompt_tokens": 0}, "-1 or above 0"),
    ("/classify", {"input": ["a", [199]]}, "input[1] has token id 199"),
    ("/predict", {"inputs": [["a"], ["a", LONG]]}, "inputs[1]: This model's"),
    ("/v1/completions", {"prompt": "x"}, "does not support Completions API"),
]


def test_refusals(server: Server) -> None:
    for path, body, said in REFUSED:
        answer = server.post(path, body)
        assert answer.status == 400 and said in answer.error["message"], answer.body


def test_long_documents_are_cut_as_asked(server: Server) -> None:
    cut = server.post("/rerank", {"query": "a", "documents": [LONG, "a a a"], "max_tokens_per_doc": 3}).json["results"]
    assert cut[0]["relevance_score"] == cut[1]["relevance_score"]
    scores = [server.post("/rerank", {"query": "a", "documents": ["a a"]} | more).json["results"][0]["relevance_score"]
              for more in ({}, {"max_tokens_per_doc": 4096})]  # fmt: skip
    assert scores[0] == scores[1]  # as Haystack's client asks
    assert server.post("/score", {"text_1": "a", "text_2": LONG, "truncate_prompt_tokens": 20}).status == 200


def test_the_endpoints_of_tei(server: Server, right: list[float]) -> None:
    """Texts are ranked, pairs are classified, and the model and its limits are told, as TEI does."""
    best = sorted(range(3), key=lambda place: -right[place])
    ranks = server.post("/rerank", {"query": QUERY, "texts": DOCUMENTS, "return_text": True}).json
    assert [(each["index"], each["text"]) for each in ranks] == [(place, DOCUMENTS[place]) for place in best]
    assert [each["score"] for each in ranks] == pytest.approx([right[place] for place in best], abs=1e-6)
    raw = server.post("/rerank", {"query": QUERY, "texts": DOCUMENTS, "raw_scores": True}).json
    assert "text" not in raw[0] and raw[0]["score"] != pytest.approx(right[best[0]], abs=1e-3)
    pairs = server.post("/predict", {"inputs": [[QUERY, document] for document in DOCUMENTS]}).json
    assert [each[0]["score"] for each in pairs] == pytest.approx(right, abs=1e-6)
    assert server.post("/predict", {"inputs": [QUERY, DOCUMENTS[0]]}).json == pairs[0]
    assert server.post("/predict", {"inputs": DOCUMENTS[0]}).json[0]["label"] == "fits"
    assert server.post("/rerank", {"query": "a", "texts": [LONG]}).status == 400
    assert server.post("/rerank", {"query": "a", "texts": [LONG], "truncate": True}).status == 200
    assert server.post("/", {"query": QUERY, "texts": DOCUMENTS}).json[0]["index"] == best[0]
    told = server.get("/info").json
    assert told["model_type"] == {"reranker": {"id2label": {"0": "fits"}, "label2id": {"fits": 0}}}
    assert told["max_input_length"] == 64
    for path, body, said in (
        ("/embed", {"inputs": "x"}, "it classifies texts"), ("/predict", {"inputs": [["a", "b", "c"]]}, "two texts"),
        ("/rerank", {"query": "x", "texts": []}, "texts must not be empty"), ("/rerank", {"query": "x"}, "documents"),
    ):  # fmt: skip
        answer = server.post(path, body)
        assert answer.status == 400 and said in answer.error["message"], answer.body


def test_a_body_at_the_root_needs_a_key() -> None:
    """The page at the root is open; a body posted there is work, so it needs a key and counts."""
    assert is_open({"path": "/", "method": "GET"}) and not is_open({"path": "/", "method": "POST"})
    assert is_open({"path": "/health", "method": "POST"}) and not is_open({"path": "/embed", "method": "POST"})
