"""Small random checkpoints of every family, written by Hugging Face transformers, which also says what is right."""

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
    "qwen3 with yarn": ("Qwen3", {"rope_parameters": YARN_ROPE, "head_dim": 64, "attention_bias": True}),
}


def save_checkpoint(model: Model, folder: Path, *, shard: str = "1GB", seed: int = 0) -> Callable[[Tensor], Tensor]:
    """Write a random checkpoint; returns the reference: token ids [tokens] -> fp32 logits [tokens, vocab]."""
    import transformers

    family, changes = model
    torch.manual_seed(seed)
    config = getattr(transformers, f"{family}Config")(**SMALL | changes, attn_implementation="eager")
    reference = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    with torch.no_grad():
        for name, weight in reference.named_parameters():
            if weight.dim() == 2:
                weight.normal_(std=weight.shape[1] ** -0.5)
            else:
                weight.normal_(mean=float("norm" in name), std=0.1)
    reference.save_pretrained(folder, max_shard_size=shard)

    @torch.inference_mode()
    def logits(tokens: Tensor) -> Tensor:
        found: Tensor = reference(tokens[None]).logits[0]
        return found

    return logits
