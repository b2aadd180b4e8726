"""Texts longer than the model's window: the weighted mean of their chunks, with the same bits beside any others."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
import torch

from preheat import LLM, InvalidRequest, PoolingParams
from preheat.backends.cpu.llvm.attention import LlvmAttention
from preheat.errors import ContextTooLong
from preheat.frontend import embedding
from preheat.frontend.long_texts import weighted_mean
from preheat.settings import Settings
from preheat.startup import boot_engine
from preheat.verify.drive import Engine
from preheat.verify.paths import PathRunner
from preheat.verify.prompts import Size
from preheat.verify.verification import tight
from tests.cpu.test_encoders import whole_step
from tests.encoders import OPTIONS, save_encoder, states_of, texts_of

pytestmark = pytest.mark.filterwarnings("ignore")  # warnings of the libraries that write the checkpoints

WINDOW, MOST = 40, 210
CHUNKED = {"enable_chunked_processing": True, "max_embed_len": MOST}
LONG = {"max_model_len": WINDOW, "hf_overrides": {"matryoshka_dimensions": [8, 96]}}
LENGTHS = (1, 200, 5, WINDOW, WINDOW + 1, 97, 2 * WINDOW, MOST)


@pytest.fixture(scope="module")
def bert(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bert")
    return folder, save_encoder("Bert", folder).double()


@pytest.fixture(scope="module")
def llm(bert):
    return LLM(str(bert[0]), pooler_config=CHUNKED | {"pooling_type": "MEAN", "normalize": True}, **OPTIONS | LONG)


def vectors(llm: LLM, texts: list[list[int]], **params: object) -> list[np.ndarray]:
    given = [{"prompt_token_ids": ids} for ids in texts]
    return [each.outputs.data for each in llm.encode(given, PoolingParams(**params), use_tqdm=False)]


def reference(model, ids: list[int], *, cls: bool = False, normalize: bool = True, size: int = 96) -> np.ndarray:
    """Return the mean of the chunks' embeddings in float64, with their tokens as weights."""
    total = np.zeros(size)
    for chunk in (ids[start : start + WINDOW] for start in range(0, len(ids), WINDOW)):
        states = states_of(model, chunk)
        vector = (states[0] if cls else states.mean(0)).numpy()[:size]
        total += len(chunk) * (vector / np.linalg.norm(vector) if normalize else vector)
    return total / len(ids)


@pytest.mark.parametrize("params", [{}, {"normalize": False}, {"dimensions": 8}])
def test_equals_the_weighted_mean_of_transformers(params, bert, llm, monkeypatch):
    """Each chunk is pooled and normalized by itself; a mean without weights is another vector."""
    texts, asked = (
        texts_of(*LENGTHS),
        {"size": params.get("dimensions", 96), "normalize": params.get("normalize", True)},
    )
    rights = [reference(bert[1], ids, **asked) for ids in texts]
    for found, right in zip(vectors(llm, texts, **params), rights, strict=True):
        assert found.dtype == np.float32 and np.allclose(found, right, rtol=1e-4, atol=1e-5)
    monkeypatch.setattr(embedding, "weighted_mean", lambda some, weights: np.mean(some, axis=0))
    close = [
        np.allclose(*pair, rtol=1e-3, atol=1e-3) for pair in zip(vectors(llm, texts, **params), rights, strict=True)
    ]
    assert not close[LENGTHS.index(WINDOW + 1)] and not close[LENGTHS.index(97)]


def same_bits(llm: LLM) -> bool:
    """Return whether texts have the same bits alone, together and in another order."""
    texts = texts_of(*LENGTHS)
    alone = [vectors(llm, [ids])[0].tobytes() for ids in texts]
    turned = [each.tobytes() for each in vectors(llm, texts[::-1])][::-1]
    return alone == [each.tobytes() for each in vectors(llm, texts)] == turned


def test_the_same_bits_beside_any_other_texts(bert, llm, monkeypatch):
    """Neighbors, threads and the room of a step change no bit, nor does the option for a text that fits."""
    texts = texts_of(*LENGTHS)
    found = [each.tobytes() for each in vectors(llm, texts)]
    options = OPTIONS | LONG | {"num_threads": 1, "max_num_batched_tokens": WINDOW}
    small = LLM(str(bert[0]), pooler_config=CHUNKED | {"pooling_type": "MEAN"}, **options)
    assert [each.tobytes() for each in vectors(small, texts)] == found
    whole = LLM(str(bert[0]), pooler_config={"pooling_type": "MEAN"}, **OPTIONS | LONG)
    fit = [place for place, length in enumerate(LENGTHS) if length <= WINDOW]
    assert [each.tobytes() for each in vectors(whole, [texts[place] for place in fit])] == [found[i] for i in fit]
    assert same_bits(llm)
    monkeypatch.setattr(LlvmAttention, "plan", whole_step)
    assert not same_bits(llm)


TAKEN = ["texts in chunks", "texts in chunks, few blocks"]


def verified(folder, **changes) -> dict[str, bool]:
    """Return whether each path of preheat verify through chunks gives the vectors of the rule."""
    settings = Settings.load({**OPTIONS, "model": str(folder), "on_cold": "off", "pooler_config": CHUNKED, **changes})
    engine, paths = Engine(boot_engine, settings), PathRunner(Size(2, 1, 2, 20), lambda engine: [])
    found = [*paths.on(engine, "asked", TAKEN)]
    if paths.sets:
        few = tight(settings, paths.for_few_blocks, whole=engine.encodes, most=engine.ready.max_model_len)
        found += paths.on(Engine(boot_engine, few), "tight", TAKEN)
    assert all(result.prompts == 3 for result in found)
    return {result.path: result.first is None for result in found}


def test_preheat_verify_reads_chunks(bert, monkeypatch):
    """Both paths are taken where texts have chunks; a wrong mean, order or neighbor is seen."""
    assert verified(bert[0], **LONG) == dict.fromkeys(TAKEN, True)
    assert verified(bert[0], **LONG | {"pooler_config": CHUNKED | {"max_embed_len": WINDOW}}) == {}
    assert verified(bert[0], **LONG | {"max_num_batched_tokens": WINDOW - 1}) == {}
    faults = [
        (embedding, "weighted_mean", lambda some, weights: np.mean(some, axis=0)),
        (embedding, "weighted_mean", lambda some, weights: weighted_mean(some[::-1], weights)),
        (LlvmAttention, "plan", whole_step),
    ]
    for owner, name, fault in faults:
        with monkeypatch.context() as planted:
            planted.setattr(owner, name, fault)
            assert verified(bert[0], **LONG) == dict.fromkeys(TAKEN, False)


def test_chunks_begin_with_the_first_token(bert):
    """With CLS the first token of each chunk counts: special tokens are not added again, as in vLLM."""
    llm = LLM(str(bert[0]), pooler_config=CHUNKED | {"pooling_type": "CLS"}, **OPTIONS | LONG)
    (ids,) = texts_of(97)
    (output,) = llm.embed({"prompt_token_ids": ids}, use_tqdm=False)
    assert np.allclose(output.outputs.embedding, reference(bert[1], ids, cls=True), rtol=1e-4, atol=1e-5)
    assert output.prompt_token_ids == ids


def test_long_texts_are_counted(llm):
    """A text is one request of several sequences, and nothing is left of it."""
    metrics = llm.frontend.metrics
    before = metrics.prompt_tokens, sum(metrics.finished.values())
    vectors(llm, texts_of(97))
    assert (metrics.prompt_tokens, sum(metrics.finished.values())) == (before[0] + 97, before[1] + 3)
    assert metrics.waiting == metrics.running == llm.frontend.num_unfinished == 0


def test_texts_are_cut_or_refused(llm, monkeypatch):
    """The longest text has max_embed_len tokens; each token's vector needs a text that fits."""
    (ids,) = texts_of(MOST + 1)
    (right,) = vectors(llm, [ids[-97:]])
    cut = llm.encode({"prompt_token_ids": ids}, truncate_prompt_tokens=97, use_tqdm=False)
    assert cut[0].outputs.data.tobytes() == right.tobytes()
    most = llm.encode({"prompt_token_ids": ids}, truncate_prompt_tokens=-1, use_tqdm=False)
    assert most[0].prompt_token_ids == ids[1:]
    with pytest.raises(ContextTooLong, match=r"input length is 210 tokens.* has 211 tokens.*raise max_embed_len"):
        vectors(llm, [ids])
    with pytest.raises(InvalidRequest, match=r"truncate_prompt_tokens is 211, but the maximum .* is 210"):
        llm.encode({"prompt_token_ids": ids}, truncate_prompt_tokens=MOST + 1)
    with pytest.raises(ContextTooLong, match=r"context length is 40 tokens.* has 41 tokens"):
        llm.encode({"prompt_token_ids": ids[:41]}, pooling_task="token_embed")
    narrow = msgspec.structs.replace(llm.frontend.ready, max_prompt_len=39)
    monkeypatch.setattr(llm.frontend, "ready", narrow)
    with pytest.raises(ContextTooLong, match=r"has 40 tokens, but .* in one step, with room for 39"):
        vectors(llm, [ids[:41]])


def test_a_decoder_leaves_one_place_free(tmp_path):
    """The chunks of a decoder have one token less than its context, as its longest prompt has."""
    import transformers

    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.LlamaConfig(vocab_size=199, num_key_value_heads=1, **sizes)
    model = transformers.LlamaModel(config).eval()
    model.save_pretrained(tmp_path)
    llm = LLM(str(tmp_path), pooler_config=CHUNKED, **OPTIONS | {"max_model_len": WINDOW + 1})
    (ids,) = texts_of(97)
    (found,) = vectors(llm, [ids], normalize=False)
    ends = [states_of(model, ids[start : start + WINDOW])[-1] * len(ids[start : start + WINDOW])
            for start in range(0, 97, WINDOW)]  # fmt: skip
    assert np.allclose(found, (sum(ends) / 97).numpy(), rtol=1e-4, atol=1e-5)
    assert verified(tmp_path, max_model_len=WINDOW + 1) == dict.fromkeys(TAKEN, True)
