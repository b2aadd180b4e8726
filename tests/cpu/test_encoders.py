"""Encoders: against transformers' hidden states, with the same bits beside any other texts."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from functools import reduce

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from preheat import LLM, ModelError, PoolingParams, SettingsError
from preheat.backends.cpu.llvm.attention import LlvmAttention
from preheat.errors import ContextTooLong, NotInvariant
from preheat.execution.input_batch import Packer
from preheat.model.pooled_head import HeadLayer
from preheat.settings import Settings
from preheat.startup import boot_engine, planned
from preheat.verify.prompts import Size, make_prompts
from preheat.verify.verification import Verification
from tests.encoders import OPTIONS, SMALL, save_encoder, states_of, texts_of

pytestmark = pytest.mark.filterwarnings("ignore")  # warnings of the libraries that write the checkpoints

MEAN = {"pooling_type": "MEAN", "normalize": False}
AS_IT_IS = PoolingParams(normalize=False)


@pytest.fixture(scope="module")
def bert(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bert")
    return folder, save_encoder("Bert", folder)


@pytest.fixture(scope="module")
def llm(bert):
    return LLM(str(bert[0]), pooler_config=MEAN, **OPTIONS)


def vectors(llm: LLM, texts: list[list[int]]) -> list[np.ndarray]:
    outputs = llm.encode([{"prompt_token_ids": ids} for ids in texts], use_tqdm=False)
    return [output.outputs.data for output in outputs]


def cosine(one: np.ndarray, other: np.ndarray) -> float:
    return float(one @ other / np.linalg.norm(one) / np.linalg.norm(other))


@pytest.mark.parametrize(
    ("family", "pooling", "mode"),
    [("Bert", "CLS", "eager"), ("Bert", "MEAN", "llvm"), ("XLMRoberta", "CLS", "llvm"), ("Roberta", "MEAN", "eager"),
     ("DistilBert", "LAST", "llvm"), ("NomicBert", "MEAN", "llvm"), ("ModernBert", "CLS", "llvm"),
     ("ModernBert", "MEAN", "eager"), ("MPNet", "MEAN", "llvm"), ("MPNet", "CLS", "eager"), ("Gte", "CLS", "llvm")],
)  # fmt: skip
def test_equals_transformers(family, pooling, mode, tmp_path):
    """The states of the first, the last and all tokens equal transformers, for texts up to the longest one."""
    model = save_encoder(family, tmp_path)
    config = {"pooling_type": pooling, "normalize": False}
    llm = LLM(str(tmp_path), pooler_config=config, execution_mode=mode, **OPTIONS)
    texts = texts_of(1, 2, 37, 298)
    for ids, found in zip(texts, vectors(llm, texts), strict=True):
        states = states_of(model, ids)
        right = {"CLS": states[0], "LAST": states[-1], "MEAN": states.mean(0)}[pooling].numpy()
        assert cosine(found, right) >= 0.99999
        assert np.allclose(found, right, rtol=1e-4, atol=1e-5)
        assert vectors(llm, [ids])[0].tobytes() == found.tobytes()


def test_windows_of_modern_bert_token_by_token(tmp_path):
    """Each token's state equals transformers, where windows end and begin; a window one wider is seen."""
    model, texts = save_encoder("ModernBert", tmp_path), texts_of(12, 13, 14, 24, 25, 26, 61, 257)
    options = OPTIONS | {"pooler_config": {"pooling_type": "CLS"}}
    rights = [states_of(model, ids).numpy() for ids in texts]

    def states(**more):
        llm = LLM(str(tmp_path), **options, **more)
        given = [{"prompt_token_ids": ids} for ids in texts]
        outputs = llm.encode(given, use_tqdm=False, pooling_task="token_embed", pooling_params=AS_IT_IS)
        return [output.outputs.data for output in outputs]

    for mode in ("eager", "llvm"):
        for found, right in zip(states(execution_mode=mode), rights, strict=True):
            assert found.shape == right.shape
            assert np.abs(found - right).max() < 2e-5
    wider = states(hf_overrides={"local_attention": 26})
    differing = [np.abs(one - right).max(1) > 1e-4 for one, right in zip(wider, rights, strict=True)]
    assert not differing[1].any()  # 13 tokens: a window reaches 12 away, over the whole text
    assert all(each.any() for each in differing[2:])


def whole_step(self, step, tables):
    """Plant ends of the longest row in all rows."""
    work = plan(self, step, tables)
    work.ends = np.full_like(work.ends, work.ends.max())
    return work


plan = LlvmAttention.plan


def same_bits(llm: LLM) -> bool:
    """Return whether texts have the same bits alone, together and in another order."""
    texts = texts_of(1, 300, 2, 64, 17, 257, 130, 5, 5, 80)
    alone = [vectors(llm, [ids])[0].tobytes() for ids in texts]
    together = [each.tobytes() for each in vectors(llm, texts)]
    turned = [each.tobytes() for each in vectors(llm, texts[::-1])][::-1]
    return alone == together == turned


def test_the_same_bits_beside_any_other_texts(bert, llm, monkeypatch):
    """A text has the same bits alone and beside others, on any number of threads, and the comparison can fail."""
    texts = texts_of(300, 64, 7)
    found = [each.tobytes() for each in vectors(llm, texts)]
    other = LLM(str(bert[0]), pooler_config=MEAN, **OPTIONS | {"num_threads": 1, "max_num_batched_tokens": 301})
    assert [each.tobytes() for each in vectors(other, texts)] == found
    assert same_bits(llm)
    monkeypatch.setattr(LlvmAttention, "plan", whole_step)
    assert not same_bits(llm)


def test_a_vector_does_not_wait_for_the_next_step(llm, monkeypatch):
    """A step's vectors are delivered behind it: no other step comes first."""

    def finished() -> list[bool]:
        states = llm.prepared_to_pool([{"prompt_token_ids": ids} for ids in texts_of(64, 5)], AS_IT_IS, None, None)
        llm.start(states)
        llm.advance()
        found = [state.finished for state in states]
        while llm.frontend.busy:
            llm.advance()
        return found

    assert finished() == [True, True]
    monkeypatch.setattr(llm.loop, "delivers_late", True)
    assert finished() == [False, False]


def test_a_text_is_read_in_one_step(bert, llm):
    """The longest text is read whole; a longer one, or one beyond the tokens of a step, is refused."""
    steps = llm.loop.scheduler.limits.max_num_batched_tokens
    assert (steps, llm.frontend.limits().max_model_len) == (1024, 300)
    assert vectors(llm, texts_of(300))[0].shape == (96,)
    with pytest.raises(
        ContextTooLong, match=r"maximum context length is 300 tokens\. However, your text has 301 tokens"
    ):
        vectors(llm, texts_of(301))
    small = LLM(str(bert[0]), pooler_config=MEAN, **OPTIONS | {"max_num_batched_tokens": 100})
    assert vectors(small, texts_of(100))[0].tobytes() == vectors(llm, texts_of(100))[0].tobytes()
    with pytest.raises(ContextTooLong, match="room for 100"):
        vectors(small, texts_of(101))
    cut = llm.encode([{"prompt_token_ids": texts_of(400)[0]}], truncate_prompt_tokens=-1, use_tqdm=False)
    assert len(cut[0].prompt_token_ids) == 300


def shifted(self, *step):
    """Plant states of the step's first tokens in place of the row's."""
    rows, tokens = states_wanted(self, *step)
    return rows, tokens - tokens[np.searchsorted(rows, rows)]


states_wanted = Packer._states_of


def test_nothing_is_cold_and_the_check_at_boot_looks(bert, monkeypatch):
    """No step is cold after the warm-up; only the check of whole texts sees states of another row."""
    options = OPTIONS | {"skip_warmup": False, "boot_check": "quick", "on_cold": "raise", "max_model_len": 90}
    options |= {"max_num_batched_tokens": 192, "max_num_seqs": 3, "pooler_config": {"pooling_type": "CLS"}}
    options |= {"determinism_warmup_iterations": 1}
    llm = LLM(str(bert[0]), **options)
    vectors(llm, texts_of(1, 90, 2, 64))
    names = [item.name for item in llm.loop.packer.plan.items if item.kind == "check"]
    assert "(check, whole texts)" in names
    assert not {"(check, chunked)", "(check, prefix hit)", "(check, decode)", "(check, pooled)"} & set(names)
    monkeypatch.setattr(Packer, "_states_of", shifted)
    with pytest.raises(NotInvariant, match=r"whole texts: .* have other states beside other texts than alone"):
        LLM(str(bert[0]), **options)


VERIFIED = Size(prompts=6, runs=2, outputs=2, longest=250)
VERIFY = ["later runs", "prefix cache cold", "shuffled arrivals", "batches of 1 to 3", "chunks, few blocks"]


def verified(folder) -> dict[str, bool]:
    """Return whether each path of preheat verify gives the bits of the first run."""
    settings = replace(Settings.load({**OPTIONS, "model": str(folder), "on_cold": "off"}))

    def made(engine):
        return make_prompts(VERIFIED, engine.vocab_size, engine.ready.max_model_len)

    run = Verification(boot_engine, settings, made, VERIFIED)
    return {result.path: result.first is None for result in run.results()}


def test_preheat_verify_takes_its_paths(bert, monkeypatch):
    assert verified(bert[0]) == dict.fromkeys(VERIFY, True)
    monkeypatch.setattr(LlvmAttention, "plan", whole_step)
    assert verified(bert[0])["batches of 1 to 3"] is False


def drifting(self, x):
    """Plant a head whose numbers grow with its calls."""
    DRIFT.append(1)
    return head_layer(self, x) + np.float32(len(DRIFT) * 1e-6)


DRIFT, head_layer = list[int](), HeadLayer.__call__


def test_preheat_verify_sees_the_heads_of_mpnet(tmp_path, monkeypatch):
    """Biases of distances, a head for classes, and the states of all tokens are in the paths; faults are found."""
    save_encoder("MPNet", tmp_path, "ForSequenceClassification", num_labels=3, num_hidden_layers=1)
    assert verified(tmp_path) == dict.fromkeys(VERIFY, True)
    with monkeypatch.context() as planted:
        planted.setattr(HeadLayer, "__call__", drifting)
        assert set(verified(tmp_path).values()) == {False}
    monkeypatch.setattr(Packer, "_states_of", shifted)
    assert verified(tmp_path)["batches of 1 to 3"] is False


def test_a_checkpoint_with_a_head_and_old_names(bert, llm, tmp_path):
    """Names with the prefix of the model, and norms with the names of old checkpoints, are read."""
    tensors = load_file(bert[0] / "model.safetensors")
    old = {
        f"bert.{name}".replace("Norm.weight", "Norm.gamma").replace("Norm.bias", "Norm.beta"): each
        for name, each in tensors.items()
    }
    save_file(old | {"cls.predictions.bias": tensors["pooler.dense.bias"].clone()}, tmp_path / "model.safetensors")
    config = (bert[0] / "config.json").read_text().replace('"BertModel"', '"BertForMaskedLM"')
    (tmp_path / "config.json").write_text(config)
    other = LLM(str(tmp_path), pooler_config=MEAN, **OPTIONS)
    texts = texts_of(20)
    assert vectors(other, texts)[0].tobytes() == vectors(llm, texts)[0].tobytes()


def test_the_names_of_nomic_bert(tmp_path):
    """The Hub has other names of fields and tensors than transformers, which writes the Hub's tensors."""
    model, texts = save_encoder("NomicBert", tmp_path), texts_of(3, 40)
    assert any("attn.Wqkv" in name for name in load_file(tmp_path / "model.safetensors"))
    right = vectors(LLM(str(tmp_path), pooler_config=MEAN, **OPTIONS), texts)
    config = (tmp_path / "config.json").read_text()
    own = {"n_embd": 96, "n_head": 4, "n_layer": 2, "n_inner": 160, "n_positions": 300, "layer_norm_epsilon": 1e-12}
    own |= {"vocab_size": 199, "rotary_emb_base": 1000, "activation_function": "swiglu", "rotary_emb_fraction": 1.0}
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["NomicBertModel"], **own}))
    found = [vectors(LLM(str(tmp_path), pooler_config=MEAN, **OPTIONS), texts)]
    (tmp_path / "config.json").write_text(config)
    save_file({name: each.clone() for name, each in model.named_parameters()}, tmp_path / "model.safetensors")
    found.append(vectors(LLM(str(tmp_path), pooler_config=MEAN, **OPTIONS), texts))
    assert all(one.tobytes() == other.tobytes() for some in found for one, other in zip(some, right, strict=True))


def test_the_names_and_the_rope_of_gte_on_the_hub(tmp_path):
    """The Hub's name is New, and its kind of rope multiplies frequency i by factor ** (-2 (i + 1) / d)."""
    model, texts = save_encoder("Gte", tmp_path, type_vocab_size=0), texts_of(3, 40, 290)
    names = load_file(tmp_path / "model.safetensors").keys()
    assert {"encoder.layer.0.attention.qkv_proj.bias", "encoder.layer.0.mlp.up_gate_proj.weight"} <= names
    own = {name: getattr(model.config, name) for name in (*SMALL, "type_vocab_size")}
    own |= {"rope_theta": 2e4, "rope_scaling": {"type": "ntk", "factor": 8.0}, "position_embedding_type": "rope"}
    own |= {"layer_norm_type": "layer_norm", "pack_qkv": True, "unpad_inputs": True, "logn_attention_scale": False}
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["NewModel"], **own}))
    steps = torch.arange(12)
    frequencies = 2e4 ** (-2 * steps / 24) * 8 ** (-2 * (steps + 1) / 24)
    model.rotary_emb.inv_freq = frequencies.float()
    llm = LLM(str(tmp_path), pooler_config={"pooling_type": "LAST", "normalize": False}, **OPTIONS)
    for ids, found in zip(texts, vectors(llm, texts), strict=True):
        assert np.allclose(found, states_of(model, ids)[-1].numpy(), rtol=1e-4, atol=1e-5)
    for changes, why in (
        ({"rope_scaling": {"type": "ntk"}}, "needs a factor"),
        ({"position_embedding_type": "absolute"}, "'absolute' is not supported, only 'rope'"),
        ({"logn_attention_scale": True}, "logn_attention_scale True"),
    ):
        with pytest.raises(ModelError, match=why):
            planned(Settings.load({"model": str(tmp_path), "hf_overrides": changes, "device": "cpu"}))


def test_the_names_of_jinas_own_code_for_xlm_roberta(tmp_path):
    """Query, key and value lie in one tensor, and modules have other names, as in jina-reranker-v2."""
    save_encoder("XLMRoberta", tmp_path)
    right = vectors(LLM(str(tmp_path), pooler_config=MEAN, **OPTIONS), texts_of(40))
    tensors, start = load_file(tmp_path / "model.safetensors"), "encoder.layer.{}.attention.self.{}.{}"
    for layer, end in itertools.product((0, 1), ("weight", "bias")):
        parts = [tensors.pop(start.format(layer, name, end)) for name in ("query", "key", "value")]
        tensors[f"encoder.layer.{layer}.mixer.Wqkv.{end}"] = torch.cat(parts)
    names = {
        "encoder.layer.": "encoder.layers.", "embeddings.LayerNorm": "emb_ln", "attention.output.dense":
        "mixer.out_proj", "attention.output.LayerNorm": "norm1", "intermediate.dense": "mlp.fc1",
        "output.dense": "mlp.fc2", "output.LayerNorm": "norm2",
    }  # fmt: skip
    hub = {f"roberta.{reduce(lambda old, pair: old.replace(*pair), names.items(), name)}": each
           for name, each in tensors.items()}  # fmt: skip
    save_file(hub, tmp_path / "model.safetensors")
    found = vectors(LLM(str(tmp_path), pooler_config=MEAN, **OPTIONS), texts_of(40))
    assert found[0].tobytes() == right[0].tobytes()


TASKS = ["retrieval.query", "separation"]


def save_tasks(folder):
    """Write Jina embeddings v3 as its repository does, and return transformers' model with the second task's weights.

    Matrices of tasks lie beside each weight: the sum of their product and the weight is used.
    """
    model = save_encoder("JinaEmbeddingsV3", folder)
    tensors, draw = {}, torch.Generator().manual_seed(1)
    for name, each in load_file(folder / "model.safetensors").items():
        if each.dim() < 2:
            tensors[f"roberta.{name}"] = each
            continue
        module = f"roberta.{name.removesuffix('.weight')}.parametrizations.weight"
        sizes = (each.shape[0], 3), (3, each.shape[1])
        tall, wide = (torch.randn(2, *size, generator=draw) * 0.2 for size in sizes)
        letters = "AB" if "_embeddings" in name else "BA"
        tensors |= {f"{module}.original": each, f"{module}.0.lora_{letters[0]}": tall}
        tensors[f"{module}.0.lora_{letters[1]}"] = wide
        changed = each + 0.5 * tall[1] @ wide[1]
        for part, right in zip(parts_of(model, name), changed.chunk(3 if "Wqkv" in name else 1), strict=True):
            part.data.copy_(right)
    save_file(tensors, folder / "model.safetensors")
    own = {name: getattr(model.config, name) for name in (*SMALL, "type_vocab_size", "layer_norm_eps", "pad_token_id")}
    own |= {"lora_adaptations": TASKS, "lora_rank": 3, "lora_alpha": 1.5, "position_embedding_type": "rotary"}
    config = {"architectures": ["XLMRobertaModel"], "rotary_emb_base": 20000.0, **own}
    (folder / "config.json").write_text(json.dumps(config))
    return model


def parts_of(model, name):
    """Return the parameters of transformers' model for tensor ``name`` of the Hub."""
    own = dict(model.named_parameters())
    if "mixer.Wqkv" in name:
        layer = name.split(".")[2]
        return [own[f"layers.{layer}.self_attn.{letter}_proj.weight"] for letter in "qkv"]
    names = {"encoder.layers": "layers", "mixer.out_proj": "self_attn.o_proj"}
    for old, new in names.items():
        name = name.replace(old, new)
    return [own[name]]


def test_the_tasks_of_jina_embeddings(tmp_path):
    """Vectors equal transformers with the chosen task's weights, in layers and tables; a task must be chosen."""
    model, texts = save_tasks(tmp_path), texts_of(3, 40, 298)
    with pytest.raises(ModelError, match=r"\['retrieval.query', 'separation'\], and lora_task names none of them"):
        planned(Settings.load({"model": str(tmp_path), "device": "cpu"}))
    llm = LLM(str(tmp_path), pooler_config=MEAN, hf_overrides={"lora_task": TASKS[1]}, **OPTIONS)
    for ids, found in zip(texts, vectors(llm, texts), strict=True):
        right = states_of(model, ids).mean(0).numpy()
        assert np.allclose(found, right, rtol=1e-4, atol=1e-5) and cosine(found, right) >= 0.99999
        assert vectors(llm, [ids])[0].tobytes() == found.tobytes()


def test_what_an_encoder_does_not_do_is_refused_by_name(bert):
    for more, why in (
        ({"enable_lora": True}, "adapters .* an encoder reads only text"),
        ({"tensor_parallel_size": 2}, "nobody has tried ranks"),
        ({"kv_offloading_size": 1}, "keeps nothing in the prefix cache"),
    ):
        with pytest.raises(SettingsError, match=why):
            LLM(str(bert[0]), **OPTIONS | more | {"execution_mode": "eager"})
    with pytest.raises(ModelError, match="the first token of a decoder sees no other"):
        LLM("bundled", runner="pooling", pooler_config={"pooling_type": "CLS"}, **OPTIONS)
    for changes, why in (
        ({"position_embedding_type": "relative_key"}, "relative_key"),
        ({"is_decoder": True}, "is_decoder"),
        ({"hidden_act": "relu"}, "activation 'relu'"),
    ):
        with pytest.raises(ModelError, match=why):
            planned(Settings.load({"model": str(bert[0]), "hf_overrides": changes, "device": "cpu"}))
    text = planned(Settings.load({"model": str(bert[0]), "device": "cpu"}))
    assert "pooler" in text
