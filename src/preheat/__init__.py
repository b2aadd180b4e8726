"""preheat: an LLM inference engine that is hot and bit-exact from the very first request.

Names are loaded on first use, so that ``import preheat`` costs nothing and never imports torch.
"""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING

from preheat.utils.module_aliases import AliasFinder

__version__ = "0.1.0"
__version_tuple__ = tuple(int(part) if part.isdigit() else part for part in __version__.split("."))

WINDOWS = "preheat runs on Linux and macOS: on Windows use WSL2 (`wsl --install`), and install preheat inside of it"

if TYPE_CHECKING:
    from preheat import reference as reference
    from preheat.async_llm import AsyncLLM as AsyncLLM
    from preheat.async_llm import AsyncLLMEngine as AsyncLLMEngine
    from preheat.core import RequestOutputKind as RequestOutputKind
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
    from preheat.frontend.flat_logprobs import FlatLogprobs as FlatLogprobs
    from preheat.frontend.outputs import BeamSearchOutput as BeamSearchOutput
    from preheat.frontend.outputs import BeamSearchSequence as BeamSearchSequence
    from preheat.frontend.outputs import ClassificationOutput as ClassificationOutput
    from preheat.frontend.outputs import ClassificationRequestOutput as ClassificationRequestOutput
    from preheat.frontend.outputs import CompletionOutput as CompletionOutput
    from preheat.frontend.outputs import EmbeddingOutput as EmbeddingOutput
    from preheat.frontend.outputs import EmbeddingRequestOutput as EmbeddingRequestOutput
    from preheat.frontend.outputs import Logprob as Logprob
    from preheat.frontend.outputs import PoolingOutput as PoolingOutput
    from preheat.frontend.outputs import PoolingRequestOutput as PoolingRequestOutput
    from preheat.frontend.outputs import RequestOutput as RequestOutput
    from preheat.frontend.outputs import RequestStateStats as RequestStateStats
    from preheat.frontend.outputs import ScoringOutput as ScoringOutput
    from preheat.frontend.outputs import ScoringRequestOutput as ScoringRequestOutput
    from preheat.library.engine_args import AsyncEngineArgs as AsyncEngineArgs
    from preheat.library.engine_args import EngineArgs as EngineArgs
    from preheat.library.inputs import EmbedsPrompt as EmbedsPrompt
    from preheat.library.inputs import PromptType as PromptType
    from preheat.library.inputs import TextPrompt as TextPrompt
    from preheat.library.inputs import TokensPrompt as TokensPrompt
    from preheat.library.refused_names import ModelRegistry as ModelRegistry
    from preheat.library.refused_names import initialize_ray_cluster as initialize_ray_cluster
    from preheat.llm import LLM as LLM
    from preheat.llm import LLMEngine as LLMEngine

_HOME = {
    "AsyncEngineArgs": "preheat.library.engine_args",
    "AsyncLLM": "preheat.async_llm",
    "AsyncLLMEngine": "preheat.async_llm",
    "BeamSearchOutput": "preheat.frontend.outputs",
    "BeamSearchParams": "preheat.frontend.beams",
    "BeamSearchSequence": "preheat.frontend.outputs",
    "ClassificationOutput": "preheat.frontend.outputs",
    "ClassificationRequestOutput": "preheat.frontend.outputs",
    "CompletionOutput": "preheat.frontend.outputs",
    "EmbeddingOutput": "preheat.frontend.outputs",
    "EmbeddingRequestOutput": "preheat.frontend.outputs",
    "EmbedsPrompt": "preheat.library.inputs",
    "EngineArgs": "preheat.library.engine_args",
    "EngineDead": "preheat.errors",
    "FlatLogprobs": "preheat.frontend.flat_logprobs",
    "InvalidRequest": "preheat.errors",
    "LLM": "preheat.llm",
    "LLMEngine": "preheat.llm",
    "LoRARequest": "preheat.frontend.adapters",
    "Logprob": "preheat.frontend.outputs",
    "ModelError": "preheat.errors",
    "ModelRegistry": "preheat.library.refused_names",
    "PoolingOutput": "preheat.frontend.outputs",
    "PoolingParams": "preheat.frontend.embedding",
    "PoolingRequestOutput": "preheat.frontend.outputs",
    "PreheatError": "preheat.errors",
    "PromptType": "preheat.library.inputs",
    "RepetitionDetectionParams": "preheat.core",
    "RequestOutput": "preheat.frontend.outputs",
    "RequestOutputKind": "preheat.core",
    "RequestStateStats": "preheat.frontend.outputs",
    "SamplingParams": "preheat.core",
    "ScoringOutput": "preheat.frontend.outputs",
    "ScoringRequestOutput": "preheat.frontend.outputs",
    "SettingsError": "preheat.errors",
    "StructuredOutputsParams": "preheat.core",
    "TextPrompt": "preheat.library.inputs",
    "TokensPrompt": "preheat.library.inputs",
    "WeightGroup": "preheat.execution.weight_group",
    "initialize_ray_cluster": "preheat.library.refused_names",
    "reference": "preheat.reference",
}

__all__ = [
    "AsyncEngineArgs",
    "AsyncLLM",
    "AsyncLLMEngine",
    "BeamSearchOutput",
    "BeamSearchParams",
    "BeamSearchSequence",
    "ClassificationOutput",
    "ClassificationRequestOutput",
    "CompletionOutput",
    "EmbeddingOutput",
    "EmbeddingRequestOutput",
    "EmbedsPrompt",
    "EngineArgs",
    "EngineDead",
    "FlatLogprobs",
    "InvalidRequest",
    "LLM",
    "LLMEngine",
    "LoRARequest",
    "Logprob",
    "ModelError",
    "ModelRegistry",
    "PoolingOutput",
    "PoolingParams",
    "PoolingRequestOutput",
    "PreheatError",
    "PromptType",
    "RepetitionDetectionParams",
    "RequestOutput",
    "RequestOutputKind",
    "RequestStateStats",
    "SamplingParams",
    "ScoringOutput",
    "ScoringRequestOutput",
    "SettingsError",
    "StructuredOutputsParams",
    "TextPrompt",
    "TokensPrompt",
    "WeightGroup",
    "__version__",
    "__version_tuple__",
    "initialize_ray_cluster",
    "reference",
]


sys.meta_path.append(AliasFinder("preheat", "preheat.library.vllm_modules"))


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module 'preheat' has no attribute {name!r}")
    if sys.platform == "win32":
        raise ImportError(WINDOWS)
    home = importlib.import_module(_HOME[name])
    value = home if _HOME[name] == f"{__name__}.{name}" else getattr(home, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
