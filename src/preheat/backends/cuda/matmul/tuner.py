"""The tuner: it finds the fastest implementation of linear maps by trying all, on an idle device.

Every time is the time of a CUDA graph that walks several copies of the weights, so that no copy is in the L2 cache.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Sequence

import torch
from torch import Tensor
from triton.runtime.errors import TritonError

from preheat.backends.cuda.device.detect import card_at
from preheat.backends.cuda.device.graph import capture
from preheat.backends.cuda.matmul.config import KernelConfig, Library, LinearShape
from preheat.backends.cuda.matmul.kernels import OWN_ROWS, candidates
from preheat.backends.cuda.matmul.linear import apply
from preheat.backends.cuda.matmul.prove import compile_kernels, differing, random_weight
from preheat.backends.cuda.matmul.tables import Entry
from preheat.backends.cuda.matmul.weights import PlainWeight, Weight
from preheat.backends.cuda.pointwise.quantize import quantize_rows
from preheat.ops.quantization import QuantizedRows

ROWS = (1, 8, 16, 32, 64, 96, 128, 192, 256, 384, 512, 1024, 2048, 4096, 8192)
COPIED_BYTES = 200 << 20
FINALISTS = 4
SPLIT_GAIN = 1.015
"""The least gain of cutting the inputs into parts for this to be chosen."""
ALONE = 1.5
"""Microseconds that cuBLAS costs its neighbors. One of our kernels starts while the kernel before it ends, but not
behind cuBLAS. Measured at one row of an 8B model on an H200: a tile that takes 0.6 us longer alone saves 1.1 us a
layer."""
WAKE_SECONDS = 1.0
"""Seconds of work until a device's clock is up."""


class Bench:
    """Times implementations of one map.

    ``weights`` are enough copies to overflow the L2 cache.
    """

    def __init__(self, shape: LinearShape, rows: int) -> None:
        size = shape.outputs * shape.inputs * shape.dtype.itemsize
        if shape.scheme is not None:
            size = shape.scheme.bytes(shape.outputs, shape.inputs)
        copies = max(2 if size < 1 << 29 else 1, math.ceil(COPIED_BYTES / size))
        self.shape = shape
        self.weights: Sequence[Weight]
        if shape.scheme is None:
            weights = torch.randn(copies, shape.outputs, shape.inputs, device="cuda", dtype=shape.dtype)
            self.weights = [PlainWeight(each) for each in weights.mul_(0.02).unbind()]
        else:
            self.weights = [random_weight(shape, torch.device("cuda"), 0) for _ in range(copies)]
        self._x = torch.randn(rows, shape.inputs, device="cuda", dtype=shape.dtype)
        self._codes: QuantizedRows | None = None
        if shape.scheme is not None and shape.scheme.activations is not None:
            self._codes = quantize_rows(self._x, shape.scheme.activations, self.weights[0].static)  # type: ignore[union-attr]
        self._bias = torch.randn(shape.outputs, device="cuda", dtype=shape.dtype) if shape.bias else None

    def _inputs(self, rows: int) -> Tensor | QuantizedRows:
        """Return the first ``rows`` rows of x, as a norm gives them."""
        if self._codes is None:
            return self._x[:rows]
        return QuantizedRows(self._codes.codes[:rows], self._codes.scales[:rows], None)

    def microseconds(self, choice: KernelConfig, rows: int, replays: int) -> float:
        """Return the median of ``replays``; infinite if ``choice`` cannot run."""
        gated, x = self.shape.gated, self._inputs(rows)
        try:
            apply(choice, x, self.weights[0], self._bias, gated)
        except (TritonError, RuntimeError):
            return math.inf
        return graph_microseconds(
            lambda: [apply(choice, x, weight, self._bias, gated) for weight in self.weights], replays
        ) / len(self.weights)


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


Report = Callable[[LinearShape, int, dict[KernelConfig, float]], None]


def tune(
    shapes: Sequence[LinearShape],
    rows: Sequence[int] = ROWS,
    seconds: float = math.inf,
    report: Report = lambda shape, rows, times: None,
) -> list[Entry]:
    """Return entries for ``shapes`` at ``rows``: the fastest of all, and the fastest with the contract's bits.

    After ``seconds``, divided equally among shapes, return the entries found so far. ``report`` hears every time that
    was taken.
    """
    end = time.monotonic() + seconds
    entries = []
    _wake_clock()
    for left, shape in zip(range(len(shapes), 0, -1), shapes, strict=True):
        share = time.monotonic() + (end - time.monotonic()) / left
        entries += _entries(shape, _times(shape, rows, share, report))
    return entries


def _wake_clock() -> None:
    """Keep the device busy until its clock is up: the first measurements would else seem slower."""
    x = torch.zeros(4096, 4096, device="cuda", dtype=torch.bfloat16)
    end = time.monotonic() + WAKE_SECONDS
    while time.monotonic() < end:
        for _ in range(50):
            torch.mm(x, x)
        torch.cuda.synchronize()


def _times(
    shape: LinearShape, rows: Sequence[int], end: float, report: Report
) -> dict[tuple[int, KernelConfig], float]:
    """Return the microseconds of the finalists at ``rows``."""
    bench = Bench(shape, max(rows))
    found: dict[tuple[int, KernelConfig], float] = {}
    for size in rows:
        if time.monotonic() > end:
            break
        choices = list(candidates(shape, size, card=card_at()))
        compile_kernels(((shape, choice) for choice in choices), ignore_errors=True)
        first = {choice: bench.microseconds(choice, size, 2) for choice in choices}
        ranked = [choice for choice in sorted(first, key=lambda choice: first[choice]) if first[choice] < math.inf]
        finalists = ranked[:FINALISTS] + [choice for choice in ranked[FINALISTS:] if choice.kind == "library"]
        times = {choice: bench.microseconds(choice, size, 9) for choice in finalists}
        report(shape, size, first | times)
        found |= {(size, choice): times[choice] for choice in finalists}
    return found


def _entries(shape: LinearShape, times: dict[tuple[int, KernelConfig], float]) -> list[Entry]:
    """Return the entries at each number of rows: the best with the contract's bits, and the best of all.

    The best of all has an entry only if it is another implementation.
    """
    wrong = differing(shape, list(times)) if times else set()
    return entries_of(shape, times, wrong)


def entries_of(
    shape: LinearShape, times: dict[tuple[int, KernelConfig], float], wrong: Collection[tuple[int, KernelConfig]]
) -> list[Entry]:
    """Return entries as the tuner writes them, from microseconds of implementations at numbers of rows.

    ``wrong`` have other bits. cuBLAS that may cut the inputs, yet does not, can be faster with the same bits: that is
    chance, and gets no entry.
    """
    entries = []
    for rows in sorted({rows for rows, _ in times}):
        taken = {choice: time for (size, choice), time in times.items() if size == rows}
        right = [choice for choice in taken if choice != Library(split=True) and (rows, choice) not in wrong]
        ordered, fastest = _best(taken, right), _best(taken, list(taken))
        if ordered is not None:
            entries.append(Entry.of(shape, rows, ordered, taken[ordered]))
        own = _best(taken, [choice for choice in right if choice.kind != "library"])
        if ordered is not None and ordered.kind == "library" and own is not None and rows <= OWN_ROWS:
            entries.append(Entry.of(shape, rows, own, taken[own], own=True))
        if fastest is not None and fastest != ordered and (rows, fastest) in wrong:
            entries.append(Entry.of(shape, rows, fastest, taken[fastest], ordered=False))
    return entries


def _best(taken: dict[KernelConfig, float], some: list[KernelConfig]) -> KernelConfig | None:
    """Return the cheapest of ``some`` where it runs among kernels of ours."""

    def cost(choice: KernelConfig) -> float:
        if choice.kind == "library":
            return (taken[choice] + ALONE) * (SPLIT_GAIN if choice.split else 1)
        return taken[choice]

    return min(some, key=cost, default=None)
