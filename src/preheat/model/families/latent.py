"""GLM-4.7-Flash, DeepSeek-V2 and V3: attention over latent vectors (MLA), and experts in groups."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import log

from preheat.errors import ModelError
from preheat.model.attention_specs import AttentionSpec, RopeSpec
from preheat.model.config import Config
from preheat.model.families.common import LLAMA, dense, model, norm
from preheat.model.families.moe import STACKED, experts, modules
from preheat.model.kv_spec import KVSpec
from preheat.model.latent_specs import LatentSpec, UpSpec
from preheat.model.mlp_specs import MoeSpec, SharedSpec
from preheat.model.specs import LayerSpec, ModelSpec, Rename
from preheat.model.tensor_specs import LinearSpec, NormSpec, VectorSpec
from preheat.ops.kinds import Scoring

Range = tuple[int, int]

_EPS = 1e-6
"""Epsilon of the norms of latent vectors and of queries, whatever the config's."""


def glm4_moe_lite(config: Config) -> ModelSpec:
    """Score experts by sigmoids, in groups; keys and values are one latent vector (MLA). The first layer is dense."""
    config = config.with_defaults(
        num_attention_heads=20, max_position_embeddings=202752, rms_norm_eps=1e-5,
        q_lora_rank=768, kv_lora_rank=512, qk_nope_head_dim=192, qk_rope_head_dim=64, v_head_dim=256,
        n_routed_experts=64, n_shared_experts=1, num_experts_per_tok=4, moe_intermediate_size=1536,
        routed_scaling_factor=1.8, norm_topk_prob=True, n_group=1, topk_group=1, rope_interleave=True,
        first_k_dense_replace=1,
    )  # fmt: skip
    return _model(config, "sigmoid", interleaved=config.flag("rope_interleave"))


def deepseek_v3(config: Config) -> ModelSpec:
    """Score experts by sigmoids, in groups; keys and values are one latent vector (MLA). The first layers are dense."""
    config = config.with_defaults(
        num_attention_heads=128, max_position_embeddings=4096, q_lora_rank=1536,
        kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128,
        n_routed_experts=256, n_shared_experts=1, num_experts_per_tok=8, moe_intermediate_size=2048,
        routed_scaling_factor=2.5, norm_topk_prob=True, n_group=8, topk_group=4, rope_interleave=True,
        first_k_dense_replace=3,
    )  # fmt: skip
    return _model(config, "sigmoid", interleaved=config.flag("rope_interleave"))


def deepseek_v2(config: Config) -> ModelSpec:
    """Score experts by softmax, in groups by their best expert; keys and values are one latent vector (MLA)."""
    config = config.with_defaults(
        num_attention_heads=32, max_position_embeddings=2048, q_lora_rank=1536, kv_lora_rank=512,
        qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128, n_routed_experts=64, n_shared_experts=2,
        moe_intermediate_size=1407, topk_method="greedy",
    )  # fmt: skip
    return _model(config, "softmax", interleaved=True)


def _model(config: Config, scoring: Scoring, *, interleaved: bool) -> ModelSpec:
    for name in ("moe_layer_freq", "ep_size", "pretraining_tp"):
        config.refuse(name, 1)
    heads = config.size("num_attention_heads")
    config.refuse("num_key_value_heads", heads)
    rope = config.rope(interleaved=interleaved)
    sparse, hidden = _sparse(config), config.size("hidden_size")
    _experts(config, "", scoring)  # a model of dense layers alone states the fields too

    def layer(index: int) -> LayerSpec:
        prefix = LLAMA.layer.format(index)
        return LayerSpec(
            attention=_attention(config, prefix, heads, rope),
            mlp=_experts(config, prefix, scoring) if sparse[index] else dense(
                config, LLAMA, prefix, bias=config.flag("mlp_bias")
            ),
            input_norm=norm(config, prefix + LLAMA.input_norm, hidden),
            post_norm=norm(config, prefix + LLAMA.post_norm, hidden),
        )  # fmt: skip

    layers = tuple(layer(index) for index in range(config.num_layers()))
    ahead = tuple(rf"model\.layers\.{config.num_layers() + at}\..*" for at in range(_predicted(config)))
    return model(config, LLAMA, layers, max_positions=config.max_positions(rope), renames=_RENAMES, ignored=ahead)


def _sparse(config: Config) -> list[bool]:
    """Return whether each layer has experts."""
    count, kinds = config.num_layers(), config.get("mlp_layer_types")
    if kinds is None:
        first = config.get("first_k_dense_replace") or 0
        if type(first) is not int:
            raise ModelError(f"config.json: first_k_dense_replace must be a whole number, got {first!r}")
        return [index >= first for index in range(count)]
    if not isinstance(kinds, list) or len(kinds) != count or set(kinds) - {"dense", "sparse"}:
        raise ModelError(f"config.json: mlp_layer_types must name {count} layers dense or sparse, got {kinds!r}")
    config.get("first_k_dense_replace")  # the list decides
    return [kind == "sparse" for kind in kinds]


def _predicted(config: Config) -> int:
    """Return the number of layers that predict further tokens, stored behind the others; they are not loaded."""
    found = config.get("num_nextn_predict_layers") or 0
    return found if type(found) is int else 0


def _attention(config: Config, prefix: str, heads: int, rope: RopeSpec) -> AttentionSpec:
    hidden, rank, turned = (config.size(name) for name in ("hidden_size", "kv_lora_rank", "qk_rope_head_dim"))
    key, value = config.size("qk_nope_head_dim"), config.size("v_head_dim")
    if turned % 2:
        raise ModelError(f"config.json: qk_rope_head_dim must be even for rotary embedding, got {turned}")
    bias, at, size = config.flag("attention_bias"), f"{prefix}self_attn.", key + turned
    order = _turning_order(rope, turned)
    queries = tuple((head * size + a, head * size + b) for head in range(heads) for a, b in ((0, key), *order(key)))
    inner = config.optional_size("q_lora_rank")
    if inner is None and bias:
        raise ModelError("attention_bias without q_lora_rank is not supported: q_proj would have no bias")
    first = (f"{at}q_proj", heads * size) if inner is None else (f"{at}q_a_proj", inner)
    rows = queries if inner is None else ((0, inner),)
    qkv = LinearSpec(
        parts=(first, (f"{at}kv_a_proj_with_mqa", rank + turned)), inputs=hidden, bias=bias,
        order=(*rows, (first[1], first[1] + rank), *order(first[1] + rank)) if rope.interleaved else (),
    )  # fmt: skip
    latent = LatentSpec(
        rope=turned,
        up=UpSpec(name=f"{at}kv_b_proj", heads=heads, key=key, value=value, rank=rank, stored_heads=heads),
        norm=NormSpec(f"{at}kv_a_layernorm", rank, _EPS),
        q=None if inner is None else LinearSpec(
            parts=((f"{at}q_b_proj", heads * size),), inputs=inner, order=queries if rope.interleaved else ()
        ),
        q_norm=None if inner is None else NormSpec(f"{at}q_a_layernorm", inner, _EPS),
    )  # fmt: skip
    return AttentionSpec(
        num_heads=heads,
        kv=KVSpec(1, rank + turned, latent=True),
        window=None,
        rope=rope,
        qk_norm=None,
        qkv=qkv,
        o=LinearSpec(parts=((f"{prefix}{LLAMA.o}", hidden),), inputs=heads * value, bias=bias),
        scale=size**-0.5 * _growth(config, rope),
        latent=latent,
    )


def _turning_order(rope: RopeSpec, turned: int) -> Callable[[int], tuple[Range, ...]]:
    """Return a function from the first of ``turned`` rows to the order of the rows.

    Partners that are neighbors in the checkpoint come half a head apart.
    """
    if not rope.interleaved:
        return lambda first: ((first, first + turned),)
    return lambda first: tuple((first + at, first + at + 1) for half in (0, 1) for at in range(half, turned, 2))


def _growth(config: Config, rope: RopeSpec) -> float:
    """Return yarn's factor of scores, the square of ``mscale_all_dim``'s."""
    scale = config.rope_fields().get("mscale_all_dim")
    if rope.kind == "default" or not scale or rope.factor <= 1:
        return 1.0
    return float((0.1 * scale * log(rope.factor) + 1.0) ** 2)


def _experts(config: Config, prefix: str, scoring: Scoring) -> MoeSpec:
    """Return a layer's experts, and the experts that all tokens share."""
    softmax, at = scoring == "softmax", f"{prefix}mlp."
    config.refuse("scoring_func", scoring)
    config.refuse("topk_method", *(("greedy", "group_limited_greedy") if softmax else ("noaux_tc",)))
    if softmax:
        config.refuse("norm_topk_prob")
    limited = not softmax or config.get("topk_method") == "group_limited_greedy"
    count, inner = config.size("n_routed_experts"), config.size("moe_intermediate_size")
    groups, kept = (config.size(name, 1) if limited else 1 for name in ("n_group", "topk_group"))
    top_k, best = config.size("num_experts_per_tok"), 1 if softmax else 2
    if count % groups or kept > groups or top_k > kept * (count // groups) or (groups > 1 and count // groups < best):
        raise ModelError(
            f"config.json: {count} experts in {groups} groups, {kept} of them kept, cannot give {top_k} experts"
        )
    found = experts(
        config, f"{at}gate", modules(prefix), count=count, inner=inner, top_k=top_k,
        renormalize=config.flag("norm_topk_prob"), round_weights=False,
    )  # fmt: skip
    names = replace(LLAMA, **{each: f"mlp.shared_experts.{each}_proj" for each in ("gate", "up", "down")})
    block = dense(config, names, prefix, bias=config.flag("mlp_bias"), inner=inner * config.size("n_shared_experts"))
    return replace(
        found,
        shared=SharedSpec(block=block),
        scoring=scoring,
        groups=groups,
        top_groups=kept,
        best=best,
        factor=config.positive("routed_scaling_factor", 1.0),
        correction=None if softmax else VectorSpec(f"{at}gate.e_score_correction_bias", count),
    )


_RENAMES = (*STACKED, Rename(r"(.*\.gate\.e_score_correction_bias)", (r"\1.weight",)))
"""The layout of transformers 5, and the name of a router's correction."""
