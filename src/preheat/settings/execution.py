"""Options of the device, of the way to run programs, and of numerics."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from preheat.backends.names import DEVICES
from preheat.options.options import option

_run = partial(option, group="Execution and numerics")


@dataclass(frozen=True, kw_only=True)
class ExecutionSettings:
    """Options of the group Execution and numerics."""

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
