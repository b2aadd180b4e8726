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
GROWING_ROPE = YARN_ROPE | {"mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1}
GROWING_ROPE |= {"original_max_position_embeddings": 16}
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

LATENT: dict[str, Any] = {
    "num_key_value_heads": 4,
    "head_dim": 16,
    "kv_lora_rank": 48,
    "q_lora_rank": 40,
    "qk_nope_head_dim": 24,
    "qk_rope_head_dim": 16,
    "v_head_dim": 28,
    "n_routed_experts": 8,
    "n_group": 4,
    "topk_group": 2,
    "n_shared_experts": 2,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 40,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.8,
    "norm_topk_prob": True,
}
"""Attention over latent vectors, and experts in groups."""

_FULL, _LOCAL = "full_attention", "sliding_attention"
GEMMA4: dict[str, Any] = {
    "num_hidden_layers": 5,
    "layer_types": [_LOCAL, _FULL, _LOCAL, _LOCAL, _FULL],
    "sliding_window": 11,
    "global_head_dim": 64,
}
"""Heads of two sizes."""
LAYER_INPUTS: dict[str, Any] = {
    "num_kv_shared_layers": 2,
    "hidden_size_per_layer_input": 16,
    "vocab_size_per_layer_input": 199,
    "use_double_wide_mlp": True,
    "final_logit_softcapping": 3.0,
}
EXPERTS_BESIDE: dict[str, Any] = {
    "hidden_size_per_layer_input": 0,
    "num_key_value_heads": 4,
    "attention_k_eq_v": True,
    "num_global_key_value_heads": 1,
    "enable_moe_block": True,
    "num_experts": 6,
    "top_k_experts": 2,
    "moe_intermediate_size": 40,
}

PLUS_ONE = ("Gemma", "Gemma3")
"""Families with norms that are stored as factors minus one."""

STATES: dict[str, Any] = {
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "partial_rotary_factor": 0.25,
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention"] * 2 + ["full_attention", "linear_attention"],
}
MAMBA: dict[str, Any] = {
    "mamba_n_heads": 12,
    "mamba_d_head": 16,
    "mamba_d_state": 32,
    "mamba_chunk_size": 16,
    "shared_intermediate_size": 56,
    "num_local_experts": 0,
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention"] * 2 + ["full_attention", "linear_attention"],
    "embedding_multiplier": 12.0,
    "attention_multiplier": 0.11,
    "residual_multiplier": 0.22,
    "logits_scaling": 8.0,
}
"""States of Mamba 2, and Granite's factors."""

SHARED = {
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 40,
    "shared_expert_intermediate_size": 56,
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
    "gpt-oss": (
        "GptOss",
        {
            "num_local_experts": 5,
            "num_experts_per_tok": 2,
            "sliding_window": 11,
            "intermediate_size": 64,
            "rope_parameters": YARN_ROPE | {"truncate": False},
        },
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
    "gemma 4": ("Gemma4", GEMMA4 | LAYER_INPUTS),
    "gemma 4 with experts": ("Gemma4", GEMMA4 | EXPERTS_BESIDE),
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
    "glm 4.7 flash": ("Glm4MoeLite", LATENT | {"n_group": 1, "topk_group": 1}),
    "deepseek v3": ("DeepseekV3", LATENT | {"rope_parameters": YARN_ROPE | {"mscale": 1.0, "mscale_all_dim": 0.7}}),
    "deepseek v2 lite": (
        "DeepseekV2",
        LATENT
        | {
            "q_lora_rank": None,
            "topk_method": "group_limited_greedy",
            "norm_topk_prob": False,
            "rope_parameters": YARN_ROPE | {"mscale": 0.707, "mscale_all_dim": 0.707},
        },
    ),
    "ministral": (
        "Ministral",
        {"sliding_window": 11, "layer_types": ["sliding_attention", "full_attention"] * 2, "num_hidden_layers": 4},
    ),
    "ministral 3": ("Ministral3", {"head_dim": 64, "rope_parameters": GROWING_ROPE}),
    "smollm3": ("SmolLM3", {"pad_token_id": 0, "head_dim": 24, "num_hidden_layers": 4, "attention_bias": True}),
    "smollm3 with windows": (
        "SmolLM3",
        {
            "pad_token_id": 0,
            "head_dim": 24,
            "no_rope_layers": [1, 0, 1],
            "use_sliding_window": True,
            "sliding_window": 11,
        },
    ),
    "olmo 2": ("Olmo2", {"head_dim": 24, "attention_bias": True}),
    "olmo 3": (
        "Olmo3",
        {
            "head_dim": 24,
            "num_hidden_layers": 4,
            "sliding_window": 11,
            "rope_parameters": {
                "full_attention": YARN_ROPE,
                "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            },
        },
    ),
    "granite": (
        "Granite",
        {
            "head_dim": 24,
            "embedding_multiplier": 12.0,
            "attention_multiplier": 0.11,
            "residual_multiplier": 0.22,
            "logits_scaling": 8.0,
            "tie_word_embeddings": True,
        },
    ),
    "glm": ("Glm", {"eos_token_id": [1, 2], "pad_token_id": 0, "attention_bias": False}),
    "glm 4": ("Glm4", {"eos_token_id": [1, 2], "pad_token_id": 0, "head_dim": 40}),
    "cohere": ("Cohere", {"head_dim": 24, "pad_token_id": 0, "attention_bias": True}),
    "cohere 2": (
        "Cohere2",
        {
            "head_dim": 24,
            "pad_token_id": 0,
            "num_hidden_layers": 4,
            "sliding_window": 11,
            "logit_scale": 0.7,
            "eos_token_id": 7,
        },
    ),
    "exaone 4": ("Exaone4", {"num_hidden_layers": 4, "sliding_window": 11}),
    "exaone 4 without windows": ("Exaone4", {"layer_types": ["full_attention"] * 3, "sliding_window": None}),
    "seed oss": ("SeedOss", {"attention_out_bias": True}),
    "ernie 4.5": ("Ernie4_5", {"use_bias": True}),
    "arcee": ("Arcee", {"mlp_bias": True}),
    "cwm": ("Cwm", {"head_dim": 24, "num_hidden_layers": 5, "sliding_window": 11, "rope_parameters": LLAMA3_ROPE}),
    "helium": ("Helium", {"head_dim": 24, "pad_token_id": 0, "attention_bias": True}),
    "jais 2": ("Jais2", {"head_dim": 24}),
    "stablelm": ("StableLm", {"head_dim": 24, "use_qkv_bias": True, "partial_rotary_factor": 0.5}),
    "stablelm side by side": (
        "StableLm",
        {"head_dim": 24, "use_parallel_residual": True, "partial_rotary_factor": 1.0},
    ),
    "gemma": ("Gemma", {"hidden_act": "gelu_pytorch_tanh"}),
    "olmoe": ("Olmoe", {"head_dim": 24, "num_experts": 6, "num_experts_per_tok": 3}),
    "flex olmo": ("FlexOlmo", {"head_dim": 24, "pad_token_id": 0, "num_experts": 6, "num_experts_per_tok": 3}),
    "phi": ("Phi", {"head_dim": 24}),
    "qwen3-next": ("Qwen3Next", STATES | SHARED),
    "qwen3-next with dense layers": (
        "Qwen3Next",
        STATES | SHARED | {"mlp_only_layers": [1], "norm_topk_prob": False, "attention_bias": True},
    ),
    "qwen3.5": ("Qwen3_5", STATES),
    "qwen3.5 tied": (
        "Qwen3_5",
        STATES
        | {
            "tie_word_embeddings": True,
            "partial_rotary_factor": 1.0,
            "linear_conv_kernel_dim": 2,
            "layer_types": ["linear_attention"] + ["full_attention"] * 2,
            "num_hidden_layers": 3,
        },
    ),
    "qwen3.5 moe": ("Qwen3_5Moe", STATES | SHARED),
    "granite 4 h": ("GraniteMoeHybrid", MAMBA),
    "granite 4 h with experts": (
        "GraniteMoeHybrid",
        MAMBA
        | {
            "num_local_experts": 6,
            "num_experts_per_tok": 3,
            "intermediate_size": 40,
            "mamba_n_groups": 2,
            "mamba_d_head": "auto",
            "mamba_conv_bias": False,
            "mamba_proj_bias": True,
            "mamba_d_conv": 3,
            "time_step_limit": [0.1, 0.8],
            "position_embedding_type": "rope",
            "attention_bias": True,
            "tie_word_embeddings": True,
        },
    ),
    "qwen3 with yarn": ("Qwen3", {"rope_parameters": YARN_ROPE, "head_dim": 64, "attention_bias": True}),
}


MISTRAL3_TEXT: dict[str, Any] = SMALL | {"model_type": "ministral3", "rope_parameters": GROWING_ROPE}


def save_mistral3(folder: Path) -> Callable[[Tensor], Tensor]:
    """Write a random Mistral 3 with a Pixtral tower and return its reference for text."""
    from transformers import Mistral3Config, Mistral3ForConditionalGeneration

    tower = {"hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 1, "num_attention_heads": 2}
    more = {"head_dim": 16, "image_size": 28, "patch_size": 7, "model_type": "pixtral"}
    config = Mistral3Config(
        text_config=MISTRAL3_TEXT, vision_config=tower | more, image_token_index=198, attn_implementation="eager",
        tie_word_embeddings=False,
    )  # fmt: skip
    torch.manual_seed(0)
    model = Mistral3ForConditionalGeneration(config).eval()
    model.save_pretrained(folder)
    return lambda tokens: model(tokens[None]).logits[0].detach()


def save_qwen3_5_with_images(folder: Path) -> Callable[[Tensor], Tensor]:
    """Write a random Qwen3.5 with an encoder of images and a layer that drafts; return its reference for text."""
    from safetensors.torch import load_file, save_file
    from transformers import Qwen3_5Config, Qwen3_5ForConditionalGeneration

    tower = {"hidden_size": 32, "intermediate_size": 40, "depth": 1, "num_heads": 2, "out_hidden_size": 96}
    text = SMALL | STATES | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [2, 1, 1],
                                                 "partial_rotary_factor": 0.25}}  # fmt: skip
    torch.manual_seed(0)
    config = Qwen3_5Config(text_config=text, vision_config=tower, image_token_id=198, attn_implementation="eager")
    model = Qwen3_5ForConditionalGeneration(config).eval()
    model.save_pretrained(folder)
    stored = load_file(folder / "model.safetensors") | {"mtp.fc.weight": torch.zeros(2, 2)}
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    return lambda tokens: model(tokens[None]).logits[0].detach()


def draw_weights(module: torch.nn.Module, family: str) -> None:
    """Draw the weights of a ``module`` of ``family`` at random, so that numbers keep their size from layer to layer."""
    with torch.no_grad():
        for name, weight in module.named_parameters():
            if weight.dim() >= 2:
                weight.normal_(std=weight.shape[-1] ** -0.5)
            elif name.endswith("A_log"):  # decays of some tokens to some hundred
                weight.normal_(mean=-3.0, std=1.5)
            else:
                around = ("norm" in name and family not in PLUS_ONE) or ".ln_" in name or name.endswith(("scale", ".D"))
                weight.normal_(mean=float(around), std=0.1)
        for name, numbers in module.named_buffers():
            if "correction" in name:
                numbers.normal_(std=0.1)
            if "layer_scalar" in name:
                numbers.uniform_(0.8, 1.2)


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
    draw_weights(reference, family)
    reference.save_pretrained(folder, max_shard_size=shard)

    @torch.inference_mode()
    def logits(tokens: Tensor) -> Tensor:
        found: Tensor = reference(tokens[None]).logits[0]
        return found

    return logits
