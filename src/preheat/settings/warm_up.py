"""Options of the plan, the warm-up, the proof at boot, and diagnostics."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from preheat.configs.bucketing import bucket_range, strategy_named
from preheat.options.options import option

_bucketing = partial(option, group="Buckets")
_warm = partial(option, group="Warm-up")
_graph = partial(option, group="Device graphs")
_defrag = partial(option, group="Defragmenter")
_proof = partial(option, group="Proof")
_trace = partial(option, group="Diagnostics")


def _count_or_zero(text: str) -> int:
    """Parse a count; negative and unreadable text mean 0, as in vLLM's determinism warm-up."""
    try:
        return max(int(text), 0)
    except ValueError:
        return 0


@dataclass(frozen=True, kw_only=True)
class BucketSettings:
    """Options of the group Buckets."""

    bucketing_policy: str | None = _bucketing(
        None,
        "Separate (`split`) or common (`unified`) steps for prompts and decoding.",
        choices=("unified", "split"),
        default_text="unified, on Gaudi split; split if a file or a range of prompts or blocks is set",
    )
    bucketing_strategy: str = _bucketing(
        "auto",
        "Rule that spaces the buckets (exp, lin and pad are understood). `auto` is linear if a range is set, "
        "padding_aware if its padding is set, else exponential with `unified` and linear with `split`.",
        env="VLLM_BUCKETING_STRATEGY",
        choices=("auto", "linear", "exponential", "padding_aware", "file"),
        parse=strategy_named,
    )
    bucketing_from_file: str | None = _bucketing(
        None, "File of buckets, instead of ranges.", env="VLLM_BUCKETING_FROM_FILE", path="file"
    )
    allow_large_plan: bool = _bucketing(False, "Boot even if the plan has more than 2,000 programs.")
    bucket_pad_max: int | None = _bucketing(
        None, "Maximum padding of `padding_aware` buckets in any dimension; 0 is no limit.", low=0
    )
    bucket_pad_percent: int | None = _bucketing(
        None, "Maximum padding of `padding_aware` buckets in any dimension, in percent.", low=0, high=50
    )
    prompt_bs_bucket_min: int | None = bucket_range("prompt_bs", "min")
    prompt_bs_bucket_step: int | None = bucket_range("prompt_bs", "step")
    prompt_bs_bucket_max: int | None = bucket_range("prompt_bs", "max")
    prompt_bs_bucket_pad_max: int | None = bucket_range("prompt_bs", "pad_max")
    prompt_bs_bucket_pad_percent: int | None = bucket_range("prompt_bs", "pad_percent")
    prompt_seq_bucket_min: int | None = bucket_range("prompt_seq", "min")
    prompt_seq_bucket_step: int | None = bucket_range("prompt_seq", "step")
    prompt_seq_bucket_max: int | None = bucket_range("prompt_seq", "max")
    prompt_seq_bucket_pad_max: int | None = bucket_range("prompt_seq", "pad_max")
    prompt_seq_bucket_pad_percent: int | None = bucket_range("prompt_seq", "pad_percent")
    decode_bs_bucket_min: int | None = bucket_range("decode_bs", "min")
    decode_bs_bucket_step: int | None = bucket_range("decode_bs", "step")
    decode_bs_bucket_max: int | None = bucket_range("decode_bs", "max")
    decode_bs_bucket_pad_max: int | None = bucket_range("decode_bs", "pad_max")
    decode_bs_bucket_pad_percent: int | None = bucket_range("decode_bs", "pad_percent")
    decode_block_bucket_min: int | None = bucket_range("decode_block", "min")
    decode_block_bucket_step: int | None = bucket_range("decode_block", "step")
    decode_block_bucket_max: int | None = bucket_range("decode_block", "max")
    decode_block_bucket_pad_max: int | None = bucket_range("decode_block", "pad_max")
    decode_block_bucket_pad_percent: int | None = bucket_range("decode_block", "pad_percent")
    decode_seq_bucket_min: int | None = bucket_range("decode_seq", "min")
    decode_seq_bucket_step: int | None = bucket_range("decode_seq", "step")
    decode_seq_bucket_max: int | None = bucket_range("decode_seq", "max")
    decode_seq_bucket_pad_max: int | None = bucket_range("decode_seq", "pad_max")
    decode_seq_bucket_pad_percent: int | None = bucket_range("decode_seq", "pad_percent")


@dataclass(frozen=True, kw_only=True)
class WarmUpSettings:
    """Options of the group Warm-up."""

    skip_warmup: bool = _warm(False, "Do not warm up before serving.", env="VLLM_SKIP_WARMUP")
    determinism_warmup_iterations: int = _warm(
        3,
        "Forward passes that settle the numerics before serving; a negative or unreadable value means none.",
        env="VLLM_DETERMINISM_WARMUP_ITERATIONS",
        low=0,
        parse=_count_or_zero,
    )
    on_cold: str = _warm(
        "warn",
        "Reaction to a cold event, such as a compilation, after ready.",
        choices=("off", "count", "warn", "raise"),
    )
    cache_dir: str | None = _warm(
        None,
        "Folder where a boot keeps its record and compiled code for the next equal boot; `off` keeps none.",
        default_text="`preheat` in `$XDG_CACHE_HOME`, or in `~/.cache`",
        path="new folder",
        no_paths=("off",),
    )


@dataclass(frozen=True, kw_only=True)
class GraphSettings:
    """Options of the group Device graphs."""

    graph_reserved_mem: float = _graph(
        0.1,
        "Share of the usable memory that is reserved for graphs, in execution mode graphs.",
        env="VLLM_GRAPH_RESERVED_MEM",
        low=0,
        high=1,
    )
    graph_prompt_ratio: float = _graph(
        0.3, "Share of the graphs' memory for graphs of prompts.", env="VLLM_GRAPH_PROMPT_RATIO", low=0, high=1
    )
    graph_prompt_strategy: str = _graph(
        "min_tokens",
        "Order of capturing graphs of prompts.",
        env="VLLM_GRAPH_PROMPT_STRATEGY",
        choices=("min_tokens", "max_bs"),
    )
    graph_decode_strategy: str = _graph(
        "max_bs",
        "Order of capturing graphs of decoding.",
        env="VLLM_GRAPH_DECODE_STRATEGY",
        choices=("min_tokens", "max_bs"),
    )
    config_hidden_layers: int | None = _graph(
        None,
        "Layers in one graph; a step runs its graphs one after another.",
        env="VLLM_CONFIG_HIDDEN_LAYERS",
        low=1,
        default_text="all, on Gaudi 1",
    )


@dataclass(frozen=True, kw_only=True)
class DefragmenterSettings:
    """Options of the group Defragmenter."""

    defrag_threshold: int = _defrag(
        32,
        "Compact the KV cache if the highest block in use exceeds the number of blocks in use by more than this.",
        env="VLLM_DEFRAG_THRESHOLD",
        low=0,
    )
    defrag_with_graphs: bool | None = _defrag(
        None,
        "Swap blocks by captured graphs; no platform supports it.",
        env="VLLM_DEFRAG_WITH_GRAPHS",
        default_text="false",
    )
    contiguous_pa: bool | None = _defrag(
        None,
        "Let decoding read the KV cache in place: on a CPU, with `--block-size 256`, and on Gaudi, if set.",
        env="VLLM_CONTIGUOUS_PA",
        default_text="on a CPU true for blocks of 256",
    )


@dataclass(frozen=True, kw_only=True)
class ProofSettings:
    """Options of the group Proof."""

    boot_check: str = _proof("quick", "Compare the bits of all paths before ready.", choices=("off", "quick", "full"))
    require_invariance: bool = _proof(False, "Refuse to start if invariance cannot be promised.")


@dataclass(frozen=True, kw_only=True)
class DiagnosticSettings:
    """Options of the group Diagnostics."""

    debug: tuple[str, ...] = _trace(
        (), "Parts of the engine that log details.", env="VLLM_DEBUG", choices=("defrag", "warmup")
    )
    profiler_enabled: bool = _trace(
        False,
        "Write a trace of the start and of every step, for https://ui.perfetto.dev, to `preheat_trace_PID.json`.",
        env="VLLM_PROFILER_ENABLED",
    )
    log_step_graph_compilation: bool = _trace(
        False, "Log the steps that compile.", env="VLLM_HPU_LOG_STEP_GRAPH_COMPILATION"
    )
    log_step_graph_compilation_all: bool = _trace(
        False,
        "Log the compilations of every step, also of steps without any.",
        env="VLLM_HPU_LOG_STEP_GRAPH_COMPILATION_ALL",
    )
    log_step_cpu_fallbacks: bool = _trace(
        False,
        "Log the steps with operations that compiled code leaves to eager Python.",
        env="VLLM_HPU_LOG_STEP_CPU_FALLBACKS",
    )
    log_step_cpu_fallbacks_all: bool = _trace(
        False,
        "Log the operations left to eager Python for every step, also for steps without any.",
        env="VLLM_HPU_LOG_STEP_CPU_FALLBACKS_ALL",
    )
