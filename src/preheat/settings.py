"""Every option of preheat, with flag, environment variables, default and help.

A :class:`Settings` is frozen and always valid. Only :meth:`Settings.load` reads the environment. Flags are the names
with dashes; every option can also be set by ``PREHEAT_<NAME>``, and some by the variable of vLLM or Gaudi.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from preheat.backends.names import DEVICES, HOST
from preheat.combinations import check_settings
from preheat.errors import SettingsError
from preheat.utils.adapters import check_names
from preheat.utils.bucketing import bucket_range, strategy_named, with_bucketing_policy
from preheat.utils.environment import read_environment, without_unused
from preheat.utils.files import read_given, shown, why_unread
from preheat.utils.given import given_options
from preheat.utils.kv_transfer import kv_transfer
from preheat.utils.options import Option, option, registry
from preheat.utils.speculation import Speculation, speculation
from preheat.utils.structured import structured_config
from preheat.utils.weight_transfer import transfer_config

BUNDLED = "bundled"
"""The name of the model that comes with preheat."""

_model = partial(option, group="Model")
_memory = partial(option, group="Memory")
_schedule = partial(option, group="Scheduling")
_run = partial(option, group="Execution and numerics")
_server = partial(option, group="Server")
_images = partial(option, group="Images")
_general = partial(option, group="General")
_bucketing = partial(option, group="Buckets")
_warm = partial(option, group="Warm-up")
_graph = partial(option, group="Device graphs")
_defrag = partial(option, group="Defragmenter")
_proof = partial(option, group="Proof")
_trace = partial(option, group="Diagnostics")
_gaudi = partial(option, group="Gaudi")
_quant = partial(option, group="Quantization")
_spread = partial(option, group="Several devices")
_lora = partial(option, group="LoRA")
_spec = partial(option, group="Speculation")


BATCH_SOFTMAX = ("wsum", "amax", "head_amax", "wsum_head_amax")
"""Softmax variants of vLLM on Gaudi that depend on a whole batch."""


def _count_or_zero(text: str) -> int:
    """Parse a count; negative and unreadable text mean 0, as in vLLM's determinism warm-up."""
    try:
        return max(int(text), 0)
    except ValueError:
        return 0


@dataclass(frozen=True, kw_only=True)
class Settings:
    """All options. Raises SettingsError, naming the option, for an unusable value."""

    model: str = _model(
        BUNDLED,
        "A directory, a GGUF file, a Hugging Face model id, or `bundled` for the model that comes with preheat.",
        several="models",
    )
    models: tuple[str, ...] = _server(
        (),
        "Several models behind one port, each as `NAME=PATH`: see docs/several-models.md. `--model NAME=PATH`, once "
        "for each model, does the same.",
    )
    model_options: dict[str, Any] | None = _server(  # noqa: RUF009 - None is not mutable
        None, "Options of each of several models: a JSON object from the model's name to an object of options."
    )
    tokenizer: str | None = _model(None, "Directory, id or GGUF file of the tokenizer, if it is not the model's.")
    skip_tokenizer_init: bool = _model(
        False, "Load no tokenizer: prompts are token ids, and answers are token ids without text."
    )
    revision: str | None = _model(None, "Branch, tag or commit of a Hub model.")
    hf_token: str | None = _model(None, "Token for private models of the Hub, instead of `HF_TOKEN`.", secret=True)
    use_tqdm_on_load: bool = _model(True, "Show the progress of a start on a terminal.")
    language_model_only: bool = _model(
        False, "Do not load the image encoder, and refuse images; no effect on a model without one."
    )
    download_dir: str | None = _model(
        None, "Folder for models of the Hub.", default_text="the Hugging Face library's, see `HF_HOME`"
    )
    hf_overrides: dict[str, Any] | None = _model(  # noqa: RUF009 - None is not mutable
        None, "A JSON object of fields that replace fields of the model's `config.json`."
    )
    generation_config: str = _model(
        "auto",
        "Source of sampling defaults: `auto` takes the model's, `vllm` takes none, and a folder takes its "
        "`generation_config.json`.",
    )
    override_generation_config: dict[str, Any] | None = _model(  # noqa: RUF009 - None is not mutable
        None, "A JSON object of sampling defaults that override `generation_config`."
    )
    load_format: str = _model(
        "auto", "Source of the weights; `dummy` draws random ones.", choices=("auto", "safetensors", "dummy")
    )
    dtype: str = _model(
        "auto",
        "Type of weights and activations; `auto` takes the checkpoint's. float16 runs as bfloat16, but in mode llvm.",
        choices=("auto", "bfloat16", "float32", "float16", "half", "float"),
    )
    max_model_len: int | None = _model(
        None,
        "Maximum tokens of prompt and output together; `auto` or -1 is the default.",
        low=1,
        default_text="the model's length",
        unset=("auto", "-1"),
    )
    enable_prompt_embeds: bool = _model(
        False, "Accept embeddings instead of a prompt's tokens, as `prompt_embeds`: see docs/prompt-embeds.md."
    )
    chat_template: str | None = _model(
        None, "A Jinja file, or the template itself, instead of the model's chat template."
    )
    chat_template_content_format: str = _model(
        "auto",
        "Form of a message in the chat template: one text (`string`) or a list of parts (`openai`). `auto` chooses "
        "the list if the model sees images and its template reads lists.",
        choices=("auto", "string", "openai"),
    )
    exclude_tools_when_tool_choice_none: bool = _model(
        False, "Give the chat template no tools if `tool_choice` is none."
    )
    trust_request_chat_template: bool = _model(
        False, "Let chat requests bring a template of their own (`chat_template`); it runs in a sandbox."
    )
    default_chat_template_kwargs: dict[str, Any] | None = _model(  # noqa: RUF009 - None is not mutable
        None,
        "Variables of the chat template, as a JSON object, for each conversation that does not set them itself "
        "(`chat_template_kwargs`, `reasoning_effort`).",
    )
    enable_auto_tool_choice: bool = _model(
        False, "Let the model decide whether to call a tool; needs `tool_call_parser`."
    )
    tool_call_parser: str | None = _model(
        None,
        "Parser for the model's tool calls: see docs/tools.md.",
        choices=(
            "deepseek_v3", "deepseek_v31", "ernie45", "gemma4", "glm45", "glm47", "granite", "granite-20b-fc",
            "granite4", "hermes", "hunyuan_a13b", "internlm", "jamba", "kimi_k2", "llama3_json", "llama4_json",
            "llama4_pythonic", "minimax_m2", "mistral", "olmo3", "openai", "phi4_mini_json", "pythonic",
            "qwen3_coder", "qwen3_xml", "seed_oss", "step3", "xlam",
        ),
    )  # fmt: skip
    reasoning_parser: str | None = _model(
        None,
        "Parser for the model's reasoning before its answer: see docs/tools.md.",
        choices=(
            "deepseek_r1", "deepseek_v3", "ernie45", "gemma4", "glm45", "glm47", "granite", "hunyuan_a13b", "kimi_k2",
            "minimax_m2", "mistral", "olmo3", "openai", "openai_gptoss", "qwen3", "seed_oss", "step3",
        ),
    )  # fmt: skip
    structured_outputs_config: dict[str, Any] | None = _model(  # noqa: RUF009 - None is not mutable
        None,
        "A JSON object: `backend` of grammars (auto, guidance, xgrammar, none), `disable_any_whitespace` and "
        "`disable_additional_properties`, see docs/structured-outputs.md.",
    )
    grammar_compile_timeout_s: float = _model(
        5.0, "Time limit for compiling a request's grammar, in seconds.", low=0.001
    )
    preload_grammars: str | None = _model(
        None, "File of grammars to compile before ready; each line is the `structured_outputs` of a request."
    )
    runner: str = _model(
        "auto",
        "Generate text (`generate`) or make embeddings (`pooling`): see docs/embeddings.md. `auto` pools if the "
        "checkpoint has a `modules.json` of sentence-transformers, or an architecture without an output head.",
        choices=("auto", "generate", "pooling", "draft"),
        later={"draft": "name a draft model in speculative_config: it runs beside its target model"},
    )
    convert: str = _model(
        "auto",
        "`embed` makes embeddings, like `runner` pooling; with `none` only an architecture without an output head "
        "makes them. `classify` asks for an architecture with a head for classes.",
        choices=("auto", "none", "embed", "classify", "reward"),
        later={"reward": "no reward models are run"},
    )
    task: str | None = _model(
        None, "An older name of `runner` and `convert`.", choices=("auto", "generate", "embed", "classify", "score")
    )
    pooler_config: dict[str, Any] | None = _model(  # noqa: RUF009 - None is not mutable
        None,
        "A JSON object that replaces the checkpoint's pooling: `pooling_type` (LAST, MEAN, CLS), `normalize`. "
        "`enable_chunked_processing` with `max_embed_len` takes longer texts: see docs/embeddings.md.",
    )
    override_pooler_config: dict[str, Any] | None = _model(  # noqa: RUF009 - None is not mutable
        None, "An older name of `pooler_config`."
    )
    max_logprobs: int = _model(20, "Maximum `logprobs` and `prompt_logprobs` of a request.", low=0)

    gpu_memory_utilization: float = _memory(
        0.9, "Share that preheat may use of the memory that is free after loading the model.", low=0.01, high=1
    )
    block_size: int | None = _memory(
        None,
        "Tokens in a block of the KV cache; a power of two.",
        low=16,
        high=256,
        default_text="64, on a CPU 256, on Gaudi 128",
    )
    num_gpu_blocks_override: int | None = _memory(None, "Blocks of the KV cache, instead of a measured number.", low=2)
    kv_cache_memory_bytes: int | None = _memory(None, "Bytes of the KV cache, instead of a measured number.", low=1)
    enable_prefix_caching: bool = _memory(True, "Keep finished blocks for later prompts with the same beginning.")

    disable_hybrid_kv_cache_manager: bool = _memory(
        False, "Keep the keys and values of all layers as long as a full layer's, in layers with windows too."
    )

    mamba_cache_mode: str = _memory(
        "align",
        "Ends of blocks with kept states, of a model with states: a prompt's last end, an answer's ends, and the end "
        "of a prefix that prompts share (`align`), each end (`all`), or none (`none`: no prefix is found).",
        choices=("none", "align", "all"),
    )
    mamba_block_size: int | None = _memory(
        None, "Tokens between the ends with kept states; a multiple of `block_size`.", low=1, default_text="block_size"
    )
    max_kept_states: int | None = _memory(
        None,
        "State slots for kept states and for drafts, of a model with states.",
        low=1,
        default_text="max_num_seqs, and as many again for each draft token",
    )

    kv_offloading_size: float | None = _memory(
        None, "Host memory in GiB for blocks that the prefix cache evicts: see docs/kv-offload.md.", low=0.000001
    )
    kv_events_config: dict[str, Any] | None = _memory(  # noqa: RUF009 - None is not mutable
        None, "Publishing of the prefix cache's events, as vLLM's JSON object: see docs/kv-offload.md."
    )
    enable_sleep_mode: bool = _memory(False, "Let an operator put the engine to sleep: see docs/sleep.md.")

    max_num_seqs: int | None = _schedule(None, "Maximum sequences in one step.", low=1, default_text="256, on a CPU 64")
    max_num_batched_tokens: int | None = _schedule(
        None, "Maximum tokens in one step, padding included.", low=1, default_text="2048, on a CPU 1024"
    )
    max_num_mixed_tokens: int | None = _schedule(
        None,
        "Maximum tokens in a step that mixes prompts and decoding, or twice the number of decoding rows if that is "
        "more; no bound while requests of a dead engine are read.",
        low=1, default_text="512 for `preheat serve`, else as in any step",
    )  # fmt: skip
    max_num_prefill_seqs: int | None = _schedule(
        None, "Maximum sequences in one step that still read their prompt.", low=1
    )
    scheduling_policy: str = _schedule(
        "fcfs",
        "Order of requests: first come, first served (`fcfs`), or the smallest `priority` first (`priority`). The last "
        "in this order is preempted.",
        choices=("fcfs", "priority"),
    )
    enable_chunked_prefill: bool = _schedule(
        True, "Split long prompts over several steps, together with decoding sequences."
    )

    device: str = _run(
        "auto",
        "Device of the model; `auto` takes a Gaudi or an NVIDIA GPU if preheat can use one.",
        choices=("auto", *DEVICES),
    )
    async_scheduling: bool | None = _run(
        None,
        "Prepare the next step while the device runs the current one.",
        default_text="on a device that runs on its own, such as a GPU",
    )
    seed: int | None = _run(
        None,
        "Seed of dummy weights (0 unless set) and, if set, of the seeds of requests that give none.",
        low=0,
        high=2**64 - 1,
        default_text="requests draw seeds from the system",
    )
    num_threads: int | None = _run(
        None, "Threads for the model on a CPU.", low=1, default_text="one per core; llvm: physical core"
    )
    enforce_eager: bool = _run(False, "Run operation by operation, without compiling or capturing anything.")
    execution_mode: str = _run(
        "auto",
        "Way to run programs: see docs/execution-modes.md. On a CPU `auto` is llvm if it runs the model, else eager.",
        choices=("auto", "graphs", "compile", "eager", "lazy", "llvm"),
    )
    lazy_mode: bool | None = _run(
        None, "Together with `enforce_eager`, chooses the execution mode by Gaudi's table.", env="PT_HPU_LAZY_MODE"
    )
    batch_invariant: bool = _run(
        True,
        "Keep the bits of a request independent of the other requests in its batch. If off, a GPU may run a faster "
        "implementation with bits that depend on them; a CPU has none, and refuses.",
        env="VLLM_BATCH_INVARIANT",
    )
    handle_topk_duplicates: bool = _run(
        False,
        "Keep every token that ties with the last of top_k, not only the tokens with the lowest ids.",
        env="VLLM_HANDLE_TOPK_DUPLICATES",
    )
    engine_iteration_timeout_s: float = _run(
        600.0, "Time limit of one step, in seconds.", env="VLLM_ENGINE_ITERATION_TIMEOUT_S", low=0.001
    )
    engine_heartbeat_timeout_s: float = _run(
        5.0,
        "Seconds without a heartbeat of the engine, or for one step on its device, until `/health` reports it.",
        low=0.1,
    )
    rpc_timeout_ms: int = _run(
        10_000, "Time limit for the engine to accept a request, in milliseconds.", env="VLLM_RPC_TIMEOUT", low=1
    )

    host: str = _server("127.0.0.1", "Address to listen on.")
    port: int = _server(8000, "Port to listen on; 0 picks a free one.", low=0, high=65535)
    uds: str | None = _server(None, "Path of a Unix socket to listen on, instead of host and port.")
    root_path: str = _server("", "Path prefix of the server behind a proxy, such as `/llm`.")
    served_model_name: tuple[str, ...] | None = _server(
        None, "Names of the model for clients; answers give the first one.", default_text="the model"
    )
    api_key: tuple[str, ...] = _server(
        (), "Keys that clients may use; without any, no key is needed.", env="VLLM_API_KEY", secret=True, one_word=True
    )
    pods: tuple[str, ...] = _server(
        (), "URLs of the servers behind `preheat front`; a host with several addresses names several: docs/fleet.md."
    )
    allowed_origins: tuple[str, ...] = _server(("*",), "Origins of pages that may call from a browser (CORS).")
    allowed_methods: tuple[str, ...] = _server(("*",), "Methods that browsers may use from another origin (CORS).")
    allowed_headers: tuple[str, ...] = _server(("*",), "Headers that browsers may send from another origin (CORS).")
    allow_credentials: bool = _server(
        False,
        "Let browsers send credentials such as cookies from another origin; name that origin in `allowed_origins`.",
    )
    ssl_keyfile: str | None = _server(None, "Private key, to serve over TLS.")
    ssl_certfile: str | None = _server(None, "Certificate, to serve over TLS.")
    ssl_ca_certs: str | None = _server(None, "File of authorities for client certificates; clients are asked for one.")
    ssl_cert_reqs: int | None = _server(
        None,
        "Check of client certificates, as in Python's `ssl`: 0 none, 1 if a client sends one, 2 required.",
        low=0,
        high=2,
        default_text="2 with `ssl_ca_certs`, else 0",
    )
    ssl_ciphers: str | None = _server(None, "Ciphers of TLS before 1.3, as OpenSSL lists them.")
    middleware: tuple[str, ...] = _server(
        (),
        "Your own ASGI middleware, as `module.NAME`: a class, or an `async def` that gets a request and the next "
        "handler. Its code is run.",
        one_word=True,
    )
    disable_fastapi_docs: bool = _server(False, "Do not serve `/openapi.json`, the description of the endpoints.")
    response_role: str = _server("assistant", "Role of the messages in chat answers.")
    enable_force_include_usage: bool = _server(
        False, "End each stream with its usage, as if `stream_options.include_usage` were true."
    )
    stream_interval: int = _server(
        1, "Tokens in each event of a stream, except the first and the last, unless a request sets it.", low=1
    )
    return_tokens_as_token_ids: bool = _server(
        False, "Show tokens in logprobs as `token_id:5`, for clients that need to tell tokens of equal text apart."
    )
    enable_responses_store: bool = _server(
        False,
        "Keep the last answers of `/v1/responses` in memory, for `previous_response_id` and for reading them again.",
        env="VLLM_ENABLE_RESPONSES_API_STORE",
    )
    batch_dir: str | None = _server(
        None,
        "Folder for the files and batches of `/v1/files` and `/v1/batches`: see docs/batches.md. Without it these "
        "endpoints are not served.",
    )
    max_batch_file_bytes: int = _server(200 * 2**20, "Maximum bytes of a batch's file.", low=1024)
    max_batch_files: int = _server(1000, "Maximum files kept, including the answers of batches.", low=3)
    max_batches: int = _server(8, "Maximum unfinished batches; beyond it, status 429.", low=1)
    request_fields: str = _server(
        "accept",
        "Handling of unknown fields in a request: `accept` ignores them and names them in the header "
        "`X-Ignored-Fields`; `strict` refuses the request.",
        choices=("accept", "strict"),
    )
    api: str = _server(
        "openai",
        "`ollama` also serves Ollama's API, for desktop tools: see docs/try-it.md.",
        choices=("openai", "ollama"),
    )
    ui: bool = _server(True, "Serve a page at `/` to try the model: see docs/try-it.md.")
    max_queued_requests: int = _server(
        20_000, "Maximum sequences waiting for the engine; beyond it, status 429.", low=1
    )
    max_concurrent_requests: int = _server(4096, "Maximum HTTP requests served at once; beyond it, status 429.", low=1)
    max_body_bytes: int = _server(16 * 2**20, "Maximum bytes in the body of an HTTP request.", low=1024)
    max_header_bytes: int = _server(2**16, "Maximum bytes in the headers of an HTTP request.", low=1024)
    timeout_headers: float = _server(
        10.0,
        "Time limit for the headers of an HTTP request to arrive, in seconds; then the connection closes.",
        low=0.1,
    )
    timeout_keep_alive: int = _server(
        5, "Seconds until an idle connection closes.", env="VLLM_HTTP_TIMEOUT_KEEP_ALIVE", low=1
    )
    shutdown_timeout: float = _server(
        30.0, "Seconds for running requests to finish after SIGTERM; then they end with an error.", low=0
    )
    engine_restarts: int = _server(
        10,
        "Restarts of an engine in ten minutes; its requests go on behind the tokens that their clients have. 0: an "
        "engine that ends stays away, and the last one ends the server.",
        low=0,
    )
    engine_restart_wait: float = _server(
        120.0,
        "Seconds that requests wait for an engine to start again while no other runs; then they end with an error.",
        low=0,
    )
    access_log: str = _server(
        "off", "Log each HTTP request after its answer, as text or as JSON.", choices=("text", "json", "off")
    )
    metrics_prefix: str = _server(
        "preheat", "Prefix of the metrics' names; `vllm` gives vLLM's names.", choices=("preheat", "vllm")
    )
    otlp_traces_endpoint: str | None = _server(
        None, "Address of an OpenTelemetry collector, to send it a span of each request: see docs/metrics.md."
    )
    otlp_traces_protocol: str = _server(
        "grpc", "Protocol for sending spans: `grpc` or `http/protobuf`.", env="OTEL_EXPORTER_OTLP_TRACES_PROTOCOL"
    )  # checked where spans are sent, as the variable may be meant for other programs
    collect_detailed_traces: str | None = _server(
        None,
        "Times of the engine's parts in spans.",
        choices=("model", "worker", "all"),
        later="a step computes many requests, and measuring its parts would hold it up",
    )

    allowed_media_domains: tuple[str, ...] = _images(
        (), "Hosts, or `host:port`, of image URLs that are fetched; without any, only data URLs are read."
    )
    allowed_local_media_path: str | None = _images(None, "Folder for images with `file://` URLs, subfolders included.")
    image_fetch_timeout: float = _images(
        5.0, "Time limit for fetching an image, in seconds.", env="VLLM_IMAGE_FETCH_TIMEOUT", low=0.01
    )
    limit_mm_per_prompt: dict[str, Any] | None = _images(  # noqa: RUF009 - None is not mutable
        None, 'Maximum images in a prompt, as `{"image": 4}`.', default_text="as many as fit the model's length"
    )
    max_image_bytes: int = _images(20 * 2**20, "Maximum bytes of an image's file.", low=1)
    max_image_pixels: int = _images(2**25, "Maximum pixels of an image, both as sent and as resized.", low=1)

    server_dev_mode: bool = _server(
        False,
        "Serve an operator's endpoints, such as `/pause` and `/update_weights`: see docs/weight-updates.md. Needs "
        "`api_key`.",
        env="VLLM_SERVER_DEV_MODE",
    )
    weight_transfer_config: dict[str, Any] | None = _server(  # noqa: RUF009 - None is not mutable
        None,
        'Transfer of new weights from a trainer, as a JSON object like vLLM\'s: `{"backend": "nccl"}`, or `gloo`; see '
        "docs/weight-updates.md.",
    )
    weights_root: str | None = _server(
        None, "Folder for new weights that `/update_weights` may read, subfolders included."
    )

    config: str | None = _general(
        None, "A file of options in YAML or JSON; flags and environment variables override it."
    )
    log_level: str = _general(
        "info",
        "Lowest severity to log.",
        env="VLLM_LOGGING_LEVEL",
        choices=("debug", "info", "warning", "error"),
        parse=str.lower,
    )
    log_config_file: str | None = _general(
        None,
        "A JSON file for Python's `logging.config.dictConfig`, for loggers below `preheat`; entries for `vllm` apply "
        "to `preheat` if it has none.",
        env="VLLM_LOGGING_CONFIG_PATH",
    )
    enable_log_requests: bool = _general(False, "Log each request at its arrival and at its end, without its text.")
    receipts: bool = _general(False, "Give each answer a receipt, as `receipt: true` does: see docs/receipts.md.")
    answer_cache_size: float | None = _general(
        None,
        "Memory for whole answers, in GiB, given again to equal greedy or seeded requests: see docs/answer-cache.md.",
        low=1e-6,
    )
    answer_cache_dir: str | None = _general(
        None, "A folder that keeps the answers of the answer cache for later boots: see docs/answer-cache.md."
    )
    answer_cache_dir_size: float = _general(1.0, "Size of `answer_cache_dir` at most, in GiB.", low=1e-6)
    answer_cache_check_every: int = _general(
        100, "One in this many requests with a kept answer is computed again and compared.", low=1
    )
    audit_every: float | None = _general(
        None,
        "Read weights, tables and cached blocks against their digests, once in this many seconds: see docs/audit.md.",
        low=1e-3,
    )
    receipts_log: str | None = _general(
        None,
        "A file for the receipts of all answers that have one, as JSON lines; 8 files of 64 MiB are kept. It holds "
        "prompts and answers as token ids.",
    )

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
        None, "File of buckets, instead of ranges.", env="VLLM_BUCKETING_FROM_FILE"
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
    )

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

    boot_check: str = _proof("quick", "Compare the bits of all paths before ready.", choices=("off", "quick", "full"))
    require_invariance: bool = _proof(False, "Refuse to start if invariance cannot be promised.")

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

    tensor_parallel_size: int = _spread(
        1, "Number of devices, or processes on a CPU, that share each layer: 1, 2, 4 or 8.", low=1, high=8
    )
    tp_invariant: bool | None = _spread(
        None,
        "Sum shared layers in one order, the same on 1, 2 and 4 devices.",
        default_text="with more than one device",
    )
    pipeline_parallel_size: int = _spread(
        1, "Number of stages, each with a range of layers and `tensor_parallel_size` devices.", low=1, high=64
    )
    enable_expert_parallel: bool = _spread(
        False,
        "Deal whole experts to the devices of `tensor_parallel_size`, instead of dividing each expert among all.",
    )
    distributed_executor_backend: str = _spread(
        "mp",
        "Processes of the ranks beside the engine: its own processes (`mp`), or actors of Ray on one or several nodes "
        "(`ray`). `uni` has no further ranks.",
        choices=("mp", "ray", "uni"),
    )
    disable_custom_all_reduce: bool = _spread(
        False,
        "Let GPUs of one host exchange through NCCL instead of writing into each other's memory. Both have the same "
        "bits. Writing is faster.",
    )

    data_parallel_size: int = _spread(
        1, "Number of replicas of the engine behind one server, each with devices of its own.", low=1, high=64
    )

    role: str | None = _spread(
        None,
        "Part of the work: `prefill` reads prompts and sends their blocks, `decode` pulls blocks from such an engine, "
        "`both` does both: see docs/roles.md.",
        choices=("prefill", "decode", "both"),
        default_text="no blocks are sent or pulled",
    )
    kv_transfer_config: dict[str, Any] | None = _spread(  # noqa: RUF009 - None is not mutable
        None, "`role` as vLLM's JSON object: `kv_role` is kv_producer, kv_consumer or kv_both."
    )
    kv_transfer_host: str = _spread(
        "127.0.0.1",
        "Address where other engines take blocks from this one. Without a key it must be of this machine alone.",
        env="VLLM_NIXL_SIDE_CHANNEL_HOST",
    )
    kv_transfer_port: int = _spread(
        0, "Port for it; 0 picks a free one.", low=0, high=65535, env="VLLM_NIXL_SIDE_CHANNEL_PORT"
    )
    kv_transfer_key: str | None = _spread(
        None, "Key that engines prove to each other before they exchange blocks.", secret=True
    )
    kv_transfer_peers: tuple[str, ...] = _spread(
        (),
        "Hosts or networks (`10.0.0.0/8`) from which blocks may be pulled; `*` for all.",
        default_text="this machine",
    )
    kv_transfer_timeout_s: float = _spread(
        30.0, "Seconds after which a pull ends and the rest of the prompt is computed.", low=0.001
    )

    quantization: str | None = _quant(
        None,
        "Quantization while loading a checkpoint: `fp8` converts weights to float8, `int8` and `int4` to integers; "
        "`inc` rounds linear layers to FP8 by the measured ranges that `quant_config` names. A quantized checkpoint "
        "needs no option; to name another method than its own is an error.",
    )
    quant_config: str | None = _quant(
        None,
        "JSON file of Intel Neural Compressor (INC) with the modules to quantize, the method, and the path of the "
        "measured ranges.",
        env="QUANT_CONFIG",
    )
    kv_cache_dtype: str = _quant(
        "auto",
        "Type of the KV cache: `auto` is the model's, `fp8` is e4m3, and `fp8_inc` takes its scales from "
        "`quant_config`.",
        choices=("auto", "fp8", "fp8_e4m3", "fp8_e5m2", "fp8_inc", "bfloat16", "float16", "float32"),
    )
    weights_load_device: str | None = _quant(
        None,
        "Device for reading and preparing weights, layer by layer, before they go to the model's device.",
        choices=(HOST,),
        default_text="the device",
    )

    enable_lora: bool = _lora(False, "Serve LoRA adapters.")
    lora_modules: tuple[str, ...] = _lora(
        (), 'Adapters to load at the start, as `name=path` or `{"name": ..., "path": ..., "base_model_name": ...}`.'
    )
    max_loras: int = _lora(
        1, "Maximum adapters in one step: the number of adapter slots on the device.", low=1, high=64
    )
    max_lora_rank: int = _lora(16, "Largest rank of an adapter.", low=1, high=512)
    max_cpu_loras: int | None = _lora(None, "Maximum adapters kept on the host.", low=1, default_text="`max_loras`")
    lora_dtype: str = _lora(
        "auto", "Type of the adapters' matrices; `auto` is the model's type.", choices=("auto", "bfloat16", "float32")
    )
    lora_root: str | None = _lora(
        None,
        "Folder for adapters that may be loaded while the server runs, subfolders included; without it only "
        "`lora_modules` are served.",
    )
    allow_runtime_lora_updating: bool = _lora(
        False,
        "Let clients with a key load and unload adapters while the server runs; needs `enable_lora`.",
        env="VLLM_ALLOW_RUNTIME_LORA_UPDATING",
    )
    fully_sharded_loras: bool = _lora(
        False,
        "In layers divided by rows, divide the adapters' first matrix among devices too, in tiles of 16 adapter ranks.",
    )

    speculative_config: dict[str, Any] | None = _spec(  # noqa: RUF009 - None is not mutable
        None, "Drafting of tokens, as vLLM's JSON object: see docs/speculation.md."
    )
    speculative_model: str | None = _spec(
        None, "`[ngram]`, or the draft model; same as `model` in `speculative_config`."
    )
    num_speculative_tokens: int | None = _spec(
        None, "Tokens drafted for a row; same as in `speculative_config`.", low=1, high=128
    )
    speculative_k: str = _spec(
        "fixed",
        "Draft always `num_speculative_tokens` tokens (`fixed`), or choose the number from measured costs and "
        "acceptance (`auto`).",
        choices=("fixed", "auto"),
    )
    ngram_prompt_lookup_max: int | None = _spec(
        None, "Same as `prompt_lookup_max` in `speculative_config`.", low=1, high=64
    )
    ngram_prompt_lookup_min: int | None = _spec(
        None, "Same as `prompt_lookup_min` in `speculative_config`.", low=1, high=64
    )
    num_scheduler_steps: int = _spec(
        1,
        "vLLM's multi-step scheduling. More than 1 means `--async-scheduling`: the next step is prepared during the "
        "current one.",
        low=1,
    )

    lazy_collectives: bool | None = _gaudi(
        None,
        "Collectives within lazy graphs; several cards with HPU Graphs need them.",
        env="PT_HPU_ENABLE_LAZY_COLLECTIVES",
        default_text="the bridge's",
    )
    disable_tensor_cache: bool | None = _gaudi(
        None,
        "Do not keep the intermediate results of graphs; false takes more memory for each graph.",
        env="PT_HPUGRAPH_DISABLE_TENSOR_CACHE",
        default_text="true",
    )
    metrics_gc_details: bool | None = _gaudi(
        None,
        "Name the compiled recipe in cold events.",
        env="PT_HPU_METRICS_GC_DETAILS",
        default_text="the bridge's",
    )
    pa_softmax_impl: str | None = _gaudi(
        None,
        "Softmax of attention over the cache: both choices subtract each row's own maximum.",
        env="VLLM_PA_SOFTMAX_IMPL",
        choices=("index_reduce", "scatter_reduce", *BATCH_SOFTMAX),
        later=dict.fromkeys(
            BATCH_SOFTMAX, "its maximum is taken over rows of other requests, and bits would depend on them"
        ),
        default_text="index_reduce",
    )
    use_fake_hpu: bool = _gaudi(
        False, "Run on a fake Gaudi, for tests; its package must be installed.", env="VLLM_USE_FAKE_HPU"
    )

    def __post_init__(self) -> None:
        for opt in OPTIONS.values():
            opt.check(getattr(self, opt.name), opt.name)
        _check_mm_limits(self.limit_mm_per_prompt)
        if self.tensor_parallel_size not in (1, 2, 4, 8):
            raise SettingsError(
                f"tensor_parallel_size must be 1, 2, 4 or 8, got {self.tensor_parallel_size}: sums are a fixed "
                "tree of four K splits (eight on 8 ranks), and each rank holds a subtree of it",
                param="tensor_parallel_size",
            )
        structured_config(self.structured_outputs_config)
        if self.root_path.strip("/") and not self.root_path.startswith("/"):
            raise SettingsError(f"root_path {self.root_path!r} must begin with a slash", param="root_path")
        transfer_config(self.weight_transfer_config)
        kv_transfer(self)
        check_names(self)
        check_settings(self)
        if self.block_size is not None and self.block_size & (self.block_size - 1):
            raise SettingsError(f"block_size must be a power of two, got {self.block_size}", param="block_size")

    @property
    def speculation(self) -> Speculation | None:
        """The drafting of tokens, or None."""
        return speculation(self)

    @classmethod
    def load(
        cls,
        args: Mapping[str, object] | None = None,
        env: Mapping[str, str] | None = None,
        config_file: str | None = None,
    ) -> Settings:
        """Load settings from keywords or flags, and other sources.

        Keywords or flags come first, then the environment, then a YAML file, then the defaults.

        ``args`` maps option names to values of the option's type, or to text. ``env`` is by default the process's
        environment, ``config_file`` the option ``config``. Raises SettingsError for unknown names and values; unknown
        variables only cause a warning.
        """
        env = os.environ if env is None else env
        values = read_environment(OPTIONS, env)
        values |= given_options(args or {}, OPTIONS)
        path = config_file or values.get("config")
        if path is not None:
            values = {"config": path, **_from_file(path), **values}
        return cls(**with_bucketing_policy(without_unused(values, args or {}, env)))


def _check_mm_limits(limits: dict[str, Any] | None) -> None:
    """Raise SettingsError unless ``limits`` are counts of images, the only kind besides text."""
    for name, count in (limits or {}).items():
        if name != "image" or type(count) is not int or count < 0:
            raise SettingsError(
                f'limit_mm_per_prompt: {name!r}: {count!r} is not {{"image": a number of images}}',
                param="limit_mm_per_prompt",
            )


OPTIONS: dict[str, Option] = registry(Settings)
"""Every option by name."""


def _from_file(path: str) -> dict[str, Any]:
    """Read the options in a YAML or JSON file. Raises SettingsError.

    The file has one mapping, from names with dashes or underscores.
    """
    import yaml

    try:
        content = yaml.safe_load(read_given(path))
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        raise SettingsError(f"cannot read the config file {shown(path)}: {why_unread(error)}", param="config") from None
    if not isinstance(content, dict | None):
        raise SettingsError(f"{path} must hold one mapping of option names to values", param="config")
    values = given_options({str(key): value for key, value in (content or {}).items()}, OPTIONS, path)
    if "config" in values:
        raise SettingsError(f"{path}: a config file cannot name another one", param="config")
    return values
