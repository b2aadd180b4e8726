"""Proof that implementations of linear maps give the contract's bits, on this device.

Three times, on data that tells: all rows and columns of what an implementation gives, eager and captured in a graph,
are compared with the plain kernel. Normal numbers show an error; numbers of all magnitudes whose exact sums are zero
leave nothing but the order in which they were added.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Sequence
from functools import partial

import torch
from torch import Tensor

from preheat.backends.cuda.graph import capture
from preheat.backends.cuda.launch import compiling
from preheat.backends.cuda.linear import apply
from preheat.backends.cuda.tuning import REFERENCE, KernelConfig, KernelConfigs, Library, LinearShape
from preheat.ops.proof import signed_pairs

logger = logging.getLogger(__name__)

SEEDS = 3
BITS = {2: torch.int16, 4: torch.int32}


def settle(
    configs: KernelConfigs, layers: Iterable[tuple[LinearShape, Sequence[int]]]
) -> dict[tuple[LinearShape, int], bool]:
    """Settle what serves the linear layers of a model at their numbers of rows.

    Kernels are compiled side by side, then whatever has not the contract's bits is rejected; without invariance nothing
    is. The answer says of each layer and number of rows whether the first config has them.
    """
    sizes: dict[LinearShape, dict[int, None]] = {}
    for shape, rows in layers:
        sizes.setdefault(shape, {}).update(dict.fromkeys(rows))
    used = [(shape, configs(shape, size)) for shape, numbers in sizes.items() for size in numbers]
    used += [(shape, REFERENCE[shape.dtype]) for shape in sizes]
    compile_kernels(used)
    proven: dict[tuple[LinearShape, int], bool] = {}
    if configs.invariant:
        for shape, numbers in sizes.items():
            proven |= prove(configs, [shape], list(numbers))
    return proven


def compile_kernels(used: Iterable[tuple[LinearShape, KernelConfig]], *, ignore_errors: bool = False) -> None:
    """Compile what is not compiled yet of our kernels among ``used``, side by side."""
    with compiling(os.cpu_count() or 1, ignore_errors=ignore_errors):
        for shape, choice in dict.fromkeys(used):
            if not isinstance(choice, Library):
                x, weight, bias, y = _operands(shape, choice.rows)
                apply(choice, x, weight, bias, shape.gated, y)


def prove(
    configs: KernelConfigs, shapes: Iterable[LinearShape], rows: Sequence[int]
) -> dict[tuple[LinearShape, int], bool]:
    """Whether what ``configs`` say for ``shapes`` at ``rows`` has the contract's bits. What has not is refused."""
    proven = {}
    for shape in dict.fromkeys(shapes):
        chosen = [(size, configs(shape, size)) for size in rows]
        wrong = differing(shape, chosen)
        for size, choice in chosen:
            proven[shape, size] = (size, choice) not in wrong
            if not proven[shape, size]:
                configs.reject(shape, size)
                logger.info("%s has not the contract's bits for %d rows of %s: done without", choice, size, shape)
    return proven


def differing(
    shape: LinearShape, chosen: Sequence[tuple[int, KernelConfig]], seeds: int = SEEDS
) -> set[tuple[int, KernelConfig]]:
    """Those of ``chosen``, numbers of rows and implementations, that differ anywhere from the plain kernel."""
    x, weight, bias, expected = _operands(shape, max(rows for rows, _ in chosen))
    differs = torch.zeros(2, len(chosen), dtype=torch.int32, device="cuda")

    def compare(found: Tensor) -> None:
        for index, (rows, choice) in enumerate(chosen):
            y = apply(choice, x[:rows], weight, bias, shape.gated)
            found[index] += _bits(y).ne(_bits(expected[:rows])).any()

    graph = None
    for seed in range(seeds):
        fill(x, weight, seed)
        apply(REFERENCE[shape.dtype], x, weight, bias, shape.gated, expected)
        compare(differs[0])
        if graph is None:
            graph = capture(partial(compare, differs[1]))
        graph.replay()
    return {pair for pair, count in zip(chosen, differs.sum(0).tolist(), strict=True) if count}


def _operands(shape: LinearShape, rows: int) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    """x, W, b (zeros) and y of ``rows`` rows."""
    x = torch.empty(rows, shape.inputs, device="cuda", dtype=shape.dtype)
    weight = torch.empty(shape.outputs, shape.inputs, device="cuda", dtype=shape.dtype)
    bias = torch.zeros(shape.outputs, device="cuda", dtype=shape.dtype) if shape.bias else None
    return x, weight, bias, torch.empty(rows, shape.columns, device="cuda", dtype=shape.dtype)


def fill(x: Tensor, weight: Tensor, seed: int) -> None:
    """New numbers, in place: normal for ``seed`` 0, else of all magnitudes, with products that sum to zero exactly."""
    random = torch.Generator(x.device).manual_seed(seed)
    for tensor, sign in ((x, 1.0), (weight, -1.0)):
        tensor.normal_(generator=random)
        if seed:
            tensor.mul_(torch.empty_like(tensor).uniform_(-6, 6, generator=random).exp_())
            signed_pairs(tensor, sign)


def _bits(y: Tensor) -> Tensor:
    return y.view(BITS[y.dtype.itemsize])
