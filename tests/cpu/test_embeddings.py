"""Engines that pool: against transformers' hidden states, with the same bits beside any other rows."""

from __future__ import annotations

import json
import random
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from preheat import LLM, InvalidRequest, ModelError, PoolingParams, SettingsError
from preheat.backends.base.device import HostEvent
from preheat.errors import NotInvariant
from preheat.execution.pooler import Pooler
from preheat.ops.pooling import sum_rows
from preheat.pooling.pooling import Pooling, pooling_of
from preheat.schedule.sequence import Pooled
from preheat.settings import Settings
from preheat.startup import boot_engine, planned
from preheat.verify.prompts import Size, make_prompts
from preheat.verify.verification import Verification
from tests.cpu.checkpoints import MODELS, save_checkpoint

VOCAB = 199
OPTIONS = {
    "device": "cpu", "dtype": "float32", "num_threads": 1, "skip_tokenizer_init": True, "max_model_len": 256,
    "max_num_seqs": 4, "max_num_batched_tokens": 64, "block_size": 16, "num_gpu_blocks_override": 64,
}  # fmt: skip
LAST, MEAN = {"pooling_type": "LAST"}, {"pooling_type": "MEAN"}


def sentence_transformers(folder: Path, mode: str, *modules: str) -> None:
    """Write the files that sentence-transformers writes beside a checkpoint."""
    kinds = ["Transformer", "Pooling", *modules]
    paths = ["", *(f"{place}_{kind}" for place, kind in enumerate(kinds) if place)]
    items = [
        {"idx": place, "name": str(place), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for place, (kind, path) in enumerate(zip(kinds, paths, strict=True))
    ]
    (folder / "modules.json").write_text(json.dumps(items))
    (folder / "1_Pooling").mkdir(exist_ok=True)
    modes = {"pooling_mode_cls_token": False, "pooling_mode_mean_tokens": False, "pooling_mode_lasttoken": False}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps({"word_embedding_dimension": 96, **modes, mode: True}))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("llama")
    save_checkpoint(MODELS["llama"], folder)
    return folder


def prompts() -> list[list[int]]:
    """Return prompts of one token, of several chunks, and some with the beginning of others."""
    chance = random.Random(3)
    drawn = [[chance.randrange(VOCAB) for _ in range(length)] for length in (1, 2, 17, 40, 130, 199)]
    return [*drawn, [*drawn[4][:96], 5], drawn[4][:100], drawn[5]]


def hidden_states(folder: Path, ids: list[int]) -> torch.Tensor:
    """Return float32 [tokens, hidden] after the final norm, by transformers."""
    import transformers

    model = transformers.AutoModel.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.inference_mode():
        return model(torch.tensor([ids])).last_hidden_state[0]


def vectors(llm: LLM, some: list[list[int]], **options) -> list[np.ndarray]:
    outputs = llm.encode([{"prompt_token_ids": ids} for ids in some], use_tqdm=False, **options)
    return [output.outputs.data for output in outputs]


def same(one: list[np.ndarray], other: list[np.ndarray]) -> bool:
    return all(a.tobytes() == b.tobytes() for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma 3"])
def test_equals_transformers(name, tmp_path):
    """The mean and the last token, normalized or not, equal transformers.

    The output head is not even loaded.
    """
    save_checkpoint(MODELS[name], tmp_path)
    sentence_transformers(tmp_path, "pooling_mode_mean_tokens")
    mean = LLM(str(tmp_path), **OPTIONS)
    last = LLM(str(tmp_path), runner="pooling", pooler_config=LAST | {"normalize": True}, **OPTIONS)
    assert mean.loop.executor.decoder.spec.head is None
    assert [path for path, _ in mean.loop.executor.decoder.weights.linears()][-1].startswith("layers.")
    for ids in prompts()[2:5]:
        states = hidden_states(tmp_path, ids)
        assert np.allclose(vectors(mean, [ids])[0], states.mean(0).numpy(), rtol=1e-4, atol=1e-4)
        right = torch.nn.functional.normalize(states[-1], dim=0).numpy()
        assert np.allclose(vectors(last, [ids])[0], right, rtol=1e-4, atol=1e-4)
        raw = vectors(last, [ids], pooling_params=PoolingParams(normalize=False))[0]
        assert np.allclose(raw, states[-1].numpy(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("config", [LAST, MEAN])
def test_the_same_bits_in_every_way(checkpoint, config):
    """An embedding has the same bits in every way to compute it.

    The ways are alone, all at once, with a warm prefix cache, in other chunks and blocks, and with few blocks.
    """
    some = prompts()
    llm = LLM(str(checkpoint), pooler_config=config, **OPTIONS)
    alone = []
    for ids in some:
        llm.reset_prefix_cache()
        alone += vectors(llm, [ids])
    assert same(vectors(llm, some), alone)
    hits = llm.loop.scheduler.stats().prefix_hits
    assert same(vectors(llm, some[::-1])[::-1], alone)
    assert (llm.loop.scheduler.stats().prefix_hits > hits) is (config is LAST)  # a mean needs every state
    few = {"num_gpu_blocks_override": 18, "max_num_batched_tokens": 48, "enable_prefix_caching": False}
    for more in ({"max_num_batched_tokens": 256, "block_size": 32}, {"max_num_batched_tokens": 33}, few):
        assert same(vectors(LLM(str(checkpoint), pooler_config=config, **OPTIONS | more), some), alone)


def test_nothing_is_cold_and_the_check_at_boot_looks(checkpoint, monkeypatch):
    options = OPTIONS | {"skip_warmup": False, "boot_check": "full", "on_cold": "raise", "pooler_config": MEAN}
    llm = LLM(str(checkpoint), **options)
    vectors(llm, prompts())
    names = [item.name for item in llm.loop.packer.plan.items]
    assert [name for name in names if "sampler" in name] == []
    assert [name for name in names if name.startswith("(pooler")]
    assert "(check, pooled)" in names
    monkeypatch.setattr(Pooled, "add", by_chunks)
    with pytest.raises(NotInvariant, match=r"pooled: .* have another mean than at once"):
        LLM(str(checkpoint), **options)


VERIFIED = Size(prompts=6, runs=2, outputs=2, longest=400)
VERIFY = ["later runs", "prefix cache cold", "shuffled arrivals", "batches of 1 to 3", "chunks, few blocks"]


def verified() -> dict[str, bool]:
    """Return whether each path of preheat verify gives the bits of the first run."""
    options = {"runner": "pooling", "max_num_seqs": 8, "max_num_batched_tokens": 2048, "block_size": 32}
    options |= {"num_threads": 1, "dtype": "float32", "skip_warmup": True, "boot_check": "off", "on_cold": "off"}
    settings = Settings.load(options)

    def made(engine):
        return make_prompts(VERIFIED, engine.vocab_size, engine.ready.max_model_len)

    run = Verification(boot_engine, settings, made, VERIFIED)
    return {result.path: result.first is None for result in run.results()}


def test_preheat_verify_takes_its_paths(monkeypatch):
    """preheat verify takes its paths for a pooling engine.

    It finds a mean that is summed in the order of its chunks.
    """
    assert verified() == dict.fromkeys(VERIFY, True)
    monkeypatch.setattr(Pooled, "add", by_chunks)
    assert verified()["chunks, few blocks"] is False


def by_chunks(self, states):
    """Plant a sum of the chunks' sums, in the order of the chunks."""
    self.total += np.stack(states).sum(0)
    self.count += len(states)


def test_the_comparison_can_fail(checkpoint, monkeypatch):
    monkeypatch.setattr(Pooled, "add", by_chunks)
    found = [
        vectors(LLM(str(checkpoint), pooler_config=MEAN, **OPTIONS | {"max_num_batched_tokens": budget}), prompts())
        for budget in (33, 256)
    ]
    assert not same(*found)


def test_scores_and_forms_of_prompts():
    """A text, its token ids and a dictionary give the same embedding.

    The score is the cosine.
    """
    llm = LLM("bundled", runner="pooling", num_threads=1, max_model_len=64, max_num_seqs=4)
    texts = ["import os", "def add(a, b):"]
    ids = [llm.frontend.tokenizer.encode(text) for text in texts]
    by_text = [output.outputs.embedding for output in llm.embed(texts, use_tqdm=False)]
    assert [o.outputs.embedding for o in llm.embed(ids, use_tqdm=False)] == by_text
    assert [o.outputs.embedding for o in llm.embed([{"prompt": texts[0]}, {"prompt_token_ids": ids[1]}])] == by_text
    assert np.linalg.norm(by_text[0]) == pytest.approx(1, rel=1e-6)
    scores = [output.outputs.score for output in llm.score(texts[0], texts, use_tqdm=False)]
    assert scores == pytest.approx([1.0, float(np.dot(*by_text))], rel=1e-6)
    with pytest.raises(InvalidRequest, match="2 texts cannot be paired with 1"):
        llm.score(texts, texts[0])
    for call in (llm.generate, lambda prompt: llm.beam_search(prompt, None), llm.chat):
        with pytest.raises(InvalidRequest, match="does not support"):
            call([{"role": "user", "content": "x"}] if call == llm.chat else "x")
    with pytest.raises(InvalidRequest, match="matryoshka"):
        llm.embed("x", pooling_params=PoolingParams(dimensions=4))
    with pytest.raises(InvalidRequest, match=r"does not support LLM\.encode: start the engine with --runner pooling"):
        LLM("bundled", num_threads=1, max_model_len=64).embed("x")


def test_the_beginning_of_a_matryoshka_embedding(checkpoint):
    llm = LLM(str(checkpoint), pooler_config=LAST, hf_overrides={"matryoshka_dimensions": [8, 96]}, **OPTIONS)
    (whole,) = vectors(llm, [[1, 2, 3]], pooling_params=PoolingParams(normalize=False))
    (short,) = vectors(llm, [[1, 2, 3]], pooling_params=PoolingParams(dimensions=8))
    assert np.allclose(short, whole[:8] / np.linalg.norm(whole[:8]), rtol=1e-6)
    with pytest.raises(InvalidRequest, match="must be one of 8, 96"):
        llm.encode([[1]], PoolingParams(dimensions=9))


def test_pooling_follows_files_and_options(tmp_path):
    def found(**options) -> Pooling | None:
        return pooling_of(Settings.load(options), tmp_path, {})

    chunked = {"enable_chunked_processing": True, "max_embed_len": 9}
    assert found() is None
    assert found(pooler_config=MEAN | chunked).max_embed_len == 9
    assert found(pooler_config=MEAN | {"enable_chunked_processing": False}).max_embed_len is None
    with pytest.raises(SettingsError, match="each token has a vector: leave it out"):
        found(pooler_config=chunked | {"pooling_type": "ALL"})
    assert found(runner="pooling") == found(task="embed") == found(convert="embed") == Pooling("LAST", True)
    assert found(override_pooler_config=MEAN | {"normalize": False}) == Pooling("MEAN", False)
    sentence_transformers(tmp_path, "pooling_mode_lasttoken", "Normalize")
    assert found() == Pooling("LAST", True)
    assert found(runner="generate") is None
    sentence_transformers(tmp_path, "pooling_mode_mean_tokens")
    assert found() == Pooling("MEAN", False)
    sentence_transformers(tmp_path, "pooling_mode_cls_token")
    assert found() == Pooling("CLS", False)
    sentence_transformers(tmp_path, "pooling_mode_max_tokens")
    assert found() == Pooling("MAX", False)
    sentence_transformers(tmp_path, "pooling_mode_attention")
    with pytest.raises(ModelError, match="asks for attention; supported are lasttoken, mean, cls, max"):
        found()
    sentence_transformers(tmp_path, "pooling_mode_mean_tokens", "Dropout")
    with pytest.raises(ModelError, match="module Dropout is not supported"):
        found()
    sentence_transformers(tmp_path, "pooling_mode_mean_tokens")
    (tmp_path / "sentence_bert_config.json").write_text('{"max_seq_length": 64, "do_lower_case": false}')
    assert found() == Pooling("MEAN", False, max_length=64)
    (tmp_path / "sentence_bert_config.json").write_text('{"do_lower_case": true}')
    with pytest.raises(ModelError, match="do_lower_case is not served"):
        found()
    for options, why in (
        ({"pooler_config": chunked | {"max_embed_len": True}}, "max_embed_len is True, but must be a whole number"),
        ({"pooler_config": chunked | {"max_embed_len": 0}}, "at least 1"),
        ({"pooler_config": chunked | {"enable_chunked_processing": 1}}, "must be true or false"),
        ({"pooler_config": {"enable_chunked_processing": True}}, "needs max_embed_len"),
        ({"pooler_config": {"max_embed_len": 9}}, "add enable_chunked_processing"),
        ({"runner": "pooling", "convert": "none"}, "contradict"),
        ({"convert": "classify"}, "no head for classes"),
        ({"convert": "reward"}, "no reward models are run"),
        ({"runner": "generate", "task": "embed"}, "contradict"),
        ({"runner": "generate", "pooler_config": LAST}, "drop it"),
        ({"pooler_config": {"pooling_type": "STEP"}}, "STEP is not supported"),
        ({"pooler_config": {"softmax": True}}, "'softmax' is not one of"),
    ):
        with pytest.raises(SettingsError, match=why):
            found(**options)


@pytest.mark.parametrize(
    ("architecture", "pools"),
    [("LlamaForCausalLM", False), ("LlamaModel", True), ("GPT2LMHeadModel", False), ("ChatModel", False),
     ("XForTextEncoding", True), ("EmbeddingModel", True), ("LlavaForConditionalGeneration", False)],
)  # fmt: skip
def test_the_architecture_decides(architecture, pools, tmp_path):
    """The architecture decides unless an option does; convert none changes no architecture."""

    def found(**options) -> bool:
        return pooling_of(Settings.load(options), tmp_path, {"architectures": [architecture]}) is not None

    assert found() == found(convert="none") == pools
    assert found(runner="pooling") and found(convert="embed")
    if pools:
        assert found(runner="pooling", convert="none")
        with pytest.raises(ModelError, match="no output head"):
            found(runner="generate")
    else:
        assert not found(runner="generate")


def test_a_checkpoint_without_an_output_head(checkpoint, tmp_path):
    """A checkpoint of AutoModel lacks the first part of its names.

    It pools, and anything else is refused.
    """
    import transformers

    transformers.AutoModel.from_pretrained(checkpoint, dtype=torch.float32).save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["architectures"] == ["LlamaModel"]
    options = OPTIONS | {"pooler_config": MEAN}
    some = prompts()[:3]
    assert same(vectors(LLM(str(tmp_path), **options), some), vectors(LLM(str(checkpoint), **options), some))
    with pytest.raises(ModelError, match="no output head"):
        LLM(str(tmp_path), runner="generate", **OPTIONS)


def test_the_plan_is_printed(checkpoint):
    text = planned(Settings.load({"model": str(checkpoint), "pooler_config": MEAN, "device": "cpu"}))
    kinds = [line.split()[0] for line in text.splitlines() if line]
    assert "pooler" in kinds
    assert "sampler" not in kinds


def test_options_that_exclude_pooling_are_refused(checkpoint):
    drafts = {"speculative_config": {"method": "ngram", "num_speculative_tokens": 2}}
    for name, more in {"speculative_config": drafts, "enable_lora": {"enable_lora": True}}.items():
        with pytest.raises(SettingsError, match=rf"pooling \(runner\) and .*{name}.* do not work together"):
            LLM(str(checkpoint), runner="pooling", **OPTIONS | more)
    llm = LLM(str(checkpoint), runner="pooling", **OPTIONS)
    with pytest.raises(InvalidRequest, match="maximum context length is 256"):
        vectors(llm, [[1] * 256])


@pytest.mark.parametrize("on_host", [True, False])
def test_sums_are_of_the_states_that_are_read(on_host):
    """States may come in float32 of a model in bfloat16: each is rounded before it is added."""
    facts = SimpleNamespace(on_host=on_host)
    host = SimpleNamespace(device="cpu", host_copy=torch.zeros_like, event=HostEvent, sum_rows=sum_rows, facts=facts)
    pooler = Pooler(host, SimpleNamespace(max_num_seqs=2, max_sampled=40), 32, torch.bfloat16)
    states = torch.randn(40, 32, generator=torch.Generator().manual_seed(0))
    pooler.report(states)
    pooler.add_up(0, np.array([0, 1, 40]))
    pooler.fetch(0, tokens=True, reports=True)
    read = pooler.states(0, 40)
    for found, rows in zip(pooler.sums(0, 2), (read[:1], read[1:]), strict=True):
        assert found.tobytes() == rows.sum(axis=0, dtype=np.float32).tobytes()
    assert pooler.sums(0, 2)[0].tobytes() != states[0].numpy().tobytes()
