"""The fake of ``habana_frameworks.torch.hpu``."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from habana_frameworks.simulator import DEVICE, GraphRefused, Program
from habana_frameworks.torch.hpu import metrics

__all__ = ["HPUGraph", "metrics", "stream", "wrap_in_hpu_graph"]


def is_available() -> bool:
    return True


def device_count() -> int:
    return 1


def current_device() -> int:
    return 0


def get_device_name(device: int = 0) -> str:
    return "GAUDI2 (simulated)"


def synchronize() -> None:
    """Do nothing: no operation runs on after its call returns."""


def mem_get_info(device: object = None) -> tuple[int, int]:
    """Return free bytes and all bytes."""
    return DEVICE.ledger.free, DEVICE.ledger.total


def max_memory_allocated(device: object = None) -> int:
    return DEVICE.ledger.peak


def memory_allocated(device: object = None) -> int:
    return DEVICE.ledger.used


def reset_peak_memory_stats(device: object = None) -> None:
    DEVICE.loading = False
    DEVICE.ledger.peak = DEVICE.ledger.used


def current_stream() -> str:
    return "the stream"


@contextmanager
def stream(_: object) -> Iterator[None]:
    """Run the operations inside on the device.

    Operations outside run on the host.
    """
    with DEVICE.running():
        yield


class HPUGraph:
    """A graph of the operations between ``capture_begin`` and ``capture_end``."""

    def __init__(self) -> None:
        self._program: Program | None = None

    def capture_begin(self) -> None:
        DEVICE.capture_begin()

    def capture_end(self, *, keeps_tensors: bool = False) -> None:
        self._program = DEVICE.capture_end(keeps_tensors=keeps_tensors)

    def replay(self) -> None:
        if self._program is None:
            raise GraphRefused("nothing was captured")
        DEVICE.replay(self._program)


def wrap_in_hpu_graph(
    module: torch.nn.Module,
    asynchronous: bool = False,
    disable_tensor_cache: bool = False,
    dry_run: bool = False,
    max_graphs: int | None = None,
) -> torch.nn.Module:
    """Wrap ``module``: its calls are captured once for each hash of their inputs, then replayed."""
    if not DEVICE.lazy:
        raise GraphRefused("HPU graphs need lazy mode: PT_HPU_LAZY_MODE=1")
    inner, graphs = module.forward, dict[Any, tuple[HPUGraph, Any]]()

    def forward(*args: Any, **kwargs: Any) -> Any:
        leaves = tree_leaves((args, kwargs))
        key = tuple((tuple(leaf.shape), leaf.dtype) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves)
        if key not in graphs:
            graph = HPUGraph()
            graph.capture_begin()
            try:
                result = inner(*args, **kwargs)
            except BaseException:
                DEVICE.capture_abort()
                raise
            graph.capture_end(keeps_tensors=not disable_tensor_cache)
            graphs[key] = graph, result
            module.hpu_graphs.append(graph)
        graph, result = graphs[key]
        graph.replay()
        return result

    module.forward, module.hpu_graphs = forward, []
    return module
