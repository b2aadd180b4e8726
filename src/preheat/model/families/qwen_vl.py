"""Qwen3-VL: Qwen3 with images in its prompts. Qwen3.5 has the same tower, without deep embeddings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from preheat.errors import ModelError
from preheat.model.attention_specs import RopeSpec
from preheat.model.config import MAX_LAYERS, Config
from preheat.model.families.common import gelu, llama_like, ungated
from preheat.model.grid_specs import GridVisionSpec, MergerSpec
from preheat.model.mlp_specs import DenseSpec
from preheat.model.specs import ModelSpec, Rename
from preheat.model.tensor_specs import EmbeddingSpec, LinearSpec, NormSpec, PatchSpec
from preheat.model.vision_specs import VisionLayerSpec

TEXT: Mapping[str, Any] = {
    "model_type": "qwen3_vl_text", "hidden_size": 4096, "intermediate_size": 22016, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 32, "head_dim": 128, "max_position_embeddings": 128000,
    "vocab_size": 151936,
}  # fmt: skip
"""Defaults of the decoder, for fields absent from ``text_config``."""

VISION: Mapping[str, Any] = {
    "model_type": "qwen3_vl_vision", "depth": 27, "hidden_size": 1152, "intermediate_size": 4304, "num_heads": 16,
    "in_channels": 3, "patch_size": 16, "spatial_merge_size": 2, "temporal_patch_size": 2, "out_hidden_size": 3584,
    "num_position_embeddings": 2304, "deepstack_visual_indexes": [8, 16, 24], "hidden_act": "gelu_pytorch_tanh",
}  # fmt: skip
"""Defaults of the tower, for fields absent from ``vision_config``."""

PIXELS: Mapping[str, int] = {"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 1280}
"""The fewest and the most pixels of an image, where the image processor has none."""

MOST_PIXELS = 1 << 26
"""Most pixels of an image after resizing."""

IMAGE_TOKEN = 151655
_EPS = 1e-6  # of the tower's norms; no field of the config

RENAMES = (Rename(r"model\.language_model\.(.+)", (r"model.\1",)),)
_SHARED = ("dtype", "torch_dtype", "bos_token_id", "eos_token_id", "tie_word_embeddings")
_THETA = 500000.0  # the default of the reference's config class
_SECTIONS = (24, 20, 20)


def qwen3_vl(config: Config) -> ModelSpec:
    """Qwen3 with images of any size, encoded by a vision tower that also adds to its first layers.

    Source of the defaults: ``Qwen3VLConfig`` of transformers.
    """
    text = _text(config)
    bias = text.flag("attention_bias")
    spec = llama_like(text, rope=_rope(text), qkv_bias=bias, o_bias=bias, qk_norm=True, renames=RENAMES)
    text.refuse_unread("text_config")
    return replace(spec, architecture=config.architecture, vision=vision_of(config, spec, VISION))


def vision_of(
    config: Config, text: ModelSpec, defaults: Mapping[str, Any], image_token: int = IMAGE_TOKEN
) -> GridVisionSpec:
    """Return the tower of a model with the decoder ``text``.

    ``defaults`` are of ``vision_config``, and ``image_token`` stands for an image if the config names no token. Raises
    ModelError, naming the field, for sizes that do not fit.
    """
    tower = Config(config.architecture, {**defaults, **_given(config, "vision_config", defaults)})
    tower.require_unquantized()
    vision = _vision(config, tower, text, image_token)
    tower.refuse_unread("vision_config")
    return vision


def _rope(text: Config) -> RopeSpec:
    """Return the rotary embedding with its three axes. Raises ModelError for sections that do not fit."""
    rope = text.rope(theta=_THETA, read=("mrope_section", "mrope_interleaved"))
    return with_axes(rope, text, text.size("head_dim") // 2, _SECTIONS)


def with_axes(rope: RopeSpec, text: Config, pairs: int, usual: tuple[int, ...]) -> RopeSpec:
    """Return ``rope`` with its three axes, for heads with so many ``pairs`` that turn.

    ``usual`` are the sections where the config has none. Raises ModelError for sections that do not fit.
    """
    given = text.rope_fields()
    sections = given.get("mrope_section") or list(usual)
    if given.get("mrope_interleaved") is False:
        raise ModelError("config.json: mrope_interleaved false is not supported, only true is")
    if not (isinstance(sections, list) and len(sections) == 3 and all(type(each) is int for each in sections)):
        raise ModelError(f"config.json: mrope_section must be three whole numbers, got {sections!r}")
    if min(sections) < 0 or 3 * max(sections[1:]) > pairs + 1:
        raise ModelError(f"config.json: mrope_section {sections} does not fit the {pairs} pairs of a head")
    return replace(rope, sections=tuple(sections))


def _text(config: Config) -> Config:
    """Return the decoder's config.

    Fields shared with the whole model may stand in either config.
    """
    given = _given(config, "text_config", TEXT)
    shared = {name: config.get(name) for name in _SHARED if config.has(name) and name not in given}
    if config.flag("tie_word_embeddings"):
        shared["tie_word_embeddings"] = True  # transformers: tied if either says so
    text = Config(config.architecture, {**TEXT, **given, **shared})
    text.require_unquantized()
    return text


def _given(config: Config, name: str, defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Return the stated fields of the part ``name`` of the config. Raises ModelError for another kind of part."""
    given = {key: value for key, value in config.mapping(name).items() if value is not None}
    kind = given.get("model_type", defaults["model_type"])
    usual = str(defaults["model_type"])
    if kind not in (usual, usual.rpartition("_")[0]):  # some checkpoints name the whole model
        raise ModelError(f"{name} of model_type {kind!r} is not supported, only {defaults['model_type']!r} is")
    return given


def _vision(config: Config, tower: Config, text: ModelSpec, image_token: int) -> GridVisionSpec:
    hidden, heads, merge = (tower.size(name) for name in ("hidden_size", "num_heads", "spatial_merge_size"))
    if hidden % (4 * heads):
        raise ModelError(f"the hidden_size {hidden} of vision_config is not a multiple of 4 * num_heads, {4 * heads}")
    table = tower.size("num_position_embeddings")
    if int(table**0.5) ** 2 != table:
        raise ModelError(f"num_position_embeddings {table} of vision_config is not the square of a whole number")
    if (out := tower.size("out_hidden_size")) != text.hidden_size:
        raise ModelError(f"out_hidden_size {out} of vision_config is not the decoder's hidden_size {text.hidden_size}")
    depth, deep_at = tower.size("depth", most=MAX_LAYERS), tower.ids("deepstack_visual_indexes")
    known, most = {*range(depth)} & {*deep_at}, text.num_layers - 1
    if len(known) < len(deep_at) or len(deep_at) > most:
        raise ModelError(
            f"deepstack_visual_indexes {list(deep_at)} must be layers of the {depth} of vision_config, each once, and "
            f"fewer than the decoder's {text.num_layers}"
        )
    token = config.get("image_token_id")
    token = image_token if token is None else token
    if type(token) is not int or not 0 <= token < text.vocab_size:
        raise ModelError(f"image_token_id {token!r} is outside the vocabulary of {text.vocab_size} tokens")
    patches = PatchSpec(
        "model.visual.patch_embed.proj", hidden, tower.size("in_channels"), tower.size("patch_size"),
        frames=tower.size("temporal_patch_size"), bias=True,
    )  # fmt: skip
    least, most = _pixels(config)
    return GridVisionSpec(
        num_heads=heads,
        patches=patches,
        positions=EmbeddingSpec("model.visual.pos_embed", table, hidden),
        layers=tuple(_layer(tower, f"model.visual.blocks.{index}.") for index in range(depth)),
        merger=_merger("model.visual.merger.", hidden, merge, out, whole=False),
        deep=tuple(
            _merger(f"model.visual.deepstack_merger_list.{index}.", hidden, merge, out, whole=True)
            for index in range(len(deep_at))
        ),
        deep_at=deep_at,
        merge=merge,
        min_pixels=least,
        max_pixels=max(most, (merge * patches.size) ** 2),
        image_token=token,
    )


def _pixels(config: Config) -> tuple[int, int]:
    """Return the fewest and the most pixels of an image, by its processor's config."""
    given = config.mapping("image_processor")
    stated = given.get("size")
    size = stated if isinstance(stated, Mapping) else {}
    found = [
        given.get(own) or size.get(own) or size.get(name) or default
        for own, (name, default) in zip(("min_pixels", "max_pixels"), PIXELS.items(), strict=True)
    ]
    if not all(type(each) is int and 0 < each <= MOST_PIXELS for each in found) or found[0] > found[1]:
        raise ModelError(
            f"the image processor's fewest and most pixels, {found}, must be whole numbers up to {MOST_PIXELS:,}, in "
            "this order: correct size in preprocessor_config.json"
        )
    return found[0], found[1]


def _layer(tower: Config, prefix: str) -> VisionLayerSpec:
    hidden, inner = tower.size("hidden_size"), tower.size("intermediate_size")
    return VisionLayerSpec(
        input_norm=_norm(f"{prefix}norm1", hidden),
        qkv=LinearSpec(parts=((f"{prefix}attn.qkv", 3 * hidden),), inputs=hidden, bias=True),
        o=LinearSpec(parts=((f"{prefix}attn.proj", hidden),), inputs=hidden, bias=True),
        post_norm=_norm(f"{prefix}norm2", hidden),
        mlp=ungated(
            f"{prefix}mlp.linear_fc1", f"{prefix}mlp.linear_fc2", hidden=hidden, inner=inner, activation=gelu(tower),
            bias=True,
        ),
    )  # fmt: skip


def _merger(prefix: str, hidden: int, merge: int, out: int, *, whole: bool) -> MergerSpec:
    """Return the map of a cell's patches; ``whole``: its norm reads all of them together."""
    cell = hidden * merge**2
    first, second = f"{prefix}linear_fc1", f"{prefix}linear_fc2"
    mlp = DenseSpec(
        gate_up=LinearSpec(parts=((first, cell),), inputs=cell, bias=True, activation="gelu"),
        down=LinearSpec(parts=((second, out),), inputs=cell, bias=True),
    )
    return MergerSpec(norm=_norm(f"{prefix}norm", cell if whole else hidden), mlp=mlp)


def _norm(name: str, size: int) -> NormSpec:
    return NormSpec(name, size, _EPS, kind="layer", bias=True)
