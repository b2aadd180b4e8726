"""New weights in place, with the digest of a fresh boot.

Every part of every family is updated: all or nothing.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from preheat import LLM, SamplingParams
from preheat.backends.cpu.backend import CpuBackend
from preheat.errors import InvalidRequest, ModelError
from preheat.model.files import BUNDLED_PATH
from preheat.model.loader import LoadedModel, load_model
from preheat.model.sources import GivenTensors, SafetensorsFiles, StoredTensors
from preheat.model.update import Update, is_packed, tensors_of
from preheat.schedule.prefix import PrefixCache
from preheat.settings import Settings
from tests.cpu.checkpoints import MODELS, save_checkpoint
from tests.cpu.test_boot_check import SMALL

PARTLY = "model.layers.1.self_attn.k_proj.weight"
GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
PROMPT = {"prompt_token_ids": list(range(40))}


def load(folder: Path, **options: object) -> LoadedModel:
    return load_model(Settings.load({"model": str(folder), "dtype": "float32", **options}), CpuBackend())


def update(model: LoadedModel, source: StoredTensors) -> None:
    with torch.no_grad():
        Update(model, source, CpuBackend()).swap()


def files(folder: Path, model: LoadedModel) -> StoredTensors:
    return SafetensorsFiles(folder, lambda source, out: out.copy_(source), model.spec.renames)


def given(model: LoadedModel, tensors: dict[str, Tensor]) -> StoredTensors:
    return StoredTensors("test", [GivenTensors(tensors)], lambda source, out: out.copy_(source), model.spec.renames)


def numbers(model: LoadedModel) -> list[Tensor]:
    return [each.to_dense() if is_packed(each) else each.clone() for each in tensors_of(model.weights)]


def same(a: list[Tensor], b: list[Tensor]) -> bool:
    return len(a) == len(b) and all(torch.equal(one, other) for one, other in zip(a, b, strict=True))


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Write two checkpoints of one model."""
    folders = tmp_path_factory.mktemp("one"), tmp_path_factory.mktemp("other")
    for seed, folder in enumerate(folders):
        save_checkpoint(MODELS["llama"], folder, seed=seed)
    return folders


@pytest.mark.parametrize(
    "name",
    ["llama tied", "qwen3", "gemma 3", "starcoder2", "gpt bigcode", "mixtral", "qwen2 moe", "mpt with six heads"],
)
@pytest.mark.parametrize("quantization", [None, "fp8"])
def test_every_part_is_that_of_a_fresh_load(name, quantization, tmp_path):
    for seed in (0, 1):
        (tmp_path / str(seed)).mkdir()
        save_checkpoint(MODELS[name], tmp_path / str(seed), seed=seed)
    old, new = (load(tmp_path / str(seed), quantization=quantization) for seed in (0, 1))
    before, addresses = numbers(old), [each.data_ptr() for each in tensors_of(old.weights) if not is_packed(each)]
    assert not same(before, numbers(new))
    update(old, files(tmp_path / "1", old))
    assert same(numbers(old), numbers(new))
    assert addresses == [each.data_ptr() for each in tensors_of(old.weights) if not is_packed(each)]
    update(old, files(tmp_path / "0", old))
    assert same(numbers(old), before)


def test_a_slice_of_a_fused_layer(pair, tmp_path):
    model, tensors = load(pair[0]), load_file(pair[0] / "model.safetensors")
    mixed = tensors | {PARTLY: load_file(pair[1] / "model.safetensors")[PARTLY]}
    shutil.copytree(pair[0], tmp_path, dirs_exist_ok=True)
    save_file(mixed, tmp_path / "model.safetensors", {"format": "pt"})
    update(model, given(model, {PARTLY: mixed[PARTLY]}))
    assert same(numbers(model), numbers(load(tmp_path)))
    assert not same(numbers(model), numbers(load(pair[0])))


REFUSED = {
    "unknown": (lambda t: {"model.layers.9.mlp.up_proj.weight": t[PARTLY]}, "unknown tensors: model.layers.9"),
    "shape": (lambda t: t | {PARTLY: t[PARTLY][:-1]}, r"k_proj.weight has shape \[63, 96\], needs \[64, 96\]"),
    "nan": (lambda t: t | {PARTLY: t[PARTLY] * torch.nan}, r"k_proj.weight of the checkpoint is not finite: 6,144"),
    "nothing": (lambda t: {}, "there are no tensors"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_a_refused_update_changes_nothing(what, pair):
    change, message = REFUSED[what]
    model = load(pair[0])
    before = numbers(model)
    with pytest.raises(ModelError, match=message):
        update(model, given(model, change(load_file(pair[1] / "model.safetensors"))))
    assert same(numbers(model), before)


def test_a_head_that_nothing_would_read_is_refused(tmp_path):
    """A tied model refuses a head, unless it repeats the table in the same update or after it."""
    save_checkpoint(MODELS["llama tied"], tmp_path)
    model, head = load(tmp_path), "lm_head.weight"
    table = load_file(tmp_path / "model.safetensors")["model.embed_tokens.weight"]
    before = numbers(model)
    for tensors in ({head: table + 1}, {head: table, "model.embed_tokens.weight": table + 1}):
        with pytest.raises(ModelError, match=r"lm_head\.weight differs from model\.embed_tokens\.weight"):
            update(model, given(model, tensors | {"model.norm.weight": torch.ones(table.shape[1])}))
        assert same(numbers(model), before)
    update(model, given(model, {head: table + 1, "model.embed_tokens.weight": table + 1}))
    assert torch.equal(model.weights.embedding, table + 1)
    update(model, given(model, {head: table + 1, "model.norm.weight": torch.ones(table.shape[1])}))


def test_a_quantized_layer_needs_all_its_tensors(pair):
    model = load(pair[0], quantization="fp8")
    with pytest.raises(ModelError, match=r"layers.1.self_attn.k_proj.weight cannot be updated alone: give .*q_proj"):
        update(model, given(model, {PARTLY: load_file(pair[1] / "model.safetensors")[PARTLY]}))


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(**SMALL, on_cold="raise")


@pytest.fixture
def restored(llm: LLM) -> Iterator[LLM]:
    """Return the engine with the weights of the boot, and restore them afterwards."""
    yield llm
    llm.update_weights(BUNDLED_PATH)


def tokens(llm: LLM) -> list[int]:
    return llm.generate(PROMPT, GREEDY, use_tqdm=False)[0].outputs[0].token_ids


def test_an_engine_with_new_weights_is_as_a_fresh_one(llm, changed, fresh):
    boot, said = llm.state.digest, tokens(llm)
    assert boot and boot != fresh[0].digest and said != fresh[1]
    llm.update_weights(changed, "step-1")
    assert (llm.state.weight_version, llm.state.digest) == ("step-1", fresh[0].digest)
    assert tokens(llm) == fresh[1]
    llm.update_weights(load_file(BUNDLED_PATH / "model.safetensors").items())
    assert llm.state.digest == boot and tokens(llm) == said
    llm.loop.scheduler.check()


def test_weights_with_logits_that_are_not_finite_are_taken_back(llm, changed):
    before, said = llm.state, tokens(llm)
    huge = {"model.norm.weight": torch.full_like(load_file(changed / "model.safetensors")["model.norm.weight"], 3e38)}
    with pytest.raises(InvalidRequest, match=r"the old weights stay, .* are not finite"):
        llm.update_weights(huge.items())
    assert llm.state == before and tokens(llm) == said


@pytest.mark.parametrize("stale", [False, True], ids=["", "planted: keys are not changed"])
def test_running_requests_go_on_with_the_new_weights(stale, restored, changed, fresh, monkeypatch):
    """A running request goes on with the new weights.

    Its keys and values are computed again. The control plants a cache that keeps its keys, and so would answer from the
    old weights.
    """
    if stale:
        monkeypatch.setattr(PrefixCache, "rekey", lambda *_: None)
        monkeypatch.setattr("preheat.schedule.blocks.BlockPool.forget_contents", lambda _: None)
    llm = restored
    state = llm._prepare(0, PROMPT, GREEDY, False, 0)
    llm.frontend.start([state])
    llm.advance()  # the prompt is read
    llm.pause("keep")
    held = llm._prepare(1, PROMPT, GREEDY, False, 0)
    llm.frontend.start([held])
    llm.update_weights(changed)
    llm.advance()
    assert not held.output().outputs[0].token_ids  # paused
    llm.resume()
    while llm.frontend.busy:
        llm.advance()
    first, again = (each.output().outputs[0].token_ids for each in (state, held))
    assert len(first) == 6
    assert (again == fresh[1]) is not stale


def test_pause(llm):
    state = llm._prepare(0, PROMPT, GREEDY, False, 0)
    llm.frontend.start([state])
    llm.advance()
    llm.pause("abort")
    assert llm.state.paused and state.output().outputs[0].finish_reason == "abort"
    with pytest.raises(InvalidRequest, match="paused"):
        tokens(llm)
    llm.resume()
    state = llm._prepare(0, PROMPT, GREEDY, False, 0)
    llm.frontend.start([state])
    llm.advance()
    llm.pause("wait")
    assert state.output().outputs[0].finish_reason == "length" and llm.state.paused
    llm.resume()
    assert tokens(llm) == state.output().outputs[0].token_ids
    llm.loop.scheduler.check()
    with pytest.raises(InvalidRequest, match="--enable-sleep-mode"):
        llm.sleep()
    assert not llm.state.paused


def test_a_device_that_knows_its_weights_refuses(llm, changed, monkeypatch):
    monkeypatch.setattr(
        llm.loop.executor.backend, "facts", replace(CpuBackend.facts, lacks={("updates",): "weights are baked in"})
    )
    before = llm.state
    with pytest.raises(InvalidRequest, match="cannot be used on cpu: weights are baked in"):
        llm.update_weights(changed)
    assert llm.state == before
