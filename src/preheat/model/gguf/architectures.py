"""Architectures of GGUF files as data: their family, fields and tensors.

llama.cpp's ``convert_hf_to_gguf.py`` wrote the files, so the tables undo the script's changes. A new architecture is a
row in :data:`ARCHITECTURES`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
"""Modules outside the layers, by the stem of their tensors."""

LAYER = {
    "attn_norm": "input_layernorm", "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj", "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm", "ffn_norm": "post_attention_layernorm", "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
}  # fmt: skip
"""Modules of a layer."""

EXPERTS = {
    "ffn_gate_inp": "mlp.gate", "ffn_gate_exps": "mlp.experts.{}.gate_proj", "ffn_up_exps": "mlp.experts.{}.up_proj",
    "ffn_down_exps": "mlp.experts.{}.down_proj", "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj", "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
}  # fmt: skip
"""Modules of a layer with experts. A tensor of all experts is stacked."""

FUSED = (
    ("attn_q", "attn_k", "attn_v"), ("attn_qkv",), ("attn_output",), ("ffn_gate", "ffn_up"), ("ffn_down",),
    ("ffn_gate_exps", "ffn_up_exps", "ffn_down_exps"), ("ffn_gate_shexp", "ffn_up_shexp"), ("ffn_down_shexp",),
)  # fmt: skip
"""Linear layers that may keep their codes. The layers of a group are computed as one."""

NOT_WEIGHTS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
"""Tensors that the config takes in."""

FIELDS = {
    "max_position_embeddings": "context_length", "hidden_size": "embedding_length", "num_hidden_layers": "block_count",
    "intermediate_size": "feed_forward_length", "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv", "head_dim": "attention.key_length",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon", "rope_theta": "rope.freq_base",
}  # fmt: skip
"""Fields of every model: the name in ``config.json``, and the name after the architecture's."""

OPTIONAL = ("attention.head_count_kv", "attention.key_length", "rope.freq_base")
"""Fields that a file may leave out, since the family has llama.cpp's default."""

EXPERT_FIELDS = {
    "num_experts": "expert_count", "num_experts_per_tok": "expert_used_count",
    "moe_intermediate_size": "expert_feed_forward_length",
}  # fmt: skip

NEUTRAL: Mapping[str, tuple[object, ...]] = {
    "attention.causal": (True,), "attention.clamp_kqv": (0,), "attention.max_alibi_bias": (0,),
    "attention.output_scale": (0, 1), "attention.scale": (0,), "attention.sliding_window": (0,),
    "attention.temperature_length": (0,), "attention.temperature_scale": (0,), "attn_logit_softcapping": (0,),
    "attention.shared_kv_layers": (0,), "attention.kv_lora_rank": (0,), "attention.q_lora_rank": (0,),
    "embedding_scale": (0, 1), "expert_count": (0,), "expert_gating_func": (0, 1), "expert_group_count": (0, 1),
    "expert_shared_count": (0,), "expert_weights_scale": (0, 1), "final_logit_softcapping": (0,),
    "full_attention_interval": (0, 1), "interleave_moe_layer_step": (0, 1), "leading_dense_block_count": (0,),
    "logit_scale": (0, 1), "moe_every_n_layers": (0, 1), "nextn_predict_layers": (0,), "residual_scale": (0, 1),
    "attention.sliding_window_pattern": (6,), "rope.dimension_sections": (), "rope.scale_linear": (1,),
    "rope.scaling.alpha": (0,), "rope.scaling.yarn_ext_factor": (-1, 1),
    "rope.scaling.yarn_log_multiplier": (0,), "use_parallel_residual": (False,),
}  # fmt: skip
"""Fields that change numbers, with the values that change nothing. A row that reads a field is not asked."""


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """An architecture of llama.cpp.

    ``family`` is the name in ``architectures`` of ``config.json``. ``fields`` are the names of its fields there, by
    :data:`FIELDS`. ``layer`` names the modules of a layer. ``constants`` are fields that llama.cpp has in its code.
    ``interleaved``: rows of queries and keys have rotary partners side by side. ``plus_one``: one was added to the
    weights of norms. ``partial``: a part of a head may turn. ``biases``: fields that say whether layers have a bias, by
    the stem of a tensor.
    """

    family: str
    model_type: str
    fields: Mapping[str, str] = field(default_factory=lambda: FIELDS)
    layer: Mapping[str, str] = field(default_factory=lambda: LAYER)
    constants: Mapping[str, object] = field(default_factory=dict)
    optional: tuple[str, ...] = OPTIONAL
    interleaved: bool = False
    plus_one: bool = False
    partial: bool = False
    biases: Mapping[str, str] = field(default_factory=dict)


LLAMA = Architecture(
    family="LlamaForCausalLM", model_type="llama", interleaved=True,
    biases={"attention_bias": "attn_q", "mlp_bias": "ffn_up"},
)  # fmt: skip

ARCHITECTURES: Mapping[str, Architecture] = {
    "llama": LLAMA,
    "llama with experts": Architecture(
        family="MixtralForCausalLM", model_type="mixtral", interleaved=True, constants={"sliding_window": None},
        fields=FIELDS | {"num_local_experts": "expert_count", "num_experts_per_tok": "expert_used_count"},
        layer=LAYER | {
            "ffn_gate_inp": "block_sparse_moe.gate", "ffn_gate_exps": "block_sparse_moe.experts.{}.w1",
            "ffn_up_exps": "block_sparse_moe.experts.{}.w3", "ffn_down_exps": "block_sparse_moe.experts.{}.w2",
        },
    ),
    "qwen2": Architecture(family="Qwen2ForCausalLM", model_type="qwen2"),
    "qwen3": Architecture(family="Qwen3ForCausalLM", model_type="qwen3", biases={"attention_bias": "attn_q"}),
    "qwen2moe": Architecture(
        family="Qwen2MoeForCausalLM", model_type="qwen2_moe", layer=LAYER | EXPERTS,
        fields=FIELDS | EXPERT_FIELDS | {"shared_expert_intermediate_size": "expert_shared_feed_forward_length"},
        constants={"norm_topk_prob": False},
    ),
    "qwen3moe": Architecture(
        family="Qwen3MoeForCausalLM", model_type="qwen3_moe", layer=LAYER | EXPERTS, fields=FIELDS | EXPERT_FIELDS,
        constants={"norm_topk_prob": True}, biases={"attention_bias": "attn_q"},
    ),
    "gemma3": Architecture(
        family="Gemma3ForCausalLM", model_type="gemma3_text", plus_one=True,
        fields=FIELDS | {"sliding_window": "attention.sliding_window", "rope_local_base_freq": "rope.freq_base_swa"},
        optional=(*OPTIONAL, "rope.freq_base_swa"),
        layer=LAYER | {
            "post_attention_norm": "post_attention_layernorm", "ffn_norm": "pre_feedforward_layernorm",
            "post_ffw_norm": "post_feedforward_layernorm",
        },
        constants={
            "hidden_activation": "gelu_pytorch_tanh", "hidden_act": "gelu_pytorch_tanh", "sliding_window_pattern": 6,
        },
    ),
    "phi3": Architecture(
        family="Phi3ForCausalLM", model_type="phi3", partial=True,
        fields=FIELDS | {"sliding_window": "attention.sliding_window"},
        optional=(*OPTIONAL, "attention.sliding_window"),
        layer=LAYER | {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"},
    ),
}  # fmt: skip
"""Architectures by ``general.architecture``. A model of "llama" with experts has its own row."""

YARN = {"attention_factor": "yarn_attn_factor", "beta_fast": "yarn_beta_fast", "beta_slow": "yarn_beta_slow"}
"""Parameters of yarn that a file may state."""

SCALED = {("gemma3", 62): ("query_pre_attn_scalar", "hidden_size", "num_attention_heads")}
"""A scale of scores that llama.cpp has in its code: the architecture and its layers; a field is a quotient of two."""
