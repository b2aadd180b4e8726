"""A linear map with random weights, and the time of its implementations on an idle device."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from triton.runtime.errors import TritonError

from preheat.backends.cuda.device.graph import capture
from preheat.backends.cuda.matmul.config import KernelConfig, LinearShape
from preheat.backends.cuda.matmul.linear import apply
from preheat.backends.cuda.matmul.prove import random_weight
from preheat.backends.cuda.matmul.weights import PlainWeight, Weight
from preheat.backends.cuda.pointwise.quantize import quantize_rows
from preheat.ops.quantization import QuantizedRows

COPIED_BYTES = 200 << 20
"""Bytes of copies of weights that are walked, so that none is in the L2 cache."""


class Bench:
    """Times implementations of one map, of at most ``rows`` rows ``x``.

    ``weights`` are enough copies to overflow the L2 cache, each of so many ``bytes``. Splits of the inputs are summed
    in fp32, as ranks send them.
    """

    def __init__(self, shape: LinearShape, rows: int) -> None:
        self.shape, self.bytes = shape, shape.outputs * shape.inputs * shape.dtype.itemsize
        if shape.scheme is not None:
            self.bytes = shape.scheme.bytes(shape.outputs, shape.inputs)
        copies = max(2 if self.bytes < 1 << 29 else 1, math.ceil(COPIED_BYTES / self.bytes))
        self.weights: Sequence[Weight]
        if shape.scheme is None:
            weights = torch.randn(copies, shape.outputs, shape.inputs, device="cuda", dtype=shape.dtype)
            self.weights = [PlainWeight(each, max(shape.splits, 1)) for each in weights.mul_(0.02).unbind()]
        else:
            self.weights = [random_weight(shape, torch.device("cuda"), 0) for _ in range(copies)]
        self.x = torch.randn(rows, shape.inputs, device="cuda", dtype=shape.dtype)
        self._codes: QuantizedRows | None = None
        if shape.scheme is not None and shape.scheme.activations is not None:
            self._codes = quantize_rows(self.x, shape.scheme.activations, self.weights[0].static)  # type: ignore[union-attr]
        self._bias = torch.randn(shape.outputs, device="cuda", dtype=shape.dtype) if shape.bias else None
        self._sums = torch.empty(rows, shape.outputs, device="cuda") if shape.splits else None

    def _inputs(self, rows: int) -> Tensor | QuantizedRows:
        """Return the first ``rows`` rows of x, as a norm gives them."""
        if self._codes is None:
            return self.x[:rows]
        return QuantizedRows(self._codes.codes[:rows], self._codes.scales[:rows], None)

    def microseconds(self, choice: KernelConfig, rows: int, replays: int) -> float:
        """Return the median of ``replays``; infinite if ``choice`` cannot run."""
        try:
            self.run(choice, rows, 0)
        except (TritonError, RuntimeError):
            return math.inf
        copies = range(len(self.weights))
        return graph_microseconds(lambda: [self.run(choice, rows, copy) for copy in copies], replays) / len(copies)

    def run(self, choice: KernelConfig, rows: int, copy: int) -> Tensor:
        """Return the outputs of the first ``rows`` rows by a copy of the weights; any number names one."""
        weight, out = self.weights[copy % len(self.weights)], None if self._sums is None else self._sums[:rows]
        return apply(choice, self._inputs(rows), weight, self._bias, self.shape.gated, out)


def graph_microseconds(work: Callable[[], object], replays: int) -> float:
    """Return the median time of a replay of ``work``, captured, in microseconds."""
    kept: list[object] = []
    graph = capture(lambda: kept.append(work()))
    graph.replay()
    times: list[float] = []
    for _ in range(replays):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3)
    return sorted(times)[len(times) // 2]
