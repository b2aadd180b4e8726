"""Tools that a model may call: the parsers of ``--tool-call-parser``, and forced calls."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from preheat.frontend.tools.base import Tool, ToolParser
from preheat.frontend.tools.gemma4 import Gemma4Parser
from preheat.frontend.tools.glm45 import Glm45Parser
from preheat.frontend.tools.harmony import HarmonyParser
from preheat.frontend.tools.json_calls import (
    GraniteFunctionParser,
    GraniteParser,
    HermesParser,
    InternlmParser,
    Llama3JsonParser,
    MistralParser,
    NamedParser,
    Phi4MiniParser,
    RequiredParser,
    ToolCallsParser,
    XlamParser,
)
from preheat.frontend.tools.named_json import DeepseekV3Parser, DeepseekV31Parser, KimiK2Parser
from preheat.frontend.tools.pythonic import Olmo3Parser, PythonicParser
from preheat.frontend.tools.tags import MinimaxM2Parser, Qwen3CoderParser, SeedOssParser, Step3Parser

TOOL_PARSERS: Mapping[str, type[ToolParser]] = MappingProxyType(
    {
        "deepseek_v3": DeepseekV3Parser,
        "deepseek_v31": DeepseekV31Parser,
        "ernie45": HermesParser,
        "gemma4": Gemma4Parser,
        "glm45": Glm45Parser,
        "glm47": Glm45Parser,
        "granite": GraniteParser,
        "granite-20b-fc": GraniteFunctionParser,
        "granite4": HermesParser,
        "hermes": HermesParser,
        "hunyuan_a13b": ToolCallsParser,
        "internlm": InternlmParser,
        "jamba": ToolCallsParser,
        "kimi_k2": KimiK2Parser,
        "llama3_json": Llama3JsonParser,
        "llama4_json": Llama3JsonParser,
        "llama4_pythonic": PythonicParser,
        "minimax_m2": MinimaxM2Parser,
        "mistral": MistralParser,
        "olmo3": Olmo3Parser,
        "openai": HarmonyParser,
        "phi4_mini_json": Phi4MiniParser,
        "pythonic": PythonicParser,
        "qwen3_coder": Qwen3CoderParser,
        "qwen3_xml": Qwen3CoderParser,
        "seed_oss": SeedOssParser,
        "step3": Step3Parser,
        "xlam": XlamParser,
    }
)
"""The parsers, by the values of ``--tool-call-parser``."""

__all__ = ["TOOL_PARSERS", "NamedParser", "RequiredParser", "Tool", "ToolParser"]
