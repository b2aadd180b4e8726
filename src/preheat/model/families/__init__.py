"""Model families, one file for each group of near-identical ones: a function from a config to a ModelSpec.

A new family is a file here and a line in :data:`FAMILIES`. No torch here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from difflib import get_close_matches
from typing import Any

from preheat.errors import ModelError
from preheat.model.config import Config
from preheat.model.families import bigcode, gemma, llama, llava, moe, mpt, phi, qwen
from preheat.model.quantization import quantized
from preheat.model.specs import ModelSpec, base_model
from preheat.settings import Settings

FAMILIES: Mapping[str, Callable[[Config], ModelSpec]] = {
    "GPTBigCodeForCausalLM": bigcode.gpt_bigcode,
    "Gemma3ForCausalLM": gemma.gemma3,
    "LlamaForCausalLM": llama.llama,
    "LlavaForConditionalGeneration": llava.llava,
    "MPTForCausalLM": mpt.mpt,
    "MistralForCausalLM": llama.mistral,
    "MixtralForCausalLM": moe.mixtral,
    "MptForCausalLM": mpt.mpt,
    "Phi3ForCausalLM": phi.phi3,
    "Qwen2ForCausalLM": qwen.qwen2,
    "Qwen2MoeForCausalLM": moe.qwen2_moe,
    "Qwen3ForCausalLM": qwen.qwen3,
    "Qwen3MoeForCausalLM": moe.qwen3_moe,
    "Starcoder2ForCausalLM": bigcode.starcoder2,
}
"""The families by the name in the ``architectures`` of ``config.json``."""

NEAREST = {
    "Baichuan": "LlamaForCausalLM", "Bloom": "MptForCausalLM", "Cohere": "LlamaForCausalLM",
    "DbrxForCausalLM": "MixtralForCausalLM", "Deepseek": "Qwen3MoeForCausalLM", "Exaone": "LlamaForCausalLM",
    "Falcon": "GPTBigCodeForCausalLM", "GPT": "GPTBigCodeForCausalLM", "Gemma": "Gemma3ForCausalLM",
    "Glm": "LlamaForCausalLM", "GptOss": "Qwen3MoeForCausalLM", "Granite": "LlamaForCausalLM",
    "InternLM": "LlamaForCausalLM", "Kimi": "Qwen3MoeForCausalLM", "Llama": "LlamaForCausalLM",
    "Llava": "LlavaForConditionalGeneration",
    "Ministral": "MistralForCausalLM", "Mistral": "MistralForCausalLM", "Mixtral": "MixtralForCausalLM",
    "Olmo": "LlamaForCausalLM", "OlmoeForCausalLM": "Qwen3MoeForCausalLM", "Phi": "Phi3ForCausalLM",
    "PhimoeForCausalLM": "MixtralForCausalLM", "Qwen": "Qwen3ForCausalLM", "Qwen3_5": "Qwen3ForCausalLM",
    "SmolLM": "LlamaForCausalLM", "StableLm": "LlamaForCausalLM", "Starcoder": "Starcoder2ForCausalLM",
}  # fmt: skip
"""For names that begin so, the supported family that is most like them; the longest beginning counts."""


def read_spec(values: Mapping[str, Any], quantization: str | None = None) -> ModelSpec:
    """The spec of a parsed ``config.json``; ``quantization`` is the method of ``--quantization``.

    Raises ModelError naming what is missing or not supported.
    """
    names = values.get("architectures") or []
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ModelError(f"config.json: architectures must be a list of names, got {names!r}")
    for name in names:
        family = name if name in FAMILIES else f"{name.removesuffix('Model')}ForCausalLM"
        if family in FAMILIES:
            config = Config(family, values)
            made = FAMILIES[family](config)
            config.refuse_unread()
            spec = made if family == name else base_model(made)
            return quantized(spec, config.quantization(), quantization)
    found = ", ".join(names) if names else f"none named (model_type {values.get('model_type')!r})"
    near = f"; the nearest that is supported: {nearest(names[0])}" if names else ""
    raise ModelError(f"architecture {found} is not supported{near}; supported are {', '.join(FAMILIES)}")


def spec_of(values: Mapping[str, Any], settings: Settings) -> ModelSpec:
    """The spec of what is loaded by these settings: as :func:`read_spec`, without an encoder that nobody uses."""
    spec = read_spec(values, settings.quantization)
    return replace(spec, vision=None) if settings.language_model_only else spec


def nearest(name: str) -> str:
    """The supported architecture that is most like the architecture ``name``."""
    known = max((start for start in NEAREST if name.startswith(start)), key=len, default=None)
    return NEAREST[known] if known else get_close_matches(name, FAMILIES, n=1, cutoff=0.0)[0]
