"""Layers timed among their neighbors: a step's products one after the other, with the norms between them."""

from __future__ import annotations

import logging
import math
from collections.abc import Collection, Mapping, Sequence

import torch
from triton.runtime.errors import TritonError

from preheat.backends.cuda.matmul.bench import COPIED_BYTES, Bench, graph_microseconds
from preheat.backends.cuda.matmul.config import KernelConfig, Library
from preheat.backends.cuda.matmul.together import fastest_together
from preheat.backends.cuda.pointwise.norm import CudaNorm

logger = logging.getLogger(__name__)

FEW_REPLAYS, MANY_REPLAYS = 5, 21

MOST_ROWS = 512
"""Rows up to which neighbors matter: products of more rows take long beside the time between two kernels."""

Times = Mapping[tuple[int, KernelConfig], float]
"""Microseconds of kernels alone, by rows and kernel."""


class Neighbors:
    """The layers of ``benches`` in the order of a step.

    A norm of the layer's inputs is before each product, but for a layer that reads gated outputs: nothing is between
    these two. The norm stands for the exchange between ranks, too.
    """

    def __init__(self, benches: Sequence[Bench]) -> None:
        self._benches = benches
        self._copies = max(2, math.ceil(COPIED_BYTES / sum(bench.bytes for bench in benches)))
        self._norms: list[CudaNorm | None] = []
        for index, bench in enumerate(benches):
            behind_gates = index > 0 and benches[index - 1].shape.gated
            ones = torch.ones(bench.shape.inputs, device="cuda", dtype=bench.shape.dtype)
            self._norms.append(None if behind_gates else CudaNorm(ones, 1e-5))

    def microseconds(self, choices: Sequence[KernelConfig], rows: int, replays: int) -> float:
        """Return the time of one pass through all layers; infinite if one of ``choices`` cannot run."""

        def work() -> list[object]:
            made: list[object] = []
            for copy in range(self._copies):
                for bench, norm, choice in zip(self._benches, self._norms, choices, strict=True):
                    if norm is not None:
                        made.append(norm(bench.x[:rows]))
                    made.append(bench.run(choice, rows, copy))
            return made

        try:
            return graph_microseconds(work, replays) / self._copies
        except (TritonError, RuntimeError):
            return math.inf

    def fastest(self, rows: int, options: Sequence[Mapping[KernelConfig, float]]) -> list[KernelConfig]:
        """Return the kernel of each layer, one of its ``options`` with their times alone."""

        def measured(choices: Sequence[KernelConfig], often: bool) -> float:
            return self.microseconds(choices, rows, MANY_REPLAYS if often else FEW_REPLAYS)

        alone = [min(some, key=lambda choice: some[choice]) for some in options]
        ours = [
            min((choice for choice in some if choice.kind != "library"), key=lambda choice: some[choice], default=best)
            for some, best in zip(options, alone, strict=True)
        ]
        found = fastest_together([list(some) for some in options], [alone, ours], measured)
        together, apart = (measured(choices, True) for choices in (found, alone))
        logger.info("%d rows: a step's layers take %.1f us, or %.1f by kernels fastest alone", rows, together, apart)
        return found


def fastest_of_steps(
    benches: Sequence[Bench], times: Sequence[Times], wrong: Sequence[Collection[tuple[int, KernelConfig]]]
) -> list[dict[int, KernelConfig]]:
    """Return for each layer the kernel at each number of rows up to ``MOST_ROWS`` that all layers were timed at.

    ``wrong`` have other bits than the contract's.
    """
    found: list[dict[int, KernelConfig]] = [{} for _ in benches]
    if len(benches) < 2:
        return found
    neighbors = Neighbors(benches)
    for rows in sorted({rows for rows, _ in times[0]}):
        options = [
            {
                choice: time
                for (size, choice), time in each.items()
                if size == rows and (rows, choice) not in bad and choice != Library(split=True)
            }
            for each, bad in zip(times, wrong, strict=True)
        ]
        if rows <= MOST_ROWS and all(options):
            for layer, choice in zip(found, neighbors.fastest(rows, options), strict=True):
                layer[rows] = choice
    return found
