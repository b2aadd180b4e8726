"""Every option of preheat, with its flag, its environment variables, its default and its help.

A :class:`Settings` is frozen and always valid. Only :meth:`Settings.load` reads the environment. Flags are the names
with dashes; every option can also be set by ``PREHEAT_<NAME>``, and some by the variable of vLLM or Gaudi.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

from preheat.backends.names import DEVICES
from preheat.errors import SettingsError
from preheat.utils.options import Option, did_you_mean, option, registry

logger = logging.getLogger(__name__)

BUNDLED = "bundled"
"""The name of the model that comes with preheat."""

_model = partial(option, group="Model")
_memory = partial(option, group="Memory")
_schedule = partial(option, group="Scheduling")
_run = partial(option, group="Execution and numerics")
_server = partial(option, group="Server")
_general = partial(option, group="General")
_bucket = partial(option, group="Buckets", low=1)
_bucketing = partial(option, group="Buckets")
_warm = partial(option, group="Warm-up")
_graph = partial(option, group="Device graphs")
_defrag = partial(option, group="Defragmenter")
_proof = partial(option, group="Proof")
_trace = partial(option, group="Diagnostics")
_gaudi = partial(option, group="Gaudi", later="Gaudi is not a supported platform yet")
_quant = partial(option, group="Quantization", later="quantized weights and caches come in a later version")
_spread = partial(option, group="Several devices", later="this version runs on one device")
_lora = partial(option, group="LoRA", later="LoRA adapters come in a later version")
_spec = partial(option, group="Speculation", later="speculative decoding comes in a later version")


def _count_or_zero(text: str) -> int:
    """Negative and unreadable text mean none, as for the determinism warm-up's environment variable in vLLM."""
    try:
        return max(int(text), 0)
    except ValueError:
        return 0


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Raises SettingsError, naming the option, for a value that cannot be used."""

    model: str = _model(
        BUNDLED, "A directory, a Hugging Face model id, or `bundled`: the model that comes with preheat."
    )
    tokenizer: str | None = _model(None, "Directory or id of the tokenizer, where it is not the model's.")
    skip_tokenizer_init: bool = _model(False, "No tokenizer: prompts are token ids, and nothing is turned into text.")
    revision: str | None = _model(None, "Branch, tag or commit of a Hub model.")
    load_format: str = _model(
        "auto", "Where weights come from; `dummy` draws random ones.", choices=("auto", "safetensors", "dummy")
    )
    dtype: str = _model(
        "auto",
        "Type of weights and activations; `auto` takes the checkpoint's, float16 runs as bfloat16.",
        choices=("auto", "bfloat16", "float32", "float16", "half", "float"),
    )
    max_model_len: int | None = _model(
        None, "Most tokens of prompt and output together.", low=1, default_text="the model's length"
    )
    chat_template: str | None = _model(None, "A Jinja file, or the template itself, in place of the model's.")
    max_logprobs: int = _model(20, "Most alternatives that `logprobs` and `prompt_logprobs` may ask for.", low=0)

    gpu_memory_utilization: float = _memory(
        0.9, "Share of the memory that is free after loading the model which preheat may use.", low=0.01, high=1
    )
    block_size: int = _memory(64, "Tokens in a block of the KV cache; a power of two.", low=16, high=256)
    num_gpu_blocks_override: int | None = _memory(None, "Blocks of the KV cache, in place of a measured number.", low=2)
    kv_cache_memory_bytes: int | None = _memory(None, "Bytes of the KV cache, in place of a measured number.", low=1)
    enable_prefix_caching: bool = _memory(True, "Keep finished blocks for prompts that begin in the same way.")

    max_num_seqs: int = _schedule(256, "Most sequences in one step.", low=1)
    max_num_batched_tokens: int = _schedule(2048, "Most tokens in one step, padding included.", low=1)
    max_num_mixed_tokens: int | None = _schedule(
        None,
        "Most tokens in a step in which some decode and others read prompts, or twice those rows if that is more.",
        low=1, default_text="512 for `preheat serve`, else as in any step",
    )  # fmt: skip
    max_num_prefill_seqs: int | None = _schedule(
        None, "Most sequences in one step that still read their prompt.", low=1
    )
    enable_chunked_prefill: bool = _schedule(True, "Let a long prompt share several steps with decoding sequences.")

    device: str = _run(
        "auto",
        "Where the model runs; `auto` takes an NVIDIA GPU where there is one that preheat has kernels for.",
        choices=("auto", *DEVICES),
    )
    async_scheduling: bool | None = _run(
        None,
        "Prepare a step while the device runs the one before it.",
        default_text="where the device runs on by itself, as a GPU does",
    )
    seed: int | None = _run(
        None,
        "Seed of dummy weights (0 unless set) and, if it is set, of the seeds of requests that bring none.",
        low=0,
        default_text="requests draw from the system",
    )
    num_threads: int | None = _run(None, "Threads for the model on a CPU.", low=1, default_text="one per core")
    enforce_eager: bool = _run(False, "Run operation by operation: nothing is compiled or captured.")
    execution_mode: str = _run(
        "auto",
        "How programs run: see docs/execution-modes.md. On a CPU `auto` is eager.",
        choices=("auto", "graphs", "compile", "eager", "lazy"),
    )
    lazy_mode: bool | None = _run(
        None, "With `enforce_eager`, picks the execution mode by Gaudi's table.", env="PT_HPU_LAZY_MODE"
    )
    batch_invariant: bool = _run(
        True,
        "The bits of a request never depend on what shares its batch. Without, a GPU may run a faster implementation "
        "whose bits do; a CPU has none, and refuses.",
        env="VLLM_BATCH_INVARIANT",
    )
    handle_topk_duplicates: bool = _run(
        False,
        "Keep every token that ties with the last of top_k, not only those with the lowest ids.",
        env="VLLM_HANDLE_TOPK_DUPLICATES",
    )
    engine_iteration_timeout_s: float = _run(
        600.0, "Seconds that one step may take.", env="VLLM_ENGINE_ITERATION_TIMEOUT_S", low=0.001
    )
    rpc_timeout_ms: int = _run(
        10_000, "Milliseconds that the engine may take to accept a request.", env="VLLM_RPC_TIMEOUT", low=1
    )

    host: str = _server("127.0.0.1", "Address to listen on.")
    port: int = _server(8000, "Port to listen on; 0 picks a free one.", low=0, high=65535)
    served_model_name: tuple[str, ...] | None = _server(
        None, "Names under which clients find the model, the first one is answered.", default_text="the model"
    )
    api_key: tuple[str, ...] = _server(
        (), "Keys that clients may use; none: no key is asked for.", env="VLLM_API_KEY", secret=True
    )
    allowed_origins: tuple[str, ...] = _server(("*",), "Origins from which browsers may call.")
    ssl_keyfile: str | None = _server(None, "Private key, to serve over TLS.")
    ssl_certfile: str | None = _server(None, "Certificate, to serve over TLS.")
    ssl_ca_certs: str | None = _server(None, "Authorities whose client certificates are asked for.")
    max_queued_requests: int = _server(20_000, "Most sequences waiting for the engine; beyond that, status 429.", low=1)
    max_concurrent_requests: int = _server(4096, "Most HTTP requests served at once; beyond that, status 429.", low=1)
    max_body_bytes: int = _server(16 * 2**20, "Most bytes in the body of an HTTP request.", low=1024)

    config: str | None = _general(None, "A YAML file of options; flags and environment win over it.")
    log_level: str = _general(
        "info",
        "Least severity that is logged.",
        env="VLLM_LOGGING_LEVEL",
        choices=("debug", "info", "warning", "error"),
        parse=str.lower,
    )

    bucketing_policy: str = _bucketing(
        "unified", "Separate or common shapes for prompts and decoding.", choices=("unified", "split")
    )
    bucketing_strategy: str = _bucketing(
        "exponential",
        "Rule that spaces the buckets.",
        env="VLLM_BUCKETING_STRATEGY",
        choices=("linear", "exponential", "padding_aware", "file"),
    )
    bucketing_from_file: str | None = _bucketing(None, "File of buckets.", env="VLLM_BUCKETING_FROM_FILE")
    allow_large_plan: bool = _bucketing(False, "Boot even when the plan has more than 2,000 programs.")
    bucket_pad_max: int | None = _bucket(None, "Most tokens or rows that `padding_aware` buckets pad by.")
    bucket_pad_percent: int | None = _bucketing(
        None, "Most percent that `padding_aware` buckets pad by.", low=0, high=50
    )
    prompt_bs_bucket_min: int | None = _bucket(None, "Smallest prompt batch.", env="VLLM_PROMPT_BS_BUCKET_MIN")
    prompt_bs_bucket_step: int | None = _bucket(None, "Step of prompt batches.", env="VLLM_PROMPT_BS_BUCKET_STEP")
    prompt_bs_bucket_max: int | None = _bucket(None, "Largest prompt batch.", env="VLLM_PROMPT_BS_BUCKET_MAX")
    prompt_seq_bucket_min: int | None = _bucket(None, "Shortest prompt.", env="VLLM_PROMPT_SEQ_BUCKET_MIN")
    prompt_seq_bucket_step: int | None = _bucket(None, "Step of prompt lengths.", env="VLLM_PROMPT_SEQ_BUCKET_STEP")
    prompt_seq_bucket_max: int | None = _bucket(None, "Longest prompt.", env="VLLM_PROMPT_SEQ_BUCKET_MAX")
    decode_bs_bucket_min: int | None = _bucket(None, "Smallest decode batch.", env="VLLM_DECODE_BS_BUCKET_MIN")
    decode_bs_bucket_step: int | None = _bucket(None, "Step of decode batches.", env="VLLM_DECODE_BS_BUCKET_STEP")
    decode_bs_bucket_max: int | None = _bucket(None, "Largest decode batch.", env="VLLM_DECODE_BS_BUCKET_MAX")
    decode_block_bucket_min: int | None = _bucket(None, "Fewest KV blocks.", env="VLLM_DECODE_BLOCK_BUCKET_MIN")
    decode_block_bucket_step: int | None = _bucket(None, "Step of KV blocks.", env="VLLM_DECODE_BLOCK_BUCKET_STEP")
    decode_block_bucket_max: int | None = _bucket(None, "Most KV blocks.", env="VLLM_DECODE_BLOCK_BUCKET_MAX")
    decode_seq_bucket_min: int | None = _bucket(
        None, "Shortest decoding row, in tokens, in place of blocks.", env="VLLM_DECODE_SEQ_BUCKET_MIN"
    )
    decode_seq_bucket_step: int | None = _bucket(
        None, "Step of decoding rows, in tokens, in place of blocks.", env="VLLM_DECODE_SEQ_BUCKET_STEP"
    )
    decode_seq_bucket_max: int | None = _bucket(
        None, "Longest decoding row, in tokens, in place of blocks.", env="VLLM_DECODE_SEQ_BUCKET_MAX"
    )

    skip_warmup: bool = _warm(False, "Do not warm up before serving.", env="VLLM_SKIP_WARMUP")
    determinism_warmup_iterations: int = _warm(
        3,
        "Passes that settle the numerics before serving; negative or unreadable means none.",
        env="VLLM_DETERMINISM_WARMUP_ITERATIONS",
        low=0,
        parse=_count_or_zero,
    )
    on_cold: str = _warm(
        "warn", "What happens when something is built after ready.", choices=("off", "count", "warn", "raise")
    )
    cache_dir: str | None = _warm(
        None,
        "Folder where a boot leaves its record and what it compiled, for the next one that is the same; `off`: none.",
        default_text="`preheat` in `$XDG_CACHE_HOME`, or in `~/.cache`",
    )

    graph_reserved_mem: float = _graph(
        0.1,
        "Share of the usable memory for graphs, in execution mode graphs.",
        env="VLLM_GRAPH_RESERVED_MEM",
        low=0,
        high=1,
    )
    graph_prompt_ratio: float = _graph(
        0.3, "Share of the graphs' memory for prompts.", env="VLLM_GRAPH_PROMPT_RATIO", low=0, high=1
    )
    graph_prompt_strategy: str = _graph(
        "min_tokens", "Order of capturing prompts.", env="VLLM_GRAPH_PROMPT_STRATEGY", choices=("min_tokens", "max_bs")
    )
    graph_decode_strategy: str = _graph(
        "max_bs", "Order of capturing decodes.", env="VLLM_GRAPH_DECODE_STRATEGY", choices=("min_tokens", "max_bs")
    )
    config_hidden_layers: int | None = _graph(
        None,
        "Layers in one graph; a step runs its graphs one after the other.",
        env="VLLM_CONFIG_HIDDEN_LAYERS",
        low=1,
        default_text="all",
    )

    defrag_threshold: int = _defrag(
        32,
        "Compact the KV cache when the highest block in use lies more than this above the number in use.",
        env="VLLM_DEFRAG_THRESHOLD",
        low=0,
    )
    defrag_with_graphs: bool | None = _defrag(
        None, "Swap blocks by captured graphs; no platform does.", env="VLLM_DEFRAG_WITH_GRAPHS", default_text="false"
    )
    contiguous_pa: bool = _defrag(
        False,
        "On a CPU, decode reads the KV cache in place, up to the highest block in use; needs `--block-size 256`.",
        env="VLLM_CONTIGUOUS_PA",
    )

    boot_check: str = _proof("quick", "Compare bits over all paths before ready.", choices=("off", "quick", "full"))
    require_invariance: bool = _proof(False, "Refuse to start where invariance cannot be promised.")

    debug: tuple[str, ...] = _trace(
        (), "Parts that explain themselves in the log.", env="VLLM_DEBUG", choices=("defrag",)
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
        False, "Log what every step compiles, nothing included.", env="VLLM_HPU_LOG_STEP_GRAPH_COMPILATION_ALL"
    )
    log_step_cpu_fallbacks: bool = _trace(
        False,
        "Log the steps in which compiled code leaves an operation to eager Python.",
        env="VLLM_HPU_LOG_STEP_CPU_FALLBACKS",
    )
    log_step_cpu_fallbacks_all: bool = _trace(
        False, "Log such fallbacks of every step, none included.", env="VLLM_HPU_LOG_STEP_CPU_FALLBACKS_ALL"
    )

    tensor_parallel_size: int = _spread(1, "Devices that share each layer.", low=1)

    quantization: str | None = _quant(None, "Method by which weights are quantized.")
    quant_config: str | None = _quant(None, "File of measured ranges for FP8.", env="QUANT_CONFIG")
    kv_cache_dtype: str = _quant("auto", "Type of the KV cache.")
    weights_load_device: str | None = _quant(None, "Device that holds weights while they are quantized.")

    enable_lora: bool = _lora(False, "Serve adapters.")
    max_loras: int = _lora(1, "Most adapters in one step.", low=1)
    max_lora_rank: int = _lora(16, "Largest rank of an adapter.", low=1)
    lora_modules: tuple[str, ...] = _lora((), "Adapters, as name=path.")

    speculative_model: str | None = _spec(None, "Model, or method, that drafts tokens.")
    num_speculative_tokens: int | None = _spec(None, "Tokens drafted for one step.", low=1)
    num_scheduler_steps: int = _spec(1, "Steps that are run for one decision of the scheduler.", low=1)

    lazy_collectives: bool | None = _gaudi(
        None, "Collectives within lazy graphs.", env="PT_HPU_ENABLE_LAZY_COLLECTIVES"
    )
    disable_tensor_cache: bool | None = _gaudi(
        None, "No tensor cache for graphs.", env="PT_HPUGRAPH_DISABLE_TENSOR_CACHE"
    )
    metrics_gc_details: bool | None = _gaudi(None, "Details of compilations.", env="PT_HPU_METRICS_GC_DETAILS")

    def __post_init__(self) -> None:
        for opt in OPTIONS.values():
            opt.check(getattr(self, opt.name), opt.name)
        if (self.ssl_keyfile is None) != (self.ssl_certfile is None):
            raise SettingsError("ssl_keyfile and ssl_certfile belong together: give both or none")
        if self.skip_warmup and self.on_cold == "raise":
            raise SettingsError(
                "on_cold raise would fail every first request without warm-up: drop skip_warmup", param="on_cold"
            )
        if self.skip_tokenizer_init and (self.tokenizer is not None or self.chat_template is not None):
            raise SettingsError(
                "skip_tokenizer_init leaves no use for tokenizer and chat_template: drop it, or them",
                param="skip_tokenizer_init",
            )
        if self.ssl_ca_certs is not None and self.ssl_certfile is None:
            raise SettingsError("ssl_ca_certs needs ssl_certfile and ssl_keyfile")
        if self.block_size & (self.block_size - 1):
            raise SettingsError(f"block_size must be a power of two, got {self.block_size}", param="block_size")

    @classmethod
    def load(
        cls,
        args: Mapping[str, object] | None = None,
        env: Mapping[str, str] | None = None,
        config_file: str | None = None,
    ) -> Settings:
        """Settings from keywords or flags, then the environment, then a YAML file, then the defaults.

        ``args`` maps option names to values of the option's type, or to text. ``env`` is by default the process's
        environment, ``config_file`` the option ``config``. Raises SettingsError for unknown names and values; unknown
        variables are only warned about.
        """
        values = _from_env(os.environ if env is None else env)
        for name, value in (args or {}).items():
            values[name] = _known(name, "option").convert(value, name)
        path = config_file or values.get("config")
        if path is not None:
            values = {"config": path, **_from_file(path), **values}
        return cls(**values)


OPTIONS: dict[str, Option] = registry(Settings)
"""Every option by name."""


def _known(name: str, what: str) -> Option:
    if name not in OPTIONS:
        raise SettingsError(f"unknown {what} {name!r}{did_you_mean(name, OPTIONS)}", param=name)
    return OPTIONS[name]


def _from_env(env: Mapping[str, str]) -> dict[str, Any]:
    """What the environment sets; warns about unknown variables with our prefixes."""
    values: dict[str, Any] = {}
    known = [name for opt in OPTIONS.values() for name in opt.env_names]
    for opt in OPTIONS.values():
        name = next((name for name in opt.env_names if name in env), None)
        if name is not None:
            values[opt.name] = opt.convert(env[name], name)
    for name in sorted(env):
        if name.startswith(("VLLM_", "PREHEAT_")) and name not in known:
            _warn(f"Unknown environment variable {name} is ignored{did_you_mean(name, known)}")
    return values


@cache
def _warn(message: str) -> None:
    """Log a warning, once for each process."""
    logger.warning(message)


def _from_file(path: str) -> dict[str, Any]:
    """The options in a YAML file: one mapping, names with dashes or underscores."""
    import yaml

    try:
        with open(path, encoding="utf-8") as file:
            content = yaml.safe_load(file)
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise SettingsError(f"cannot read the config file {path}: {error}", param="config") from None
    if not isinstance(content, dict | None):
        raise SettingsError(f"{path} must hold one mapping of option names to values", param="config")
    values: dict[str, Any] = {}
    for key, value in (content or {}).items():
        opt = _known(str(key).replace("-", "_"), f"option in {path}:")
        if opt.name == "config":
            raise SettingsError(f"{path}: a config file cannot name another one", param="config")
        values[opt.name] = opt.convert(value, f"{path}: {key}")
    return values
