"""The engines that show the faults of :mod:`tools.faults`.

They are options, and small models of random weights.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

_SIZES: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 512, "max_position_embeddings": 2048,
}  # fmt: skip

_MODELS: dict[str, dict[str, Any]] = {
    "windows": {
        "architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text", "sliding_window": 24,
        "sliding_window_pattern": 3, "query_pre_attn_scalar": 16, **_SIZES,
    },
    "experts": {
        "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "num_experts": 8,
        "num_experts_per_tok": 2, "moe_intermediate_size": 48, "norm_topk_prob": True, **_SIZES,
    },
    "alibi": {
        "architectures": ["MPTForCausalLM"], "model_type": "mpt", "d_model": 64, "n_heads": 4, "n_layers": 2,
        "max_seq_len": 2048, "vocab_size": 512, "no_bias": True, "attn_config": {"alibi": True},
    },
}  # fmt: skip

_OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "adapters": {"enable_lora": True, "max_loras": 2, "max_lora_rank": 24},
    "embeds": {"enable_prompt_embeds": True},
    "offload": {"kv_offloading_size": 0.05},
    "drafts": {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1}},
    "fp8 cache": {"kv_cache_dtype": "fp8"},
    **{name: {} for name in _MODELS},
}

ENGINES = tuple(_OPTIONS)


def options(engine: str, folder: Path) -> dict[str, Any]:
    """Return the settings of ``engine``.

    Its own model, if it has one, is written into ``folder``.
    """
    if engine not in _MODELS:
        return _OPTIONS[engine]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"torch_dtype": "float32", **_MODELS[engine]}))
    return _OPTIONS[engine] | {"model": str(folder), "load_format": "dummy", "skip_tokenizer_init": True}
