"""Tools that a model may call: how models write calls (``--tool-call-parser``), and how a call is forced."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from preheat.frontend.tools.base import Tool, ToolParser
from preheat.frontend.tools.json_calls import (
    HermesParser,
    Llama3JsonParser,
    MistralParser,
    NamedParser,
    RequiredParser,
)
from preheat.frontend.tools.pythonic import Olmo3Parser, PythonicParser
from preheat.frontend.tools.qwen3_coder import Qwen3CoderParser

TOOL_PARSERS: Mapping[str, type[ToolParser]] = MappingProxyType(
    {
        "hermes": HermesParser,
        "llama3_json": Llama3JsonParser,
        "mistral": MistralParser,
        "olmo3": Olmo3Parser,
        "pythonic": PythonicParser,
        "qwen3_coder": Qwen3CoderParser,
    }
)
"""The parsers by the names that ``--tool-call-parser`` takes."""

__all__ = ["TOOL_PARSERS", "NamedParser", "RequiredParser", "Tool", "ToolParser"]
