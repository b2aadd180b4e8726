"""Small random checkpoints of every family, written by Hugging Face transformers, with its logits as reference."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

SMALL: dict[str, Any] = {
    "vocab_size": 199,
    "hidden_size": 96,
    "intermediate_size": 160,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 256,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
}
LINEAR_ROPE = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}


def longrope(pairs: int) -> dict[str, Any]:
    """Return longrope factors for ``pairs`` pairs of dimensions.

    Any sequence of more than 8 tokens is long.
    """
    return {
        "rope_type": "longrope",
        "short_factor": [1.0 + i / pairs for i in range(pairs)],
        "long_factor": [2.0 + 3 * i / pairs for i in range(pairs)],
    }


PHI = {"head_dim": 24, "pad_token_id": 0, "eos_token_id": 1}

GEMMA_ROPE = {
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
    "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
}

Model = tuple[str, dict[str, Any]]

MODELS: dict[str, Model] = {
    "llama": ("Llama", {}),
    "llama tied": ("Llama", {"tie_word_embeddings": True, "rms_norm_eps": 1e-5}),
    "llama 3.1": ("Llama", {"rope_parameters": LLAMA3_ROPE, "head_dim": 128, "num_key_value_heads": 1}),
    "llama linear rope": ("Llama", {"rope_parameters": LINEAR_ROPE}),
    "llama with biases": ("Llama", {"attention_bias": True, "mlp_bias": True, "num_key_value_heads": 4}),
    "mistral": ("Mistral", {"sliding_window": None, "head_dim": 64}),
    "mistral with window": ("Mistral", {"sliding_window": 11}),
    "qwen2": ("Qwen2", {"head_dim": 24}),
    "qwen2 with windows": (
        "Qwen2",
        {"head_dim": 24, "use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1},
    ),
    "qwen3": ("Qwen3", {"head_dim": 128, "tie_word_embeddings": True}),
    "mixtral": ("Mixtral", {"num_local_experts": 5, "num_experts_per_tok": 2}),
    "mixtral with window": ("Mixtral", {"num_local_experts": 3, "num_experts_per_tok": 3, "sliding_window": 11}),
    "qwen3 moe": (
        "Qwen3Moe",
        {"num_experts": 7, "num_experts_per_tok": 3, "moe_intermediate_size": 40, "norm_topk_prob": True},
    ),
    "qwen3 moe with dense layers": (
        "Qwen3Moe",
        {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 56, "mlp_only_layers": [1]},
    ),
    "phi3": ("Phi3", {**PHI, "sliding_window": 11}),
    "phi3 with longrope": (
        "Phi3",
        {**PHI, "original_max_position_embeddings": 8, "rope_parameters": longrope(12)},
    ),
    "phi4 mini": (
        "Phi3",
        {
            **PHI,
            "original_max_position_embeddings": 8,
            "tie_word_embeddings": True,
            "rope_parameters": longrope(9) | {"partial_rotary_factor": 0.75, "attention_factor": 1.2},
        },
    ),
    "starcoder2": ("Starcoder2", {"sliding_window": 11}),
    "starcoder2 without biases": ("Starcoder2", {"use_bias": False, "num_key_value_heads": 1, "head_dim": 40}),
    "gpt bigcode": ("GPTBigCode", {}),
    "gpt bigcode with a key head each": (
        "GPTBigCode",
        {"multi_query": False, "n_inner": 200, "scale_attn_weights": False, "activation_function": "gelu"},
    ),
    "gpt bigcode with 48 heads": ("GPTBigCode", {"num_attention_heads": 48, "hidden_size": 384}),
    "gemma 3": (
        "Gemma3",
        {
            "num_hidden_layers": 4,
            "layer_types": ["sliding_attention"] * 2 + ["full_attention", "sliding_attention"],
            "sliding_window": 11,
            "head_dim": 40,
            "query_pre_attn_scalar": 50,
            "rope_parameters": GEMMA_ROPE,
        },
    ),
    "gemma 3 with one key head": ("Gemma3", {"num_key_value_heads": 1, "sliding_window": 7, "head_dim": 256}),
    "mpt": ("Mpt", {}),
    "mpt with six heads": (
        "Mpt",
        {"num_attention_heads": 6, "attn_config": {"clip_qkv": 0.7, "softmax_scale": 0.3}},
    ),
    "qwen2 moe": (
        "Qwen2Moe",
        {
            "num_experts": 7,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 40,
            "head_dim": 24,
            "shared_expert_intermediate_size": 72,
        },
    ),
    "qwen2 moe with dense layers": (
        "Qwen2Moe",
        {
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 56,
            "mlp_only_layers": [1],
            "norm_topk_prob": True,
            "qkv_bias": False,
        },
    ),
    "qwen3 with yarn": ("Qwen3", {"rope_parameters": YARN_ROPE, "head_dim": 64, "attention_bias": True}),
}


def save_checkpoint(model: Model, folder: Path, *, shard: str = "1GB", seed: int = 0) -> Callable[[Tensor], Tensor]:
    """Write a random checkpoint and return its reference.

    The reference maps token ids [tokens] to float32 logits [tokens, vocab].
    """
    import transformers

    family, changes = model
    torch.manual_seed(seed)
    kind = getattr(transformers, f"{family}ForCausalLM")
    config = kind.config_class(**SMALL | changes, attn_implementation="eager", experts_implementation="eager")
    reference = kind(config).eval()
    with torch.no_grad():
        for name, weight in reference.named_parameters():
            if weight.dim() >= 2:
                weight.normal_(std=weight.shape[-1] ** -0.5)
            else:
                weight.normal_(mean=float(("norm" in name and family != "Gemma3") or ".ln_" in name), std=0.1)
    reference.save_pretrained(folder, max_shard_size=shard)

    @torch.inference_mode()
    def logits(tokens: Tensor) -> Tensor:
        found: Tensor = reference(tokens[None]).logits[0]
        return found

    return logits
