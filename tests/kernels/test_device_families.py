"""Families that differ from Llama in more than sizes, on the CUDA backend, with kernels in the interpreter.

Answers are compared with the engine on a CPU.
"""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import PIL.Image
import pytest

from preheat import LLM, SamplingParams, llm, startup
from tests.kernels.backend import InterpretedCuda
from tests.kernels.test_device_engine import OPTIONS, VOCAB, answers, assert_close, tokens_of

LLAMA = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1,
    "intermediate_size": 48, "max_position_embeddings": 64,
}  # fmt: skip
LATENT = {
    "kv_lora_rank": 24, "q_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 20,
    "n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
    "first_k_dense_replace": 1, "routed_scaling_factor": 1.8, "norm_topk_prob": True, "num_key_value_heads": 2,
}  # fmt: skip
CONFIGS: dict[str, dict[str, Any]] = {
    "Cohere2": {**LLAMA, "head_dim": 16, "sliding_window": 5, "sliding_window_pattern": 2},
    "GPTBigCode": {"n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 64},
    "DeepseekV3": {**LLAMA, **LATENT, "n_group": 2, "topk_group": 1},
    "Gemma3": {**LLAMA, "head_dim": 16, "sliding_window": 5, "sliding_window_pattern": 2, "query_pre_attn_scalar": 9},
    "Gemma4": {
        **LLAMA, "head_dim": 8, "global_head_dim": 16, "num_attention_heads": 4, "num_key_value_heads": 2,
        "num_global_key_value_heads": 1, "sliding_window": 5, "num_hidden_layers": 3, "num_kv_shared_layers": 1,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"], "attention_k_eq_v": True,
        "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": VOCAB, "enable_moe_block": True,
        "num_experts": 3, "top_k_experts": 2, "moe_intermediate_size": 16, "final_logit_softcapping": 3.0,
        "tie_word_embeddings": True,
    },
    "GptOss": {
        **LLAMA, "head_dim": 16, "sliding_window": 5, "num_local_experts": 3, "num_experts_per_tok": 2,
        "quantization_config": {"quant_method": "mxfp4"}, "intermediate_size": 32,
    },
    "GraniteMoeHybrid": {
        **LLAMA, "layer_types": ["mamba", "attention"], "mamba_n_heads": 6, "mamba_n_groups": 2, "mamba_d_head": 16,
        "mamba_expand": 3, "mamba_d_state": 64, "num_local_experts": 3, "num_experts_per_tok": 2,
        "shared_intermediate_size": 24, "residual_multiplier": 0.3, "position_embedding_type": "nope",
    },
    "Mpt": {
        "d_model": 48, "n_layers": 2, "n_heads": 3, "max_seq_len": 64, "expansion_ratio": 2,
        "attn_config": {"clip_qkv": 0.5, "alibi_bias_max": 4},
    },
    "Olmo2": {**LLAMA, "head_dim": 16},
    "Phi3": {
        **LLAMA, "original_max_position_embeddings": 16, "partial_rotary_factor": 0.75,
        "rope_scaling": {"type": "longrope", "short_factor": [1.0] * 6, "long_factor": [1.0, 2, 3, 4, 5, 6]},
    },
    "Qwen3Next": {
        **LLAMA, "head_dim": 16, "linear_key_head_dim": 64, "linear_value_head_dim": 4, "linear_num_key_heads": 1,
        "linear_num_value_heads": 2, "full_attention_interval": 2, "num_experts": 3, "num_experts_per_tok": 2,
        "moe_intermediate_size": 16, "shared_expert_intermediate_size": 24, "partial_rotary_factor": 0.5,
        "mlp_only_layers": [0], "norm_topk_prob": False, "attention_bias": True,
    },
    "Starcoder2": {**LLAMA, "sliding_window": 5},
}  # fmt: skip


@pytest.mark.parametrize("family", CONFIGS)
def test_a_family_has_the_answers_of_the_cpu(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    architecture = {"architectures": [f"{family}ForCausalLM"], "dtype": "float32", "vocab_size": VOCAB}
    (tmp_path / "config.json").write_text(json.dumps({**CONFIGS[family], **architecture, "eos_token_id": 2}))
    names = ("greedy", "seeded", "penalised", "prompt")
    right = answers(LLM(str(tmp_path), device="cpu", execution_mode="eager", **OPTIONS), names)
    monkeypatch.setattr(llm, "boot_engine", partial(startup.boot_engine, backend=InterpretedCuda()))
    found = answers(LLM(str(tmp_path), **OPTIONS), names)
    assert tokens_of(found) == tokens_of(right)
    assert_close(found[1].outputs[0].logprobs, right[1].outputs[0].logprobs)
    assert_close(found[3].prompt_logprobs, right[3].prompt_logprobs)


SEEING = "LlavaForConditionalGeneration", "Qwen3VLForConditionalGeneration"


@pytest.mark.parametrize("family", SEEING)
def test_images_are_encoded_as_on_the_cpu(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two images are encoded in one step, then one comes from the encoder's cache."""
    vision = {"hidden_size": 24, "intermediate_size": 36, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = {
        "architectures": ["LlavaForConditionalGeneration"], "dtype": "float32", "image_token_index": VOCAB - 1,
        "text_config": {**LLAMA, "vocab_size": VOCAB, "eos_token_id": 2},
        "vision_config": {**vision, "image_size": 8, "patch_size": 4},
    }  # fmt: skip
    pixels: dict[str, Any] = {"size": 8, "crop_size": 8}
    if family == SEEING[1]:
        text = {**LLAMA, "head_dim": 16, "vocab_size": VOCAB, "eos_token_id": 2}
        text |= {"num_hidden_layers": 3, "rope_parameters": {"rope_theta": 1e4, "mrope_section": [4, 2, 2]}}
        tower = {**vision, "depth": 2, "num_heads": 2, "out_hidden_size": 32, "patch_size": 4, "hidden_size": 32}
        tower |= {"num_position_embeddings": 16, "deepstack_visual_indexes": [0, 1]}
        config = {"architectures": [family], "dtype": "float32", "image_token_id": VOCAB - 1, "text_config": text,
                  "vision_config": tower}  # fmt: skip
        pixels = {"image_processor_type": "Qwen2VLImageProcessor", "min_pixels": 64, "max_pixels": 512}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(pixels))
    pictures = [PIL.Image.effect_noise((12, 9), 80), PIL.Image.effect_noise((8, 8), 80)]
    prompts = [
        {"prompt_token_ids": [5, VOCAB - 1, 7, VOCAB - 1, 9], "multi_modal_data": {"image": pictures}},
        {"prompt_token_ids": [VOCAB - 1, 6], "multi_modal_data": {"image": pictures[1]}},
    ]
    params = SamplingParams(temperature=0, max_tokens=3, logprobs=3, ignore_eos=True)
    right = LLM(str(tmp_path), device="cpu", execution_mode="eager", **OPTIONS).generate(
        prompts, params, use_tqdm=False
    )
    monkeypatch.setattr(llm, "boot_engine", partial(startup.boot_engine, backend=InterpretedCuda()))
    found = LLM(str(tmp_path), **OPTIONS).generate(prompts, params, use_tqdm=False)
    assert tokens_of(found) == tokens_of(right)
    for one, other in zip(found, right, strict=True):
        assert_close(one.outputs[0].logprobs, other.outputs[0].logprobs)
