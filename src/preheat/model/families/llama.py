"""Llama (2, 3, 3.1 and later), and families that differ from it in a field or two."""

from __future__ import annotations

from dataclasses import replace

from preheat.errors import ModelError
from preheat.model.attention_specs import QueryGrowth
from preheat.model.config import Config
from preheat.model.families.common import LLAMA, llama_like, norms_after, squared_mlp, with_layers
from preheat.model.specs import LayerSpec, ModelSpec, attention_of

_CWM_ROPE = {
    "rope_type": "llama3", "factor": 16.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0, "rope_theta": 1e6,
    "original_max_position_embeddings": 8192,
}  # fmt: skip
_MINISTRAL3_ROPE = {
    "rope_type": "yarn", "factor": 16.0, "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0,
    "rope_theta": 1e6, "original_max_position_embeddings": 16384, "llama_4_scaling_beta": 0.1,
}  # fmt: skip


def llama(config: Config) -> ModelSpec:
    """No sliding windows; all biases by the config."""
    config = config.with_defaults(max_position_embeddings=2048)
    bias = config.flag("attention_bias")
    return llama_like(config, qkv_bias=bias, o_bias=bias, mlp_bias=config.flag("mlp_bias"))


def arcee(config: Config) -> ModelSpec:
    """Llama with an MLP without a gate, by the square of ReLU."""
    config = config.with_defaults(max_position_embeddings=4096, rms_norm_eps=1e-5)
    bias = config.flag("attention_bias")
    return llama_like(config, qkv_bias=bias, o_bias=bias, mlp=squared_mlp(config))


def seed_oss(config: Config) -> ModelSpec:
    """Llama with a field of its own for the bias of attention's output."""
    config = config.with_defaults(
        max_position_embeddings=524288, num_key_value_heads=8, head_dim=128, attention_bias=True
    )
    return llama_like(
        config, qkv_bias=config.flag("attention_bias"), o_bias=config.flag("attention_out_bias"),
        mlp_bias=config.flag("mlp_bias"),
    )  # fmt: skip


def ernie4_5(config: Config) -> ModelSpec:
    """Llama with rope in pairs, and one field for all biases."""
    config = config.with_defaults(
        max_position_embeddings=131072, num_key_value_heads=2, head_dim=128, rms_norm_eps=1e-5, rope_theta=500000.0,
        tie_word_embeddings=True,
    )  # fmt: skip
    bias = config.flag("use_bias")
    return llama_like(config, qkv_bias=bias, o_bias=bias, mlp_bias=bias, rope=config.rope(interleaved=True))


def helium(config: Config) -> ModelSpec:
    """Llama with rope in pairs."""
    config = config.with_defaults(
        max_position_embeddings=4096, num_key_value_heads=20, head_dim=128, rms_norm_eps=1e-8, rope_theta=100000.0
    )
    bias, mlp_bias = config.flag("attention_bias"), config.flag("mlp_bias")
    return llama_like(config, qkv_bias=bias, mlp_bias=mlp_bias, rope=config.rope(interleaved=True))


def smollm3(config: Config) -> ModelSpec:
    """Llama with layers that do not turn; windows by the config."""
    config = config.with_defaults(
        max_position_embeddings=32768, num_key_value_heads=4, tie_word_embeddings=True, no_rope_layer_interval=4,
        rope_theta=2000000.0,
    )  # fmt: skip
    bias, count, every = config.flag("attention_bias"), config.num_layers(), config.size("no_rope_layer_interval")
    turns = config.ids("no_rope_layers") or tuple(int((index + 1) % every != 0) for index in range(count))
    if len(turns) < count:
        raise ModelError(f"config.json: no_rope_layers has {len(turns)} entries for {count} layers")
    windows = config.windows(used=config.flag("use_sliding_window"))
    if not config.has("layer_types"):
        windows = tuple(None if turn else each for each, turn in zip(windows, turns, strict=False))

    def layer(index: int, made: LayerSpec) -> LayerSpec:
        return made if turns[index] else replace(made, attention=replace(attention_of(made), rope=None))

    mlp_bias = config.flag("mlp_bias")
    return with_layers(llama_like(config, windows=windows, qkv_bias=bias, o_bias=bias, mlp_bias=mlp_bias), layer)


def cwm(config: Config) -> ModelSpec:
    """Llama with a window in three of four layers."""
    config = config.with_defaults(
        max_position_embeddings=131072, num_key_value_heads=8, head_dim=128, rms_norm_eps=1e-5, sliding_window=8192,
        rope_theta=1e6, rope_parameters=_CWM_ROPE, eos_token_id=[128001, 128008, 128009],
        layer_types=[("sliding" if index % 4 else "full") + "_attention" for index in range(config.num_layers())],
    )  # fmt: skip
    return llama_like(config, windows=config.windows(), mlp_bias=config.flag("mlp_bias"))


def exaone4(config: Config) -> ModelSpec:
    """Norms after attention and MLP in place of before, and of heads; layers that see everything do not turn."""
    config = config.with_defaults(
        max_position_embeddings=2048, num_key_value_heads=32, rms_norm_eps=1e-5, sliding_window=4096
    )
    pattern = config.get("sliding_window_pattern") or 4
    if not config.has("layer_types") and not isinstance(pattern, int):
        raise ModelError(f"config.json: sliding_window_pattern {pattern!r} needs layer_types beside it")
    windows = config.windows(every=pattern if isinstance(pattern, int) else 0)
    turns_all = config.window() is None

    def layer(index: int, made: LayerSpec) -> LayerSpec:
        if not (turns_all or windows[index]):
            made = replace(made, attention=replace(attention_of(made), rope=None))
        return norms_after(config, made, LLAMA.layer.format(index))

    return with_layers(llama_like(config, windows=windows, qk_norm=True), layer)


def mistral(config: Config) -> ModelSpec:
    """No biases; a sliding window by the config."""
    config = config.with_defaults(sliding_window=4096, num_key_value_heads=8, max_position_embeddings=131072)
    return llama_like(config, windows=config.windows())


def ministral3(config: Config) -> ModelSpec:
    """Mistral with yarn, and queries that grow with their position."""
    config = config.with_defaults(
        num_key_value_heads=8, head_dim=128, max_position_embeddings=262144, rms_norm_eps=1e-5, rope_theta=1e6,
        rope_parameters=_MINISTRAL3_ROPE,
    )  # fmt: skip
    rope = config.rope(read=("llama_4_scaling_beta",))
    rate = config.rope_fields().get("llama_4_scaling_beta") or 0
    if not isinstance(rate, int | float):
        raise ModelError(f"config.json: llama_4_scaling_beta must be a number, got {rate!r}")
    growth = QueryGrowth(float(rate), rope.original_length) if rate else None

    def layer(_: int, made: LayerSpec) -> LayerSpec:
        return replace(made, attention=replace(attention_of(made), growth=growth))

    return with_layers(llama_like(config, windows=config.windows(), rope=rope), layer)
