"""Options of the KV cache and of the order of requests."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

from preheat.options.options import option

_memory = partial(option, group="Memory")
_schedule = partial(option, group="Scheduling")


@dataclass(frozen=True, kw_only=True)
class MemorySettings:
    """Options of the group Memory."""

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


@dataclass(frozen=True, kw_only=True)
class SchedulingSettings:
    """Options of the group Scheduling."""

    max_num_seqs: int | None = _schedule(None, "Maximum sequences in one step.", low=1, default_text="256, on a CPU 64")
    max_num_batched_tokens: int | None = _schedule(
        None,
        "Maximum tokens in one step, padding included.",
        low=1,
        default_text="2048, on a CPU 1024, for experts on a GPU 8192",
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
