"""Modules of vLLM that scripts import, as tables of names.

A name has its home in preheat, or the reason of its absence. Each module of the tables can be imported below
``preheat``, though it has no file; see :mod:`preheat.utils.module_aliases`.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from functools import cache, partial

from preheat.utils.module_aliases import Names
from preheat.utils.refused import Refused

_OUTPUTS = """ClassificationOutput ClassificationRequestOutput CompletionOutput EmbeddingOutput EmbeddingRequestOutput
    PoolingOutput PoolingRequestOutput RequestOutput ScoringOutput ScoringRequestOutput"""

OFFERED: Mapping[str, str] = {
    "beam_search": "BeamSearchOutput BeamSearchSequence",
    "distributed": "cleanup_dist_env_and_memory",
    "distributed.parallel_state": "cleanup_dist_env_and_memory",
    "engine.arg_utils": "AsyncEngineArgs EngineArgs",
    "engine.async_llm_engine": "AsyncLLMEngine",
    "engine.llm_engine": "LLMEngine",
    "entrypoints.llm": "LLM",
    "inputs": "EmbedsPrompt PromptType TextPrompt TokensPrompt",
    "logger": "init_logger",
    "logprobs": "FlatLogprobs Logprob",
    "lora.request": "LoRARequest",
    "model_executor.models": "ModelRegistry",
    "outputs": _OUTPUTS,
    "pooling_params": "PoolingParams",
    "sampling_params": "BeamSearchParams RequestOutputKind SamplingParams StructuredOutputsParams",
    "sequence": "Logprob",
    "utils.argparse_utils": "FlexibleArgumentParser",
    "utils.print_utils": "print_embeddings",
    "v1.engine.async_llm": "AsyncLLM",
    "v1.engine.llm_engine": "LLMEngine",
    "v1.executor.ray_utils": "initialize_ray_cluster",
    "v1.metrics.reader": "Counter Gauge Histogram Metric Vector",
    "version": "__version__ __version_tuple__",
}
"""Names that are here, by the module where vLLM has them."""

HOMES: Mapping[str, str] = {
    "FlexibleArgumentParser": "preheat.library.engine_args:FlexibleArgumentParser",
    "cleanup_dist_env_and_memory": "preheat.utils.gc:give_back_memory",
    "init_logger": "logging:getLogger",
    "print_embeddings": "preheat.frontend.embedding",
    **dict.fromkeys(("Counter", "Gauge", "Histogram", "Metric", "Vector"), "preheat.frontend.metric_values"),
}
"""The homes of names that the package itself does not offer."""

_NO_CODE = (
    "no code of a script runs in a step: see docs/structured-outputs.md and allowed_token_ids, logit_bias, bad_words"
)
_SETTINGS = "settings are one object, of options by name: see docs/settings.md"

REFUSED: Mapping[str, str] = {
    _NO_CODE: """v1.sample.logits_processor:AdapterLogitsProcessor v1.sample.logits_processor:BatchUpdate
        v1.sample.logits_processor:LogitsProcessor v1.sample.logits_processor:RequestLogitsProcessor
        v1.sample.logits_processor.builtin:process_dict_updates""",
    _SETTINGS: """config:CacheConfig config:CompilationConfig config:KVTransferConfig config:ModelConfig
        config:ParallelConfig config:ProfilerConfig config:SchedulerConfig config:SpeculativeConfig config:VllmConfig
        config:PoolerConfig config.kv_transfer:KVTransferConfig config.profiler:ProfilerConfig""",
    "write StructuredOutputsParams": "sampling_params:GuidedDecodingParams",
    "write preheat doctor, or ask torch": "platforms:current_platform",
    "images are given as images of Pillow": """assets.image:ImageAsset multimodal.utils:fetch_image
        multimodal.image:convert_image_mode""",
    "there are no videos here": "assets.video:VideoAsset",
    "there is no sound here": "assets.audio:AudioAsset",
    "statistics are not logged: see get_metrics": """v1.metrics.loggers:AggregatedLoggingStatLogger
        v1.metrics.loggers:LoggingStatLogger v1.metrics.loggers:StatLoggerBase""",
    "ranks are processes of the engine's own: see docs/parallel.md": """distributed.parallel_state:get_world_group
        distributed.parallel_state:get_tensor_model_parallel_rank""",
    "an engine ends when nothing refers to it: write del llm, and cleanup_dist_env_and_memory()": """
        distributed.parallel_state:destroy_model_parallel
        distributed.parallel_state:destroy_distributed_environment""",
    "measure with preheat bench": "benchmarks.datasets:add_dataset_parser benchmarks.datasets:get_samples",
    "checkpoints are read in one way, by every rank": "model_executor.model_loader:ShardedStateLoader",
    "prompts are made by LLM.generate and LLM.chat": "renderers.inputs.preprocess:parse_model_prompt",
    "an address with port 0 gets a free port": "utils.network_utils:get_open_port",
}
"""Names that can have no meaning here, as ``module:name``, by the reason."""


PROGRAMS: Mapping[str, str] = {"entrypoints.openai.api_server": "serve", "entrypoints.openai.run_batch": "run-batch"}
"""The commands of modules that are run by ``python -m``."""


_PROGRAM = """
import sys
if __name__ == "__main__":
    from preheat.__main__ import main
    sys.argv.insert(1, "{command}")
    sys.exit(main())
"""


@cache
def _refused() -> dict[tuple[str, str], Refused]:
    listed = [(*each.split(":"), reason) for reason, names in REFUSED.items() for each in names.split()]
    return {(module, name): Refused(name, reason) for module, name, reason in listed}


@cache
def modules() -> frozenset[str]:
    """Return the modules, without the package's name."""
    return frozenset(OFFERED) | frozenset(PROGRAMS) | {module for module, _ in _refused()}


def names(module: str) -> Names:
    """Return the names in a module, with functions that return their objects."""
    found: dict[str, object] = {name: partial(_object, name) for name in OFFERED.get(module, "").split()}
    refused = {name: partial(_same, value) for (home, name), value in _refused().items() if home == module}
    return found | refused  # type: ignore[return-value]


def program(module: str) -> str:
    """Return the program that ``python -m`` runs; empty for a module that is no program."""
    if module not in PROGRAMS:
        return ""
    return _PROGRAM.format(command=PROGRAMS[module])


def _object(name: str) -> object:
    """Return the object that preheat has by ``name``."""
    home, _, other = HOMES.get(name, "preheat").partition(":")
    return getattr(importlib.import_module(home), other or name)


def _same(value: object) -> object:
    return value
