"""Small random models for ``preheat verify --fuzz --random-models``.

Sizes and weights are random. No torch here.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

DENSE = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
LLAMA_LIKE = (
    "ArceeForCausalLM", "CohereForCausalLM", "Cohere2ForCausalLM", "Ernie4_5ForCausalLM", "Exaone4ForCausalLM",
    "GemmaForCausalLM", "GlmForCausalLM", "Glm4ForCausalLM", "GraniteForCausalLM", "HeliumForCausalLM",
    "Jais2ForCausalLM", "Ministral3ForCausalLM", "Olmo2ForCausalLM", "Olmo3ForCausalLM", "PhiForCausalLM",
    "SmolLM3ForCausalLM", "StableLmForCausalLM",
)  # fmt: skip
"""Dense families that differ from Llama by their norms, factors, rotations or activations."""

WHOLE_NORMS = ("FlexOlmoForCausalLM", "Olmo2ForCausalLM", "Olmo3ForCausalLM", "OlmoeForCausalLM")
"""Families that norm all query heads together; ranks cannot share them."""

WITH_EXPERTS = (
    "MixtralForCausalLM",
    "Qwen2MoeForCausalLM",
    "Qwen3MoeForCausalLM",
    "OlmoeForCausalLM",
    "FlexOlmoForCausalLM",
)
WITH_WINDOWS, WITH_ALIBI = "Gemma3ForCausalLM", "MptForCausalLM"
WITH_LATENTS = ("DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM", "Glm4MoeLiteForCausalLM")
WITH_SINKS, WITH_SIZES = "GptOssForCausalLM", "Gemma4ForCausalLM"
WITH_MAMBA = "GraniteMoeHybridForCausalLM"
WITH_STATES = ("Qwen3NextForCausalLM", "Qwen3_5ForCausalLM", "Qwen3_5MoeForCausalLM", WITH_MAMBA)
"""Families with a state in most layers."""

BIASED = ("LlamaForCausalLM", "Qwen3ForCausalLM", "Qwen3MoeForCausalLM", WITH_WINDOWS)
SOMETIMES_WINDOWS = (*DENSE[1:], "MixtralForCausalLM", "Qwen3MoeForCausalLM")
"""Families with a field for attention biases or windows.

A field that a family does not read is an error.
"""

FAMILIES = (
    *DENSE, *LLAMA_LIKE, *WITH_EXPERTS, *WITH_LATENTS, WITH_WINDOWS, WITH_ALIBI, *WITH_STATES, WITH_SINKS, WITH_SIZES
)  # fmt: skip
HEAD_RATIOS = (1, 2, 3, 4, 5, 6, 7, 8)
HEAD_DIMS = (16, 24, 32, 40, 64, 80, 96, 128, 256)
POSITIONS = 1_024
WIDEST = 4_096
"""The most numbers in all query heads of a token, so that a round takes seconds."""

EVEN = 32
"""The step of sizes where ranks or groups divide them.

Ranks share a model, or groups of its weights have a scale.
"""

INT4: dict[str, Any] = {
    "quant_method": "awq", "bits": 4, "group_size": EVEN, "zero_point": True, "version": "gemm",
    "modules_to_not_convert": ["mlp.gate", "block_sparse_moe.gate", "shared_expert_gate"],
}  # fmt: skip


def random_config(draw: random.Random) -> dict[str, Any]:
    """Return the ``config.json`` of a model with a random family and sizes.

    Drawn are head ratios, head sizes, widths that nothing divides, biases, norms, sliding windows and experts. Some
    models have weights of four bits.
    """
    family, even = draw.choice(FAMILIES), draw.random() < 0.3
    ratio, dim = draw.choice(HEAD_RATIOS), draw.choice((32, 64, 128) if even else HEAD_DIMS)
    kv_heads = draw.choice([heads for heads in (1, 2, 3, 4) if heads * ratio * dim <= WIDEST])
    if even:
        ratio, kv_heads = draw.choice((1, 2, 4)), draw.choice((2, 4))
    layers, inner = draw.randint(1, 3), _width(draw, 700, even)
    config: dict[str, Any] = {
        "architectures": [family],
        "model_type": family.removesuffix("ForCausalLM").lower(),
        "hidden_size": draw.choice((64, 96, _width(draw, 400, even))),
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": kv_heads * ratio,
        "num_key_value_heads": kv_heads,
        "head_dim": dim,
        "vocab_size": draw.choice((256, _width(draw, 3_000, even, least=130))),
        "max_position_embeddings": POSITIONS,
        "tie_word_embeddings": draw.random() < 0.3,
        "torch_dtype": "float32",
    }
    config |= _of_its_own(draw, config, even)
    if even and family in (*DENSE, *WITH_EXPERTS) and draw.random() < 0.5:
        config["quantization_config"] = INT4
    return config


def _of_its_own(draw: random.Random, config: dict[str, Any], even: bool) -> dict[str, Any]:
    """Return the fields that a family's config has besides, or instead."""
    (family,), dim, layers = config["architectures"], config["head_dim"], config["num_hidden_layers"]
    if family == WITH_ALIBI:
        heads = min(config["num_attention_heads"], WIDEST // dim)
        return {
            "d_model": heads * dim, "hidden_size": heads * dim, "n_heads": heads, "num_attention_heads": heads,
            "num_key_value_heads": heads, "n_layers": layers, "max_seq_len": POSITIONS, "no_bias": True,
            "attn_config": {"alibi": True}, "expansion_ratio": 2, "tie_word_embeddings": True,
        }  # fmt: skip
    found: dict[str, Any] = {"rope_theta": draw.choice((10_000.0, 1e6))}
    if family in WITH_STATES:
        return found | _states(draw, family, dim, even)
    if family in BIASED:
        found["attention_bias"] = draw.random() < 0.3
    if family == "LlamaForCausalLM":
        found["mlp_bias"] = draw.random() < 0.2
    if family in WITH_LATENTS:
        return found | _latent(draw, family, config, even)
    if family in LLAMA_LIKE:
        return found | _beside_llama(draw, family, dim)
    narrow, wide = draw.randrange(1, 64), draw.randrange(64, 600)
    if family == WITH_SINKS:
        kinds = [draw.choice(("full_attention", "sliding_attention")) for _ in range(layers)]
        return found | {"sliding_window": draw.choice((narrow, wide)), "layer_types": kinds, "num_local_experts": 4,
                        "num_experts_per_tok": draw.randint(1, 4)}  # fmt: skip
    if family == WITH_SIZES:
        return found | _sizes(draw, config, even) | {"sliding_window": draw.choice((narrow, wide))}
    if family == WITH_WINDOWS:
        window = draw.choice((narrow, wide))
        found |= {"sliding_window": window, "sliding_window_pattern": draw.randint(2, 3), "query_pre_attn_scalar": dim}
    elif family in SOMETIMES_WINDOWS:
        found["sliding_window"] = draw.choice((None, None, narrow, wide))
    if family in SOMETIMES_WINDOWS and family.startswith("Qwen"):
        found["use_sliding_window"] = True
    if family in ("Qwen2ForCausalLM", "Qwen3ForCausalLM"):
        found["max_window_layers"] = draw.randint(0, layers)
    return found | (_experts(draw, family, layers, even) if family in WITH_EXPERTS else {})


def _beside_llama(draw: random.Random, family: str, dim: int) -> dict[str, Any]:
    """Return the fields of a family that differs from Llama by more than its sizes."""
    flip, window = (
        draw.random() < 0.5,
        {"sliding_window": draw.choice((draw.randrange(1, 64), draw.randrange(64, 600)))},
    )
    half = {"partial_rotary_factor": 0.5 if dim % 4 == 0 else 1.0}
    yarn = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": draw.randrange(16, POSITIONS // 2)}
    factors = _factors(draw, dim)
    own: dict[str, dict[str, Any]] = {
        "ArceeForCausalLM": {"hidden_act": "relu2", "mlp_bias": flip},
        "CohereForCausalLM": {"attention_bias": flip},
        "Cohere2ForCausalLM": {**window, "sliding_window_pattern": draw.randint(2, 3), "attention_bias": flip},
        "Ernie4_5ForCausalLM": {"use_bias": flip},
        "Exaone4ForCausalLM": {**window, "sliding_window_pattern": draw.randint(2, 3)},
        "GlmForCausalLM": half,
        "Glm4ForCausalLM": {**half, "attention_bias": flip},
        "GraniteForCausalLM": {**factors, "mlp_bias": flip},
        "Jais2ForCausalLM": {"hidden_act": "relu2", "mlp_bias": flip},
        "Ministral3ForCausalLM": {"rope_parameters": {**yarn, "llama_4_scaling_beta": draw.uniform(0.1, 1)}},
        "Olmo3ForCausalLM": window,
        "PhiForCausalLM": {**half, "hidden_act": "gelu_new", "tie_word_embeddings": False},
        "SmolLM3ForCausalLM": {"no_rope_layer_interval": draw.randint(2, 3), "use_sliding_window": flip, **window},
        "StableLmForCausalLM": {**half, "use_parallel_residual": flip, "use_qkv_bias": draw.random() < 0.5},
    }
    return own.get(family, {})


def _factors(draw: random.Random, dim: int) -> dict[str, Any]:
    """Return Granite's factors, for heads of ``dim`` numbers."""
    return {
        "embedding_multiplier": draw.uniform(1, 20), "attention_multiplier": dim**-0.5 * draw.uniform(0.5, 2),
        "residual_multiplier": draw.uniform(0.1, 1), "logits_scaling": draw.uniform(1, 16),
    }  # fmt: skip


def _mamba(draw: random.Random, dim: int, even: bool) -> dict[str, Any]:
    """Return the fields of a model with states of Mamba 2, and with experts or without."""
    hidden, size = EVEN * draw.randint(2, 12), draw.choice((8, 16, 32, 64))
    heads, count = 2 * hidden // size, draw.choice((0, 4, 6, 8))
    found: dict[str, Any] = {
        "hidden_size": hidden, "mamba_n_heads": heads, "mamba_d_head": size, "mamba_expand": 2,
        "mamba_n_groups": draw.choice([groups for groups in (1, 1, 2, 4) if heads % groups == 0]),
        "mamba_d_state": draw.choice((8, 16, 32, 64)), "mamba_d_conv": draw.randint(2, 5),
        "mamba_conv_bias": draw.random() < 0.7, "mamba_proj_bias": draw.random() < 0.3,
        "shared_intermediate_size": _width(draw, 300, even), "num_local_experts": count,
        "position_embedding_type": draw.choice(("nope", "rope")),
    }  # fmt: skip
    if draw.random() < 0.3:
        found["time_step_limit"] = [draw.uniform(0, 0.2), draw.uniform(0.3, 2)]
    return found | _factors(draw, dim) | ({"num_experts_per_tok": draw.randint(1, 3)} if count else {})


def _states(draw: random.Random, family: str, dim: int, even: bool) -> dict[str, Any]:
    """Return the fields of a model with states; at least one layer has keys."""
    layers, heads = draw.randint(2, 4), draw.randint(1, 3)
    kinds = ["linear_attention"] * layers
    kinds[draw.randrange(layers)] = "full_attention"
    if family == WITH_MAMBA:
        return {"num_hidden_layers": layers, "layer_types": kinds} | _mamba(draw, dim, even)
    found: dict[str, Any] = {
        "num_hidden_layers": layers, "layer_types": kinds, "linear_num_key_heads": heads,
        "linear_num_value_heads": heads * draw.randint(1, 3), "linear_key_head_dim": draw.choice((8, 16, 32, 64)),
        "linear_value_head_dim": draw.choice((8, 16, 32, 64)), "linear_conv_kernel_dim": draw.randint(2, 5),
        "partial_rotary_factor": 0.25 if dim % 8 == 0 else 1.0, "attention_bias": draw.random() < 0.3,
    }  # fmt: skip
    if family != "Qwen3_5ForCausalLM":
        count = draw.choice((4, 6, 8))
        found |= {"num_experts": count, "num_experts_per_tok": draw.randint(1, 3),
                  "moe_intermediate_size": _width(draw, 200, even),
                  "shared_expert_intermediate_size": _width(draw, 200, even)}  # fmt: skip
    return found


def _experts(draw: random.Random, family: str, layers: int, even: bool) -> dict[str, Any]:
    """Return the fields of a model with experts."""
    count, chosen = draw.choice((4, 6, 8)), draw.randint(1, 3)
    if family == "MixtralForCausalLM":
        return {"num_local_experts": count, "num_experts_per_tok": chosen}
    if family in WHOLE_NORMS:
        return {"num_experts": count, "num_experts_per_tok": chosen, "norm_topk_prob": draw.random() < 0.7}
    shared = {"shared_expert_intermediate_size": _width(draw, 200, even)} if family == "Qwen2MoeForCausalLM" else {}
    return shared | {
        "num_experts": count, "num_experts_per_tok": chosen, "moe_intermediate_size": _width(draw, 200, even),
        "norm_topk_prob": draw.random() < 0.7, "decoder_sparse_step": draw.randint(1, min(layers, 2)),
        "mlp_only_layers": [],
    }  # fmt: skip


def _sizes(draw: random.Random, config: dict[str, Any], even: bool) -> dict[str, Any]:
    """Return the fields of a model with heads of two sizes; some have inputs of each layer, others experts."""
    dim, heads, layers = config["head_dim"], config["num_attention_heads"], draw.randint(2, 5)
    kinds = [draw.choice(("full_attention", "sliding_attention")) for _ in range(layers - 1)] + ["full_attention"]
    shares = [count for count in range(layers) if {*kinds[layers - count :]} <= {*kinds[: layers - count]}]
    found = {
        "num_hidden_layers": layers, "layer_types": kinds, "attention_k_eq_v": draw.random() < 0.5,
        "global_head_dim": 2 * dim if 2 * dim * heads <= WIDEST and dim < 256 else dim,
        "num_global_key_value_heads": draw.choice((config["num_key_value_heads"], 2 if even else 1)),
        "num_kv_shared_layers": draw.choice(shares), "use_double_wide_mlp": draw.random() < 0.5,
        "final_logit_softcapping": draw.choice((None, 30.0)), "hidden_size_per_layer_input": draw.choice((0, 16, 24)),
        "vocab_size_per_layer_input": WIDEST,
    }  # fmt: skip
    if heads % found["num_global_key_value_heads"]:
        found["num_global_key_value_heads"] = config["num_key_value_heads"]
    if not found["hidden_size_per_layer_input"] and draw.random() < 0.7:
        found |= {"enable_moe_block": True, "num_experts": draw.choice((4, 6, 8)), "top_k_experts": draw.randint(1, 4),
                  "moe_intermediate_size": _width(draw, 200, even)}  # fmt: skip
    return found


def _latent(draw: random.Random, family: str, config: dict[str, Any], even: bool) -> dict[str, Any]:
    """Return the fields of a model with latent vectors; all heads of a query fit into :data:`WIDEST`."""
    softmax, groups, heads = family == "DeepseekV2ForCausalLM", draw.choice((1, 2)), config["num_attention_heads"]
    heads = -(-heads // 4) * 4 if even else heads
    entry = min(256, WIDEST // heads)
    turned = 2 * draw.randrange(4, max(entry // 4, 5))
    return {
        "num_attention_heads": heads, "num_key_value_heads": heads, "head_dim": turned, "qk_rope_head_dim": turned,
        "kv_lora_rank": draw.randrange(16, max(entry - turned, 17)), "qk_nope_head_dim": draw.randrange(8, 65),
        "v_head_dim": 8 * draw.randint(1, 8) if even else draw.randrange(8, 65),
        "q_lora_rank": draw.choice((None, _width(draw, 200, even))), "n_routed_experts": 8, "n_group": 2 * groups,
        "topk_group": groups, "num_experts_per_tok": draw.randint(1, 4), "n_shared_experts": draw.randint(1, 2),
        "moe_intermediate_size": _width(draw, 200, even), "first_k_dense_replace": draw.randint(0, 1),
        "topk_method": "group_limited_greedy" if softmax else "noaux_tc", "norm_topk_prob": not softmax,
        "routed_scaling_factor": draw.uniform(0.5, 3.0),
    }  # fmt: skip


ENCODERS = (
    "Bert", "Roberta", "XLMRoberta", "DistilBert", "MPNet", "NomicBert", "ModernBert", "Gte", "JinaEmbeddingsV3"
)  # fmt: skip
"""Families of encoders. NomicBert has no head for classes."""


def random_encoder(draw: random.Random) -> dict[str, Any]:
    """Return the ``config.json`` of an encoder with a random family, head and sizes."""
    family, heads, dim = draw.choice(ENCODERS), draw.randint(1, 8), draw.choice((16, 24, 32, 64, 80, 128))
    classifies = family != "NomicBert" and draw.random() < 0.3
    config: dict[str, Any] = {
        "architectures": [family + ("ForSequenceClassification" if classifies else "Model")],
        "model_type": family.lower(), "hidden_size": heads * dim, "intermediate_size": _width(draw, 700, False),
        "num_hidden_layers": draw.randint(1, 4), "num_attention_heads": heads, "vocab_size": draw.randrange(130, 3_000),
        "max_position_embeddings": POSITIONS, "torch_dtype": "float32", "pad_token_id": draw.randint(0, 1),
    }  # fmt: skip
    if classifies:
        config["num_labels"] = draw.randint(1, 4)
    if family == "MPNet" and draw.random() < 0.5:  # otherwise the family's own default
        config["relative_attention_num_buckets"] = draw.choice((16, 32))
    if family == "DistilBert":
        names = {"hidden_size": "dim", "num_attention_heads": "n_heads", "num_hidden_layers": "n_layers",
                 "intermediate_size": "hidden_dim"}  # fmt: skip
        config = {names.get(name, name): value for name, value in config.items()}
    if family == "ModernBert":
        kind = draw.choice(("cls", "mean"))
        config |= {"local_attention": 2 * draw.randrange(1, 200), "global_attn_every_n_layers": draw.randint(1, 3)}
        config |= {"classifier_pooling": kind} if classifies else {}
    return config


def _width(draw: random.Random, most: int, even: bool, least: int = 33) -> int:
    """Return a size below ``most``: a multiple of :data:`EVEN` if ``even``."""
    return EVEN * draw.randrange(-(-least // EVEN), most // EVEN) if even else draw.randrange(least, most)


def write_model(folder: Path, draw: random.Random, *, encodes: bool = False) -> dict[str, Any]:
    """Write a random config into ``folder``, for ``--load-format dummy``; returns it."""
    config = random_encoder(draw) if encodes else random_config(draw)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    return config


def write_draft(folder: Path, target: dict[str, Any], draw: random.Random) -> None:
    """Write the config of a model that drafts for ``target``.

    It knows the same tokens.
    """
    config = random_config(draw)
    while config["architectures"][0] in WITH_STATES:  # such a model cannot draft
        config = random_config(draw)
    config["vocab_size"] = target["vocab_size"]
    config.pop("quantization_config", None)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
