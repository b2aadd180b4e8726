"""Clients of embeddings and rankings: OpenAI's by LangChain, Cohere's, and those of Text Embeddings Inference.

The server makes embeddings. Each step compares the vectors of a client with the vectors of another endpoint.
"""

from __future__ import annotations

import os

os.environ["HAYSTACK_TELEMETRY_ENABLED"] = "False"

import json
import urllib.request

import numpy as np
from asked import API, KEY, MODEL, URL, run
from cohere import Client, ClientV2
from haystack.utils import Secret
from haystack_integrations.components.embedders.huggingface_api import HuggingFaceAPITextEmbedder
from huggingface_hub import InferenceClient
from langchain_cohere import CohereRerank
from langchain_openai import OpenAIEmbeddings
from llama_index.embeddings.text_embeddings_inference import TextEmbeddingsInference

TEXTS = ["import os", "def add(a, b):", "the cat sat on the mat"]


def posted(path: str, body: object) -> object:
    headers = {"Content-Type": "application/json"}
    with urllib.request.urlopen(urllib.request.Request(URL + path, json.dumps(body).encode(), headers)) as answer:
        return json.load(answer)


def close(found: object, right: list[list[float]]) -> bool:
    return bool(np.allclose(np.array(found), np.array(right), atol=1e-6))


RIGHT = posted("/embed", {"inputs": TEXTS})


def langchain() -> None:
    embeddings = OpenAIEmbeddings(model=MODEL, base_url=API, api_key=KEY, check_embedding_ctx_length=False)
    assert embeddings.embed_documents(TEXTS) == RIGHT
    assert embeddings.embed_query(TEXTS[1]) == RIGHT[1]


def hugging_face() -> None:
    client = InferenceClient(URL, token=KEY)
    assert close(client.feature_extraction(TEXTS, truncate=True), RIGHT)
    assert close(client.feature_extraction(TEXTS[0], normalize=True), RIGHT[:1])
    assert max(client.sentence_similarity(TEXTS[1], other_sentences=TEXTS, model=f"{URL}/similarity")) > 0.999


def haystack() -> None:
    embedder = HuggingFaceAPITextEmbedder(
        api_type="text_embeddings_inference", api_params={"url": URL}, token=Secret.from_token(KEY), normalize=True
    )
    assert close([embedder.run(text=text)["embedding"] for text in TEXTS], RIGHT)


def llama_index() -> None:
    embeddings = TextEmbeddingsInference(model_name=MODEL, base_url=URL, text_instruction="", query_instruction="")
    assert embeddings.get_text_embedding_batch(TEXTS) == RIGHT
    assert embeddings.get_query_embedding(TEXTS[0]) == RIGHT[0]


def cohere() -> None:
    for client in (Client(api_key=KEY, base_url=URL), ClientV2(api_key=KEY, base_url=URL)):
        found = client.rerank(model=MODEL, query=TEXTS[1], documents=TEXTS, top_n=2).results
        assert [found[0].index, len(found)] == [1, 2] and found[0].relevance_score > found[1].relevance_score
    ranker = CohereRerank(model=MODEL, cohere_api_key=KEY, base_url=URL, top_n=1)
    assert [each["index"] for each in ranker.rerank(TEXTS, TEXTS[2])] == [2]


run(langchain, hugging_face, haystack, llama_index, cohere)
