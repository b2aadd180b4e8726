"""Flags of vLLM that are no option here: one table of their effects.

A flag of vLLM with a meaning here is an option, in :mod:`preheat.settings`. Every other flag is a row below. It sets an
option of another name, it is taken because it asks for our usual behavior, or it is refused with the reason. The
parser, files of options, keywords of ``LLM`` and docs/vllm-flags.md all read this table.

Flags are written as in a usage line, several in one text:

- ``--switch`` takes no value. Only its negation is taken, since that asks for nothing;
- ``--flag=`` takes a value, and none is taken; with ``--flag=a|b`` these values are, since we do just that.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from preheat.errors import SettingsError

Verdict = Literal["sets", "always", "unused", "refused"]

SETS: Mapping[str, str] = {
    "max_queued_requests": "--max-num-queued-reqs=",
    "speculative_model": "--spec-model=",
    "num_speculative_tokens": "--spec-tokens=",
    "speculative_config.method": "--spec-method=",
    "structured_outputs_config.backend": "--guided-decoding-backend=",
    "structured_outputs_config.disable_any_whitespace": "--guided-decoding-disable-any-whitespace",
    "structured_outputs_config.disable_additional_properties": "--guided-decoding-disable-additional-properties",
    "hf_overrides.rope_scaling": "--rope-scaling=",
    "hf_overrides.rope_theta": "--rope-theta=",
}
"""Flags that set an option of another name, or a key of its JSON object, by the option."""

ALWAYS: Mapping[str, str] = {
    "the usage has prompt_tokens_details.cached_tokens in every answer": "--enable-prompt-tokens-details",
    "/load always counts requests": "--enable-server-load-tracking",
    "/tokenizer_info is always served; with --api-key it needs a key": "--enable-tokenizer-info-endpoint",
    "every answer has X-Request-Id": "--enable-request-id-headers",
    "requests are not logged unless --access-log or --enable-log-requests asks for it": (
        "--disable-uvicorn-access-log --disable-access-log-for-endpoints= --disable-log-requests"
    ),
    "prompts and answers are never logged": "--max-log-len= --enable-log-deltas",
    "statistics are in /metrics and never in the log": "--disable-log-stats --aggregate-engine-logging",
    "steps are scheduled by their padded tokens, up to --max-num-batched-tokens": "--use-padding-aware-scheduling",
    "the engine runs in one process of its own": "--disable-frontend-multiprocessing",
    "every size in the plan is warmed up, for any context length": (
        "--max-seq-len-to-capture= --max-context-len-to-capture= --enable-cutedsl-warmup"
    ),
    "there is only one block manager": "--use-v2-block-manager",
    "--reasoning-parser alone turns reasoning on": "--enable-reasoning",
    "images are never kept in the HTTP process": "--disable-mm-preprocessor-cache",
}
"""Flags that ask for our usual behavior, by the behavior."""

UNUSED: Mapping[str, str] = {
    "no code of a checkpoint is ever run": "--trust-remote-code --code-revision=",
    "preempted sequences are computed again, never swapped": "--swap-space=",
    "weights are read by several threads already": "--max-parallel-loading-workers=",
    "--log-level sets the lowest level to log": "--uvicorn-log-level=",
    "the tokenizer always runs in threads of the HTTP process": (
        "--tokenizer-pool-size= --tokenizer-pool-type= --tokenizer-pool-extra-config= --renderer-num-workers="
    ),
    "--async-scheduling decides whether steps are prepared ahead": "--disable-async-output-proc",
    "--enable-chunked-prefill decides whether prompts are split, also with images": "--skip-mm-profiling",
}
"""Flags that are taken with a warning: nothing here depends on them."""

_KERNELS = "the plan chooses kernels; --execution-mode sets the way to run programs"
_BUCKETS = (
    "every size of the plan is captured; VLLM_DECODE_BS_BUCKET_* and its siblings space them, see docs/warm-up.md"
)
_RANKS = "ranks are processes of one host, or of several nodes through Ray, see docs/parallel.md"
_REPLICAS = "the replicas of --data-parallel-size are processes of one host, behind one server: leave it out"
_EXPERTS = "experts are dealt in order to the ranks of --tensor-parallel-size, by --enable-expert-parallel"
_CHECKPOINT = "checkpoints are read in one way: config.json, safetensors and tokenizer.json of one directory"
_NO_CODE = "code is never loaded by name"
_IMAGES = "images are always read as docs/images.md describes"
_LOG = "prompts and answers are never logged; use --log-level, and --enable-log-requests for a line about each request"
_METRICS = "statistics are in /metrics, see docs/metrics.md; for spans of requests use --otlp-traces-endpoint"
_CACHE = "the KV cache keeps all keys and values that each layer needs, in blocks of --block-size"
_HOST = "weights stay on the device; --kv-offloading-size moves blocks of the KV cache to the host"
_DRAFTS = "a draft is kept if it is the token that plain decoding draws, see docs/speculation.md"
_MIXED = "use --max-num-mixed-tokens to limit the delay of decoding sequences by long prompts"

REFUSED: Mapping[str, str] = {
    _KERNELS: """--attention-backend= --attention-config={} --all2all-backend= --compilation-config={}
        --disable-cascade-attn --enable-bf16x3-router-gemm --enable-flashinfer-autotune --gdn-prefill-backend=
        --ir-op-priority={} --kda-decode-backend= --kda-prefill-backend= --kernel-config={} --linear-backend=auto
        --moe-backend=auto --monokernel --optimization-level= --override-attention-dtype=
        --sparse-indexer-topk-backend=auto
        --mm-encoder-attn-backend= --performance-mode=balanced""",
    _BUCKETS: "--cuda-graph-sizes= --cudagraph-capture-sizes= --max-cudagraph-capture-size=",
    _RANKS: """--master-addr= --master-port= --nnodes=1 --node-rank=0 --distributed-timeout-seconds=
        --cpu-distributed-timeout-seconds= --dcp-q-replicate --dcp-comm-backend= --dcp-kv-cache-interleave-size=1
        --cp-kv-cache-interleave-size=1 --decode-context-parallel-size=1 --prefill-context-parallel-size=1
        --enable-hc-sp --enable-batch-sharded-sampling""",
    "use --distributed-executor-backend ray": "--worker-use-ray --engine-use-ray",
    "name the devices in CUDA_VISIBLE_DEVICES": "--device-ids=",
    "bind the process with numactl": "--numa-bind --numa-bind-nodes= --numa-bind-cpus=",
    _REPLICAS: """--data-parallel-size-local= --data-parallel-rank= --data-parallel-start-rank= --data-parallel-address=
        --data-parallel-rpc-port= --data-parallel-backend=mp --data-parallel-external-lb --data-parallel-hybrid-lb
        --data-parallel-multi-port-external-lb --data-parallel-supervisor-port= --dp-supervisor-probe-interval-s=
        --dp-supervisor-probe-timeout-s= --dp-supervisor-probe-failure-threshold= --dp-sync-interval= --headless
        --disable-nccl-for-dp-synchronization""",
    "one HTTP process serves all replicas; for more, run several servers behind a load balancer": (
        "--api-server-count=1"
    ),
    _EXPERTS: """--enable-ep-weight-filter --enable-elastic-ep --elastic-ep-max-dp-size=
        --enable-eplb --eplb-config={} --num-redundant-experts=0 --eplb-window-size= --eplb-step-interval=
        --eplb-log-balancedness --expert-placement-strategy=linear""",
    "a step is always one batch": """--enable-dbo --dbo-prefill-token-threshold= --dbo-decode-token-threshold=
        --ubatch-size=0 --enable-microbatching""",
    _CHECKPOINT: """--hf-config-path= --config-format=auto|hf --quantization-config= --allow-deprecated-quantization
        --safetensors-load-strategy=auto|lazy --safetensors-prefetch-num-threads= --safetensors-prefetch-block-size=
        --model-loader-extra-config={} --pt-load-map-location=cpu --ignore-patterns=original/**/*
        --tokenizer-mode=auto|hf|fast --quantization-param-path= --qlora-adapter-name-or-path=
        --override-neuron-config= --model-weights=""",
    "give --tokenizer as a directory, or put its files beside the model's and pin both by --revision": (
        "--tokenizer-revision="
    ),
    "each model family has only one implementation": "--model-impl=auto|vllm --model-class-overrides={}",
    _NO_CODE: """--logits-processors= --logits-processor-pattern= --worker-cls=auto --worker-extension-cls=
        --scheduler-cls= --tool-parser-plugin= --reasoning-parser-plugin= --io-processor-plugin=
        --additional-config={}""",
    "there is only one kind of sleep, see docs/sleep.md": """--sleep-mode-backend= --sleep-mode-offload-cudagraph
        --sleep-preserve-parameter-names= --enable-cumem-allocator --enable-nccl-comm-suspend""",
    "a state has one kernel on each device, and its numbers are float32": """--mamba-backend= --mamba-cache-dtype=auto
        --mamba-cache-philox-rounds= --mamba-config={} --mamba-ssm-cache-dtype=auto
        --mamba-ssu-algorithm= --enable-mamba-cache-stochastic-rounding --enable-mamba-shared-prefix-checkpoint
        --enable-mamba-fine-grained-prefix-cache --use-replayssm --replayssm-buffer-len= --max-num-active-seqs=""",
    _IMAGES: """--enable-mm-embeds --interleave-mm-strings --media-io-kwargs={} --mm-device-do-normalize
        --mm-encoder-attn-dtype= --mm-encoder-fp8-scale-path= --mm-encoder-fp8-scale-save-path=
        --mm-encoder-fp8-scale-save-margin= --mm-encoder-only --mm-encoder-tp-mode=weights --mm-hasher-algorithm=
        --mm-ipc-gpu-memory-gb=0 --mm-processor-device=auto|cpu --mm-processor-kwargs={} --mm-tensor-ipc=
        --enable-mm-processor-stats --disable-chunked-mm-input --enable-multimodal-encoder-data-parallel""",
    "processed images are not kept in the HTTP process: write 0, or leave it out": """--mm-processor-cache-gb=0
        --mm-processor-cache-type=lru --mm-shm-cache-max-object-size-mb=""",
    "a video has the frames that its client sends": "--video-pruning-rate= --video-pruning-method=",
    "adapters serve every module that PEFT names in them, of the language model": """--enable-tower-connector-lora
        --lora-target-modules= --default-mm-loras={} --enable-moe-shared-loras --enable-mixed-moe-lora-format
        --specialize-active-lora --long-lora-scaling-factors=""",
    "an adapter that trained a bias or new tokens is refused": "--enable-lora-bias --lora-extra-vocab-size=",
    "prompt adapters are not supported: merge them, or train a LoRA adapter": """--enable-prompt-adapter
        --prompt-adapters= --max-prompt-adapters= --max-prompt-adapter-token=""",
    _LOG: """--logging-config= --enable-log-outputs --log-error-stack
        --enable-logging-iteration-details""",
    _METRICS: """--show-hidden-metrics-for-version= --per-request-spec-decode-metrics=none --kv-cache-metrics
        --kv-cache-metrics-sample= --custom-histogram-buckets={} --cudagraph-metrics --enable-mfu-metrics
        --enable-layerwise-nvtx-tracing --enable-per-request-metrics --jit-monitor-mode= --jit-monitor-verbose
        --ray-workers-use-nsight""",
    "set VLLM_PROFILER_ENABLED for a trace of the start and of every step": "--profiler-config={}",
    _CACHE: """--disable-sliding-window --kv-cache-dtype-skip-layers=
        --kv-sharing-fast-prefill --prefix-cache-retention-interval= --prefix-match-unit= --swa-bounded-replay""",
    "there is only one hash for blocks": "--prefix-caching-hash-algo=sha256",
    "scales of the first pass differ from boot to boot: measure them with preheat calibrate": "--calculate-kv-scales",
    _HOST: """--cpu-offload-gb=0 --cpu-offload-params= --kv-offloading-backend=native --offload-backend=auto
        --offload-group-size=0 --offload-num-in-group= --offload-params= --offload-prefetch-step=""",
    "--role alone divides the work, see docs/roles.md": """--ec-transfer-config= --ec-manager-config={}
        --tokens-only --enable-scale-out""",
    _MIXED: """--long-prefill-token-threshold=0 --long-prefill-token-threshold-adaptive --max-long-partial-prefills=1
        --max-num-partial-prefills=1 --max-num-scheduled-tokens= --prefill-schedule-interval=1
        --scheduler-delay-factor=0""",
    "a request is admitted when a block is free; sequences that later do not fit are computed again": """--watermark=0
        --scheduler-reserve-full-isl""",
    "use --max-queued-requests to limit waiting sequences, and --max-body-bytes to limit their size": (
        "--max-num-queued-tokens="
    ),
    "preempted sequences are always computed again": "--preemption-mode=recompute",
    _DRAFTS: """--spec-decoding-acceptance-method= --typical-acceptance-sampler-posterior-threshold=
        --typical-acceptance-sampler-posterior-alpha= --disable-logprobs-during-spec-decoding""",
    "use --speculative-config; docs/speculation.md lists its keys": """--num-lookahead-slots=
        --speculative-max-model-len= --speculative-draft-tensor-parallel-size=1 --speculative-model-quantization=
        --speculative-disable-by-batch-size= --speculative-disable-mqa-scorer""",
    "use --async-scheduling to prepare the next step during the current one": "--num-scheduler-seqs=",
    "an event is always sent for each step": "--multi-step-stream-outputs",
    "logprobs are always computed from the model's own distribution": "--logprobs-mode=raw_logprobs",
    "there is one way to draw tokens, and a seed repeats it": "--use-fp64-gumbel --watermark-config=",
    "answers contain only tokens and logprobs": "--enable-return-routed-experts --return-sampling-mask",
    "use prompt_logprobs to score given tokens, and preheat verify to repeat requests": "--enable-trace-replay",
    "a failed process ends; let a supervisor start it again": "--enable-fault-tolerance --fault-tolerance-config=",
    "unknown variables only cause a warning with their name": "--fail-on-environ-validation",
    "set reasoning_effort in --default-chat-template-kwargs": "--reasoning-effort-map={}",
    "use --reasoning-parser for the marks of a model's reasoning": "--reasoning-config={} --cohere-is-reasoning-model",
    "the client calls tools, never the server": "--tool-server=",
    "streams send no keep-alive comments: give the proxy a longer timeout than a prompt takes": (
        "--sse-keep-alive-interval=0"
    ),
    "the record at /warmup describes the start": "--fingerprint-mode=none --fingerprint-value=",
    "only HTTP is served": "--grpc --grpc-port=",
    "use --max-header-bytes to limit all headers of a request": (
        "--h11-max-header-count= --h11-max-incomplete-event-size="
    ),
    "/openapi.json describes the endpoints; there are no documentation pages": "--enable-offline-docs",
    "certificates are read once, at the start: restart the server to change them": "--enable-ssl-refresh",
    "the models that need it are not supported": (
        "--engram-config= --diffusion-config= --enable-flash-late-interaction --omni"
    ),
    "answers have only the formats of OpenAI, Anthropic and vLLM": "--cohere-format=",
}
"""Flags that are refused, by the reason."""

INSTEAD: Mapping[str, str] = {
    "--tp": "--tensor-parallel-size",
    "--pp": "--pipeline-parallel-size",
    "--dp": "--data-parallel-size",
    "--max-len": "--max-model-len",
    "--max-length": "--max-model-len",
    "--max-seq-len": "--max-model-len",
    "--max-tokens": "--max-model-len",
    "--context-length": "--max-model-len",
    "--gpu-mem": "--gpu-memory-utilization",
    "--gpu-memory": "--gpu-memory-utilization",
    "--mem-fraction-static": "--gpu-memory-utilization",
    "--max-batch-size": "--max-num-seqs",
    "--max-concurrency": "--max-num-seqs",
    "--model-path": "--model",
    "--tokenizer-path": "--tokenizer",
    "--tool-parser": "--tool-call-parser",
    "--kv-dtype": "--kv-cache-dtype",
    "--served-name": "--served-model-name",
    "--tensor-paralel-size": "--tensor-parallel-size",
}
"""Flags of other engines, or of people's guesses, and the flag that is meant."""

SHORT: Mapping[str, str] = {
    "-tp": "--tensor-parallel-size",
    "-pp": "--pipeline-parallel-size",
    "-dp": "--data-parallel-size",
    "-dpl": "--data-parallel-size-local",
    "-dpn": "--data-parallel-rank",
    "-dpr": "--data-parallel-start-rank",
    "-dpa": "--data-parallel-address",
    "-dpp": "--data-parallel-rpc-port",
    "-dpb": "--data-parallel-backend",
    "-dph": "--data-parallel-hybrid-lb",
    "-dpe": "--data-parallel-external-lb",
    "-dcp": "--decode-context-parallel-size",
    "-pcp": "--prefill-context-parallel-size",
    "-ep": "--enable-expert-parallel",
    "-n": "--nnodes",
    "-r": "--node-rank",
    "-q": "--quantization",
    "-O": "--optimization-level",
    "-cc": "--compilation-config",
    "-ac": "--attention-config",
    "-sc": "--speculative-config",
    "-asc": "--api-server-count",
}
"""The short names of vLLM's flags."""


@dataclass(frozen=True, slots=True)
class Foreign:
    """A flag of vLLM.

    ``says`` is the option that it sets, or the reason why it is taken or refused. ``accepted`` are the values of a
    refused flag that ask for our usual behavior; a switch has none.
    """

    flag: str
    verdict: Verdict
    says: str
    switch: bool
    accepted: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return self.flag.removeprefix("--").replace("-", "_")

    @property
    def help(self) -> str:
        if self.verdict == "refused":
            return argparse.SUPPRESS
        return (f"sets {self.says}" if self.verdict == "sets" else self.says).replace("%", "%%")

    def takes(self, value: object) -> bool:
        """Return whether ``value``, parsed or as text, asks only for our usual behavior."""
        if self.verdict != "refused" or value is None:
            return True
        return _same(value, "false") if self.switch else any(_same(value, each) for each in self.accepted)


def _same(value: object, text: str) -> bool:
    """Return whether ``value`` equals ``text``, as a number, as JSON or in words of any case."""
    if isinstance(value, list | tuple):
        return len(value) == 1 and _same(value[0], text)
    return bool(_read(value) == _read(text))


def _read(value: object) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value.lower())
    except ValueError:
        return value.lower()


def _rows(verdict: Verdict, table: Mapping[str, str]) -> Iterator[tuple[str, Foreign]]:
    for says, flags in table.items():
        for word in flags.split():
            flag, equals, taken = word.partition("=")
            row = Foreign(flag, verdict, says, not equals, tuple(filter(None, taken.split("|"))))
            yield row.name, row


FOREIGN: Mapping[str, Foreign] = dict(
    [
        *_rows("sets", SETS),
        *_rows("always", ALWAYS),
        *_rows("unused", UNUSED),
        *_rows("refused", REFUSED),
    ]
)
"""Every row by the flag's name as a keyword."""


def add_flags_of_vllm(parser: argparse.ArgumentParser) -> None:
    """Add the rows as flags of ``parser``; its help leaves out refused flags."""
    group = parser.add_argument_group(
        "Flags of vLLM", "Accepted: they set an option above, or ask for the only behavior."
    )
    for row in FOREIGN.values():
        if row.flag in parser._option_string_actions:
            continue
        keywords: dict[str, Any] = {"dest": row.name, "default": argparse.SUPPRESS, "help": row.help}
        if row.switch:
            keywords["action"] = argparse.BooleanOptionalAction
        elif row.verdict == "refused" and not row.accepted:
            keywords["nargs"] = "*"
        group.add_argument(row.flag, **keywords)


def refuse(row: Foreign, value: object) -> SettingsError:
    """Return the error for a ``value`` that the flag of ``row`` does not take."""
    shown = "" if row.switch or not row.accepted else f" {value} is not {' or '.join(row.accepted)}"
    return SettingsError(f"{row.flag}{shown}: {row.says}", param=row.name)
