"""A tiny random Qwen3-VL, written by Hugging Face transformers, with its logits as reference."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

TEXT: dict[str, Any] = {
    "hidden_size": 96, "intermediate_size": 160, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 640,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_interleaved": True,
                        "mrope_section": [6, 5, 5]},
}  # fmt: skip
VISION: dict[str, Any] = {
    "hidden_size": 48, "intermediate_size": 72, "depth": 4, "num_heads": 3, "out_hidden_size": 96, "patch_size": 4,
    "num_position_embeddings": 36, "deepstack_visual_indexes": [0, 2],
}  # fmt: skip
TEXT_CONFIG = TEXT | {"model_type": "qwen3_vl_text", "vocab_size": 199}


def save_model(folder: Path, vocab_size: int = 199, seed: int = 0, **changes: Any) -> Any:
    """Write a random checkpoint and return the model."""
    from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

    config = Qwen3VLConfig(
        text_config=TEXT | {"vocab_size": vocab_size}, vision_config=VISION, attn_implementation="eager",
        **{"image_token_id": vocab_size - 1, "video_token_id": vocab_size - 2} | changes,
    )  # fmt: skip
    torch.manual_seed(seed)
    model = Qwen3VLForConditionalGeneration(config).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            mean = float("norm" in name and name.endswith("weight"))
            std = weight[0].numel() ** -0.5 if weight.dim() > 1 else 0.1
            weight.normal_(mean=mean if weight.dim() == 1 else 0.0, std=std)
    model.save_pretrained(folder)
    return model


def save_text(folder: Path) -> Callable[[Tensor], Tensor]:
    """Write a random checkpoint and return its reference for texts."""
    model = save_model(folder)

    @torch.inference_mode()
    def logits(tokens: Tensor) -> Tensor:
        found: Tensor = model(input_ids=tokens[None]).logits[0]
        return found

    return logits
