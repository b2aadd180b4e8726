"""Mistral Small 3.1 and later, and Ministral 3: the text part of a model that also sees images."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from preheat.errors import ModelError
from preheat.model.config import Config
from preheat.model.families.llama import ministral3, mistral
from preheat.model.specs import ModelSpec, Rename

_TEXT: Mapping[str, Any] = {
    "model_type": "mistral", "hidden_size": 5120, "intermediate_size": 32768, "num_hidden_layers": 40,
    "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5, "rope_theta": 1e9, "vocab_size": 131072,
}  # fmt: skip
"""Defaults of the decoder if the config has no ``text_config``."""

_DECODERS: Mapping[str, Callable[[Config], ModelSpec]] = {"mistral": mistral, "ministral3": ministral3}
_SHARED = ("dtype", "torch_dtype", "bos_token_id", "eos_token_id", "tie_word_embeddings")
_RENAMES = (
    Rename(r"language_model\.lm_head\.(.+)", (r"lm_head.\1",)),
    Rename(r"(?:language_model\.model|model\.language_model)\.(.+)", (r"model.\1",)),
    Rename(r"model\.(vision_tower|multi_modal_projector)\.(.+)", (r"\1.\2",)),
)


def mistral3(config: Config) -> ModelSpec:
    """Text only: Mistral, or Ministral 3. The encoder of images is not loaded, and images are refused."""
    text = Config(config.architecture, config.mapping("text_config") or _TEXT)
    text.require_unquantized()
    given = {name: config.get(name) for name in _SHARED if config.has(name) and not text.has(name)}
    kind = text.get("model_type")
    if kind not in _DECODERS:
        raise ModelError(f"text_config of model_type {kind!r} is not supported, only {', '.join(_DECODERS)} are")
    text = text.updated(given)
    spec = _DECODERS[str(kind)](text)
    text.refuse_unread("text_config")
    ignored = r"(vision_tower|multi_modal_projector)\..+"
    return replace(spec, architecture=config.architecture, renames=_RENAMES, ignored=(ignored,))
