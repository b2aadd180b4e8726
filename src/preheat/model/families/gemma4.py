"""Gemma 4, text only: dense models, models with inputs of each layer, and models with experts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from preheat.errors import ModelError
from preheat.model.attention_specs import AttentionSpec
from preheat.model.config import Config
from preheat.model.families.common import LLAMA, dense, identity, model
from preheat.model.families.moe import experts, modules
from preheat.model.kv_spec import KVSpec
from preheat.model.layer_input_specs import InputReaderSpec, LayerEndSpec, LayerInputsSpec
from preheat.model.mlp_specs import BesideSpec, DenseSpec, MlpSpec, MoeSpec, SharedSpec
from preheat.model.specs import LayerSpec, ModelSpec, Rename
from preheat.model.tensor_specs import EmbeddingSpec, LinearSpec, NormSpec, VectorSpec
from preheat.ops.kinds import Activation

_GLOBAL, _LOCAL = "full_attention", "sliding_attention"
_GATE: Activation = "gelu_tanh_and_mul"
_SHARED = ("dtype", "torch_dtype", "bos_token_id", "eos_token_id", "tie_word_embeddings")
_ROPES: Mapping[str, Any] = {
    _LOCAL: {"rope_type": "default", "rope_theta": 1e4},
    _GLOBAL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
}
_LAYER = r"model\.(?:language_model\.)?(layers\.\d+\.)"
_EXPERT = r"model.\1mlp.experts.{}."
_RENAMES = (
    Rename(rf"{_LAYER}experts\.gate_up_proj", (f"{_EXPERT}gate_proj.weight", f"{_EXPERT}up_proj.weight")),
    Rename(rf"{_LAYER}experts\.down_proj", (f"{_EXPERT}down_proj.weight",)),
    Rename(rf"{_LAYER}(router\.scale|router\.per_expert_scale|layer_scalar)", (r"model.\1\2.weight",)),
    Rename(r"model\.language_model\.(.+)", (r"model.\1",)),
)


def text_of(config: Config) -> ModelSpec:
    """Return the text part of a model that also sees or hears; its encoders are not loaded."""
    text = Config(config.architecture, config.mapping("text_config"))
    text.require_unquantized()
    text = text.updated({name: config.get(name) for name in _SHARED if config.has(name) and not text.has(name)})
    spec = gemma4(text)
    text.refuse_unread("text_config")
    others = r"(model\.)?(vision_tower|audio_tower|embed_vision|embed_audio)\..+"
    return replace(spec, architecture=config.architecture, ignored=(*spec.ignored, others))


def gemma4(config: Config) -> ModelSpec:
    """Full layers have larger heads; the last layers read the keys and values of layers before."""
    config = config.with_defaults(
        num_key_value_heads=4, head_dim=256, max_position_embeddings=131072, sliding_window=512, rms_norm_eps=1e-6,
        tie_word_embeddings=True, hidden_activation="gelu_pytorch_tanh", hidden_size_per_layer_input=256,
        vocab_size_per_layer_input=262144, rope_parameters=_ROPES,
    )  # fmt: skip
    config.refuse("hidden_activation", "gelu_pytorch_tanh")
    config.refuse("use_bidirectional_attention", "vision")  # it concerns the tokens of images
    made = _Family(config)
    layers = tuple(made.layer(index) for index in range(len(made.windows)))
    spec = model(
        config, LLAMA, layers, final_norm=made.norm(LLAMA.final_norm), scale=made.hidden**0.5,
        max_positions=config.size("max_position_embeddings"), renames=_RENAMES, ignored=made.ignored,
    )  # fmt: skip
    assert spec.head is not None
    if config.get("final_logit_softcapping"):
        spec = replace(spec, head=replace(spec.head, cap=config.positive("final_logit_softcapping", 30.0)))
    return replace(spec, inputs=made.inputs())


class _Family:
    """The parts of a model of ``config``."""

    def __init__(self, config: Config) -> None:
        self.config, self.hidden = config, config.size("hidden_size")
        self.windows = (*config.windows(every=6)[:-1], None)  # the last layer is always full
        self.heads, self.bias = config.size("num_attention_heads"), config.flag("attention_bias")
        self.one_kv = config.flag("attention_k_eq_v")
        self.ropes = {name: config.rope(name, partial=name == _GLOBAL) for name in (_GLOBAL, _LOCAL)}
        if self.ropes[_GLOBAL].partial != 1.0 and self.ropes[_GLOBAL].kind != "proportional":
            raise ModelError("partial_rotary_factor is only supported for rope_type 'proportional'")
        self.size = config.get("hidden_size_per_layer_input") or 0
        self.moe = config.flag("enable_moe_block")
        shared = config.get("num_kv_shared_layers") or 0
        count = len(self.windows)
        if type(shared) is not int or not 0 <= shared < count:
            raise ModelError(f"config.json: num_kv_shared_layers {shared!r} must leave one of the {count} layers")
        self.first_shared = count - shared
        if not {*self.windows[self.first_shared :]} <= {*self.windows[: self.first_shared]}:
            raise ModelError("config.json: layers share keys and values of a kind that no layer before them has")
        self.wide = config.flag("use_double_wide_mlp")

    @property
    def ignored(self) -> tuple[str, ...]:
        """Tensors of layers that have no keys of their own."""
        shared = range(self.first_shared, len(self.windows))
        return tuple(rf"model\.layers\.{index}\.self_attn\.(k_proj|v_proj|k_norm|v_norm)\..*" for index in shared)

    def norm(self, name: str, size: int | None = None) -> NormSpec:
        return NormSpec(name, size or self.hidden, self.config.positive("rms_norm_eps", 1e-6), kind="rms_once")

    def layer(self, index: int) -> LayerSpec:
        prefix = LLAMA.layer.format(index)
        before = self.norm(f"{prefix}pre_feedforward_layernorm")
        return LayerSpec(
            attention=self._attention(index, prefix),
            mlp=self._mlp(index, prefix, before),
            input_norm=self.norm(f"{prefix}input_layernorm"),
            post_norm=identity(self.config) if self.moe else before,
            attention_out_norm=self.norm(f"{prefix}post_attention_layernorm"),
            mlp_out_norm=self.norm(f"{prefix}post_feedforward_layernorm"),
            end=self._end(prefix),
        )

    def _kv(self, index: int) -> KVSpec:
        """Return the entry of a layer: the config states sizes of a layer, or of all full layers."""
        config, full = self.config, self.windows[index] is None
        heads, dim = config.size("num_key_value_heads"), config.size("head_dim")
        if (own := config.mapping("per_layer_config")) or not full:
            changes = Config(config.architecture, own.get(str(index)) or {}, num_key_value_heads=heads, head_dim=dim)
            return KVSpec(changes.size("num_key_value_heads"), changes.size("head_dim"))
        if self.one_kv and config.has("num_global_key_value_heads"):
            heads = config.size("num_global_key_value_heads")
        return KVSpec(heads, config.size("global_head_dim", 512))

    def _attention(self, index: int, prefix: str) -> AttentionSpec:
        kv, window, at = self._kv(index), self.windows[index], f"{prefix}self_attn."
        if self.heads % kv.num_kv_heads or kv.head_dim % 2:
            raise ModelError(f"layer {index}: {self.heads} heads cannot share {kv.num_kv_heads} heads of {kv.head_dim}")
        source = None
        if index >= self.first_shared:
            source = max(each for each in range(self.first_shared) if self.windows[each] == window)
        one_kv = self.one_kv and window is None
        sizes = {"q": self.heads * kv.head_dim, "k": kv.num_kv_heads * kv.head_dim}
        sizes["v"] = sizes["k"]
        kept = "q" if source is not None else "qk" if one_kv else "qkv"
        qk_norm = tuple(self.norm(f"{at}{each}_norm", kv.head_dim) for each in kept[:2])
        return AttentionSpec(
            num_heads=self.heads,
            kv=kv,
            window=window,
            rope=self.ropes[_GLOBAL if window is None else _LOCAL],
            qk_norm=qk_norm,
            qkv=LinearSpec(
                parts=tuple((f"{at}{each}_proj", sizes[each]) for each in kept), inputs=self.hidden, bias=self.bias
            ),
            o=LinearSpec(parts=((f"{at}o_proj", self.hidden),), inputs=sizes["q"], bias=self.bias),
            scale=1.0,
            source=source,
            one_kv=one_kv,
            value_eps=self.config.positive("rms_norm_eps", 1e-6),
        )

    def _mlp(self, index: int, prefix: str, before: NormSpec) -> MlpSpec:
        wide = self.config.size("intermediate_size") * (1 + (self.wide and index >= self.first_shared))
        block = dense(self.config, LLAMA, prefix, bias=False, inner=wide, activation=_GATE)
        return self._moe(prefix, block, before) if self.moe else block

    def _moe(self, prefix: str, block: DenseSpec, before: NormSpec) -> MoeSpec:
        """Return the experts beside a dense ``block``: all of them read the residual stream."""
        config, at = self.config, f"{prefix}router."
        count = config.size("num_experts")
        made = experts(
            config, f"{at}proj", modules(prefix), count=count, inner=config.size("moe_intermediate_size"),
            top_k=config.size("top_k_experts"), renormalize=True, round_weights=False,
        )  # fmt: skip
        return replace(
            made,
            router=replace(made.router, factor=self.hidden**-0.5),
            experts=replace(made.experts, activation=_GATE),
            shared=SharedSpec(block=block),
            weighted=VectorSpec(f"{at}per_expert_scale", count),
            beside=BesideSpec(
                router=self.norm(f"{at}scale"),
                experts=self.norm(f"{prefix}pre_feedforward_layernorm_2"),
                experts_out=self.norm(f"{prefix}post_feedforward_layernorm_2"),
                shared=before,
                shared_out=self.norm(f"{prefix}post_feedforward_layernorm_1"),
            ),
        )

    def _end(self, prefix: str) -> LayerEndSpec:
        scalar = VectorSpec(f"{prefix}layer_scalar", 1)
        if not self.size:
            return LayerEndSpec(scalar=scalar)
        size = self.config.size("hidden_size_per_layer_input")
        gate, up = f"{prefix}per_layer_input_gate", f"{prefix}per_layer_projection"
        reader = InputReaderSpec(
            gate=LinearSpec(parts=((gate, size),), inputs=self.hidden, activation="gelu_tanh"),
            projection=LinearSpec(parts=((up, self.hidden),), inputs=size),
            norm=self.norm(f"{prefix}post_per_layer_input_norm"),
        )
        return LayerEndSpec(scalar=scalar, reader=reader)

    def inputs(self) -> LayerInputsSpec | None:
        """Return the inputs of all layers, None for a model without them."""
        vocab = self.config.size("vocab_size_per_layer_input")
        if not self.size:
            return None
        if vocab < self.config.size("vocab_size"):
            raise ModelError(f"config.json: vocab_size_per_layer_input {vocab} has no row for some tokens")
        size = self.config.size("hidden_size_per_layer_input")
        whole = size * len(self.windows)
        name = "model.per_layer_model_projection"
        return LayerInputsSpec(
            size=size,
            table=EmbeddingSpec("model.embed_tokens_per_layer", vocab, whole, size**0.5),
            projection=LinearSpec(parts=((name, whole),), inputs=self.hidden, factor=self.hidden**-0.5),
            norm=self.norm("model.per_layer_projection_norm", size),
            factor=2.0**-0.5,
        )
