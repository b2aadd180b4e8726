"""Needs of architectures that are not supported.

The error that refuses an architecture states its need.
"""

from __future__ import annotations

from collections.abc import Mapping

_ENCODER = "attention that looks ahead (an encoder)"
_CROSS = "an encoder, and attention to its output"
_STATES = "layers that keep a state in place of keys and values (state-space or linear attention)"
_LATENT = "keys and values compressed to a latent vector (MLA)"
_LEARNED = "learned positions, with norms that subtract a mean and add a bias"
_PARALLEL = "attention and MLP side by side in a layer"
_BOTH_SIDES = "norms after attention and MLP, besides or instead of the norms before"
_PACKED = "query, key and value packed in one weight"
_IMAGES = "an encoder of images other than CLIP's, with its own positions"
_SOUND = "an encoder of sound"

NEEDS: Mapping[str, str] = {
    "Albert": _ENCODER, "Bert": _ENCODER, "DistilBert": _ENCODER, "Deberta": _ENCODER, "ModernBert": _ENCODER,
    "NomicBert": _ENCODER, "Roberta": _ENCODER, "XLMRoberta": _ENCODER,
    "Bart": _CROSS, "MBart": _CROSS, "M2M100": _CROSS, "Marian": _CROSS, "T5": _CROSS, "MT5": _CROSS, "Whisper": _CROSS,
    "Bamba": _STATES, "FalconH1": _STATES, "FalconMamba": _STATES, "GraniteMoeHybrid": _STATES, "Jamba": _STATES,
    "KimiLinear": _STATES, "Lfm2": _STATES, "Mamba": _STATES, "MiniMaxM1": _STATES, "MiniMaxText": _STATES,
    "Nemotron_H": _STATES, "NemotronH": _STATES, "Plamo2": _STATES, "Qwen3Next": _STATES, "Qwen3_5": _STATES,
    "Rwkv": _STATES, "RWKV": _STATES, "Zamba": _STATES,
    "Deepseek": _LATENT, "KimiK2": _LATENT, "Kimi": _LATENT, "MiniCPM3": _LATENT,
    "DeepseekForCausalLM": "experts that all tokens share, without a gate",
    "GPT2": _LEARNED, "OPT": _LEARNED, "XGLM": _LEARNED,
    "Cohere": _PARALLEL, "CodeGen": _PARALLEL, "Falcon": _PARALLEL, "GPTJ": _PARALLEL, "GPTNeoX": _PARALLEL,
    "PhiFor": _PARALLEL, "Persimmon": _PARALLEL,
    "Bloom": "ALiBi with a norm behind the embeddings, and biases",
    "Baichuan": _PACKED, "InternLM2": _PACKED, "QWenLMHead": _PACKED, "ChatGLM": _PACKED,
    "Dbrx": "query, key and value packed in one weight, and cut to a range",
    "Exaone4": _BOTH_SIDES, "Gemma2": f"{_BOTH_SIDES}, and logits that are capped softly", "Glm4": _BOTH_SIDES,
    "Gemma3n": "embeddings for each layer, and layers that use each other's keys and values",
    "Gemma4": "layers that use each other's keys and values, and heads of two sizes",
    "GlmFor": "rotary positions on half of each head, in pairs",
    "GptOss": "attention with a sink for each head, and experts of MXFP4 with biases",
    "Granite": "multipliers of embeddings, attention, residuals and logits",
    "Llama4": "attention in chunks, layers without positions, and one expert that all tokens share",
    "MiniCPM": "multipliers of embeddings, residuals and logits",
    "Nemotron": "a squared ReLU, and norms that subtract a mean",
    "Olmo2": _BOTH_SIDES, "Olmo3": _BOTH_SIDES, "OlmoFor": "norms without weights",
    "Olmoe": "norms of whole queries and keys",
    "Phimoe": "norms with biases, and a router that looks at two experts in turn",
    "SmolLM3": "layers without positions",
    "StableLm": "rotary positions on a part of each head, and norms with biases",
    "Idefics": _IMAGES, "InternVL": _IMAGES, "LlavaNext": _IMAGES, "LlavaOnevision": _IMAGES, "MiniCPMV": _IMAGES,
    "Mistral3": _IMAGES, "Mllama": _IMAGES, "Molmo": _IMAGES, "PaliGemma": _IMAGES, "Phi3V": _IMAGES,
    "Pixtral": _IMAGES,
    "Gemma3ForConditionalGeneration": _IMAGES, "Qwen2VL": _IMAGES, "Qwen2_5_VL": _IMAGES, "Qwen3VL": _IMAGES,
    "Phi4MM": _SOUND, "Qwen2Audio": _SOUND, "Qwen2_5Omni": _SOUND, "Qwen3Omni": _SOUND, "Ultravox": _SOUND,
    "Voxtral": _SOUND,
}  # fmt: skip
"""Needs by the beginning of the architecture's name; the longest beginning counts."""


def need_of(name: str) -> str:
    """Return the need of the architecture ``name``; "" if it is unknown."""
    known = max((start for start in NEEDS if name.startswith(start)), key=len, default="")
    return NEEDS.get(known, "")
