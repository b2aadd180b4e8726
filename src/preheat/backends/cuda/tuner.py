"""Finds the fastest implementation of linear maps by trying them, on an idle device.

Every time is that of a CUDA graph that walks several copies of the weights, so that none is found in the L2 cache.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from itertools import product

import torch
from torch import Tensor
from triton.runtime.errors import TritonError

from preheat.backends.cuda.graph import capture
from preheat.backends.cuda.hopper import is_hopper
from preheat.backends.cuda.linear import apply
from preheat.backends.cuda.linear_hopper import fits
from preheat.backends.cuda.matmul.weights import DeviceWeight
from preheat.backends.cuda.prove import compile_kernels, differing, random_weight
from preheat.backends.cuda.quantize import quantize_rows
from preheat.backends.cuda.tuning import (
    OWN_ROWS,
    SHARED_BYTES,
    Entry,
    Expanded,
    KernelConfig,
    Library,
    LinearShape,
    Tile,
    Wide,
    codes_bytes,
    few_bytes,
    few_rows,
    few_rule,
    few_tile,
    whole_groups,
    wide_float8,
)
from preheat.ops.quantization import QuantizedRows

ROWS = (1, 8, 16, 32, 64, 96, 128, 192, 256, 384, 512, 1024, 2048, 4096, 8192)
COPIED_BYTES = 200 << 20
FINALISTS = 4
SPLIT_GAIN = 1.015
"""What cutting the inputs into parts must gain to be chosen."""
ALONE = 0.5
"""Microseconds that cuBLAS costs its neighbours: a kernel of ours starts while the one before it ends, but not behind
cuBLAS. Half of what that gained in a chain of kernels."""

NARROW = [(16, 256), (16, 512), (32, 128), (32, 256), (32, 512), (64, 64), (64, 128), (64, 256), (128, 64), (128, 128)]
MIDDLE = [(64, 64), (64, 128), (128, 64), (128, 128)]
BROAD = [(64, 64), (128, 64), (256, 64)]
WIDE = [Wide(256, 128, 4), Wide(128, 256, 4), Wide(128, 128, 6)]
WIDE_FP8 = [Wide(256, 128, 4), Wide(128, 128, 6)]


def candidates(shape: LinearShape, rows: int) -> Iterator[KernelConfig]:
    """Everything worth trying for ``rows`` rows of ``shape``."""
    if shape.scheme is not None:
        if not shape.dealt:
            yield from _on_codes(shape, rows)
        if is_hopper() and few_rows(shape) and rows <= 256:
            yield from _streamed(shape, rows)
        if rows >= 64 and is_hopper() and wide_float8(shape):
            yield from WIDE_FP8
        if shape.scheme.activations is None and rows >= 128:
            yield Expanded(Library())
            yield from (Expanded(each) for each in WIDE if fits(shape))
        return
    yield Library()
    yield Library(split=True)
    if rows >= 128 and fits(shape):
        yield from WIDE
    if rows > 2048 or shape.dtype == torch.float32:
        return
    for height, (outputs, inputs), stages, bulk in product(*_sizes(rows), (False, True)):
        yield from fitting_tiles(shape, height, outputs, inputs, stages, bulk=bulk)


def fitting_tiles(
    shape: LinearShape, rows: int, outputs: int, inputs: int, stages: int, *, bulk: bool
) -> Iterator[Tile]:
    """A tile of these sizes, by each number of warps that suits it, if it divides the inputs and fits into a
    processor.
    """
    for warps in _warps(outputs, rows, shape.gated):
        tile = Tile(outputs, rows, inputs, warps, stages, bulk)
        if shape.inputs % inputs == 0 and _fits(tile, shape.gated):
            yield tile


def _on_codes(shape: LinearShape, rows: int) -> Iterator[Tile]:
    """Tiles of the kernels that read codes. Those that multiply in float8 have at least 64 outputs and four warps."""
    assert shape.scheme is not None
    height = min(max(16, _power(rows)), 256)
    widths = (64, 128) if shape.scheme.activations or rows > 64 else (16, 32, 64, 128)
    depths = (128, 256, 512) if rows <= 32 else (128, 256) if rows <= 64 else (128,)
    if shape.scheme.activations is None:  # deeper ones take the compiler half a minute
        depths = depths[:2] if whole_groups(shape.scheme) else (128,)
    heights = sorted({height, min(height, 64), min(height, 128)})
    for outputs, each, depth, stages in product(widths, heights, depths, (2, 3, 4, 6, 8)):
        registers = outputs * each * (3 if shape.gated else 2) <= 192 * 256  # accumulators, and what is added to them
        memory = codes_bytes(shape, outputs, each, depth) * stages
        if registers and (depth == 128 or shape.inputs % depth == 0) and 24_000 < memory < SHARED_BYTES:
            fewest = 8 if outputs * each > 64 * 64 else min(4, outputs // 16)
            # codes that become numbers keep more threads busy than the product alone
            for warps in (fewest,) if shape.scheme.activations else sorted({fewest, 4, 8} - set(range(fewest))):
                yield Tile(outputs, each, depth, warps, stages)


def _streamed(shape: LinearShape, rows: int) -> Iterator[Tile]:
    """Tiles of the kernel for few rows on Hopper. Those of four bits by the rule: alone, as here, shallow rings are as
    fast, and in a model slower, where a ring fills while the kernels ahead run.
    """
    if shape.dealt:
        yield few_rule(shape, rows)
        return
    for height in sorted({max(8, min(_power(rows), most)) for most in (32, 64)}):
        for stages in (2, 3, 4, 6, 8, 12, 16):
            tile = few_tile(shape, height, stages)
            if few_bytes(shape, tile) < SHARED_BYTES:
                yield tile


def _sizes(rows: int) -> tuple[Sequence[int], Sequence[tuple[int, int]], Sequence[int]]:
    """Rows of a tile; its outputs and inputs; stages."""
    if rows <= 64:
        return [max(16, _power(rows))], NARROW if rows <= 16 else MIDDLE, (3, 4, 6, 8)
    if rows <= 384:
        return [height for height in (64, 128, 256) if height < 2 * rows], BROAD, (3, 4)
    return [128, 256], BROAD[1:], (3, 4)


def _power(rows: int) -> int:
    return 1 << (rows - 1).bit_length()


def _warps(outputs: int, height: int, gated: bool) -> tuple[int, ...]:
    """So many that an accumulator fits into registers, and each warp has sixteen outputs."""
    numbers = outputs * height * (2 if gated else 1)
    if numbers > 64 * 512:
        return ()
    if numbers >= 16 * 1024:
        return (8,)
    return (4, 8) if outputs >= 128 and height >= 32 else (max(1, min(4, outputs // 16)),)


def _fits(tile: Tile, gated: bool) -> bool:
    size = (tile.outputs * (2 if gated else 1) + tile.rows) * tile.inputs * 2 * tile.stages
    return 60_000 < size < SHARED_BYTES


class Bench:
    """Times implementations of one map. ``weights`` are enough copies to overflow the L2 cache."""

    def __init__(self, shape: LinearShape, rows: int) -> None:
        size = shape.outputs * shape.inputs * shape.dtype.itemsize
        if shape.scheme is not None:
            size = shape.scheme.bytes(shape.outputs, shape.inputs)
        copies = max(2 if size < 1 << 29 else 1, math.ceil(COPIED_BYTES / size))
        self.shape = shape
        self.weights: Sequence[Tensor | DeviceWeight]
        if shape.scheme is None:
            weights = torch.randn(copies, shape.outputs, shape.inputs, device="cuda", dtype=shape.dtype)
            self.weights = weights.mul_(0.02).unbind()
        else:
            self.weights = [random_weight(shape, torch.device("cuda"), 0) for _ in range(copies)]
        self._x = torch.randn(rows, shape.inputs, device="cuda", dtype=shape.dtype)
        self._codes: QuantizedRows | None = None
        if shape.scheme is not None and shape.scheme.activations is not None:
            self._codes = quantize_rows(self._x, shape.scheme.activations, self.weights[0].static)  # type: ignore[union-attr]
        self._bias = torch.randn(shape.outputs, device="cuda", dtype=shape.dtype) if shape.bias else None

    def _inputs(self, rows: int) -> Tensor | QuantizedRows:
        """As a norm gives them."""
        if self._codes is None:
            return self._x[:rows]
        return QuantizedRows(self._codes.codes[:rows], self._codes.scales[:rows], None)

    def microseconds(self, choice: KernelConfig, rows: int, replays: int) -> float:
        """Median of ``replays``; infinite for what cannot run."""
        gated, x = self.shape.gated, self._inputs(rows)
        try:
            apply(choice, x, self.weights[0], self._bias, gated)
        except (TritonError, RuntimeError):
            return math.inf
        return graph_microseconds(
            lambda: [apply(choice, x, weight, self._bias, gated) for weight in self.weights], replays
        ) / len(self.weights)


def graph_microseconds(work: Callable[[], object], replays: int) -> float:
    """Median time of a replay of ``work``, captured."""
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
    """Entries for ``shapes`` at ``rows``: the fastest of all, and of those that give the contract's bits.

    After ``seconds``, which shapes share alike, it ends with what it has. ``report`` hears every time that was taken.
    """
    end = time.monotonic() + seconds
    entries = []
    _wake_clock()
    for left, shape in zip(range(len(shapes), 0, -1), shapes, strict=True):
        share = time.monotonic() + (end - time.monotonic()) / left
        entries += _entries(shape, _times(shape, rows, share, report))
    return entries


def _wake_clock(seconds: float = 1.0) -> None:
    """Keep the device busy until its clock is up: what is timed first would seem slower than it is."""
    x = torch.zeros(4096, 4096, device="cuda", dtype=torch.bfloat16)
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        for _ in range(50):
            torch.mm(x, x)
        torch.cuda.synchronize()


def _times(
    shape: LinearShape, rows: Sequence[int], end: float, report: Report
) -> dict[tuple[int, KernelConfig], float]:
    """Microseconds of the finalists at ``rows``."""
    bench = Bench(shape, max(rows))
    found: dict[tuple[int, KernelConfig], float] = {}
    for size in rows:
        if time.monotonic() > end:
            break
        choices = list(candidates(shape, size))
        compile_kernels(((shape, choice) for choice in choices), ignore_errors=True)
        first = {choice: bench.microseconds(choice, size, 2) for choice in choices}
        ranked = [choice for choice in sorted(first, key=lambda choice: first[choice]) if first[choice] < math.inf]
        finalists = ranked[:FINALISTS] + [choice for choice in ranked[FINALISTS:] if isinstance(choice, Library)]
        times = {choice: bench.microseconds(choice, size, 9) for choice in finalists}
        report(shape, size, first | times)
        found |= {(size, choice): times[choice] for choice in finalists}
    return found


def _entries(shape: LinearShape, times: dict[tuple[int, KernelConfig], float]) -> list[Entry]:
    """At each number of rows the best that has the contract's bits, and the best of all where that is another one."""
    wrong = differing(shape, list(times)) if times else set()
    return entries_of(shape, times, wrong)


def entries_of(
    shape: LinearShape, times: dict[tuple[int, KernelConfig], float], wrong: Collection[tuple[int, KernelConfig]]
) -> list[Entry]:
    """As the tuner writes them, from microseconds of implementations at numbers of rows; ``wrong`` have other bits.

    What is faster yet has the same bits, as cuBLAS that may cut the inputs and does not, is so by chance.
    """
    entries = []
    for rows in sorted({rows for rows, _ in times}):
        taken = {choice: time for (size, choice), time in times.items() if size == rows}
        right = [choice for choice in taken if choice != Library(split=True) and (rows, choice) not in wrong]
        ordered, fastest = _best(taken, right), _best(taken, list(taken))
        if ordered is not None:
            entries.append(Entry.of(shape, rows, ordered, taken[ordered]))
        own = _best(taken, [choice for choice in right if not isinstance(choice, Library)])
        if isinstance(ordered, Library) and own is not None and rows <= OWN_ROWS:
            entries.append(Entry.of(shape, rows, own, taken[own], own=True))
        if fastest is not None and fastest != ordered and (rows, fastest) in wrong:
            entries.append(Entry.of(shape, rows, fastest, taken[fastest], ordered=False))
    return entries


def _best(taken: dict[KernelConfig, float], some: list[KernelConfig]) -> KernelConfig | None:
    """Of ``some`` the one that costs least where it runs among kernels of ours."""

    def cost(choice: KernelConfig) -> float:
        if isinstance(choice, Library):
            return (taken[choice] + ALONE) * (SPLIT_GAIN if choice.split else 1)
        return taken[choice]

    return min(some, key=cost, default=None)
