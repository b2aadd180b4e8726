"""The mode of an engine that asks for none: compiled layers, or torch's operations where functions are missing."""

from __future__ import annotations

import json
import logging
from typing import Any

import pytest
import torch

from preheat import LLM
from preheat.backends.cpu import facts
from preheat.backends.cpu.backend import CpuBackend
from preheat.errors import SettingsError
from preheat.settings import Settings

pytest.importorskip("llvmlite", reason="llvmlite is not installed: pip install llvmlite")

OPTIONS: dict[str, Any] = {
    "num_threads": 1, "skip_warmup": True, "boot_check": "off", "cache_dir": "off", "dtype": "float32",
    "max_model_len": 256, "max_num_seqs": 2, "num_gpu_blocks_override": 4,
}  # fmt: skip

SMALL = {
    "architectures": ["LlamaForCausalLM"], "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1,
    "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "vocab_size": 64,
    "max_position_embeddings": 256, "rms_norm_eps": 1e-5, "rope_theta": 1e4, "tie_word_embeddings": True,
    "torch_dtype": "float32",
}  # fmt: skip

LATENT = {
    "architectures": ["DeepseekV3ForCausalLM"], "num_key_value_heads": 2, "kv_lora_rank": 16, "q_lora_rank": None,
    "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16, "first_k_dense_replace": 1,
    "n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
    "n_group": 1, "topk_group": 1, "scoring_func": "sigmoid", "topk_method": "noaux_tc", "norm_topk_prob": True,
    "routed_scaling_factor": 1.0, "hidden_act": "silu",
}  # fmt: skip


def mode_of(llm: LLM) -> str:
    return "eager" if llm.loop.executor.decoder.functions is None else "llvm"


def test_layers_are_compiled_unless_an_option_has_no_functions(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    llm = LLM("bundled", **OPTIONS | {"num_threads": 3})
    assert mode_of(llm) == "llvm"
    assert llm.loop.executor.decoder.functions.team.threads == 3
    assert torch.get_num_threads() == 1, "torch's threads would wait actively beside those of the functions"
    assert "instead of llvm" not in caplog.text
    CpuBackend().prepare(Settings(), "eager", None)
    assert torch.get_num_threads() == 3, "an engine without functions has torch's threads again"
    assert mode_of(LLM("bundled", tp_invariant=True, **OPTIONS)) == "eager"
    (line,) = (line for line in caplog.messages if "instead of llvm" in line)
    assert line.startswith(
        "Execution mode eager instead of llvm: mode llvm (execution_mode) and layers that ranks share"
    )


def test_a_mode_that_is_asked_for_is_not_replaced() -> None:
    with pytest.raises(SettingsError, match=r"mode llvm .* and layers that ranks share .* do not work together yet"):
        LLM("bundled", tp_invariant=True, execution_mode="llvm", **OPTIONS)


def test_float8_weights_run_eagerly(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    assert mode_of(LLM("bundled", quantization="fp8", **OPTIONS)) == "eager"
    assert "instead of llvm: mode llvm (execution_mode) and layers of 8 bits with inputs of 8 bits" in caplog.text


def test_a_draft_without_functions_takes_its_target_with_it(tmp_path, caplog: pytest.LogCaptureFixture) -> None:
    """Without the look at the draft, the boot would end with the draft's refusal."""
    caplog.set_level(logging.INFO)
    target, draft = tmp_path / "target", tmp_path / "draft"
    for folder, more in ((target, {}), (draft, LATENT)):
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(SMALL | more))
    own = {"load_format": "dummy", "skip_tokenizer_init": True}
    drafting = {"speculative_config": {"method": "draft_model", "model": str(draft), "num_speculative_tokens": 2}}
    assert mode_of(LLM(str(target), **OPTIONS | own)) == "llvm"
    assert mode_of(LLM(str(target), **OPTIONS | own | drafting)) == "eager"
    assert "Execution mode eager instead of llvm: layers.0.attention.latent.up: execution mode llvm" in caplog.text


def test_without_llvmlite_the_default_is_eager(monkeypatch: pytest.MonkeyPatch) -> None:
    assert facts.modes().default == "llvm"
    monkeypatch.setattr(facts, "find_spec", lambda name: None)
    found = facts.modes()
    assert found.default == "eager" and found.rejected["llvm"] == "it needs llvmlite: pip install llvmlite"
