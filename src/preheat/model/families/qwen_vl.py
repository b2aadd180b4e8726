"""Qwen3-VL: Qwen3 with images in its prompts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from preheat.errors import ModelError
from preheat.model.config import Config
from preheat.model.families.common import llama_like
from preheat.model.specs import ModelSpec, Rename

TEXT: Mapping[str, Any] = {
    "model_type": "qwen3_vl_text", "hidden_size": 4096, "intermediate_size": 22016, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 32, "head_dim": 128, "max_position_embeddings": 128000,
    "vocab_size": 151936,
}  # fmt: skip
"""Defaults of the decoder, for fields absent from ``text_config``."""

RENAMES = (Rename(r"model\.language_model\.(.+)", (r"model.\1",)),)
_SHARED = ("dtype", "torch_dtype", "bos_token_id", "eos_token_id", "tie_word_embeddings")
_THETA = 500000.0  # the default of the reference's config class


def qwen3_vl(config: Config) -> ModelSpec:
    """Text only: Qwen3. The encoder of images is not loaded, and images are refused.

    All tokens of a text have one position on each of the three axes of its rotary embedding, so it turns as usual.
    Source of the defaults: ``Qwen3VLTextConfig`` of transformers.
    """
    text = _text(config)
    bias = text.flag("attention_bias")
    rope = text.rope(theta=_THETA, read=("mrope_section", "mrope_interleaved"))
    spec = llama_like(text, rope=rope, qkv_bias=bias, o_bias=bias, qk_norm=True, renames=RENAMES)
    text.refuse_unread("text_config")
    return replace(spec, architecture=config.architecture, ignored=(r"model\.visual\..+",))


def _text(config: Config) -> Config:
    """Return the decoder's config.

    Fields shared with the whole model may stand in either config. Raises ModelError for another kind of decoder.
    """
    given = {key: value for key, value in config.mapping("text_config").items() if value is not None}
    kind = given.get("model_type", TEXT["model_type"])
    if kind != TEXT["model_type"]:
        raise ModelError(f"text_config of model_type {kind!r} is not supported, only {TEXT['model_type']!r} is")
    shared = {name: config.get(name) for name in _SHARED if config.has(name) and name not in given}
    if config.flag("tie_word_embeddings"):
        shared["tie_word_embeddings"] = True  # transformers: tied if either says so
    text = Config(config.architecture, {**TEXT, **given, **shared})
    text.require_unquantized()
    return text
