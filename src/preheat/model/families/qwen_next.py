"""Qwen3-Next and Qwen3.5: most layers keep a state, the others have attention with gates; Qwen3.5 sees images."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

from preheat.errors import ModelError
from preheat.model.attention_specs import AttentionSpec, RopeSpec
from preheat.model.config import Config
from preheat.model.families.common import LLAMA, attention, dense, model, norm, turning_order, with_layers
from preheat.model.families.moe import STACKED, sparse_layers, with_shared_expert
from preheat.model.families.qwen_vl import VISION, vision_of, with_axes
from preheat.model.families.states import layer_kinds, recurrence
from preheat.model.mlp_specs import MlpSpec
from preheat.model.recurrence_specs import ConvSpec, DeltaSpec
from preheat.model.specs import LayerSpec, ModelSpec, Rename
from preheat.model.tensor_specs import LinearSpec, NormSpec, VectorSpec
from preheat.ops.values import Recurrence

Ranges = tuple[tuple[int, int], ...]
Parts = tuple[tuple[str, int], ...]
Stored = Callable[[str, Recurrence], tuple[Parts, Ranges]]
"""Returns the modules of a layer's projection, and the order of their rows."""

_STATE, _FULL = "linear_attention", "full_attention"
_OWN = (*STACKED, Rename(r"(.*\.linear_attn\.(?:A_log|dt_bias))", (r"\1.weight",)))
_PART = Rename(r"(.+)", (r"\1",))
_RENAMES = (
    *(Rename(rf"model\.language_model\.{own.stored}", tuple(f"model.{name}" for name in own.names))
      for own in (*_OWN, _PART)),
    *_OWN,
)  # fmt: skip
"""Names of the text part of a larger model, and numbers that are no module's weight."""

_DRAFTING, _SEEING = r"mtp\..+", r"model\.visual\..+"
"""Layers that draft tokens, and an encoder of images that the config does not describe. None of them is loaded."""

_TOWERS = {
    kind: {name: each for name, each in VISION.items() if name != "deepstack_visual_indexes"} | {"model_type": kind}
    for kind in ("qwen3_5_vision", "qwen3_5_moe_vision")
}
"""Defaults of the tower by the kind of ``vision_config``."""

_IMAGE_TOKEN, _SECTIONS = 248056, (11, 11, 10)


def qwen3_next(config: Config) -> ModelSpec:
    """All layers have experts, unless the config names others. Projections are stored by key heads."""
    config = _defaults(config, num_key_value_heads=2, num_experts=512, num_experts_per_tok=10, norm_topk_prob=True)
    return _hybrid(config, sparse_layers(config), _by_key_heads)


def qwen3_5(config: Config) -> ModelSpec:
    """Dense layers; each projection is a module."""
    config = _defaults(config, num_key_value_heads=4)
    return _hybrid(config, lambda prefix, _: dense(config, LLAMA, prefix, bias=False), _side_by_side)


def qwen3_5_moe(config: Config) -> ModelSpec:
    """All layers have experts. The weights of the chosen experts sum to one."""
    config = _defaults(config, num_key_value_heads=2, num_experts=256, num_experts_per_tok=8)
    return _hybrid(config, lambda prefix, _: with_shared_expert(config, prefix, renormalize=True), _side_by_side)


_TEXTS: Mapping[str, Callable[[Config], ModelSpec]] = {"qwen3_5_text": qwen3_5, "qwen3_5_moe_text": qwen3_5_moe}
_SHARED = ("dtype", "torch_dtype", "bos_token_id", "eos_token_id", "tie_word_embeddings")


def with_images(config: Config) -> ModelSpec:
    """Images as in Qwen3-VL, without deep embeddings; none where the config has no ``vision_config``."""
    text = Config(config.architecture, config.mapping("text_config"))
    text.require_unquantized()
    if (kind := text.get("model_type")) not in _TEXTS:
        raise ModelError(f"text_config of model_type {kind!r} is not supported, only {', '.join(_TEXTS)} are")
    text = text.updated({name: config.get(name) for name in _SHARED if config.has(name) and not text.has(name)})
    spec = _TEXTS[str(kind)](text)
    text.refuse_unread("text_config")
    if not config.mapping("vision_config"):
        return spec
    found = config.mapping("vision_config").get("model_type")
    tower = _TOWERS.get(str(found or "qwen3_5").removesuffix("_vision") + "_vision")
    if tower is None:
        raise ModelError(f"vision_config of model_type {found!r} is not supported, only {', '.join(_TOWERS)} are")
    spec = replace(with_layers(spec, lambda _, layer: _with_places(text, layer)), ignored=(_DRAFTING,))
    return replace(spec, vision=vision_of(config, spec, tower, _IMAGE_TOKEN))


def _with_places(text: Config, layer: LayerSpec) -> LayerSpec:
    """Return ``layer`` with heads that turn by places on three axes."""
    own = layer.attention
    if not isinstance(own, AttentionSpec) or own.rope is None:
        return layer
    rope = with_axes(own.rope, text, own.rope.turned(own.head_dim) // 2, _SECTIONS)
    return replace(layer, attention=replace(own, rope=rope))


def _defaults(config: Config, **more: object) -> Config:
    """Return ``config`` with the defaults of the reference's config classes."""
    return config.with_defaults(
        head_dim=256, max_position_embeddings=32768, partial_rotary_factor=0.25, linear_conv_kernel_dim=4,
        linear_key_head_dim=128, linear_value_head_dim=128, linear_num_key_heads=16, linear_num_value_heads=32,
        full_attention_interval=4, moe_intermediate_size=512, shared_expert_intermediate_size=512, **more,
    )  # fmt: skip


def _hybrid(config: Config, mlp: Callable[[str, int], MlpSpec], stored: Stored) -> ModelSpec:
    """Return a whole model of layers with feed-forward blocks ``mlp(prefix, index)``."""
    config.require_silu()
    if config.get("attn_output_gate") is False:
        raise ModelError("config.json: attn_output_gate False is not supported, only True is")
    hidden, bias = config.size("hidden_size"), config.flag("attention_bias")
    rope = config.rope(partial=True, read=("mrope_section", "mrope_interleaved"))
    value = _recurrence(config)

    def layer(index: int, state: bool) -> LayerSpec:
        prefix = LLAMA.layer.format(index)
        if state:
            mixer: AttentionSpec | DeltaSpec = _delta(config, f"{prefix}linear_attn.", value, stored)
        else:
            mixer = _gated_attention(config, prefix, rope, bias=bias)
        return LayerSpec(
            attention=mixer,
            mlp=mlp(prefix, index),
            input_norm=_plus_one(config, prefix + LLAMA.input_norm, hidden),
            post_norm=_plus_one(config, prefix + LLAMA.post_norm, hidden),
        )

    layers = tuple(layer(index, state) for index, state in enumerate(_kinds(config)))
    return model(
        config, LLAMA, layers, final_norm=_plus_one(config, LLAMA.final_norm, hidden),
        max_positions=config.max_positions(rope), renames=_RENAMES, ignored=(_DRAFTING, _SEEING),
    )  # fmt: skip


def _kinds(config: Config) -> list[bool]:
    """Return whether each layer has a state."""
    count, every = config.num_layers(), config.size("full_attention_interval")
    kinds = config.get("layer_types")
    if kinds is None:
        kinds = [_STATE if (index + 1) % every else _FULL for index in range(count)]
    return layer_kinds(config, kinds, (_STATE,), (_FULL,))


def _recurrence(config: Config) -> Recurrence:
    """Return the sizes of a layer's state. Raises ModelError for sizes that the recurrence does not take."""
    names = {
        "key_heads": "linear_num_key_heads", "value_heads": "linear_num_value_heads", "key_dim": "linear_key_head_dim",
        "value_dim": "linear_value_head_dim", "taps": "linear_conv_kernel_dim",
    }  # fmt: skip
    return recurrence(config, names)


def _delta(config: Config, at: str, value: Recurrence, stored: Stored) -> DeltaSpec:
    """Return the recurrence of the module ``at``."""
    hidden, heads = config.size("hidden_size"), value.value_heads
    parts, order = stored(at, value)
    return DeltaSpec(
        value=value,
        qkv=LinearSpec(parts=parts, inputs=hidden, order=order),
        o=LinearSpec(parts=((f"{at}out_proj", hidden),), inputs=value.value_size),
        conv=ConvSpec(f"{at}conv1d", value.channels, value.taps),
        rate=VectorSpec(f"{at}A_log", heads),
        bias=VectorSpec(f"{at}dt_bias", heads),
        norm=norm(config, f"{at}norm", value.value_dim),
    )


def _side_by_side(at: str, value: Recurrence) -> tuple[Parts, Ranges]:
    """Return four modules in the layer's order."""
    sizes = {"qkv": value.channels, "z": value.value_size, "b": value.value_heads, "a": value.value_heads}
    return tuple((f"{at}in_proj_{name}", size) for name, size in sizes.items()), ()


def _by_key_heads(at: str, value: Recurrence) -> tuple[Parts, Ranges]:
    """Return two modules with the rows of a key head, and of its value heads, beside each other."""
    share = value.value_heads // value.key_heads
    first = value.channels + value.value_size
    widths = {"q": value.key_dim, "k": value.key_dim, "v": share * value.value_dim, "z": share * value.value_dim}
    parts = (f"{at}in_proj_qkvz", first), (f"{at}in_proj_ba", 2 * value.value_heads)

    def ranges() -> Iterator[tuple[int, int]]:
        step, begin = sum(widths.values()), 0
        for width in widths.values():
            yield from ((at * step + begin, at * step + begin + width) for at in range(value.key_heads))
            begin += width
        for begin in (0, share):
            heads = range(first + begin, first + 2 * value.value_heads, 2 * share)
            yield from ((at, at + share) for at in heads)

    return parts, tuple(ranges())


def _gated_attention(config: Config, prefix: str, rope: RopeSpec, *, bias: bool) -> AttentionSpec:
    """Return attention with a gate of each output, and norms of heads before a part of each head turns.

    A checkpoint has the rows of a query head and of its gates beside each other.
    """
    made = attention(config, LLAMA, prefix, None, rope, qkv_bias=bias, o_bias=bias, qk_norm=False)
    heads, dim, size = made.num_heads, made.head_dim, made.o.inputs
    order = made.qkv.order or tuple((at, at + dim) for at in range(0, made.qkv.outputs, dim))
    own = tuple((a + a // dim * dim, b + a // dim * dim) if a < size else (a + size, b + size) for a, b in order)
    gates = tuple((at + dim, at + 2 * dim) for at in range(0, 2 * size, 2 * dim))
    (q, _), *others = made.qkv.parts
    head = turning_order(rope, 1, replace(made.kv, num_kv_heads=1))
    norms = (
        replace(_plus_one(config, prefix + name, dim), order=tuple(each for each in head if each[1] <= dim))
        for name in (LLAMA.q_norm, LLAMA.k_norm)
    )
    return replace(
        made,
        gated=True,
        qkv=replace(made.qkv, parts=((q, 2 * heads * dim), *others), order=(*own, *gates)),
        qk_norm=(next(norms), next(norms)),
    )


def _plus_one(config: Config, name: str, size: int) -> NormSpec:
    return replace(norm(config, name, size), kind="rms_plus_one")
