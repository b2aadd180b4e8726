"""The models of the oracles.

There is a small one of each family, in each storage format of weights.
"""

from __future__ import annotations

import zlib
from typing import Any

import torch
from torch import Tensor

SIZES: dict[str, Any] = {
    "hidden_size": 128, "intermediate_size": 640, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 32, "vocab_size": 320, "max_position_embeddings": 512,
}  # fmt: skip
"""Sizes of the models.

An adapter's inputs are cut into parts of 512: ``intermediate_size`` has two. Four ranks share four heads.
"""

EXPERTS: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 640}
PHI: dict[str, Any] = {"rms_norm_eps": 1e-5, "original_max_position_embeddings": 512}

FAMILIES: dict[str, dict[str, Any]] = {
    "GPTBigCodeForCausalLM": {
        "model_type": "gpt_bigcode", "n_embd": 128, "n_head": 4, "n_layer": 2, "n_inner": 640, "n_positions": 512,
    },
    "Gemma3ForCausalLM": {
        "model_type": "gemma3_text", "sliding_window": 24, "sliding_window_pattern": 2, "query_pre_attn_scalar": 32,
    },
    "LlamaForCausalLM": {"model_type": "llama", "attention_bias": True, "mlp_bias": True},
    "LlavaForConditionalGeneration": {
        "model_type": "llava", "image_token_index": 319, "text_config": {**SIZES, "model_type": "llama"},
        "vision_config": {
            "model_type": "clip_vision_model", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
            "num_attention_heads": 2, "image_size": 28, "patch_size": 7,
        },
    },
    "MPTForCausalLM": {
        "model_type": "mpt", "d_model": 128, "n_heads": 4, "n_layers": 2, "max_seq_len": 512, "no_bias": True,
        "expansion_ratio": 5, "attn_config": {"alibi": True, "clip_qkv": 0.7},
    },
    "MistralForCausalLM": {"model_type": "mistral", "sliding_window": 24},
    "MixtralForCausalLM": {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2},
    "Phi3ForCausalLM": {"model_type": "phi3", **PHI},
    "Qwen2ForCausalLM": {"model_type": "qwen2"},
    "Qwen2MoeForCausalLM": {
        "model_type": "qwen2_moe", **EXPERTS, "shared_expert_intermediate_size": 640, "norm_topk_prob": True,
        "decoder_sparse_step": 2, "mlp_only_layers": [],
    },
    "Qwen3ForCausalLM": {"model_type": "qwen3", "tie_word_embeddings": True},
    "Qwen3MoeForCausalLM": {"model_type": "qwen3_moe", **EXPERTS, "norm_topk_prob": False, "mlp_only_layers": []},
    "Starcoder2ForCausalLM": {"model_type": "starcoder2", "use_bias": True},
    "LlamaModel": {"model_type": "llama"},
}  # fmt: skip
"""By architecture: the differences from :data:`SIZES`. ``LlamaModel`` has no head: its engine pools."""

ELSEWHERE: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("GPTBigCodeForCausalLM", "MPTForCausalLM"), tuple(name for name in SIZES if name != "vocab_size")),
    "LlavaForConditionalGeneration": tuple(SIZES),
}
"""Sizes that a family's config has under other names, or not at all."""

ROUTERS = ["lm_head", "mlp.gate", "block_sparse_moe.gate", "shared_expert_gate"]
BLOCKS = {"head_dim": 128, "intermediate_size": 1024, "moe_intermediate_size": 1024,
          "shared_expert_intermediate_size": 1024}  # fmt: skip
"""Sizes of models with a scale for each weight block.

A block is 128 x 128; ranks divide whole blocks.
"""


def _compressed(style: str, weights: dict[str, Any], inputs: dict[str, Any] | None = None) -> dict[str, Any]:
    common = {"symmetric": True, "dynamic": False}
    group = {"targets": ["Linear"], "weights": common | weights, "input_activations": inputs}
    ignored = ["lm_head", r"re:.*\.gate$", r"re:.*shared_expert_gate$"]
    return {"quantization_config": {
        "quant_method": "compressed-tensors", "format": style, "ignore": ignored, "config_groups": {"a": group},
    }}  # fmt: skip


def _fp8(**more: Any) -> dict[str, Any]:
    ignored = "modules_to_not_convert" if "weight_block_size" in more else "ignored_layers"
    return {"quantization_config": {"quant_method": "fp8", ignored: ROUTERS, **more}}


def _gptq(bits: int = 4, **more: Any) -> dict[str, Any]:
    return {"quantization_config": {
        "quant_method": "gptq", "bits": bits, "group_size": 32, "desc_act": False, "sym": False, **more
    }}  # fmt: skip


_TOKEN = {"num_bits": 8, "type": "float", "strategy": "token", "symmetric": True, "dynamic": True}
_AWQ: dict[str, Any] = {"quantization_config": {
    "quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm",
    "modules_to_not_convert": ROUTERS,
}}  # fmt: skip

FORMATS: dict[str, dict[str, Any]] = {
    "plain": {},
    "fp8": _fp8(activation_scheme="dynamic"),
    "awq": _AWQ,
    "fp8 static": _fp8(activation_scheme="static"),
    "fp8 block": {**BLOCKS, **_fp8(activation_scheme="dynamic", weight_block_size=[128, 128])},
    "modelopt": {"quantization_config": {"quant_method": "modelopt", "quant_algo": "FP8", "exclude_modules": ROUTERS}},
    "fp8 online": {},
    "fp8 channel": _compressed("float-quantized", {"num_bits": 8, "type": "float", "strategy": "channel"}, _TOKEN),
    "fp8 weights": _compressed("float-quantized", {"num_bits": 8, "type": "float", "strategy": "channel"}),
    "int4 packed": _compressed("pack-quantized", {
        "num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": False}),
    "int8 packed": _compressed("pack-quantized", {"num_bits": 8, "type": "int", "strategy": "channel"}),
    "gptq": _gptq(),
    "gptq desc_act": _gptq(desc_act=True),
    "gptq symmetric": _gptq(sym=True),
    "gptq 8": _gptq(8, checkpoint_format="gptq_v2"),
    "inc": {},
}  # fmt: skip
"""Storage formats of weights: fields of config.json. Formats rounded while loading have none: see :data:`ASKED`."""

ASKED: dict[str, dict[str, Any]] = {"fp8 online": {"quantization": "fp8"}, "inc": {"quantization": "inc"}}
"""The options of formats that a checkpoint does not name."""


def config(family: str, stored: str) -> dict[str, Any]:
    """Return the ``config.json`` of a model of ``family``.

    Its weights are ``stored`` in a format of :data:`FORMATS`.
    """
    sizes = {name: value for name, value in SIZES.items() if name not in ELSEWHERE.get(family, ())}
    found = {"architectures": [family], "torch_dtype": "float32", **sizes, **FAMILIES[family]}
    changes = FORMATS[stored]
    return found | {name: changes[name] for name in changes if name in found or name == "quantization_config"}


class Weights:
    """The contents of a model's tensors, ``stored`` in a format of :data:`FORMATS`.

    It replaces :class:`preheat.model.dummy_tensors.DummyTensors`, where all scales are equal, and all zero points. Here
    they differ, so that one in a wrong place changes the digest. Groups are shuffled where ``desc_act`` allows it.
    """

    def __init__(self, stored: str) -> None:
        self._indexed, self._symmetric = "desc_act" in stored, "symmetric" in stored
        self._scale = 2.0 ** (-7 if "fp8" in stored or stored == "modelopt" else -10 if "8" in stored else -6)

    def fill(self, name: str, out: Tensor, piece: Any = None) -> None:
        """Write tensor ``name``, or a ``piece`` of it, into ``out``."""
        shape = tuple(out.shape) if piece is None else piece.shape
        whole = self._whole(name, shape, out)
        out.copy_(whole if shape == tuple(out.shape) else whole[piece.index])

    def _whole(self, name: str, shape: tuple[int, ...], out: Tensor) -> Tensor:
        kind, chance = name.rpartition(".")[2], torch.Generator().manual_seed(zlib.crc32(name.encode()))
        found = torch.empty(shape)
        if kind == "g_idx":
            groups = torch.arange(shape[0]) // 32
            return groups[torch.randperm(shape[0], generator=chance.manual_seed(shape[0]))] if self._indexed else groups
        if kind == "qzeros" and self._symmetric:
            return torch.full(shape, 0x77777777)
        if not out.is_floating_point():
            return torch.randint(-(2**31), 2**31 - 1, shape, generator=chance)
        if kind == "input_scale":
            return found.uniform_(0.01, 0.04, generator=chance)
        if kind in ("scales", "weight_scale", "weight_scale_inv"):
            return found.uniform_(0.5, 1.5, generator=chance) * self._scale
        if out.itemsize == 1:
            return found.normal_(std=16.0, generator=chance)
        if kind == "bias":
            return found.normal_(std=0.1, generator=chance)
        if len(shape) == 1:
            return found.normal_(1.0, 0.1, generator=chance)
        return found.normal_(std=(found.numel() // shape[0]) ** -0.5, generator=chance)
