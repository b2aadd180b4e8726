"""Published configs of families with windows, sinks, latent vectors or experts beside a block."""

from __future__ import annotations

from typing import Any

FAMILIES: dict[str, dict[str, Any]] = {
    "gpt-oss-20b": {
        "architectures": ["GptOssForCausalLM"],
        "model_type": "gpt_oss",
        "hidden_size": 2880,
        "intermediate_size": 2880,
        "num_hidden_layers": 24,
        "layer_types": ["sliding_attention", "full_attention"] * 12,
        "sliding_window": 128,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "attention_bias": True,
        "num_local_experts": 32,
        "num_experts_per_tok": 4,
        "swiglu_limit": 7.0,
        "vocab_size": 201088,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 150000.0,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 4096,
        },
        "tie_word_embeddings": False,
        "hidden_act": "silu",
        "torch_dtype": "bfloat16",
        "eos_token_id": 200002,
        "pad_token_id": 199999,
        "quantization_config": {
            "quant_method": "mxfp4",
            "modules_to_not_convert": [
                "model.layers.*.self_attn",
                "model.layers.*.mlp.router",
                "model.embed_tokens",
                "lm_head",
            ],
        },
    },
    "glm-4.7-flash": {
        "architectures": ["Glm4MoeLiteForCausalLM"],
        "model_type": "glm4_moe_lite",
        "hidden_size": 2048,
        "intermediate_size": 10240,
        "moe_intermediate_size": 1536,
        "num_hidden_layers": 47,
        "num_attention_heads": 20,
        "num_key_value_heads": 20,
        "q_lora_rank": 768,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 192,
        "qk_rope_head_dim": 64,
        "v_head_dim": 256,
        "n_routed_experts": 64,
        "n_shared_experts": 1,
        "num_experts_per_tok": 4,
        "first_k_dense_replace": 1,
        "routed_scaling_factor": 1.8,
        "norm_topk_prob": True,
        "topk_method": "noaux_tc",
        "n_group": 1,
        "topk_group": 1,
        "attention_bias": False,
        "vocab_size": 154880,
        "max_position_embeddings": 202752,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1000000.0,
        "tie_word_embeddings": False,
        "hidden_act": "silu",
        "torch_dtype": "bfloat16",
        "eos_token_id": 154820,
        "num_nextn_predict_layers": 1,
    },
    "gemma-4-26b-a4b": {
        "architectures": ["Gemma4ForCausalLM"],
        "model_type": "gemma4_text",
        "hidden_size": 2816,
        "intermediate_size": 2112,
        "moe_intermediate_size": 704,
        "num_hidden_layers": 30,
        "layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 5,
        "sliding_window": 1024,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "num_global_key_value_heads": 2,
        "head_dim": 256,
        "global_head_dim": 512,
        "attention_k_eq_v": True,
        "num_kv_shared_layers": 0,
        "hidden_size_per_layer_input": 0,
        "vocab_size_per_layer_input": 262144,
        "enable_moe_block": True,
        "num_experts": 128,
        "top_k_experts": 8,
        "final_logit_softcapping": 30.0,
        "vocab_size": 262144,
        "max_position_embeddings": 262144,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1000000.0},
        },
        "tie_word_embeddings": True,
        "hidden_activation": "gelu_pytorch_tanh",
        "torch_dtype": "bfloat16",
        "bos_token_id": 2,
        "eos_token_id": 1,
        "pad_token_id": 0,
    },
}
"""The published config of each model. Gemma's is the text part of its file."""

SMALL = {
    "hidden_size": 256, "intermediate_size": 256, "moe_intermediate_size": 128, "shared_expert_intermediate_size": 128,
    "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "num_global_key_value_heads": 1,
    "head_dim": 32, "global_head_dim": 64, "q_lora_rank": 64, "kv_lora_rank": 64, "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16, "v_head_dim": 32, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_key_head_dim": 64, "linear_value_head_dim": 64, "num_experts": 16, "num_local_experts": 16,
    "n_routed_experts": 16, "num_experts_per_tok": 2, "top_k_experts": 2, "sliding_window": 32, "vocab_size": 2048,
    "vocab_size_per_layer_input": 2048,
}  # fmt: skip
"""The most of each size in a scaled-down model."""


def scaled_down(config: dict[str, Any]) -> dict[str, Any]:
    """Return ``config`` with sizes that a smoke test runs on a CPU; the family's kinds of layers stay."""
    found = config | {name: min(most, config[name]) for name, most in SMALL.items() if config.get(name)}
    if "kv_lora_rank" in config:
        found["num_key_value_heads"] = found["num_attention_heads"]
    kinds = config.get("layer_types")
    if kinds is not None:
        found["layer_types"] = kinds[-found["num_hidden_layers"] :]
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        if config.get(name) is not None:
            found[name] = config[name] % found["vocab_size"]
    return found
