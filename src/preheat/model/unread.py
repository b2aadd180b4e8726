"""Fields of a checkpoint that change numbers.

An unread field must have a neutral value. A table names such fields, as far as they are known from any model or method,
with the values that change nothing. A field that a family or a method reads is not looked up: its reader computes it or
refuses it. So each field is read, harmless or refused by name, and a new family has all refusals without a line of its
own. Fields that only add tensors need no line, because a tensor that is never read is an error of its own. No torch
here.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

from preheat.errors import ModelError

Neutral = Mapping[str, tuple[object, ...]]
"""Values that change nothing, by field.

For a list or an object they are the values of each item.
"""


def _each(allowed: tuple[object, ...], names: str) -> dict[str, tuple[object, ...]]:
    return dict.fromkeys(names.split(), allowed)


_OFF, _ON, _ONE = (False, 0), (True,), (1,)

MODEL: Neutral = {
    # biases and norms that other families have
    **_each(_OFF, """
        attention_bias attention_out_bias add_bias_linear add_qkv_bias apply_residual_connection_post_layernorm bias
        enable_bias lm_head_bias mlp_bias norm_after norm_bias qk_layernorm qk_norm qkv_bias use_bias use_post_norm
        use_qk_norm use_qkv_bias
    """),
    # factors and bounds of embeddings, residuals, scores and logits
    **_each(_ONE, """
        attention_in_multiplier attention_multiplier attention_out_multiplier attention_value_scale embedding_multiplier
        embedding_scale key_multiplier lm_head_multiplier logit_scale logits_scaling output_multiplier
        residual_multiplier residual_scale scale_depth scale_emb
    """),
    **_each(_OFF, """
        attention_logit_cap attn_logit_softcapping attn_scale attn_temperature_tuning clip_qkv dim_model_base
        final_logit_softcapping logits_soft_cap query_pre_attn_scalar scale_attn_by_inverse_layer_idx scale_embedding
        swiglu_limit use_logn_attn
    """),
    "scale_attn_weights": _ON,
    # positions
    **_each(_ONE, "embedding_fraction interpolate_factor partial_rotary_factor rope_ratio rotary_pct"),
    **_each(_OFF, "alibi no_rope_layer_interval rope_interleave rotary_dim use_dynamic_ntk use_mrope"),
    **_each(_ON, "no_rope_layers"),  # a list of whether each layer turns
    "position_embedding_type": ("rope", "absolute"),  # old libraries write "absolute" for every model
    # attention masks
    **_each(_OFF, """
        add_cross_attention attention_chunk_size attention_k_eq_v global_attn_every_n_layers is_encoder_decoder
        local_attention num_kv_shared_layers prefix_lm use_bidirectional_attention use_sliding_window
    """),
    **_each(_ONE, "cla_share_factor full_attn_mod"),
    "is_causal": _ON,
    "layer_types": ("full_attention",),
    "layers_block_type": ("attention", "full_attention"),
    # other parts of a layer
    **_each(_OFF, """
        activation_sparsity_pattern altup_num_inputs gated_attention hidden_size_per_layer_input kv_lora_rank
        laurel_rank mamba_d_state parallel_attn pruned_heads q_lora_rank use_double_wide_mlp use_mla
        use_parallel_residual
    """),
    # experts
    **_each(_OFF, """
        apply_router_weight_on_input enable_moe_block first_k_dense_replace mlp_only_layers
        moe_apply_router_weight_on_input moe_num_experts moe_num_shared_experts moe_router_enable_expert_bias
        n_routed_experts n_shared_experts num_shared_experts
        use_expert_bias zero_expert_num
    """),
    **_each((0, 1), "n_group topk_group"),
    **_each(_ONE, "decoder_sparse_step moe_layer_freq routed_scaling_factor router_scaling_factor"),
    **_each(("softmax",), "moe_router_activation_func scoring_func"),
    "mlp_layer_types": ("dense",),
    "norm_topk_prob": _ON,
    "topk_method": ("greedy",),
}  # fmt: skip
"""Neutral fields of ``config.json``."""

METHODS: Mapping[str, Neutral] = {
    "fp8": {"kv_cache_scheme": _OFF, "scale_fmt": ("ue8m0", "float")},  # scales in the file are already rounded
    "modelopt": {"quantized_layers": _OFF, "transform_config": _OFF},
    "awq": {"do_fuse": _OFF, "modules_to_fuse": _OFF},
    "gptq": {"is_marlin_format": _OFF, "adapter": _OFF, "pack_dtype": ("int32",)},
    "compressed-tensors": {},
    "gguf": {},
    "mxfp4": {},
}
"""Neutral fields of a ``quantization_config``, by its method."""

GENERATION: Neutral = {
    **_each(_OFF, """
        bad_words_ids begin_suppress_tokens constraints encoder_no_repeat_ngram_size epsilon_cutoff eta_cutoff
        exponential_decay_length_penalty force_words_ids forced_bos_token_id forced_eos_token_id
        min_length min_new_tokens no_repeat_ngram_size penalty_alpha remove_invalid_values renormalize_logits
        sequence_bias suppress_tokens top_h watermarking_config diversity_penalty dola_layers
    """),
    **_each(_ONE, "encoder_repetition_penalty guidance_scale num_beam_groups num_beams typical_p"),
}  # fmt: skip
"""Neutral fields of ``generation_config.json``."""


def refuse_unread(
    where: str, values: Mapping[str, Any], neutral: Neutral, read: Collection[str] = (), hint: str = ""
) -> None:
    """Raise ModelError for an unread field that is not ``neutral``.

    ``values`` are all fields. ``read`` are the names of read fields. The message names ``where`` the field stands and
    ends with the ``hint``.
    """
    for name in sorted((neutral.keys() & values.keys()) - set(read)):
        if not all(item in (None, "", *neutral[name]) for item in _items(values[name])):
            allowed = " or ".join(map(str, neutral[name]))
            raise ModelError(f"{where}: {name} {values[name]!r} is not supported, only {allowed}{hint}")


def _items(value: object) -> Iterable[object]:
    """Return the plain values in ``value``, through nested lists and objects."""
    if isinstance(value, Mapping):
        value = list(value.values()) or None
    if isinstance(value, list | tuple):
        return [item for each in value for item in _items(each)]
    return [value]
