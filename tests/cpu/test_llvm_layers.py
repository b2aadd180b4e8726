"""Execution mode llvm beyond one prompt's logits: logprobs, pooling, images, narrow caches, updates, faults.

``test_family_engines.py`` has every kind of dense layer.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from preheat import LLM, SamplingParams
from preheat.ops.float8 import round_to
from preheat.ops.norm import PlusOneNorm
from tests.cpu import test_embeddings as embeddings
from tests.cpu import test_llava as llava
from tests.cpu.checkpoints import MODELS, save_checkpoint
from tests.cpu.test_family_engines import DENSE, LLVM, OTHER, differing, prompts, run
from tests.llava import save_llava

pytest.importorskip("llvmlite", reason="llvmlite is not installed: pip install llvmlite")
from preheat.backends.cpu.llvm import model, norms, products, targets

RAW = embeddings.LAST | {"normalize": False}


def test_logprobs_of_prompts(tmp_path: Path) -> None:
    reference, some = save_checkpoint(MODELS["gemma 3"], tmp_path), prompts()
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)

    def of_prompts(llm: LLM) -> list[list[float]]:
        outputs = llm.generate(some, params, use_tqdm=False)
        return [
            [entry[token].logprob for token, entry in zip(ids[1:], output.prompt_logprobs[1:], strict=True)]
            for ids, output in zip(some, outputs, strict=True)
        ]

    found = of_prompts(LLM(str(tmp_path), **LLVM))
    for ids, ours in zip(some, found, strict=True):
        theirs = reference(torch.tensor(ids))[:-1].log_softmax(-1).gather(1, torch.tensor(ids[1:]).unsqueeze(1))
        assert np.allclose(ours, theirs.squeeze(1).numpy(), atol=3e-5)
    assert of_prompts(LLM(str(tmp_path), **LLVM | OTHER)) == found


def test_pooled_states(tmp_path: Path) -> None:
    save_checkpoint(MODELS["qwen3"], tmp_path)
    options = {**embeddings.OPTIONS, "execution_mode": "llvm", "runner": "pooling", "pooler_config": RAW}
    llm, some = LLM(str(tmp_path), **options), embeddings.prompts()
    found = embeddings.vectors(llm, some)
    for ids, ours in list(zip(some, found, strict=True))[2:5]:
        assert np.allclose(ours, embeddings.hidden_states(tmp_path, ids)[-1].numpy(), rtol=1e-4, atol=1e-4)
    other = LLM(str(tmp_path), **options | OTHER)
    assert embeddings.same([embeddings.vectors(other, [ids])[0] for ids in some], found)


def test_images(tmp_path: Path) -> None:
    """The tower's linear layers are functions too; its norms and attention stay torch's."""
    reference = save_llava(tmp_path)
    options = {**llava.OPTIONS, "execution_mode": "llvm", "num_threads": 1}
    found = llava.run(LLM(str(tmp_path), **options))
    for prompt, each in zip(llava.PROMPTS, found, strict=True):
        assert llava.error(reference, prompt, each) <= 1e-5
    other = LLM(str(tmp_path), **options | OTHER)
    assert all(llava.same([llava.run(other, [prompt])[0] for prompt in llava.PROMPTS], found))


# --- caches of narrow numbers ---


def scaled_checkpoint(folder: Path, step: tuple[float, float] = (0.05, 0.02)) -> tuple[float, float]:
    """Write a checkpoint with scales of keys and values, ``step`` more in each layer; return the first ones."""
    save_checkpoint(DENSE["llama of odd sizes"], folder)
    scales = [(step[0] * (layer + 1), step[1] * (layer + 1)) for layer in range(3)]
    tensors = load_file(folder / "model.safetensors")
    for layer, pair in enumerate(scales):
        for kind, scale in zip("kv", pair, strict=True):
            tensors[f"model.layers.{layer}.self_attn.{kind}_proj.output_scale"] = torch.tensor([scale])
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return scales[0]


def cached(llm: LLM) -> Tensor:
    """Return the first layer's cache after three prompts, without the pad block."""
    llm.generate(prompts(), SamplingParams(temperature=0, max_tokens=1), use_tqdm=False)
    return llm.loop.executor.cache.layers[0][1:]


@pytest.mark.parametrize("name", ["fp8_e4m3", "fp8_e5m2"])
def test_a_cache_of_eight_bits_has_the_engines_numbers(name: str, tmp_path: Path) -> None:
    """The first layer has the keys and values of a float32 cache, divided by their scales and rounded."""
    if name == "fp8_e4m3":
        scales = torch.tensor(scaled_checkpoint(tmp_path)).view(1, 2, 1, 1, 1)
    else:  # no scales are known for its range
        save_checkpoint(MODELS["starcoder2"], tmp_path)
        scales = torch.ones(1, 2, 1, 1, 1)
    llm, wide = LLM(str(tmp_path), **LLVM | {"kv_cache_dtype": name}), cached(LLM(str(tmp_path), **LLVM))
    found = cached(llm)
    assert wide.count_nonzero() > 1000
    expected = round_to(wide, scales, found.dtype)
    assert torch.equal(found.view(torch.uint8), expected.view(torch.uint8))
    together = run(llm, prompts())
    other = LLM(str(tmp_path), **LLVM | OTHER | {"kv_cache_dtype": name})
    assert differing([run(other, [prompt])[0] for prompt in prompts()], together) == 0
    exact = run(LLM(str(tmp_path), **LLVM), prompts())
    first = [abs(a[1][0] - b[1][0]).max() for a, b in zip(together, exact, strict=True)]
    assert all(0 < each < 0.5 for each in first)


def test_a_scale_that_is_not_undone_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scaled_checkpoint(tmp_path)
    exact = run(LLM(str(tmp_path), **LLVM), prompts())
    monkeypatch.setattr("preheat.backends.cpu.llvm.attend.VALUE", 0)  # the scores' factor in place of the values'
    found = run(LLM(str(tmp_path), **LLVM | {"kv_cache_dtype": "fp8"}), prompts())
    assert all(abs(a[1][0] - b[1][0]).max() > 0.5 for a, b in zip(found, exact, strict=True))


# --- updates, processors, faults ---


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_update_reaches_the_numbers_of_norms(dtype: str, tmp_path: Path) -> None:
    for folder, seed in (("old", 0), ("new", 1)):
        save_checkpoint(MODELS["starcoder2"], tmp_path / folder, seed=seed)
    new = load_file(tmp_path / "new" / "model.safetensors")
    llm, fresh = (LLM(str(tmp_path / folder), **LLVM | {"dtype": dtype}) for folder in ("old", "new"))
    before = run(llm, prompts())
    llm.update_weights(list(new.items()))
    after = run(llm, prompts())
    assert differing(after, run(fresh, prompts())) == 0
    assert differing(after, before) == len(before)


def test_other_processors_have_the_same_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A whole model for SSE and AVX2: norms of heads and outputs, windows, masked vectors, a cache of eight bits."""
    save_checkpoint(DENSE["gemma 3 of odd sizes"], tmp_path)
    some = [prompt[:24] for prompt in prompts()]
    options = LLVM | {"kv_cache_dtype": "fp8"}
    here = run(LLM(str(tmp_path), **options), some)
    others = [target for target in map(targets.TARGETS.get, ("avx2", "sse")) if target is not None and target.runs_here]
    if not others:
        pytest.skip("this processor runs the code of no other one")
    for target in others:
        monkeypatch.setattr(targets, "here", lambda target=target: target)
        assert differing(run(LLM(str(tmp_path), **options), some), here) == 0


@pytest.mark.parametrize("fault", ["factors minus one", "another activation", "no slopes", "no clip"])
def test_a_fault_in_a_part_is_seen(fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kind, layer_of = model.kind_of, products.ACTIVATIONS
    if fault == "factors minus one":
        monkeypatch.setattr(PlusOneNorm, "factors", property(lambda norm: norm.weight.float()))
    elif fault == "another activation":
        monkeypatch.setattr(products, "ACTIVATIONS", {**layer_of, "gelu_tanh_and_mul": layer_of["silu_and_mul"]})
    elif fault == "no slopes":
        monkeypatch.setattr(model, "kind_of", lambda *args: kind(*args)._replace(alibi=False))
    else:
        monkeypatch.setattr(products, "kept_between", lambda e, x, limit: x)
    name = "gemma 3" if fault in ("factors minus one", "another activation") else "mpt with six heads"
    reference, some = save_checkpoint(MODELS[name], tmp_path), prompts()
    (found,) = run(LLM(str(tmp_path), **LLVM), some[:1])
    tokens, ours = found
    theirs = reference(torch.tensor(some[0] + tokens))[len(some[0]) - 1 : -1].log_softmax(-1)
    assert float((ours - theirs).abs().max()) > 1e-2


def test_a_norm_that_follows_the_number_of_rows_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_checkpoint(MODELS["gemma 3"], tmp_path)
    right = norms._scaled

    def planted(e, how, column):
        scaled = right(e, how, column)
        more = e.b.select(e.less(1, e.rows), e.f(1 + 2**-20), e.f(1.0))
        return lambda at, mask: e.b.fmul(scaled(at, mask), e.splat(more))

    monkeypatch.setattr(norms, "_scaled", planted)
    llm = LLM(str(tmp_path), **LLVM)
    assert differing([run(llm, [prompt])[0] for prompt in prompts()], run(llm, prompts())) > 0
