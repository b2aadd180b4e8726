"""Layers that predict one token further, as heads that draft: against transformers, and with the bits of no drafts."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from preheat import LLM, SamplingParams
from preheat.errors import ModelError
from preheat.execution import draft_head
from preheat.model.families import read_spec
from preheat.model.files import read_config
from preheat.model.mtp import MtpHead, mtp_spec
from preheat.schedule.states import StateSlots
from preheat.settings import Settings
from preheat.startup import boot_engine
from preheat.transport import InlineTransport
from preheat.warmup.record import Record
from tests.cpu.checkpoints import MODELS
from tests.cpu.mtp_checkpoints import Reference, copying, save_with_layer
from tests.cpu.test_eagle import heard
from tests.cpu.test_model_families import random_tokens

OPTIONS: dict[str, Any] = {
    "device": "cpu", "dtype": "float32", "execution_mode": "eager", "num_threads": 1, "skip_tokenizer_init": True,
    "max_model_len": 128, "max_num_seqs": 4, "max_num_batched_tokens": 24, "block_size": 16, "skip_warmup": True,
    "boot_check": "off",
}  # fmt: skip
FAMILIES = ("qwen3-next", "deepseek v3")


class Saved(NamedTuple):
    folder: Path
    reference: Reference


@pytest.fixture(scope="module", params=FAMILIES)
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Saved:
    folder = tmp_path_factory.mktemp("random")
    return Saved(folder, save_with_layer(MODELS[request.param], folder))


@pytest.fixture(scope="module", params=FAMILIES)
def right(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("right")
    save_with_layer(MODELS[request.param], folder, copying)
    return folder


def drafting(tokens: int = 3, **more: Any) -> dict[str, Any]:
    return OPTIONS | {"speculative_config": {"method": "mtp", "num_speculative_tokens": tokens}} | more


PROMPTS = [random_tokens(length).tolist() for length in (40, 3, 30, 29)]
PARAMS = [
    SamplingParams(temperature=0.8 * (n % 2), seed=n, max_tokens=20, ignore_eos=True, logprobs=0) for n in range(4)
]


def answers(llm: LLM) -> list[Any]:
    """Return tokens and logprobs of the prompts, asked together twice, the second time with hits."""
    found = []
    for _ in range(2):
        for output in llm.generate([{"prompt_token_ids": each} for each in PROMPTS], PARAMS, use_tqdm=False):
            (choice,) = output.outputs
            logprobs = [each[token].logprob for token, each in zip(choice.token_ids, choice.logprobs, strict=True)]
            found.append((list(choice.token_ids), logprobs))
    return found


def agreeing(reference: Reference, found: list[tuple[list[int], int, Tensor]]) -> float:
    """Return the share of the recorded logits that are the reference's."""
    near = [torch.allclose(logits, reference.next_logits(tokens, known), atol=5e-4, rtol=5e-4)
            for tokens, known, logits in found]  # fmt: skip
    return sum(near) / len(near)


def test_the_layers_logits_are_those_of_transformers(saved: Saved) -> None:
    """At first and later drafts, behind chunks and cached prefixes; no answer differs from one without drafts."""
    llm = LLM(str(saved.folder), **drafting())
    found, plain = heard(llm), answers(LLM(str(saved.folder), **OPTIONS))
    assert answers(llm) == plain
    assert plain[:4] == plain[4:]
    assert llm.loop.scheduler.stats().prefix_hits > 0
    assert {len(tokens) - known for tokens, known, _ in found} == {0, 1, 2}
    for prompt, (tokens, _) in zip(PROMPTS, plain, strict=False):
        saved.reference.read(prompt + tokens)
    assert agreeing(saved.reference, found[::3]) == 1.0


def shifted(patch: pytest.MonkeyPatch) -> None:
    """Plant features that are read one position too early."""
    places = draft_head.token_places
    patch.setattr(draft_head, "token_places", lambda *given: np.maximum(places(*given) - 1, 0))


def other_states(patch: pytest.MonkeyPatch) -> None:
    """Plant features of next positions that are not normed."""
    patch.setattr(MtpHead, "following", lambda self, residual, hidden: residual)


@pytest.mark.parametrize(("plant", "most"), [(shifted, 0.1), (other_states, 0.5)])
def test_control_the_comparison_notices(saved: Saved, monkeypatch: pytest.MonkeyPatch, plant: Any, most: float) -> None:
    plant(monkeypatch)
    llm = LLM(str(saved.folder), **drafting())
    found = heard(llm)
    (output,) = llm.generate([{"prompt_token_ids": PROMPTS[2]}], PARAMS[0], use_tqdm=False)
    saved.reference.read(PROMPTS[2] + output.outputs[0].token_ids)
    assert agreeing(saved.reference, found) <= most


TIGHT = {"max_num_batched_tokens": 16, "num_gpu_blocks_override": 9, "mamba_cache_mode": "all"}


def test_right_drafts_give_the_bits_of_no_drafts(right: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Most drafts are accepted, greedy and sampled; also in few blocks and small chunks, with preemption.

    Control: the states behind rejected drafts stay.
    """
    plain = answers(LLM(str(right), **OPTIONS))
    for options in ({}, TIGHT):
        llm = LLM(str(right), **drafting(**options))
        assert answers(llm) == plain
        stats = llm.loop.scheduler.stats()
        assert stats.draft_tokens > stats.accepted_tokens > stats.draft_tokens / 2
        assert not options or stats.preemptions > 0
        llm.loop.scheduler.check()
    if not llm.loop.executor.decoder.spec.has_states:
        return
    settle = StateSlots.settle
    monkeypatch.setattr(StateSlots, "settle", lambda self, schedule, *given: settle(
        self, schedule, *given[:-1], schedule.ends))  # fmt: skip
    assert answers(LLM(str(right), **drafting())) != plain


@pytest.mark.parametrize("right", ["qwen3-next"], indirect=True)
def test_a_boot_proves_drafts_and_hidden_states(right: Path) -> None:
    """All items are ready, and the digest is the one without drafts."""
    found = []
    for options in (OPTIONS, drafting(2)):
        own = options | {"model": str(right), "boot_check": "full", "skip_warmup": False, "cache_dir": "off",
                         "on_cold": "raise", "max_num_seqs": 2, "max_num_batched_tokens": 8,
                         "max_model_len": 64}  # fmt: skip
        record = Record.from_json(boot_engine(Settings.load(own), InlineTransport()).listener.report())
        assert {entry.outcome for entry in record.entries} == {"ready"}
        found.append((record.proof.digest, {entry.kind for entry in record.entries}))
    (alone, _), (drafted, kinds) = found
    assert alone == drafted
    assert "draft" in kinds


def changed(saved: Saved, folder: Path, change: Callable[[dict[str, Tensor]], object], **fields: Any) -> Path:
    """Return a copy of a checkpoint with changed tensors and fields."""
    tensors = load_file(saved.folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(read_config(saved.folder) | fields))
    return folder


def without(text: str) -> Callable[[dict[str, Tensor]], object]:
    return lambda tensors: [tensors.pop(name) for name in list(tensors) if text in name]


def is_hybrid(saved: Saved) -> bool:
    return "layer_types" in read_config(saved.folder)


def test_a_checkpoint_without_the_layer_is_refused(saved: Saved, tmp_path: Path) -> None:
    hybrid = is_hybrid(saved)
    at, norm = ("mtp.", "mtp.norm") if hybrid else ("model.layers.3.", "shared_head.norm")
    with pytest.raises(ModelError, match=re.escape(f"needs the tensors {at}*, and the checkpoint has none")):
        LLM(str(changed(saved, tmp_path, without(at))), **drafting())
    with pytest.raises(ModelError, match=f"method mtp: missing tensors: .*{norm}.weight"):
        LLM(str(changed(saved, tmp_path, without(norm))), **drafting())
    count = "mtp_num_hidden_layers" if hybrid else "num_nextn_predict_layers"
    with pytest.raises(ModelError, match=f"{count} is 2"):
        LLM(str(changed(saved, tmp_path, lambda _: None, **{count: 2})), **drafting())


def test_names_and_sizes_of_each_family() -> None:
    """A family's layer has the released names, whatever the kinds of the model's own layers."""
    sizes = {"hidden_size": 64, "intermediate_size": 96, "vocab_size": 99, "num_attention_heads": 4,
             "max_position_embeddings": 64, "num_hidden_layers": 4}  # fmt: skip
    latent = sizes | {"architectures": ["Glm4MoeLiteForCausalLM"], "num_nextn_predict_layers": 1,
                      "mlp_layer_types": ["dense", *["sparse"] * 3]}  # fmt: skip
    dense = sizes | {"architectures": ["Qwen3_5ForCausalLM"], "full_attention_interval": 2}
    eyes = {"architectures": ["Qwen3_5MoeForConditionalGeneration"], "text_config": sizes | {
        "model_type": "qwen3_5_moe_text", "num_experts": 4, "num_experts_per_tok": 2}}  # fmt: skip
    names = [sorted(mtp_spec(values, read_spec(values)).tensors) for values in (latent, dense, eyes)]
    assert {"model.layers.4.enorm.weight", "model.layers.4.mlp.experts.63.up_proj.weight"} < set(names[0])
    assert {"mtp.fc.weight", "mtp.layers.0.mlp.up_proj.weight", "mtp.layers.0.self_attn.q_norm.weight"} < set(names[1])
    assert {"mtp.norm.weight", "mtp.layers.0.mlp.experts.3.up_proj.weight"} < set(names[2])
    assert all(name.startswith(("mtp.", "model.layers.4.")) for each in names for name in each)
    plain = sizes | {"architectures": ["LlamaForCausalLM"]}
    with pytest.raises(ModelError, match="LlamaForCausalLM has none: choose another method"):
        mtp_spec(plain, read_spec(plain))
