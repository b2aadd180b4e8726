"""Model families, one file for each group of near-identical ones: a function from a config to a ModelSpec.

A new family is a file here and a line in :data:`FAMILIES`. No torch here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from preheat.errors import ModelError
from preheat.model.config import Config
from preheat.model.families import llama, qwen
from preheat.model.specs import ModelSpec

FAMILIES: Mapping[str, Callable[[Config], ModelSpec]] = {
    "LlamaForCausalLM": llama.llama,
    "MistralForCausalLM": llama.mistral,
    "Qwen2ForCausalLM": qwen.qwen2,
    "Qwen3ForCausalLM": qwen.qwen3,
}
"""The families by the name in the ``architectures`` of ``config.json``."""


def read_spec(values: Mapping[str, Any]) -> ModelSpec:
    """The spec of a parsed ``config.json``; raises ModelError naming what is missing or not supported."""
    names = values.get("architectures") or []
    for name in names:
        if name in FAMILIES:
            config = Config(name, values)
            config.require_unquantized()
            return FAMILIES[name](config)
    found = ", ".join(names) if names else f"none named (model_type {values.get('model_type')!r})"
    raise ModelError(f"architecture {found} is not supported; supported are {', '.join(FAMILIES)}")
