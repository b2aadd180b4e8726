"""ColBERT, decoders with heads, and modules of sentence-transformers: against transformers' states."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from preheat import LLM, InvalidRequest, ModelError, PoolingParams, SettingsError
from preheat.core import POOLS
from preheat.schedule import pooled
from tests.encoders import OPTIONS, SMALL, logits_of, save_encoder, save_wordpiece, states_of, texts_of

pytestmark = pytest.mark.filterwarnings("ignore")  # warnings of the libraries that write the checkpoints

TEXT = {**OPTIONS, "skip_tokenizer_init": False}
QUERY, DOCUMENTS = "the cat?", ["the cat sat, the mat.", "a mat", "z" * 40, "the the the! " * 12]
RAW = PoolingParams(use_activation=False)


@pytest.fixture(scope="module")
def bert(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bert")
    return folder, save_encoder("Bert", folder), save_wordpiece(folder)


def vectors(llm: LLM, texts: list[list[int]], **options: Any) -> list[np.ndarray]:
    outputs = llm.encode([{"prompt_token_ids": ids} for ids in texts], use_tqdm=False, **options)
    return [output.outputs.data for output in outputs]


def write_modules(folder: Path, out: Path, mode: str, *dense: dict[str, Any]) -> list[torch.nn.Linear]:
    """Copy a model, and write modules beside it in the layout of sentence-transformers; return its Dense layers."""
    shutil.copytree(folder, out)
    kinds = ["Transformer", "Pooling", *["Dense"] * len(dense), "Normalize"]
    modules = [
        {"type": f"sentence_transformers.models.{kind}", "path": f"{place}_{kind}" if place else ""}
        for place, kind in enumerate(kinds)
    ]
    (out / "modules.json").write_text(json.dumps(modules))
    (out / "1_Pooling").mkdir()
    (out / "1_Pooling" / "config.json").write_text(json.dumps({f"pooling_mode_{mode}": True}))
    layers = []
    for place, config in enumerate(dense, 2):
        torch.manual_seed(place)
        layer = torch.nn.Linear(config["in_features"], config["out_features"], bias=config.get("bias", True))
        (out / f"{place}_Dense").mkdir()
        (out / f"{place}_Dense" / "config.json").write_text(json.dumps(config))
        save_file({f"linear.{name}": each.data for name, each in layer.named_parameters()},
                  out / f"{place}_Dense" / "model.safetensors")  # fmt: skip
        layers.append(layer)
    return layers


def right_of(states: torch.Tensor, mode: str) -> torch.Tensor:
    """Return what sentence-transformers' Pooling makes of the states [tokens, hidden] of one text."""
    weights = torch.arange(1, len(states) + 1).unsqueeze(1)
    return {
        "max_tokens": lambda: states.max(0).values,
        "weightedmean_tokens": lambda: (states * weights).sum(0) / weights.sum(),
        "mean_sqrt_len_tokens": lambda: states.sum(0) / len(states) ** 0.5,
        "mean_tokens": lambda: states.mean(0),
    }[mode]()


TANH = {"in_features": 96, "out_features": 40, "activation_function": "torch.nn.modules.activation.Tanh"}
IDENTITY = {"in_features": 40, "out_features": 24, "bias": False,
            "activation_function": "torch.nn.modules.linear.Identity"}  # fmt: skip


@pytest.mark.parametrize("mode", ["max_tokens", "weightedmean_tokens", "mean_sqrt_len_tokens"])
def test_pools_equal_sentence_transformers(mode):
    """Each pool has the numbers of its definition, and the same bits for any chunks of a text."""
    torch.manual_seed(0)
    for tokens in (1, 2, 40):
        states = torch.randn(tokens, 33)
        parts = [states.numpy()[first : first + 7] for first in range(0, tokens, 7)]
        whole, cut = (pooled.pool_of(POOLS.index(_KINDS[mode]), states[0].numpy()) for _ in range(2))
        whole.add(states.numpy())
        for part in parts:
            cut.add(part)
        assert whole.result() == cut.result()
        assert np.allclose(np.frombuffer(whole.result(), np.float32), right_of(states, mode).numpy(), atol=1e-6)


def one_by_one(states: np.ndarray) -> np.ndarray:
    """Return the sum by the contract: one token after the other, in float32."""
    total = np.zeros(states.shape[1], np.float32)
    for state in states:
        total += state
    return total


@pytest.mark.parametrize("size", [16, 33, 1024])
def test_the_mean_adds_one_token_after_the_other(size):
    """Numbers of all magnitudes tell each order from any other, as sums in pairs show."""
    draw = np.random.default_rng(size)
    for tokens in (1, 2, 9, 700):
        states = (draw.standard_normal((tokens, size)) * 10.0 ** draw.integers(-6, 6, (tokens, size))).astype("f4")
        whole, cut, right = pooled.Pooled(states[0]), pooled.Pooled(states[0]), one_by_one(states)
        whole.add(states)
        for first in range(0, tokens, 7):
            cut.add(states[first : first + 7])
        assert whole.total.tobytes() == cut.total.tobytes() == right.tobytes()
        assert whole.count == cut.count == tokens
        others = one_by_one(states[::-1]), np.ascontiguousarray(states.T).sum(1)  # backwards, and in pairs
        assert tokens < 700 or right.tobytes() not in [other.tobytes() for other in others]


_KINDS = {"max_tokens": "MAX", "weightedmean_tokens": "WEIGHTEDMEAN", "mean_sqrt_len_tokens": "MEAN_SQRT_LEN"}


def test_modules_equal_sentence_transformers(bert, tmp_path):
    """A pool, layers behind it and the norm equal their definition; bits are alike in any batch."""
    folder, model, _ = bert
    first, second = write_modules(folder, tmp_path / "m", "weightedmean_tokens", TANH, IDENTITY)
    llm, texts = LLM(str(tmp_path / "m"), **OPTIONS), texts_of(1, 37, 300, 5)
    found = vectors(llm, texts)
    for ids, vector in zip(texts, found, strict=True):
        right = second(first(right_of(states_of(model, ids), "weightedmean_tokens")).tanh()).detach()
        assert np.allclose(vector, torch.nn.functional.normalize(right, dim=0).numpy(), atol=1e-5)
    alone = [vectors(llm, [ids])[0].tobytes() for ids in texts]
    assert alone == [each.tobytes() for each in found] == [each.tobytes() for each in vectors(llm, texts[::-1])][::-1]
    with pytest.raises(InvalidRequest, match="token_embed is not supported"):
        vectors(llm, texts, pooling_task="token_embed")


def test_modules_that_are_not_served_are_refused(bert, tmp_path):
    folder = tmp_path / "m"
    write_modules(bert[0], folder, "mean_tokens", TANH)
    for path, old, new, why in (
        ("2_Dense/config.json", "Tanh", "SiLU", "activation_function SiLU is not supported"),
        ("2_Dense/config.json", "40", '"x"', "in_features and out_features must be numbers"),
        ("2_Dense/config.json", "40", "41", "has shape .40, 96., needs .41, 96."),
        ("modules.json", "Normalize", "Dropout", "module Dropout is not supported"),
        ("1_Pooling/config.json", "mean_tokens", "attention", "asks for attention"),
    ):
        text = (folder / path).read_text()
        (folder / path).write_text(text.replace(old, new, 1))
        with pytest.raises(ModelError, match=why):
            LLM(str(folder), **OPTIONS)
        (folder / path).write_text(text)


@pytest.fixture(scope="module")
def colbert(bert, tmp_path_factory):
    """A ColBERT of the layout on the Hub, its layer of tokens, and an engine."""
    folder = tmp_path_factory.mktemp("colbert")
    shutil.copytree(bert[0], folder, dirs_exist_ok=True)
    torch.manual_seed(3)
    layer = torch.nn.Linear(96, 32, bias=False)
    tensors = {f"bert.{name}": each for name, each in load_file(folder / "model.safetensors").items()}
    save_file({**tensors, "linear.weight": layer.weight.data}, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text()) | {"architectures": ["HF_ColBERT"], "dim": 32}
    (folder / "config.json").write_text(json.dumps(config))
    return layer, LLM(str(folder), **TEXT)


def token_vectors(bert: Any, layer: torch.nn.Linear, text: str) -> torch.Tensor:
    """Return transformers' vectors of a text's tokens."""
    states = states_of(bert[1], bert[2](text)["input_ids"]).clone()
    return torch.nn.functional.normalize(layer(states).detach(), dim=1)


def test_vectors_of_tokens_and_late_interaction(bert, colbert):
    """Each token's vector equals transformers; a score is the sum of the greatest products of the query's tokens."""
    layer, llm = colbert
    found = llm.encode(DOCUMENTS, use_tqdm=False, pooling_task="token_embed")
    for text, output in zip(DOCUMENTS, found, strict=True):
        assert np.allclose(output.outputs.data, token_vectors(bert, layer, text).numpy(), atol=1e-5)
    query = token_vectors(bert, layer, QUERY)
    right = [float((query @ token_vectors(bert, layer, text).T).max(1).values.sum()) for text in DOCUMENTS]
    scores = [each.outputs.score for each in llm.score(QUERY, DOCUMENTS, use_tqdm=False)]
    assert scores == pytest.approx(right, abs=1e-5)
    assert scores == [llm.score(QUERY, text, use_tqdm=False)[0].outputs.score for text in DOCUMENTS]
    assert llm.supported_tasks == ("token_embed", "score")
    with pytest.raises(InvalidRequest, match="each token has a vector"):
        llm.embed(DOCUMENTS)
    with pytest.raises(SettingsError, match="leave pooling_type out"):
        LLM(llm.settings.model, pooler_config={"pooling_type": "CLS"}, **TEXT)


def test_tokens_of_a_model_that_pools_the_first_token(bert, monkeypatch):
    """Vectors of all tokens come in their order from an engine whose texts are pooled at the first token."""
    llm, texts = LLM(str(bert[0]), pooler_config={"pooling_type": "CLS", "normalize": False}, **OPTIONS), texts_of(9, 1)

    def agree() -> bool:
        found = vectors(llm, texts, pooling_task="token_embed")
        rights = [states_of(bert[1], ids).numpy() for ids in texts]
        return all(np.allclose(one, right, atol=1e-5) for one, right in zip(found, rights, strict=True))

    assert agree()
    monkeypatch.setattr(pooled.ByToken, "add", lambda self, states: [self.join(state) for state in states[::-1]])
    assert not agree()
    with pytest.raises(InvalidRequest, match="dimensions has no meaning"):
        llm.encode(texts, PoolingParams(dimensions=8), use_tqdm=False, pooling_task="token_embed")


def test_a_classifier_of_modern_bert_equals_transformers(tmp_path):
    """A head with an activation and a norm, behind the mean of all tokens."""
    more = {"num_labels": 1, "classifier_pooling": "mean", "num_hidden_layers": 2}
    model = save_encoder("ModernBert", tmp_path, "ForSequenceClassification", **more)
    tokenizer, llm = save_wordpiece(tmp_path), LLM(str(tmp_path), execution_mode="eager", **TEXT)
    right = [float(logits_of(model, tokenizer, QUERY, document)) for document in DOCUMENTS]
    found = [each.outputs.score for each in llm.score(QUERY, DOCUMENTS, use_tqdm=False, pooling_params=RAW)]
    assert found == pytest.approx(right, abs=1e-5)
    assert found[::-1] == [e.outputs.score for e in llm.score(QUERY, DOCUMENTS[::-1], False, RAW)]


QWEN = {**SMALL, "max_position_embeddings": 900, "num_key_value_heads": 2, "head_dim": 24, "pad_token_id": 0}
RERANKER = {"architectures": ["Qwen3ForSequenceClassification"], "classifier_from_token": ["mat", "cat"],
            "is_original_qwen3_reranker": True}  # fmt: skip


@pytest.mark.parametrize("tied", [True, False])
def test_a_qwen3_reranker_equals_transformers(tied, tmp_path):
    """The score is the logit of one token less the logit of the other, behind the model's template."""
    model = save_encoder("Qwen3", tmp_path, "ForCausalLM", **QWEN, tie_word_embeddings=tied)
    tokenizer = save_wordpiece(tmp_path)
    plain = json.loads((tmp_path / "tokenizer.json").read_text()) | {"post_processor": None}
    (tmp_path / "tokenizer.json").write_text(json.dumps(plain))
    llm = LLM(str(tmp_path), hf_overrides=RERANKER, **TEXT | {"execution_mode": "eager"})
    template = llm.frontend.pooling.template
    assert template is not None

    def right(document: str) -> float:
        parts = template.before, template.body.format(QUERY, document), template.behind
        ids = [id for part in parts for id in tokenizer(part, add_special_tokens=False)["input_ids"]]
        with torch.inference_mode():
            logits = model(torch.tensor([ids])).logits[0, -1]
        no, yes = tokenizer.convert_tokens_to_ids(["mat", "cat"])
        return float(logits[yes] - logits[no])

    found = [each.outputs.score for each in llm.score(QUERY, DOCUMENTS, use_tqdm=False, pooling_params=RAW)]
    assert found == pytest.approx(list(map(right, DOCUMENTS)), abs=1e-5)
    written = template.before + template.body.format(QUERY, DOCUMENTS[0]) + template.behind
    assert llm.score(written, "", use_tqdm=False, pooling_params=RAW)[0].outputs.score == found[0]
    cut = llm.score(QUERY, "a " * 900, use_tqdm=False, truncate_prompt_tokens=-1)[0].prompt_token_ids
    behind = tokenizer(template.behind, add_special_tokens=False)["input_ids"]
    assert cut[-len(behind) :] == behind


def test_a_decoder_with_a_head_equals_transformers(tmp_path):
    """Several classes of the last token, and options that contradict the config."""
    labels = {0: "bad", 1: "fair", 2: "good"}
    model = save_encoder("Qwen3", tmp_path, "ForSequenceClassification", **QWEN, id2label=labels)
    llm, texts = LLM(str(tmp_path), execution_mode="eager", **OPTIONS), texts_of(3, 50)
    found = llm.classify([{"prompt_token_ids": ids} for ids in texts], use_tqdm=False, pooling_params=RAW)
    with torch.inference_mode():
        right = [model(torch.tensor([ids])).logits[0].numpy() for ids in texts]
    assert np.allclose([each.outputs.probs for each in found], right, atol=1e-5)
    for changes, why in (
        ({"classifier_from_token": ["cat"]}, "needs is_original_qwen3_reranker, or method"),
        ({"classifier_from_token": ["a", "b", "c"], "method": "from_2_way_softmax"}, "needs two tokens"),
        ({"classifier_from_token": "cat"}, "must be a list of tokens"),
    ):
        with pytest.raises(ModelError, match=why):
            LLM(str(tmp_path), hf_overrides=changes, **OPTIONS)
