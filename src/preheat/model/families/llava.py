"""LLaVA-1.5: a CLIP vision tower in front of Llama."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from preheat.errors import ModelError
from preheat.model.config import MAX_LAYERS, Config
from preheat.model.families.common import ungated
from preheat.model.families.llama import llama
from preheat.model.mlp_specs import DenseSpec
from preheat.model.specs import ModelSpec, Rename
from preheat.model.tensor_specs import EmbeddingSpec, LinearSpec, NormSpec, PatchSpec, VectorSpec
from preheat.model.vision_specs import VisionLayerSpec, VisionSpec
from preheat.ops.kinds import Activation

TEXT: Mapping[str, Any] = {
    "model_type": "llama", "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32,
    "num_attention_heads": 32, "vocab_size": 32000,
}  # fmt: skip
"""Defaults of the decoder, for fields absent from ``text_config``."""

CLIP: Mapping[str, Any] = {
    "model_type": "clip_vision_model", "hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12,
    "num_attention_heads": 12, "image_size": 224, "patch_size": 32,
}  # fmt: skip
"""Defaults of the tower, for fields absent from ``vision_config``."""

CLIP_LARGE: Mapping[str, Any] = {
    "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24, "num_attention_heads": 16,
    "image_size": 336, "patch_size": 14,
}  # fmt: skip
"""Defaults of the tower, without a ``vision_config``."""

_TOWER = r"(?:model\.)?vision_tower\.(?:vision_model\.)?"
RENAMES = (
    Rename(_TOWER + r"embeddings\.class_embedding", ("vision_tower.embeddings.class_embedding.weight",)),
    Rename(_TOWER + r"(.+)", (r"vision_tower.\1",)),
    Rename(r"(?:model\.)?(multi_modal_projector\..+)", (r"\1",)),
    Rename(r"language_model\.lm_head\.(.+)", (r"lm_head.\1",)),
    Rename(r"(?:language_model\.model|model\.language_model)\.(.+)", (r"model.\1",)),
)
"""Renames for the names on the Hub and of transformers' modules.

transformers 5 writes the Hub's names too.
"""

ACTIVATIONS: Mapping[str, Activation] = {"quick_gelu": "quick_gelu", "gelu": "gelu", "gelu_pytorch_tanh": "gelu_tanh"}


def llava(config: Config) -> ModelSpec:
    """Llama with images in its prompts, encoded by a CLIP vision tower.

    Source of the defaults: ``LlavaConfig`` of transformers.
    """
    config = config.with_defaults(
        vision_feature_layer=-2, vision_feature_select_strategy="default", projector_hidden_act="gelu",
        multimodal_projector_bias=True,
    )  # fmt: skip
    text = _text(config)
    spec = llama(text)
    text.refuse_unread("text_config")
    tower = _part(config, "vision_config", CLIP if config.has("vision_config") else {**CLIP, **CLIP_LARGE})
    count = tower.size("num_hidden_layers", most=MAX_LAYERS)
    needed = _layers_needed(config, count)
    beyond = "|".join(map(str, range(needed, count)))
    vision = _vision(config, tower, needed, spec)
    tower.refuse_unread("vision_config")
    return replace(
        spec,
        architecture=config.architecture,
        vision=vision,
        renames=RENAMES,
        ignored=(
            r"vision_tower\.embeddings\.position_ids",
            r"vision_tower\.post_layernorm\..+",
            *([rf"vision_tower\.encoder\.layers\.(?:{beyond})\..+"] if beyond else []),
        ),
    )


def _part(config: Config, name: str, defaults: Mapping[str, Any]) -> Config:
    """Return the fields of the part ``name`` of the config, over ``defaults``.

    Raises ModelError for another kind of model.
    """
    given = {key: value for key, value in config.mapping(name).items() if value is not None}
    kind = given.get("model_type", defaults["model_type"])
    if kind != defaults["model_type"]:
        raise ModelError(f"{name} of model_type {kind!r} is not supported, only {defaults['model_type']!r} is")
    part = Config(config.architecture, {**defaults, **given})
    part.require_unquantized()
    return part


def _text(config: Config) -> Config:
    """Return the decoder's config.

    Fields shared with the whole model may stand in either config.
    """
    text = _part(config, "text_config", TEXT)
    shared = ("dtype", "torch_dtype", "bos_token_id", "eos_token_id", "tie_word_embeddings")
    given = {name: config.get(name) for name in shared if config.has(name)}
    if not given.get("tie_word_embeddings"):
        given.pop("tie_word_embeddings", None)  # transformers: tied if either says so
    return text.updated(given)


def _layers_needed(config: Config, count: int) -> int:
    """Return the number of the tower's ``count`` layers that run."""
    layer = config.get("vision_feature_layer")
    if type(layer) is not int:
        raise ModelError(f"vision_feature_layer {layer!r} is not supported, only the number of one layer is")
    needed = layer if layer >= 0 else count + 1 + layer
    if not 0 < needed <= count:
        raise ModelError(f"vision_feature_layer {layer} is not the output of one of the {count} layers")
    return needed


def _vision(config: Config, tower: Config, layers: int, text: ModelSpec) -> VisionSpec:
    hidden, heads = tower.size("hidden_size"), tower.size("num_attention_heads")
    image, patch = tower.size("image_size", most=1 << 14), tower.size("patch_size")
    if hidden % heads:
        raise ModelError(f"the hidden_size {hidden} of vision_config is not a multiple of num_attention_heads {heads}")
    if image < patch or image % patch:
        raise ModelError(f"image_size {image} of vision_config is not a multiple of patch_size {patch}")
    config.refuse("vision_feature_select_strategy", "default", "full")
    token = config.get("image_token_id") if config.has("image_token_id") else config.get("image_token_index")
    token = 32000 if token is None else token
    if type(token) is not int or not 0 <= token < text.vocab_size:
        raise ModelError(f"image_token_index {token!r} is outside the vocabulary of {text.vocab_size} tokens")
    return VisionSpec(
        image_size=image,
        num_heads=heads,
        patches=PatchSpec("vision_tower.embeddings.patch_embedding", hidden, tower.size("num_channels", 3), patch),
        cls=VectorSpec("vision_tower.embeddings.class_embedding", hidden),
        positions=EmbeddingSpec("vision_tower.embeddings.position_embedding", (image // patch) ** 2 + 1, hidden),
        pre_norm=_norm(tower, "vision_tower.pre_layrnorm"),  # so it is spelled
        layers=tuple(_layer(tower, f"vision_tower.encoder.layers.{index}.") for index in range(layers)),
        projector=_projector(config, hidden, text.hidden_size),
        keeps_cls=config.get("vision_feature_select_strategy") == "full",
        image_token=token,
    )


def _layer(tower: Config, prefix: str) -> VisionLayerSpec:
    hidden, inner = tower.size("hidden_size"), tower.size("intermediate_size")
    activation = _activation(tower, "hidden_act", "quick_gelu")
    parts = tuple((f"{prefix}self_attn.{each}_proj", hidden) for each in "qkv")
    return VisionLayerSpec(
        input_norm=_norm(tower, f"{prefix}layer_norm1"),
        qkv=LinearSpec(parts=parts, inputs=hidden, bias=True),
        o=LinearSpec(parts=((f"{prefix}self_attn.out_proj", hidden),), inputs=hidden, bias=True),
        post_norm=_norm(tower, f"{prefix}layer_norm2"),
        mlp=ungated(
            f"{prefix}mlp.fc1", f"{prefix}mlp.fc2", hidden=hidden, inner=inner, activation=activation, bias=True
        ),
    )


def _norm(tower: Config, name: str) -> NormSpec:
    return NormSpec(name, tower.size("hidden_size"), tower.positive("layer_norm_eps", 1e-5), kind="layer", bias=True)


def _projector(config: Config, inputs: int, hidden: int) -> DenseSpec:
    """Return the projector; both layers have the decoder's hidden size as outputs."""
    bias, activation = config.flag("multimodal_projector_bias"), _activation(config, "projector_hidden_act", "gelu")
    first, second = "multi_modal_projector.linear_1", "multi_modal_projector.linear_2"
    return DenseSpec(
        gate_up=LinearSpec(parts=((first, hidden),), inputs=inputs, bias=bias, activation=activation),
        down=LinearSpec(parts=((second, hidden),), inputs=hidden, bias=bias),
    )


def _activation(config: Config, name: str, default: str) -> Activation:
    given = str(config.get(name) or default)
    if given not in ACTIVATIONS:
        raise ModelError(f"{name} {given!r} is not supported; supported are {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[given]
