"""Classifiers and cross-encoders: against transformers' logits, with the same bits beside any other texts."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch

from preheat import LLM, InvalidRequest, ModelError, PoolingParams, SettingsError
from preheat.frontend.pairs import Pair
from preheat.model.pooled_head import HeadLayer
from preheat.pooling.classes import activation_of, labels_of
from tests.encoders import OPTIONS, logits_of, save_encoder, save_wordpiece

pytestmark = pytest.mark.filterwarnings("ignore")  # warnings of the libraries that write the checkpoints

QUERY = "the cat?"
DOCUMENTS = ["the cat sat, the mat.", "a mat", "z" * 40, "the the the! " * 12]
RAW = PoolingParams(use_activation=False)
TEXT = {**OPTIONS, "skip_tokenizer_init": False}


@pytest.fixture(scope="module")
def reranker(tmp_path_factory):
    """A cross-encoder, its tokenizer and an engine."""
    folder = tmp_path_factory.mktemp("reranker")
    model = save_encoder("Bert", folder, "ForSequenceClassification", num_labels=1)
    tokenizer = save_wordpiece(folder)
    return model, tokenizer, LLM(str(folder), **TEXT)


def scores(llm: LLM, documents: list[str], params: PoolingParams | None = RAW, **options: Any) -> list[float]:
    outputs = llm.score(QUERY, documents, use_tqdm=False, pooling_params=params, **options)
    return [output.outputs.score for output in outputs]


def test_a_cross_encoder_equals_transformers(reranker):
    """The number of each pair, and its sigmoid, equal transformers; the second text has the second type."""
    model, tokenizer, llm = reranker
    right = [float(logits_of(model, tokenizer, QUERY, document)) for document in DOCUMENTS]
    assert scores(llm, DOCUMENTS) == pytest.approx(right, abs=1e-5)
    assert scores(llm, DOCUMENTS, None) == pytest.approx(torch.tensor(right).sigmoid().tolist(), abs=1e-5)
    output = llm.score(QUERY, DOCUMENTS[1], use_tqdm=False)[0]
    assert output.prompt_token_ids == tokenizer(QUERY, DOCUMENTS[1])["input_ids"]
    untyped = logits_of(model, lambda *texts, **more: tokenizer(*texts, **more) | {"token_type_ids": 0 * tokenizer(
        *texts, **more)["token_type_ids"]}, QUERY, DOCUMENTS[0])  # fmt: skip
    assert abs(float(untyped) - right[0]) > 1e-3


def test_long_pairs_are_cut_as_transformers_cuts_them(reranker):
    """The longer text loses its last tokens first, at every length."""
    _, tokenizer, llm = reranker
    chance, own = random.Random(1), llm.frontend.tokenizer
    for most in range(4, 40, 5):
        one, other = ("".join(chance.choices("abc .", k=chance.randrange(1, 40))) for _ in range(2))
        right = tokenizer(one, other, truncation="longest_first", max_length=most)["input_ids"]
        assert own.encode_pair(Pair(one, other), most) == right, (one, other, most)
    model, long = reranker[0], "the mat sat. " * 90
    with pytest.raises(InvalidRequest, match="maximum context length is 300"):
        scores(llm, [long])
    right = float(logits_of(model, tokenizer, QUERY, long, truncation="longest_first", max_length=300))
    assert scores(llm, [long], truncate_prompt_tokens=-1) == pytest.approx([right], abs=1e-5)


def same_bits(llm: LLM) -> bool:
    together = scores(llm, DOCUMENTS)
    alone = [scores(llm, [document])[0] for document in DOCUMENTS]
    return together == alone == scores(llm, DOCUMENTS[::-1])[::-1]


def test_the_same_bits_beside_any_other_pairs(reranker, monkeypatch):
    """A pair has the same bits alone and beside others; the comparison sees a head that adds up its calls."""
    llm, calls = reranker[2], list[int]()
    assert same_bits(llm)
    right = HeadLayer.__call__

    def drifting(self, x):
        calls.append(1)
        return right(self, x) + np.float32(len(calls) * 1e-6)

    monkeypatch.setattr(HeadLayer, "__call__", drifting)
    assert not same_bits(llm)


@pytest.mark.parametrize("family", ["Bert", "XLMRoberta", "DistilBert", "Gte"])
def test_classes_equal_transformers(family, tmp_path):
    """The logits and the probabilities of several classes equal transformers; a score is refused."""
    labels = {0: "bad", 1: "fair", 2: "good"}
    more = {} if family == "Bert" else {"problem_type": "multi_label_classification"}
    model = save_encoder(family, tmp_path, "ForSequenceClassification", id2label=labels, **more)
    tokenizer, llm = save_wordpiece(tmp_path), LLM(str(tmp_path), **TEXT)
    right = [logits_of(model, tokenizer, text) for text in DOCUMENTS]
    found = llm.classify(DOCUMENTS, use_tqdm=False, pooling_params=RAW)
    assert np.allclose([each.outputs.probs for each in found], torch.stack(right).numpy(), atol=1e-5)
    shares = [each.sigmoid() if more else each.softmax(0) for each in right]
    found = llm.classify(DOCUMENTS, use_tqdm=False)
    assert np.allclose([each.outputs.probs for each in found], torch.stack(shares).numpy(), atol=1e-6)
    assert (found[0].outputs.num_classes, llm.supported_tasks) == (3, ("classify",))
    with pytest.raises(InvalidRequest, match="it has 3 classes"):
        llm.score(QUERY, DOCUMENTS)
    with pytest.raises(InvalidRequest, match="it classifies texts"):
        llm.embed(DOCUMENTS)


def test_what_has_no_meaning_is_refused(reranker):
    llm = reranker[2]
    assert llm.supported_tasks == ("classify", "score")
    with pytest.raises(InvalidRequest, match="give texts, not token ids"):
        llm.score([[5, 6]], DOCUMENTS)
    with pytest.raises(InvalidRequest, match="no head for classes"):
        LLM("bundled", runner="pooling", num_threads=1, max_model_len=64).classify("x")
    with pytest.raises(SettingsError, match="no head for classes"):
        LLM("bundled", convert="classify", max_model_len=64)
    with pytest.raises(SettingsError, match="a head for classes reads the first token"):
        LLM(llm.settings.model, pooler_config={"pooling_type": "MEAN"}, **TEXT)


def test_labels_and_activations_of_a_config():
    assert labels_of({}) == ("LABEL_0", "LABEL_1")
    assert labels_of({"id2label": {"0": "a", "1": "b"}, "num_labels": 5}) == ("a", "b")
    assert activation_of({"num_labels": 1}) == "sigmoid"
    assert activation_of({}) == "softmax"
    assert activation_of({"problem_type": "regression"}) == "none"
    identity = {"activation_fn": "torch.nn.modules.linear.Identity"}
    assert activation_of({"sentence_transformers": identity, "problem_type": "regression"}) == "none"
    assert activation_of({"sbert_ce_default_activation_function": "torch.nn.modules.activation.Sigmoid"}) == "sigmoid"
    single = {"problem_type": "single_label_classification"}
    assert activation_of(single | {"id2label": {"0": "a"}}) == "sigmoid"
    assert activation_of(single) == "softmax"
    assert activation_of({"problem_type": "multi_label_classification"}) == "sigmoid"
    for config, why in (
        ({"id2label": {"1": "a"}}, "id2label must name the classes 0 to 0"),
        ({"num_labels": 0}, "num_labels must"),
        ({"problem_type": "odd"}, "problem_type 'odd'"),
        ({"sentence_transformers": {"activation_fn": "torch.nn.GELU"}}, "activation_fn 'GELU'"),
    ):
        with pytest.raises(ModelError, match=why):
            labels_of(config), activation_of(config)
