"""Environment variables of vLLM without an option here: one table of the reasons.

A variable that sets an option is declared with it, in :mod:`preheat.settings`. An environment that was made for vLLM
never keeps a server from starting: a variable without effect causes one warning, with the reason. A name that ends in
an underscore stands for all names with this beginning; the longest beginning counts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

ALWAYS = """VLLM_USE_V1 VLLM_NO_USAGE_STATS VLLM_DO_NOT_TRACK VLLM_USAGE_SOURCE VLLM_USAGE_STATS_SERVER
    VLLM_NO_DEPRECATION_WARNING VLLM_ENABLE_V1_MULTIPROCESSING VLLM_CONFIGURE_LOGGING VLLM_USE_RUST_FRONTEND
    VLLM_TARGET_DEVICE VLLM_USE_PRECOMPILED VLLM_PRECOMPILED_ VLLM_MAIN_CUDA_VERSION VLLM_VERSION_OVERRIDE
    VLLM_BUILD_ VLLM_DOCKER_BUILD_CONTEXT VLLM_TEST_ VLLM_CI_ VLLM_SERVICE_ VLLM_PORT VLLM_PORT_"""
"""Variables about the building, testing and counting of vLLM, or about our usual behavior, and the variables that
Kubernetes sets for a service named vllm. Nothing is said about them."""

_KERNELS = "the plan chooses kernels; --execution-mode sets the way to run programs"
_COMPILED = "programs are compiled and kept in --cache-dir, see docs/warm-up.md"
_RANKS = "ranks are processes of one host, or of several nodes through Ray, see docs/parallel.md"
_REPLICAS = "the replicas of --data-parallel-size are processes of one host"
_DEVICE = "the device has no such setting"
_LOG = "the log goes to standard error, from --log-level up; prompts and answers are never logged"
_TRANSFER = "--role alone divides the work, see docs/roles.md"
_MEDIA = "images are always read as docs/images.md describes; video and audio are not supported"
_CHECKPOINT = "checkpoints are read in one way"
_TOOLS = "the client calls tools, never the server"

UNUSED: Mapping[str, str] = {
    "the cached context of a prompt is not part of a program": "VLLM_PROMPT_CTX_BUCKET_",
    "both phases follow VLLM_BUCKETING_STRATEGY": "VLLM_PROMPT_BUCKETING_STRATEGY VLLM_DECODE_BUCKETING_STRATEGY",
    _KERNELS: """VLLM_ATTENTION_BACKEND VLLM_FLASH_ATTN_ VLLM_USE_FLASHINFER_ VLLM_FLASHINFER_ VLLM_USE_TRITON_
        VLLM_USE_DEEP_GEMM VLLM_USE_DEEP_GEMM_
        VLLM_DEEP_GEMM_ VLLM_DEEPEP_ VLLM_MOE_ VLLM_FUSED_MOE_ VLLM_USE_FUSED_MOE_
        VLLM_ENABLE_FUSED_MOE_ VLLM_ENABLE_MOE_ VLLM_MARLIN_ VLLM_MLA_ VLLM_USE_CUDNN_PREFILL VLLM_USE_TRTLLM_
        VLLM_DISABLED_KERNELS VLLM_ALL2ALL_BACKEND VLLM_KV_CACHE_LAYOUT VLLM_USE_NVFP4_ VLLM_NVFP4_ VLLM_MXFP4_
        VLLM_MAX_TOKENS_PER_EXPERT_FP4_MOE VLLM_CUTLASS_ VLLM_USE_CUTLASS_ VLLM_B12X_ VLLM_HUMMING_ VLLM_INT4_
        VLLM_USE_FBGEMM VLLM_LM_HEAD_ VLLM_GPT_OSS_ VLLM_FLOAT32_MATMUL_PRECISION VLLM_CPU_MOE_PREPACK
        VLLM_CPU_SGL_KERNEL VLLM_CPU_ATTN_ VLLM_V1_USE_PREFILL_DECODE_ATTENTION VLLM_USE_AITER_ VLLM_ROCM_
        VLLM_ALLREDUCE_ VLLM_USE_SYMM_MEM_ VLLM_USE_NCCL_SYMM_MEM VLLM_SHARED_EXPERTS_
        VLLM_DISABLE_SHARED_EXPERTS_STREAM
        VLLM_GDN_ VLLM_KDA_ VLLM_USE_TOPK_ VLLM_HAS_FLASHINFER_CUBIN VLLM_TUNED_CONFIG_FOLDER VLLM_SPARSE_""",
    _COMPILED: """VLLM_DISABLE_COMPILE_CACHE VLLM_TORCH_COMPILE_ VLLM_USE_AOT_COMPILE VLLM_FORCE_AOT_LOAD
        VLLM_USE_STANDALONE_COMPILE VLLM_USE_MEGA_AOT_ARTIFACT VLLM_COMPILE_ VLLM_CUDA_GRAPH_ VLLM_CUDAGRAPH_
        VLLM_ENABLE_CUDAGRAPH_GC VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS VLLM_USE_BYTECODE_HOOK
        VLLM_ENABLE_INDUCTOR_ VLLM_PATTERN_MATCH_DEBUG VLLM_DEBUG_DUMP_PATH VLLM_CACHE_ROOT VLLM_CONFIG_ROOT
        VLLM_ENABLE_PREGRAD_PASSES""",
    _RANKS: """VLLM_HOST_IP VLLM_LOOPBACK_IP VLLM_RAY_ VLLM_USE_RAY_ VLLM_PP_LAYER_PARTITION VLLM_NCCL_
        VLLM_SKIP_P2P_CHECK VLLM_WORKER_MULTIPROC_METHOD VLLM_RPC_BASE_PATH VLLM_RINGBUFFER_WARNING_INTERVAL
        VLLM_MQ_ VLLM_SLEEP_WHEN_IDLE VLLM_DISABLE_PYNCCL VLLM_PYNCCL_ VLLM_MSGPACK_ZERO_COPY_THRESHOLD
        VLLM_SHM_ VLLM_MULTI_STREAM_ VLLM_ELASTIC_ VLLM_DCP_ VLLM_USE_V2_MODEL_RUNNER""",
    _REPLICAS: "VLLM_DP_ VLLM_RANDOMIZE_DP_DUMMY_INPUTS VLLM_EPLB_ VLLM_API_SERVER_COUNT",
    _DEVICE: "VLLM_XLA_ VLLM_TPU_ VLLM_NEURON_ VLLM_XPU_ VLLM_IPEX_ VLLM_ZENTORCH_ VLLM_CUDART_SO_PATH VLLM_CUDA_",
    _LOG: """VLLM_LOGGING_PREFIX VLLM_LOGGING_STREAM VLLM_LOGGING_COLOR VLLM_LOG_
        VLLM_DEBUG_LOG_ VLLM_TRACE_FUNCTION VLLM_DEBUG_WORKSPACE VLLM_DEBUG_MFU_METRICS VLLM_KV_EVENTS_USE_""",
    "set VLLM_PROFILER_ENABLED for a trace of the start and of every step": (
        "VLLM_TORCH_PROFILER_ VLLM_TORCH_CUDA_PROFILE VLLM_CUSTOM_SCOPES_FOR_PROFILING VLLM_NVTX_SCOPES_FOR_PROFILING "
        "VLLM_PROFILER_"
    ),
    _TRANSFER: "VLLM_NIXL_ VLLM_MOONCAKE_ VLLM_P2P_ VLLM_EC_ VLLM_LMCACHE_ VLLM_KV_CONNECTOR_ VLLM_MORIIO_",
    _MEDIA: """VLLM_VIDEO_ VLLM_AUDIO_ VLLM_MAX_AUDIO_ VLLM_MM_ VLLM_MEDIA_ VLLM_ASSETS_CACHE VLLM_ASSETS_CACHE_
        VLLM_OBJECT_STORAGE_ VLLM_MAX_MEDIA_DOWNLOAD_SIZE_MB VLLM_IMAGE_""",
    _CHECKPOINT: """VLLM_USE_MODELSCOPE VLLM_MODEL_REDIRECT_PATH VLLM_S3_ VLLM_DIST_S3_ VLLM_FORCE_FP8_
        VLLM_LOAD_ VLLM_SAFETENSORS_""",
    _TOOLS: "VLLM_GPT_OSS_SYSTEM_TOOL_MCP_LABELS VLLM_GPT_OSS_HARMONY_ VLLM_TOOL_JSON_ VLLM_USE_MCP_",
    "code is never loaded by name": "VLLM_PLUGINS VLLM_LORA_RESOLVER_ VLLM_LOGITS_PROCESSOR_THREADS",
    "data from outside is never unpickled": "VLLM_ALLOW_INSECURE_SERIALIZATION",
    "a length beyond the model's positions is refused: raise the positions with --hf-overrides": (
        "VLLM_ALLOW_LONG_MAX_MODEL_LEN"
    ),
    "use --kv-cache-memory-bytes, in bytes": "VLLM_CPU_KVCACHE_SPACE",
    "use --num-threads, and bind the process with numactl": (
        "VLLM_CPU_OMP_THREADS_BIND VLLM_CPU_NUM_OF_RESERVED_CPU VLLM_CPU_SIM_MULTI_NUMA VLLM_CPU_"
    ),
    "an engine that dies is started again; --engine-restarts bounds it": "VLLM_KEEP_ALIVE_ON_ENGINE_DEATH",
    "use VLLM_ENGINE_ITERATION_TIMEOUT_S to limit the time of a step": "VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS",
    "a start has no time limit; /ready reports its progress": "VLLM_ENGINE_READY_TIMEOUT_S",
    "grammars are compiled within --grammar-compile-timeout-s": (
        "VLLM_XGRAMMAR_CACHE_MB VLLM_XGRAMMAR_ VLLM_V0_USE_OUTLINES_CACHE VLLM_V1_USE_OUTLINES_CACHE "
        "VLLM_REGEX_COMPILATION_TIMEOUT_S"
    ),
    "tool calls are read without regular expressions": "VLLM_TOOL_PARSE_REGEX_TIMEOUT_SECONDS",
    "a row always ends with an error if its logits are not finite": "VLLM_COMPUTE_NANS_IN_LOGITS",
    "answers are always processed as they arrive": "VLLM_V1_OUTPUT_PROC_CHUNK_SIZE",
    "use --async-scheduling to choose whether steps are prepared ahead": "VLLM_ENABLE_ASYNC_SCHEDULING",
    "the KV cache keeps all keys and values that each layer needs": (
        "VLLM_PREFIX_CACHE_ VLLM_MAMBA_ VLLM_SSM_CONV_STATE_LAYOUT"
    ),
    "weights stay on the device": "VLLM_WEIGHT_OFFLOADING_",
    "the number of sequences of a request is limited": "VLLM_MAX_N_SEQUENCES",
    "statistics are in /metrics, see docs/metrics.md": "VLLM_METRICS_ VLLM_KV_CACHE_METRICS_",
}
"""Variables that are warned about, by the reason."""


def _reasons() -> Iterator[tuple[str, str]]:
    yield from ((name, "") for name in ALWAYS.split())
    for reason, names in UNUSED.items():
        yield from ((name, reason) for name in names.split())


VARIABLES: Mapping[str, str] = dict(_reasons())
"""The reason why each variable has no effect; empty if it asks for our usual behavior."""


def why_unused(name: str) -> str | None:
    """Return the reason why a variable of vLLM has no effect.

    It is empty if nothing need be said, None for an unknown variable.
    """
    if name in VARIABLES:
        return VARIABLES[name]
    start = max((each for each in VARIABLES if each.endswith("_") and name.startswith(each)), key=len, default=None)
    return None if start is None else VARIABLES[start]
