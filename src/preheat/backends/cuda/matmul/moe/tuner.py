"""The tuner of routed experts: it finds the fastest kernels by trying all, on an idle device.

:mod:`preheat.backends.cuda.matmul.tuner` does the same for linear layers. Each layer's kernels are timed for every size
of block that may pay. Then the whole block of experts is timed with the best kernels of both layers, because arranging
rows costs time too. Experts with biases, or with another activation than SiLU, are timed with them.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import product

import torch
from torch import Tensor
from triton.runtime.errors import TritonError

from preheat.backends.cuda.device.compiling import compiling
from preheat.backends.cuda.device.detect import card_at
from preheat.backends.cuda.matmul.bench import graph_microseconds
from preheat.backends.cuda.matmul.config import ExpertsConfig, ExpertsShape, LinearShape, Tile, Wide
from preheat.backends.cuda.matmul.fit import fitted
from preheat.backends.cuda.matmul.hopper.large_m import fits
from preheat.backends.cuda.matmul.kernels import fitting_tiles
from preheat.backends.cuda.matmul.moe.experts import Apart, experts_forward, experts_layer, fuses, with_biases
from preheat.backends.cuda.matmul.moe.route import Arrangement, arrange
from preheat.backends.cuda.matmul.rules import ALONE, experts_rule
from preheat.backends.cuda.matmul.tables import ExpertsEntry
from preheat.backends.cuda.matmul.weights import DeviceWeight, PlainWeight, Weight
from preheat.backends.cuda.pointwise.activation import activate
from preheat.ops.quantization import empty_weight
from preheat.ops.values import NOTHING_MORE, Finish, Routing

TOKENS = (1, 2, 4, 8, 32, 64, 128, 192, 256, 512, 1024, 2048, 4096, 8192)
ROUTINGS = 8
"""Ways to route the same tokens; a time is their mean. With one way, the experts of few tokens would stay in the L2
cache."""

SIZES = [(32, 128), (32, 256), (64, 64), (64, 128), (64, 256), (128, 64), (128, 128)]
"""Outputs and inputs of a tile."""
CODE_SIZES = [(64, 128), (128, 128)]
"""Outputs and inputs of a tile of codes in eight bits; their steps have 128 inputs."""

Choice = Tile | Wide
Report = Callable[[ExpertsShape, int, ExpertsConfig, float], None]


def block_sizes(shape: ExpertsShape, tokens: int) -> list[int]:
    """Return numbers of rows of an expert that may be worth computing together; 1 for few slots.

    They depend on the mean number of rows of an expert.
    """
    slots = tokens * shape.top_k
    mean = slots / shape.num_experts
    alone = [1] if slots * ALONE <= shape.num_experts else []
    return alone + [size for size in (16, 32, 64, 128) if min(mean / 3, 128) <= size <= max(4 * mean, 16)]


def candidates(shape: ExpertsShape, layer: LinearShape, block: int, *, biased: bool = False) -> Iterator[Choice]:
    """Yield kernels for one of both layers; the kernel for many rows adds no biases."""
    if block == 128 and shape.scheme is None and not biased:
        if fits(shape.gate_up) and fits(shape.down):
            yield from (Wide(256, 128, 4), Wide(128, 128, 6))
        return
    sizes = SIZES if shape.scheme is None else CODE_SIZES
    for (outputs, inputs), stages in product(sizes, (3, 4, 6, 8)):
        yield from fitting_tiles(layer, max(block, 16), outputs, inputs, stages, bulk=shape.scheme is None)


def _that_fit(shape: ExpertsShape, layer: LinearShape, block: int, *, biased: bool) -> Iterator[Choice]:
    """Yield the kernels for one of both layers, cut to this card, each once."""
    card = card_at()
    cut = (fitted(choice, layer, card) for choice in candidates(shape, layer, block, biased=biased))
    yield from dict.fromkeys(choice for choice in cut if choice.kind == "tile" or choice.kind == "wide")


class Bench:
    """Times the kernels of experts with random weights.

    It has ``x`` [tokens, hidden] and, for each routing, logits. ``finish`` ends the first layer. With its bias both
    layers have biases.
    """

    def __init__(
        self, shape: ExpertsShape, tokens: int, finish: Finish = NOTHING_MORE, device: str = "cuda"
    ) -> None:  # fmt: skip
        count, hidden, inner = shape.num_experts, shape.hidden, shape.inner
        activation = finish.activation or "silu_and_mul"
        self.between: Apart | None = None
        if finish.bias or activation != "silu_and_mul":
            first, second = (
                torch.randn(count, size, device=device, dtype=shape.dtype) if finish.bias else None
                for size in (2 * inner, hidden)
            )
            self.between = Apart(first, second, activation)
        self.biased = finish.bias
        self.shape, self.routing = shape, Routing(shape.top_k, True, False)
        self.gate_up, self.down = _random(shape, 2 * inner, hidden, device), _random(shape, hidden, inner, device)
        self.x = torch.randn(tokens, hidden, device=device, dtype=shape.dtype)
        self.logits = torch.randn(ROUTINGS, tokens, count, device=device, dtype=shape.dtype)
        self.counts = torch.zeros(count, dtype=torch.int32, device=device)

    def arranged(self, tokens: int, block: int) -> list[Arrangement]:
        return [arrange(logits[:tokens], self.routing, block, self.counts.clone()) for logits in self.logits]

    def layer(self, choice: Choice, rows: Sequence[Tensor], arranged: Sequence[Arrangement], *, gated: bool) -> float:
        """Return the microseconds of a layer for its ``rows`` of each arrangement."""
        pairs = list(zip(rows, arranged, strict=True))
        return _microseconds(lambda: [self.run(choice, x, each, gated=gated) for x, each in pairs])

    def run(self, choice: Choice, rows: Tensor, arranged: Arrangement, *, gated: bool) -> Tensor:
        """Return the outputs of a layer; the first one ends with the activation, as in ``experts_rows``."""
        between = self.between
        if not gated:
            bias = None if between is None else between.down
            return experts_layer(choice, rows, self.down, arranged, gated=False, bias=bias)
        if between is None:
            return experts_layer(choice, rows, self.gate_up, arranged, gated=True)
        fused = fuses(ExpertsConfig(arranged.block, choice, choice), between.activation)
        y = experts_layer(
            choice, rows, self.gate_up, arranged, gated=between.activation if fused else False, gathered=True,
            bias=between.gate_up,
        )  # fmt: skip
        return y if fused else activate(y, between.activation)

    def whole(self, config: ExpertsConfig, tokens: int) -> float:
        """Return the microseconds of the block of experts, from tokens to tokens."""
        return _microseconds(lambda: [self._forward(config, self.x[:tokens], each[:tokens]) for each in self.logits])

    def _forward(self, config: ExpertsConfig, x: Tensor, logits: Tensor) -> Tensor:
        return experts_forward(
            config, x, logits, self.gate_up, self.down, self.routing, self.counts, between=self.between
        )

    def best(self, tokens: int, block: int) -> tuple[ExpertsConfig, float] | None:
        """Return the fastest kernels for ``block``, and their time for the whole block of experts."""
        arranged, x = self.arranged(tokens, block), [self.x[:tokens]] * ROUTINGS
        gates, downs = (
            list(_that_fit(self.shape, layer, block, biased=self.biased))
            for layer in (self.shape.gate_up, self.shape.down)
        )  # fmt: skip
        if not gates or not downs:
            return None
        inner = [self.x.new_zeros(each.rows, self.shape.inner) for each in arranged]
        with compiling(os.cpu_count() or 1, ignore_errors=True):
            for choice in gates:
                self.run(choice, x[0], arranged[0], gated=True)
            for choice in downs:
                self.run(choice, inner[0], arranged[0], gated=False)
        gate = min(gates, key=lambda choice: self.layer(choice, x, arranged, gated=True))
        down = min(downs, key=lambda choice: self.layer(choice, inner, arranged, gated=False))
        config = ExpertsConfig(block, gate, down)
        return config, self.whole(config, tokens)


def tune_experts(
    shape: ExpertsShape,
    max_tokens: int,
    seconds: float = math.inf,
    report: Report = lambda *found: None,
    finish: Finish = NOTHING_MORE,
) -> list[ExpertsEntry]:
    """Return entries for ``shape`` at up to ``max_tokens`` tokens, for a first layer that ends with ``finish``.

    After ``seconds``, return the entries found so far. ``report`` hears the fastest kernels for each number of tokens.
    """
    end, entries = time.monotonic() + seconds, list[ExpertsEntry]()
    bench = Bench(shape, max_tokens, finish)
    for tokens in (size for size in TOKENS if size <= max_tokens):
        if time.monotonic() > end:
            break
        guess = experts_rule(shape, tokens, card=card_at())
        guess = with_biases(guess) if finish.bias else guess
        timed = [(guess, bench.whole(guess, tokens))]  # the best of each layer need not be the best together
        timed += [found for block in block_sizes(shape, tokens) if (found := bench.best(tokens, block)) is not None]
        config, taken = min(timed, key=lambda found: found[1])
        report(shape, tokens, config, taken)
        entries.append(ExpertsEntry.of(shape, tokens, config, taken))
    return entries


def _microseconds(work: Callable[[], object]) -> float:
    """Return the microseconds of ``work`` for one routing; infinite if it cannot run."""
    try:
        work()
    except (TritonError, RuntimeError):
        return math.inf
    return graph_microseconds(work, 5) / ROUTINGS


def _random(shape: ExpertsShape, outputs: int, inputs: int, device: str) -> Weight:
    """Return random weights of all experts."""
    size = (shape.num_experts, outputs, inputs)
    if shape.scheme is None:
        return PlainWeight(torch.randn(size, device=device, dtype=shape.dtype).mul_(0.02))
    weight = empty_weight(shape.scheme, *size, dtype=shape.dtype, device=torch.device(device))
    weight.codes.view(torch.uint8).random_(0, 0x70)
    weight.scales.uniform_(0.5, 2).mul_(2.0**-10)
    if shape.scheme.powers:
        weight.scales.log2_().round_().exp2_()
    if weight.static is not None:
        weight.static.fill_(2.0**-5)
    return DeviceWeight.of(weight)
