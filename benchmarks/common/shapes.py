"""The measured models: published sizes with random weights.

Speed does not depend on the weights.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.common.checkpoint import write_checkpoint
from benchmarks.common.families import FAMILIES, scaled_down
from preheat.model.files import BUNDLED, BUNDLED_PATH, read_config

HYBRID: dict[str, Any] = {
    "full_attention_interval": 4,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25},
    "tie_word_embeddings": False,
    "hidden_act": "silu",
    "torch_dtype": "bfloat16",
    "bos_token_id": 151643,
    "eos_token_id": 151645,
}
"""The fields that the measured models with states share."""

SHAPES: dict[str, dict[str, Any]] = {
    "llama-3.1-8b": {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 128256,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "tie_word_embeddings": False,
        "hidden_act": "silu",
        "torch_dtype": "bfloat16",
        "bos_token_id": 128000,
        "eos_token_id": 128001,
    },
    "qwen3-0.6b": {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151936,
        "max_position_embeddings": 40960,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "tie_word_embeddings": True,
        "hidden_act": "silu",
        "torch_dtype": "bfloat16",
        "bos_token_id": 151643,
        "eos_token_id": 151645,
    },
    "qwen3-30b-a3b": {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "vocab_size": 151936,
        "max_position_embeddings": 40960,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "tie_word_embeddings": False,
        "hidden_act": "silu",
        "torch_dtype": "bfloat16",
        "bos_token_id": 151643,
        "eos_token_id": 151645,
    },
    "qwen3.5-0.8b": {
        "architectures": ["Qwen3_5ForCausalLM"],
        "model_type": "qwen3_5_text",
        "hidden_size": 1024,
        "intermediate_size": 3584,
        "num_hidden_layers": 24,
        **HYBRID,
        "linear_num_value_heads": 16,
        "num_attention_heads": 8,
        "tie_word_embeddings": True,
        "vocab_size": 248320,
    },
    "qwen3.5-35b-a3b": {
        "architectures": ["Qwen3_5MoeForCausalLM"],
        "model_type": "qwen3_5_moe_text",
        "hidden_size": 2048,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
        "num_hidden_layers": 40,
        **HYBRID,
        "num_experts": 256,
        "num_experts_per_tok": 8,
        "vocab_size": 248320,
    },
    "qwen3-next-80b-a3b": {
        "architectures": ["Qwen3NextForCausalLM"],
        "model_type": "qwen3_next",
        "hidden_size": 2048,
        "intermediate_size": 5632,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
        "num_hidden_layers": 48,
        **HYBRID,
        "num_experts": 512,
        "num_experts_per_tok": 10,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "vocab_size": 151936,
    },
    "llama-3-70b": {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 8192,
        "intermediate_size": 28672,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 128256,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "tie_word_embeddings": False,
        "hidden_act": "silu",
        "torch_dtype": "bfloat16",
        "bos_token_id": 128000,
        "eos_token_id": 128001,
    },
    "mixtral-8x7b": {
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "sliding_window": None,
        "vocab_size": 32000,
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1000000.0,
        "tie_word_embeddings": False,
        "hidden_act": "silu",
        "torch_dtype": "bfloat16",
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
    **FAMILIES,
}
"""The published config of each model. One more entry here is one more ``--shape``.

Qwen3-Next's 80 billion weights fit one GPU of 140 GB in float8 (``--format fp8``), not in bfloat16.
"""

CHOICES = (*SHAPES, BUNDLED)

FORMATS: dict[str, dict[str, Any]] = {
    "fp8": {},
    "fp8-block": {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]},
    "awq": {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"},
}
"""The quantization of weights, by ``--format``: the checkpoint's ``quantization_config``; fp8 is made while loading."""


WEIGHTS = ("normal", "narrow")
"""Names of dummy weights, see :func:`benchmarks.common.dummies.dummy_weights`."""


def named(shape: str, number_format: str | None, options: dict[str, Any], weights: str = "normal") -> str:
    """Return the name of a result.

    It has the shape, the formats of weights and cache other than the model's own, the number of several ranks, and
    dummy ``weights`` other than normal ones.
    """
    kv, ranks = options.get("kv_cache_dtype", "auto"), int(options.get("tensor_parallel_size", 1))
    parts = [shape, *([number_format] if number_format else []), *([] if kv == "auto" else ["kv", kv])]
    parts += [] if ranks == 1 else [f"tp{ranks}"]
    return "_".join([*parts, *([] if weights == "normal" else [weights])])


@dataclass(frozen=True)
class Sizes:
    """The amount of work: ``FULL``, or ``TINY`` for a smoke test without meaning."""

    batches: tuple[int, ...] = (1, 8, 32, 64, 128, 256)
    context: int = 128
    steps: int = 128
    prompt: int = 2048
    prompts: int = 32
    lengths: tuple[int, int] = (512, 4000)
    length_tokens: int = 32768
    long: tuple[tuple[int, int], ...] = ((32, 8192), (4, 32768))
    requests: int = 256
    request_tokens: tuple[int, int] = (100, 1024)
    first_lengths: tuple[int, ...] = (16, 128, 300, 777, 1000)
    rates: tuple[float, ...] = (1, 4, 8, 16, 24)
    rate_seconds: float = 15.0
    served_tokens: tuple[int, int] = (100, 1024)
    answer_tokens: tuple[int, int] = (32, 256)
    burst: int = 512
    streams: int = 64
    stream_tokens: int = 3000


FULL = Sizes()
TINY = Sizes(
    batches=(1, 2),
    context=16,
    steps=6,
    prompt=40,
    prompts=2,
    lengths=(20, 60),
    length_tokens=64,
    long=((2, 100),),
    requests=4,
    request_tokens=(4, 12),
    first_lengths=(16,),
    rates=(20.0,),
    rate_seconds=0.3,
    served_tokens=(4, 12),
    answer_tokens=(2, 6),
    burst=4,
    streams=2,
    stream_tokens=100,
)

ENGINE: dict[str, Any] = {
    "skip_tokenizer_init": True,
    "max_model_len": 4096,
    "gpu_memory_utilization": 0.9,
    "enable_prefix_caching": False,
    "max_num_seqs": 256,
    "on_cold": "raise",
    "log_level": "warning",
}
"""The options of vLLM's figures. The command line can change each of them."""

SMALL_ENGINE: dict[str, Any] = {"max_model_len": 160, "max_num_seqs": 4, "max_num_batched_tokens": 64}


def engine_options(
    shape: str, given: dict[str, Any], folder: Path, *, tiny: bool, number_format: str | None = None
) -> dict[str, Any]:
    """Return options for an engine of ``shape``, quantized as ``number_format`` of ``FORMATS``, if given.

    Its config is written into ``folder``; with ``tiny``, scaled down.
    """
    defaults = ENGINE | (SMALL_ENGINE if tiny else {})
    if number_format == "fp8":
        defaults = defaults | {"quantization": "fp8"}
    if shape == BUNDLED:
        return defaults | {"model": BUNDLED, "max_model_len": min(2048, defaults["max_model_len"])} | given
    folder.mkdir(parents=True, exist_ok=True)
    stored = FORMATS.get(number_format or "")
    config = config_of(shape, tiny=tiny) | ({"quantization_config": stored} if stored else {})
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return defaults | {"model": str(folder), "load_format": "dummy"} | given


def with_weights(options: dict[str, Any]) -> dict[str, Any]:
    """Return ``options`` for a checkpoint on disk, written beside the config."""
    folder = Path(options["model"])
    write_checkpoint(read_config(folder), folder)
    return options | {"load_format": "safetensors"}


def config_of(shape: str, *, tiny: bool = False) -> dict[str, Any]:
    """Return the config.json of ``shape``, one of ``CHOICES``; with ``tiny``, scaled down where it is not bundled."""
    config = SHAPES.get(shape)
    if config is None:
        return read_config(BUNDLED_PATH)
    return scaled_down(config) if tiny else config


def vocabulary(shape: str, *, tiny: bool = False) -> int:
    """Return the number of tokens that the model knows."""
    return int(config_of(shape, tiny=tiny)["vocab_size"])


def long_answer(sizes: Sizes, rows: int, context: int) -> int:
    """Return the tokens that each of ``rows`` generates.

    They are enough for the first row to still decode when the last one has read its prompt, at 512 tokens a step or
    more.
    """
    return sizes.steps + 2 * rows + rows * context // 512


def long_length(sizes: Sizes) -> int:
    """Return the model length that the long contexts need."""
    return max(context + long_answer(sizes, rows, context) for rows, context in sizes.long) + 1
