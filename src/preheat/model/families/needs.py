"""Needs of architectures that are not supported.

The error that refuses an architecture states its need.
"""

from __future__ import annotations

from collections.abc import Mapping

from preheat.pooling.encoders import ENCODERS

_ENCODER = "attention that looks ahead (an encoder)"
_HEAD = "a head that is not read: an encoder makes embeddings, scores and classes"
_CROSS = "an encoder, and attention to its output"
_STATES = "layers with a state of another recurrence than the gated delta rule and Mamba 2"
_ALONE = "layers of a single block: a state of Mamba 2, attention, an MLP or experts"
_LATENT = "keys and values compressed to a latent vector (MLA), in another form than DeepSeek's"
_SPARSE = "attention to keys that an indexer chooses"
_SINKS = "attention with a sink for each head"
_GATED_ROUTER = "a family file: routers by sigmoids and shared experts without a gate exist on a CPU"
_LEARNED = "learned positions, with norms that subtract a mean and add a bias"
_CAPPED = "scores and logits that are capped softly"
_PACKED = "query, key and value packed in one weight"
_IMAGES = "an encoder of images other than CLIP's, with its own positions"
_SOUND = "an encoder of sound"

A_ROW = "a line in the table of families: all of its parts exist"

NEEDS: Mapping[str, str] = {
    **dict.fromkeys(ENCODERS, _HEAD),
    "Albert": "layers that share one set of weights", "BigBirdFor": _ENCODER, "Data2VecText": _ENCODER,
    "Deberta": "attention to relative positions (an encoder)", "Electra": _ENCODER, "ErnieFor": _ENCODER,
    "EuroBert": _ENCODER, "MegatronBert": _ENCODER,
    "BertGeneration": _ENCODER, "RobertaPreLayerNorm": _ENCODER, "RemBert": _ENCODER, "RoCBert": _ENCODER,
    "RoFormer": _ENCODER,
    "XLM": _ENCODER, "XLNet": _ENCODER, "Xmod": _ENCODER, "Reformer": _ENCODER,
    "Bart": _CROSS, "BigBirdPegasus": _CROSS, "Blenderbot": _CROSS, "M2M100": _CROSS, "MBart": _CROSS, "MT5": _CROSS,
    "Marian": _CROSS, "Musicgen": _CROSS, "Mvp": _CROSS, "PLBart": _CROSS, "Pegasus": _CROSS, "ProphetNet": _CROSS,
    "T5": _CROSS, "TrOCR": _CROSS, "Whisper": _CROSS,
    "BailingHybrid": _STATES, "Bamba": "a family file: states of Mamba 2 exist, and heads that turn in part",
    "FalconH1": "layers with a state of Mamba 2 and attention side by side, with factors inside of both",
    "FalconMamba": _STATES, "Jamba": _STATES, "KimiLinear": _STATES, "Lfm": _STATES, "Mamba": _STATES,
    "Mamba2": "a cache without keys: states of Mamba 2 run beside layers with attention",
    "MiniMaxFor": _STATES, "MiniMaxM1": _STATES, "MiniMaxText": _STATES, "Nemotron_H": _ALONE, "NemotronH": _ALONE,
    "OlmoHybrid": "states with heads of any size, and with betas up to 2", "Plamo2": _STATES, "Qwen4Exp": _STATES,
    "RecurrentGemma": _STATES, "Rwkv": _STATES, "RWKV": _STATES, "Zamba": _STATES,
    "Zamba2": "layers that share one set of weights: states of Mamba 2 exist", "Zaya": _STATES, "xLSTM": _STATES,
    "Inkling": _STATES,
    "AXK1": _LATENT, "AXK2": _SPARSE, "Deepseek": _LATENT, "DeepseekV32": _SPARSE, "DeepseekV4": _SPARSE,
    "Dots3": _SPARSE, "GlmMoeDsa": _SPARSE, "HYV4": _SPARSE, "KimiK2": _LATENT,
    "Kimi": _LATENT, "LongcatFlash": _LATENT, "MiniCPM3": _LATENT, "MiniMaxM3": _SPARSE, "Youtu": A_ROW,
    "DeepseekForCausalLM": _GATED_ROUTER,
    "BioGpt": _LEARNED, "GPT2": _LEARNED, "GPTNeoFor": _LEARNED, "OPT": _LEARNED, "OpenAIGPT": _LEARNED,
    "XGLM": _LEARNED, "CTRL": "positions that are sines",
    "CodeGen": _PACKED, "Falcon": _PACKED, "GPTNeoX": _PACKED, "Persimmon": "a norm with a bias for each head",
    "GPTJ": A_ROW, "Mellum": A_ROW,
    "HyperCLOVAX": "a factor behind the norms that follow attention and MLP",
    "Bloom": "ALiBi with a norm behind the embeddings, and biases",
    "Baichuan": _PACKED, "InternLM2": _PACKED, "QWenLMHead": _PACKED, "ChatGLM": _PACKED,
    "Dbrx": "query, key and value packed in one weight, and cut to a range",
    "Afmoe": _GATED_ROUTER, "Beam": _GATED_ROUTER, "Cohere2Moe": _GATED_ROUTER, "Dots1": _GATED_ROUTER,
    "Ernie4_5_Moe": _GATED_ROUTER, "ExaoneMoe": _GATED_ROUTER, "Glm4Moe": _GATED_ROUTER, "HYV3": _GATED_ROUTER,
    "Kolibri1": _GATED_ROUTER, "Laguna": _GATED_ROUTER, "MiniMaxM2": _GATED_ROUTER, "SolarOpen": _GATED_ROUTER,
    "AriaText": "experts that all tokens share, without a gate",
    "GraniteMoe": "experts packed in one weight, and factors of their outputs",
    "HunYuanDense": "norms of heads behind their rotation", "HunYuanMoE": "norms of heads behind their rotation",
    "JetMoe": "experts in attention",
    "Flint": _SINKS, "GraniteSWA": _SINKS, "GraniteMoeSWA": _SINKS, "MiMoV2": _SINKS,
    "GptOss": "attention with a sink for each head, and experts of MXFP4 with biases",
    "Apertus": "an activation with learned numbers (xIELU)",
    "BitNet": "weights of three values, and norms inside of attention and MLP",
    "Blt": "bytes in place of tokens, and layers that join them",
    "CpmAnt": "biases of scores by learned distances",
    "DiffLlama": "attention as the difference of two", "Doge": "masks that the values decide",
    "HrmText": "layers that run several times",
    "Gemma2": _CAPPED, "VaultGemma": _CAPPED, "NanoChat": f"norms without weights, and {_CAPPED}",
    "Gemma3n": "embeddings for each layer, and layers that use each other's keys and values",
    "Gemma4Assistant": "a model that it drafts for",
    "Gemma4Unified": "an encoder of images and sound that lies in the decoder",
    "Llama4": "attention in chunks, layers without positions, and one expert that all tokens share",
    "MiniCPM": "multipliers of embeddings, residuals and logits",
    "Nemotron": "norms that subtract a mean, stored as factors minus one",
    "OlmoFor": "norms without weights",
    "Phimoe": "norms with biases, and a router that looks at two experts in turn",
    "CohereCompass": _IMAGES, "Emu3": _IMAGES, "Fuyu": _IMAGES, "Git": _IMAGES, "GotOcr2": _IMAGES,
    "Idefics": _IMAGES, "InternVL": _IMAGES, "LlavaNext": _IMAGES, "LlavaOnevision": _IMAGES, "MiniCPMV": _IMAGES,
    "Mllama": _IMAGES, "Molmo": _IMAGES, "PaliGemma": _IMAGES, "Phi3V": _IMAGES,
    "Pixtral": _IMAGES,
    "Gemma3ForConditionalGeneration": _IMAGES, "Qwen2VL": _IMAGES, "Qwen2_5_VL": _IMAGES, "Qwen3VLMoe": _IMAGES,
    "Moshi": _SOUND, "MossTranscribe": _SOUND, "Phi4Multimodal": _SOUND, "Phi4MM": _SOUND, "Qwen2Audio": _SOUND,
    "Qwen2_5Omni": _SOUND, "Qwen3Omni": _SOUND, "Ultravox": _SOUND, "Voxtral": _SOUND,
}  # fmt: skip
"""Needs by the beginning of the architecture's name; the longest beginning counts."""


def need_of(name: str) -> str:
    """Return the need of the architecture ``name``; "" if it is unknown."""
    known = max((start for start in NEEDS if name.startswith(start)), key=len, default="")
    return NEEDS.get(known, "")
