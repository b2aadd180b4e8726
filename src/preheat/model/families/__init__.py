"""Model families: functions from a config to a ModelSpec.

A file holds a group of near-identical families. A new family is a file here and a line in :data:`FAMILIES`. No torch
here.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from preheat.errors import ModelError
from preheat.model.config import Config
from preheat.model.families import (
    bert,
    bigcode,
    cohere,
    gemma,
    gemma4,
    glm,
    gpt_oss,
    granite,
    granite_hybrid,
    gte,
    jina,
    latent,
    llama,
    llava,
    mistral3,
    modern_bert,
    moe,
    mpt,
    nomic_bert,
    olmo,
    phi,
    qwen,
    qwen_next,
    qwen_vl,
    stablelm,
)
from preheat.model.families.common import with_layers
from preheat.model.families.heads import classifying_decoder, with_classifier, with_token_head
from preheat.model.families.needs import need_of
from preheat.model.formats import expected_tensors
from preheat.model.mlp_specs import MoeSpec
from preheat.model.quantization import quantized
from preheat.model.specs import LayerSpec, ModelSpec, base_model
from preheat.pooling.encoders import CLASSIFIER, TOKENS, encoder_name
from preheat.settings import Settings
from preheat.utils.text import misspelled

FAMILIES: Mapping[str, Callable[[Config], ModelSpec]] = {
    "ArceeForCausalLM": llama.arcee,
    "Cohere2ForCausalLM": cohere.cohere2,
    "CohereForCausalLM": cohere.cohere,
    "CwmForCausalLM": llama.cwm,
    "DeepseekV2ForCausalLM": latent.deepseek_v2,
    "DeepseekV3ForCausalLM": latent.deepseek_v3,
    "Ernie4_5ForCausalLM": llama.ernie4_5,
    "Exaone4ForCausalLM": llama.exaone4,
    "FlexOlmoForCausalLM": moe.flex_olmo,
    "GPTBigCodeForCausalLM": bigcode.gpt_bigcode,
    "Gemma3ForCausalLM": gemma.gemma3,
    "Gemma4ForCausalLM": gemma4.gemma4,
    "Gemma4ForConditionalGeneration": gemma4.text_of,
    "GemmaForCausalLM": gemma.gemma,
    "Glm4ForCausalLM": glm.glm4,
    "Glm4MoeLiteForCausalLM": latent.glm4_moe_lite,
    "GlmForCausalLM": glm.glm,
    "GptOssForCausalLM": gpt_oss.gpt_oss,
    "GraniteForCausalLM": granite.granite,
    "GraniteMoeHybridForCausalLM": granite_hybrid.granite_hybrid,
    "HeliumForCausalLM": llama.helium,
    "Jais2ForCausalLM": stablelm.jais2,
    "LlamaForCausalLM": llama.llama,
    "LlavaForConditionalGeneration": llava.llava,
    "MPTForCausalLM": mpt.mpt,
    "Ministral3ForCausalLM": llama.ministral3,
    "MinistralForCausalLM": llama.mistral,
    "Mistral3ForConditionalGeneration": mistral3.mistral3,
    "MistralForCausalLM": llama.mistral,
    "MixtralForCausalLM": moe.mixtral,
    "MptForCausalLM": mpt.mpt,
    "Olmo2ForCausalLM": olmo.olmo2,
    "Olmo3ForCausalLM": olmo.olmo3,
    "OlmoeForCausalLM": moe.olmoe,
    "Phi3ForCausalLM": phi.phi3,
    "PhiForCausalLM": phi.phi,
    "Qwen2ForCausalLM": qwen.qwen2,
    "Qwen2MoeForCausalLM": moe.qwen2_moe,
    "Qwen3ForCausalLM": qwen.qwen3,
    "Qwen3MoeForCausalLM": moe.qwen3_moe,
    "Qwen3NextForCausalLM": qwen_next.qwen3_next,
    "Qwen3VLForConditionalGeneration": qwen_vl.qwen3_vl,
    "Qwen3_5ForCausalLM": qwen_next.qwen3_5,
    "Qwen3_5ForConditionalGeneration": qwen_next.with_images,
    "Qwen3_5MoeForCausalLM": qwen_next.qwen3_5_moe,
    "Qwen3_5MoeForConditionalGeneration": qwen_next.with_images,
    "SeedOssForCausalLM": llama.seed_oss,
    "SmolLM3ForCausalLM": llama.smollm3,
    "StableLmForCausalLM": stablelm.stablelm,
    "Starcoder2ForCausalLM": bigcode.starcoder2,
}
"""The families by the name in the ``architectures`` of ``config.json``."""

ENCODERS: Mapping[str, Callable[[Config], ModelSpec]] = {
    "Bert": bert.bert,
    "Camembert": bert.roberta,
    "DistilBert": bert.distilbert,
    "Gte": gte.gte,
    "JinaEmbeddingsV3": jina.jina_embeddings_v3,
    "MPNet": bert.mpnet,
    "ModernBert": modern_bert.modern_bert,
    "New": gte.gte,
    "NomicBert": nomic_bert.nomic_bert,
    "Roberta": bert.roberta,
    "XLMRoberta": jina.xlm_roberta,
}
"""The encoders by the beginning of the name, see :mod:`preheat.pooling.encoders`."""


HEADS: Mapping[str, Callable[[ModelSpec, Config], ModelSpec]] = {CLASSIFIER: with_classifier, TOKENS: with_token_head}
"""The heads of encoders that are read, by the end of the name."""


def read_spec(values: Mapping[str, Any], quantization: str | None = None) -> ModelSpec:
    """Return the spec of a parsed ``config.json``.

    ``quantization`` is the method of ``--quantization``. Raises ModelError naming the field that is missing or not
    supported.
    """
    for name in _names(values):
        if (encoder := encoder_name(name)) is not None:
            config = Config(encoder.family, values)
            spec = replace(ENCODERS[encoder.family](config), architecture=name)
            if encoder.head in HEADS:
                spec = HEADS[encoder.head](spec, config)
            config.refuse_unread()
            return quantized(spec, config.quantization(), quantization)
        if (family := _family(name)) is not None:
            config = Config(family, values)
            made = FAMILIES[family](config)
            if name.endswith(CLASSIFIER):
                made = classifying_decoder(made, config, name)
            config.refuse_unread()
            spec = made if name.endswith(("ForCausalLM", "ForConditionalGeneration", CLASSIFIER)) else base_model(made)
            return quantized(spec, config.quantization(), quantization)
    raise _unsupported(values)


def check_architecture(values: Mapping[str, Any]) -> None:
    """Raise ModelError if a parsed ``config.json`` names architectures, but no family's."""
    if (names := _names(values)) and not any(encoder_name(name) or _family(name) for name in names):
        raise _unsupported(values)


def _names(values: Mapping[str, Any]) -> list[str]:
    names = values.get("architectures") or []
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ModelError(f"config.json: architectures must be a list of names, got {names!r}")
    return names


def _family(name: str) -> str | None:
    """Return the family of the architecture ``name``.

    The name may be of a model without its output head, or with a head for classes.
    """
    found = name if name in FAMILIES else f"{name.removesuffix('Model').removesuffix(CLASSIFIER)}ForCausalLM"
    return found if found in FAMILIES else None


def _unsupported(values: Mapping[str, Any]) -> ModelError:
    names = _names(values)
    found = ", ".join(names) if names else f"none named (model_type {values.get('model_type')!r})"
    need = need_of(names[0]) if names else ""
    why = f": it needs {need}" if need else misspelled(names[0], FAMILIES) if names else ""
    return ModelError(
        f"architecture {found} is not supported{why}; supported are {', '.join(FAMILIES)}, and "
        f"encoders: {', '.join(ENCODERS)}"
    )


def spec_of(values: Mapping[str, Any], settings: Settings) -> ModelSpec:
    """Return the spec to load by these settings.

    It is the spec of :func:`read_spec`, without an unused encoder, and with experts that are dealt whole to ranks if
    the settings say so.
    """
    spec = read_spec(values, settings.quantization)
    spec = without_images(spec) if settings.language_model_only else spec
    return deal_experts(spec) if settings.enable_expert_parallel else spec


def deal_experts(spec: ModelSpec) -> ModelSpec:
    """Return ``spec`` with experts to be dealt whole to ranks.

    Raises ModelError for a model without experts.
    """

    def dealt(_: int, layer: LayerSpec) -> LayerSpec:
        if not isinstance(layer.mlp, MoeSpec):
            return layer
        return replace(layer, mlp=replace(layer.mlp, experts=replace(layer.mlp.experts, dealt=True)))

    found = with_layers(spec, dealt)
    if found == spec:
        raise ModelError(
            "--enable-expert-parallel: the model has no experts; leave --enable-expert-parallel out",
            param="enable_expert_parallel",
        )
    return found


def without_images(spec: ModelSpec) -> ModelSpec:
    """Return ``spec`` without its encoder of images.

    Its tensors are no weights, and tokens turn by their position, as all of a text's axes have one place.
    """
    if spec.vision is None:
        return spec
    unused = tuple(map(re.escape, expected_tensors(spec.vision)))

    def plain(_: int, layer: LayerSpec) -> LayerSpec:
        own = layer.attention
        if own.rope is None or not own.rope.sections:
            return layer
        return replace(layer, attention=replace(own, rope=replace(own.rope, sections=())))

    return replace(with_layers(spec, plain), vision=None, ignored=(*spec.ignored, *unused))
