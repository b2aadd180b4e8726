"""preheat: an LLM inference engine that is hot and bit-exact from the very first request.

Names are loaded on first use, so that ``import preheat`` costs nothing and never imports torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

__version__ = "0.1.0"

if TYPE_CHECKING:
    from preheat import reference as reference
    from preheat.core import SamplingParams as SamplingParams
    from preheat.core import StructuredOutputsParams as StructuredOutputsParams
    from preheat.errors import EngineDead as EngineDead
    from preheat.errors import InvalidRequest as InvalidRequest
    from preheat.errors import ModelError as ModelError
    from preheat.errors import PreheatError as PreheatError
    from preheat.errors import SettingsError as SettingsError
    from preheat.execution.weight_group import WeightGroup as WeightGroup
    from preheat.frontend.adapters import LoRARequest as LoRARequest
    from preheat.frontend.beams import BeamSearchParams as BeamSearchParams
    from preheat.frontend.embedding import PoolingParams as PoolingParams
    from preheat.frontend.outputs import BeamSearchOutput as BeamSearchOutput
    from preheat.frontend.outputs import BeamSearchSequence as BeamSearchSequence
    from preheat.frontend.outputs import CompletionOutput as CompletionOutput
    from preheat.frontend.outputs import RequestOutput as RequestOutput
    from preheat.llm import LLM as LLM
    from preheat.llm import EmbedsPrompt as EmbedsPrompt
    from preheat.llm import TextPrompt as TextPrompt
    from preheat.llm import TokensPrompt as TokensPrompt

_HOME = {
    "BeamSearchOutput": "preheat.frontend.outputs",
    "BeamSearchParams": "preheat.frontend.beams",
    "BeamSearchSequence": "preheat.frontend.outputs",
    "CompletionOutput": "preheat.frontend.outputs",
    "EmbedsPrompt": "preheat.llm",
    "EngineDead": "preheat.errors",
    "InvalidRequest": "preheat.errors",
    "LLM": "preheat.llm",
    "LoRARequest": "preheat.frontend.adapters",
    "ModelError": "preheat.errors",
    "PoolingParams": "preheat.frontend.embedding",
    "PreheatError": "preheat.errors",
    "RequestOutput": "preheat.frontend.outputs",
    "SamplingParams": "preheat.core",
    "SettingsError": "preheat.errors",
    "StructuredOutputsParams": "preheat.core",
    "TextPrompt": "preheat.llm",
    "TokensPrompt": "preheat.llm",
    "WeightGroup": "preheat.execution.weight_group",
    "reference": "preheat.reference",
}

__all__ = [
    "BeamSearchOutput",
    "BeamSearchParams",
    "BeamSearchSequence",
    "CompletionOutput",
    "EmbedsPrompt",
    "EngineDead",
    "InvalidRequest",
    "LLM",
    "LoRARequest",
    "ModelError",
    "PoolingParams",
    "PreheatError",
    "RequestOutput",
    "SamplingParams",
    "SettingsError",
    "StructuredOutputsParams",
    "TextPrompt",
    "TokensPrompt",
    "WeightGroup",
    "__version__",
    "reference",
]


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module 'preheat' has no attribute {name!r}")
    home = importlib.import_module(_HOME[name])
    value = home if _HOME[name] == f"{__name__}.{name}" else getattr(home, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
