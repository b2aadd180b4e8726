"""Options of ranks, stages, replicas, and of engines that share the work."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

from preheat.options.options import option

_spread = partial(option, group="Several devices")


@dataclass(frozen=True, kw_only=True)
class SeveralDevicesSettings:
    """Options of the group Several devices."""

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
