"""The tuner: it finds the fastest implementation of linear maps by trying all, on an idle device.

Every time is the time of a CUDA graph that walks several copies of the weights, so that no copy is in the L2 cache.
Each layer is timed alone; the best of few rows are then timed among the layers of a step
(:mod:`preheat.backends.cuda.matmul.neighbors`).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence

import torch

from preheat.backends.cuda.device.detect import card_at
from preheat.backends.cuda.matmul.bench import Bench
from preheat.backends.cuda.matmul.config import KernelConfig, Library, LinearShape
from preheat.backends.cuda.matmul.kernels import OWN_ROWS, candidates
from preheat.backends.cuda.matmul.neighbors import fastest_of_steps
from preheat.backends.cuda.matmul.prove import compile_kernels, differing
from preheat.backends.cuda.matmul.tables import Entry

ROWS = (
    1, 8, 16, 32, 48, 64, 96, 128, 160, 192, 224, 256, 320, 384, 448, 512, 640, 768, 1024, 1280, 1536, 2048, 4096, 8192,
)  # fmt: skip
FINALISTS = 12
"""Kernels that are timed again, and among their neighbors."""
SPLIT_GAIN = 1.015
"""The least gain of cutting the inputs into parts for this to be chosen."""
ALONE = 1.5
"""Microseconds that cuBLAS costs its neighbors. One of our kernels starts while the kernel before it ends, but not
behind cuBLAS. Measured at one row of an 8B model on an H200: a tile that takes 0.6 us longer alone saves 1.1 us a
layer."""
WAKE_SECONDS = 1.0
"""Seconds of work until a device's clock is up."""


Report = Callable[[LinearShape, int, dict[KernelConfig, float]], None]


def tune(
    shapes: Sequence[LinearShape],
    rows: Sequence[int] = ROWS,
    seconds: float = math.inf,
    report: Report = lambda shape, rows, times: None,
) -> list[Entry]:
    """Return entries for ``shapes`` at ``rows``: the fastest of all, and the fastest with the contract's bits.

    Several ``shapes`` follow each other in a step, in their order. The fewest rows are measured first, of all shapes.
    After ``seconds`` no more rows are. ``report`` hears every time that a layer took alone.
    """
    end = time.monotonic() + seconds
    _wake_clock()
    benches = [Bench(shape, max(rows)) for shape in shapes]
    times: list[dict[tuple[int, KernelConfig], float]] = [{} for _ in shapes]
    for size in sorted(rows):
        if time.monotonic() > end:
            break
        for bench, taken in zip(benches, times, strict=True):
            taken.update(_times(bench, size, report))
    wrong = [differing(shape, list(each)) if each else set() for shape, each in zip(shapes, times, strict=True)]
    found = map(entries_of, shapes, times, wrong, fastest_of_steps(benches, times, wrong))
    return [entry for entries in found for entry in entries]


def _wake_clock() -> None:
    """Keep the device busy until its clock is up: the first measurements would else seem slower."""
    x = torch.zeros(4096, 4096, device="cuda", dtype=torch.bfloat16)
    end = time.monotonic() + WAKE_SECONDS
    while time.monotonic() < end:
        for _ in range(50):
            torch.mm(x, x)
        torch.cuda.synchronize()


def _times(bench: Bench, rows: int, report: Report) -> dict[tuple[int, KernelConfig], float]:
    """Return the microseconds of the finalists at ``rows``."""
    shape = bench.shape
    choices = list(candidates(shape, rows, card=card_at()))
    compile_kernels(((shape, choice) for choice in choices), ignore_errors=True)
    first = {choice: bench.microseconds(choice, rows, 2) for choice in choices}
    ranked = [choice for choice in sorted(first, key=lambda choice: first[choice]) if first[choice] < math.inf]
    finalists = ranked[:FINALISTS] + [choice for choice in ranked[FINALISTS:] if choice.kind == "library"]
    times = {choice: bench.microseconds(choice, rows, 9) for choice in finalists}
    report(shape, rows, first | times)
    return {(rows, choice): taken for choice, taken in times.items()}


def entries_of(
    shape: LinearShape, times: dict[tuple[int, KernelConfig], float], wrong: Collection[tuple[int, KernelConfig]],
    among: Mapping[int, KernelConfig] = {},
) -> list[Entry]:  # fmt: skip
    """Return entries as the tuner writes them, from microseconds of implementations at numbers of rows.

    There is an entry of the fastest one in order, and one of the fastest of all if that is another. ``wrong`` have
    other bits. ``among`` its neighbors a kernel is the fastest in order. cuBLAS that may cut the inputs, yet does not,
    can be faster with the same bits: that is chance, and gets no entry.
    """
    entries = []
    for rows in sorted({rows for rows, _ in times}):
        taken = {choice: time for (size, choice), time in times.items() if size == rows}
        right = [choice for choice in taken if choice != Library(split=True) and (rows, choice) not in wrong]
        ordered, fastest = among.get(rows) or _best(taken, right), _best(taken, list(taken))
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
