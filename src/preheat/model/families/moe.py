"""Mixtral, OLMoE, Qwen2-MoE and Qwen3-MoE: Llama-like models with experts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from preheat.errors import ModelError
from preheat.model.config import Config
from preheat.model.families.common import LLAMA, dense, llama_like, normed_whole, norms_after, with_layers
from preheat.model.mlp_specs import ExpertsSpec, MlpSpec, MoeSpec, SharedSpec
from preheat.model.specs import LayerSpec, ModelSpec, Rename, attention_of
from preheat.model.tensor_specs import GateSpec, LinearSpec


def mixtral(config: Config) -> ModelSpec:
    """All layers have experts. Their weights sum to one and stay float32."""
    config = config.with_defaults(
        num_key_value_heads=8, max_position_embeddings=131072, rms_norm_eps=1e-5, rope_theta=1e6
    )

    def mlp(prefix: str, index: int) -> MlpSpec:
        at = f"{prefix}block_sparse_moe."
        modules = (f"{at}experts.{{}}.w1", f"{at}experts.{{}}.w3", f"{at}experts.{{}}.w2")
        count = config.size("num_local_experts", 8)
        return experts(
            config, f"{at}gate", modules, count=count, inner=config.size("intermediate_size"),
            top_k=config.size("num_experts_per_tok", 2), renormalize=True, round_weights=False,
        )  # fmt: skip

    at = r"\1block_sparse_moe."
    renames = (
        Rename(r"(.*\.)mlp\.gate\.weight", (f"{at}gate.weight",)),
        Rename(r"(.*\.)mlp\.experts\.gate_up_proj", (f"{at}experts.{{}}.w1.weight", f"{at}experts.{{}}.w3.weight")),
        Rename(r"(.*\.)mlp\.experts\.down_proj", (f"{at}experts.{{}}.w2.weight",)),
    )
    return llama_like(config, windows=config.windows(), mlp=mlp, renames=renames)


def qwen3_moe(config: Config) -> ModelSpec:
    """Query and key heads are normed; some layers may be dense. The experts' weights are rounded to the model's dtype.

    Some class defaults of the reference fit no released model, so the config must state these fields.
    """
    for name in ("num_hidden_layers", "head_dim", "norm_topk_prob", "num_key_value_heads"):
        config.require(name)
    config = config.with_defaults(sliding_window=4096, max_position_embeddings=32768)
    every, dense_layers = config.size("decoder_sparse_step", 1), config.ids("mlp_only_layers")
    bias = config.flag("attention_bias")
    count = config.size("num_experts" if config.has("num_experts") else "num_local_experts")
    config.refuse("num_local_experts", count)

    def mlp(prefix: str, index: int) -> MlpSpec:
        if index in dense_layers or (index + 1) % every:
            return dense(config, LLAMA, prefix, bias=False)
        return experts(
            config, f"{prefix}mlp.gate", modules(prefix), count=count,
            inner=config.size("moe_intermediate_size"), top_k=config.size("num_experts_per_tok"),
            renormalize=config.flag("norm_topk_prob"), round_weights=True,
        )  # fmt: skip

    windows = config.windows(used=config.flag("use_sliding_window"))
    return llama_like(config, windows=windows, qkv_bias=bias, o_bias=bias, qk_norm=True, mlp=mlp, renames=STACKED)


def olmoe(config: Config) -> ModelSpec:
    """All layers have experts; queries and keys are normed over all heads. The experts' weights are rounded."""
    config = config.with_defaults(
        max_position_embeddings=4096, rms_norm_eps=1e-5, num_experts=64, num_experts_per_tok=8
    )
    return _olmoe(config)


def _olmoe(config: Config) -> ModelSpec:
    config.refuse("clip_qkv")
    bias = config.flag("attention_bias")

    def mlp(prefix: str, _: int) -> MlpSpec:
        return experts(
            config, f"{prefix}mlp.gate", modules(prefix), count=config.size("num_experts"),
            inner=config.size("intermediate_size"), top_k=config.size("num_experts_per_tok"),
            renormalize=config.flag("norm_topk_prob"), round_weights=True,
        )  # fmt: skip

    def layer(index: int, made: LayerSpec) -> LayerSpec:
        return replace(made, attention=normed_whole(config, attention_of(made), LLAMA.layer.format(index)))

    return with_layers(llama_like(config, qkv_bias=bias, o_bias=bias, mlp=mlp, renames=STACKED), layer)


def flex_olmo(config: Config) -> ModelSpec:
    """As OLMoE, with norms after attention and experts in place of before."""

    def layer(index: int, made: LayerSpec) -> LayerSpec:
        return norms_after(config, made, LLAMA.layer.format(index))

    config = config.with_defaults(
        max_position_embeddings=4096, num_experts=7, num_experts_per_tok=5, rope_theta=500000.0
    )
    return with_layers(_olmoe(config), layer)


def qwen2_moe(config: Config) -> ModelSpec:
    """Besides the chosen experts, all tokens visit a shared expert behind a gate; some layers may be dense."""
    config = config.with_defaults(
        max_position_embeddings=32768, num_key_value_heads=16, num_experts=60, num_experts_per_tok=4, qkv_bias=True,
        moe_intermediate_size=1408, shared_expert_intermediate_size=5632,
    )  # fmt: skip
    config.refuse("use_sliding_window")
    return llama_like(config, qkv_bias=config.flag("qkv_bias"), mlp=sparse_layers(config), renames=STACKED)


def sparse_layers(config: Config) -> Callable[[str, int], MlpSpec]:
    """Return the function that makes a Qwen layer's experts, or the dense block of a layer that has none."""
    renormalize = config.flag("norm_topk_prob")
    every, dense_layers = config.size("decoder_sparse_step", 1), config.ids("mlp_only_layers")

    def mlp(prefix: str, index: int) -> MlpSpec:
        if index in dense_layers or (index + 1) % every:
            return dense(config, LLAMA, prefix, bias=False)
        return with_shared_expert(config, prefix, renormalize=renormalize)

    return mlp


def with_shared_expert(config: Config, prefix: str, *, renormalize: bool) -> MoeSpec:
    """Return a Qwen layer's experts, with one behind a gate that all tokens visit."""
    names = replace(LLAMA, **{each: f"mlp.shared_expert.{each}_proj" for each in ("gate", "up", "down")})
    block = dense(config, names, prefix, bias=False, inner=config.size("shared_expert_intermediate_size"))
    routed = experts(
        config, f"{prefix}mlp.gate", modules(prefix), count=config.size("num_experts"),
        inner=config.size("moe_intermediate_size"), top_k=config.size("num_experts_per_tok"),
        renormalize=renormalize, round_weights=True,
    )  # fmt: skip
    gate = GateSpec(f"{prefix}mlp.shared_expert_gate", config.size("hidden_size"))
    return replace(routed, shared=SharedSpec(block=block, gate=gate))


STACKED = (
    Rename(r"(.*\.mlp\.)experts\.gate_up_proj", (r"\1experts.{}.gate_proj.weight", r"\1experts.{}.up_proj.weight")),
    Rename(r"(.*\.mlp\.)experts\.down_proj", (r"\1experts.{}.down_proj.weight",)),
)
"""The layout of transformers 5."""


def modules(prefix: str) -> tuple[str, str, str]:
    """Return gate, up and down of a layer's experts."""
    at = f"{prefix}mlp.experts.{{}}."
    return f"{at}gate_proj", f"{at}up_proj", f"{at}down_proj"


def experts(
    config: Config, router: str, modules: tuple[str, str, str], *,
    count: int, inner: int, top_k: int, renormalize: bool, round_weights: bool,
) -> MoeSpec:  # fmt: skip
    """Return experts of the modules gate, up and down.

    The module ``router`` chooses them.
    """
    config.require_silu()
    if top_k > count:
        raise ModelError(f"config.json: num_experts_per_tok is {top_k}, but there are only {count} experts")
    hidden = config.size("hidden_size")
    gate, up, down = modules
    return MoeSpec(
        router=LinearSpec(parts=((router, count),), inputs=hidden),
        experts=ExpertsSpec(gate=gate, up=up, down=down, num_experts=count, hidden=hidden, inner=inner),
        top_k=top_k,
        renormalize=renormalize,
        round_weights=round_weights,
    )
