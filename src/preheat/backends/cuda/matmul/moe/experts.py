"""Routed experts on CUDA, see :mod:`preheat.ops.moe`: route, arrange, two linear layers of all experts, combine.

In steps with adapters, their terms are added to the outputs of each layer, and the activation is a launch of its own
between the layers. Every row goes through the same kernels, whether it has an adapter or not.

Every expert's rows go through the contract of linear layers (:mod:`preheat.backends.cuda.matmul.linear`). So a token
has the same bits alone and among thousands; alone, each of its slots is a block and nothing is arranged. The host never
waits for the choice of experts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple, cast

import torch
from torch import Tensor

from preheat.backends.base.layers import ALONE, ExpertsWeights, FusedInput, LayerContext, Norm
from preheat.backends.cuda.matmul.config import Expanded, ExpertsConfig, Tile, Wide, experts_shape_of
from preheat.backends.cuda.matmul.gemm import Gated, experts_product, experts_splits
from preheat.backends.cuda.matmul.hopper.large_m import wide
from preheat.backends.cuda.matmul.hopper.mxfp4_experts import multiply_streamed
from preheat.backends.cuda.matmul.kernels import KernelConfigs
from preheat.backends.cuda.matmul.layer import stored
from preheat.backends.cuda.matmul.lora.blocks import Blocks, CudaAdapterRows
from preheat.backends.cuda.matmul.lora.routed import (
    Kept,
    RoutedFactors,
    add_experts,
    expand_experts,
    expand_tokens,
    shrink_experts,
    shrink_slots,
)
from preheat.backends.cuda.matmul.lora.slots import Factors
from preheat.backends.cuda.matmul.moe.route import Arrangement, Scales, arrange, by_slots, combine, spread
from preheat.backends.cuda.matmul.weights import PlainWeight, Weight
from preheat.backends.cuda.pointwise.activation import activate, silu_and_mul
from preheat.backends.cuda.pointwise.closing import Unsummed
from preheat.backends.cuda.pointwise.elementwise import FUSED
from preheat.backends.cuda.pointwise.norm import QuantizedInput
from preheat.backends.cuda.pointwise.quantize import quantize_parts, silu_and_quantize
from preheat.backends.cuda.ranks.collective import RankSums, add_ranks
from preheat.ops.kinds import Activation
from preheat.ops.matmul import tree_sum
from preheat.ops.quantization import QuantizedRows, plain_rows
from preheat.ops.values import ONE_SUM, Experts, Routing

_TILES = ExpertsConfig(64, Tile(128, 64, 64, 4, 4, True), Tile(128, 64, 64, 4, 3, True))
"""Tiles in place of the kernel for many rows, for experts with biases, and for terms of experts that ranks share."""

Inner = Callable[[Tile, Arrangement], Iterator[Tensor]]
"""Function that yields the activations [arranged rows, inner numbers of a split] of each split, by a kernel's tile."""

Rows = Tensor | QuantizedRows
Adding = Callable[[Tensor, Tensor, Arrangement, bool], Tensor]
"""Function that adds terms to a layer's outputs, in arranged rows. It gets the outputs, the plain inputs, the
arrangement, and whether the layer is the first; inputs of the first layer are tokens."""


class Apart(NamedTuple):
    """An activation that is a launch of its own where it is not fused, and the layers' biases, if there are any.

    The biases are [experts, 2 * inner] and [experts, hidden].
    """

    gate_up: Tensor | None
    down: Tensor | None
    activation: Activation


def experts_forward(
    config: ExpertsConfig, x: Rows, logits: Tensor, gate_up: Weight, down: Weight, routing: Routing, counts: Tensor,
    adding: Adding | None = None, between: Apart | None = None,
) -> Tensor:  # fmt: skip
    """Return the outputs of the experts for ``x`` [tokens, hidden] by the kernels of ``config``.

    ``counts`` are as for :func:`arrange`. ``adding`` adds terms to the outputs of both layers, before the activation
    and before rows are weighted. Experts with an activation ``between`` their layers have no terms.
    """
    arrangement = arrange(logits, routing, config.block, counts, largest_first=streams(config.gate_up, gate_up))
    return combine(experts_rows(config, x, gate_up, down, arrangement, adding, between), arrangement)


def experts_rows(
    config: ExpertsConfig, x: Rows, gate_up: Weight, down: Weight, arrangement: Arrangement,
    adding: Adding | None = None, between: Apart | None = None,
) -> Tensor:  # fmt: skip
    """Return the outputs [arranged rows, hidden] of each expert, see :func:`experts_forward`."""
    early = config.gate_up.kind == "tile"  # its programs wait for the arrangement before the next kernel begins
    if between is not None:
        fused = fuses(config, between.activation)
        gated: Gated = between.activation if fused else False
        y = experts_layer(config.gate_up, x, gate_up, arrangement, gated=gated, gathered=True, bias=between.gate_up)
        inner = y if fused else activate(y, between.activation)
        return experts_layer(config.down, inner, down, arrangement, gated=False, bias=between.down, early=early)
    if adding is None:
        inner = experts_layer(config.gate_up, x, gate_up, arrangement, gated=True)
        return experts_layer(config.down, inner, down, arrangement, gated=False, early=early)
    y = experts_layer(config.gate_up, x, gate_up, arrangement, gated=False, gathered=True)
    rows = activated(adding(y, plain_rows(x), arrangement, True), down)
    z = experts_layer(config.down, rows, down, arrangement, gated=False)
    return adding(z, plain_rows(rows), arrangement, False)


def fuses(config: ExpertsConfig, activation: Activation) -> bool:
    """Whether the kernel of gates and ups ends with the ``activation``.

    A block of one slot has few programs, and each would have the work of two.
    """
    return config.block > 1 and activation in FUSED and config.gate_up.multiplies.kind == "tile"


def streams(choice: Tile | Wide | Expanded, weight: Weight) -> bool:
    """Whether ``choice`` is the kernel that streams codes: its programs take tiles in turn."""
    return choice.kind == "tile" and choice.bulk and weight.form == "codes"


def with_biases(config: ExpertsConfig) -> ExpertsConfig:
    """Return ``config`` for experts with biases: tiles in place of the kernel for many rows, which adds none."""
    return _TILES if config.gate_up.kind == "wide" else config


def activated(gate_up: Tensor, down: Weight) -> Rows:
    """Return silu(gate) * up of ``gate_up`` [rows, 2 * inner], as the layer ``down`` reads it, and plain."""
    how = down.quantized_input
    return silu_and_mul(gate_up) if how is None else silu_and_quantize(gate_up, how.kind, how.static)


def experts_layer(
    choice: Tile | Wide | Expanded, x: Rows, weight: Weight, arrangement: Arrangement, *, gated: Gated,
    gathered: bool | None = None, bias: Tensor | None = None, early: bool = False,
) -> Tensor:  # fmt: skip
    """Return the outputs of one of both layers by the kernel ``choice``.

    See :func:`preheat.backends.cuda.matmul.gemm.experts_product`.
    """
    gathered = bool(gated) if gathered is None else gathered
    if choice.kind == "tile" and not streams(choice, weight):
        return experts_product(
            choice, x, weight, arrangement, gated=gated, gathered=gathered, bias=bias, early=early
        )  # fmt: skip
    if choice.kind == "expanded":
        plain = PlainWeight(weight.plain())
        return experts_layer(choice.choice, x, plain, arrangement, gated=gated, gathered=gathered, bias=bias)  # type: ignore[arg-type]
    rows = spread(plain_rows(x), arrangement) if gathered else plain_rows(x)
    y = weight.room(arrangement.rows, weight.shape[1] // 2 if gated else weight.shape[1])
    if choice.kind == "wide":
        assert weight.form == "plain" and bias is None and isinstance(gated, bool)
        wide(choice, rows, weight, None, gated, y, arrangement.experts, arrangement.starts)
    else:
        assert weight.form != "plain"
        multiply_streamed(choice, rows, weight, arrangement, y, gated=gated, bias=bias)
    return y


class ExpertsLayer:
    """The routed experts of ``value``; ``configs`` choose the kernels for a number of tokens.

    Ranks may share the inner numbers. Then a token's experts are added in slot order inside of each split, in fp32; the
    splits are added in their tree, then the ranks. The gates and ups of a rank are one product, and the splits of down
    are the columns of one launch. For terms, plain weights are cut: each split has a part of every expert's inner
    numbers, their rows of gate and up and their columns of down.

    Or ranks have whole experts. Then each rank computes the slots of its own experts, gives them to all ranks, and adds
    a token's experts in slot order: the bits of experts that no ranks share.
    """

    def __init__(
        self,
        value: Experts,
        weights: ExpertsWeights,
        configs: KernelConfigs,
        device: torch.device,
        context: LayerContext = ALONE,
    ) -> None:
        order = value.down.order
        self.value, self.configs, self._split = value, configs, order.is_split
        self._ranks, self._rows = cast(RankSums, context.ranks or RankSums()), cast(CudaAdapterRows, context.rows)
        self.shape = experts_shape_of(value)
        biases, gate_up, down = weights[2:], stored(weights[0], ONE_SUM), stored(weights[1], order)
        self._scales, self._between = Scales(weights.correction, weights.factors), None
        activation = value.gate_up.finish.activation or "silu_and_mul"
        if biases[0] is not None or activation != "silu_and_mul":
            self._between = Apart(biases[0], biases[1], activation)
        self._gate_up, self._down, spare = [gate_up], [down], 0
        if self._split and gate_up.form == "plain" and down.form == "plain" and value.down.terms:
            spare, experts = 1, len(gate_up)
            self.shape = self.shape._replace(inner=down.shape[2] // order.own_k_splits, splits=0)
            halves = gate_up.tensor.view(experts, 2, -1, gate_up.shape[2]).chunk(order.own_k_splits, 2)
            self._gate_up = [PlainWeight(half.reshape(experts, -1, gate_up.shape[2]).contiguous()) for half in halves]
            self._down = [PlainWeight(part.contiguous()) for part in down.tensor.chunk(order.own_k_splits, 2)]
        self._own = value.own if self._ranks.world > 1 else None
        experts = self.shape.num_experts * (self._ranks.world if self._own else 1)
        self._counts = torch.zeros(experts, dtype=torch.int32, device=device)
        self._spare = [torch.zeros_like(self._counts)] * spare  # of all splits but the last
        self.slots: RoutedFactors | None = None
        if value.down.terms:
            self.slots = RoutedFactors(Factors.of(value.gate_up, device), Factors.of(value.down, device))

    def weights(self) -> Iterator[Tensor]:
        """See :class:`preheat.backends.base.layers.HasWeights`."""
        for weight in (*self._gate_up, *self._down):
            yield from weight.tensors
        biases = () if self._between is None else self._between[:2]
        yield from (each for each in (*biases, *self._scales) if each is not None)

    def state(self) -> tuple[Tensor, ...]:
        """See :class:`preheat.backends.base.layers.HasWeights`."""
        counts = self._counts, *self._spare
        return counts if self.slots is None else (*counts, *self.slots.matrices)

    @property
    def fused_input(self) -> QuantizedInput | None:
        """How the norm before experts may quantize their rows; terms read them plain."""
        found = self._gate_up[0].quantized_input
        return found if found is None or self.slots is None else found.beside_plain()

    def __call__(self, x: Rows, logits: Tensor) -> Tensor:
        """Return the outputs, a new tensor [tokens, hidden], equal on all ranks.

        ``x`` is [tokens, hidden], ``logits`` [tokens, experts].
        """
        config = self.configs.experts(self.shape, len(x))
        blocks = None if self.slots is None else self._rows.blocks
        if self._own is not None:
            return self._dealt(config, x, logits, self._own)
        if not self._split:
            return self.by(config, x, logits, apart=blocks is not None)
        if blocks is not None:
            return self._with_terms(config, cast(Tensor, x), logits, blocks)
        partial = self._partial(config, x, logits, self._ranks)
        if self._ranks.world == 1:
            return partial.to(self.shape.dtype)
        return self._ranks.sum(partial, None, self.shape.dtype)

    def join(
        self, x: Rows, router: Callable[[Rows], Tensor], norm: Norm, residual: Tensor, how: FusedInput | None
    ) -> Tensor | QuantizedRows | None:
        """See :data:`preheat.backends.base.layers.Join`; only for experts that ranks share, in a step without terms.

        ``router`` returns the logits of ``x``.
        """
        shared = self._split and self._own is None and self._ranks.world > 1
        if not shared or (self.slots is not None and self._rows.blocks is not None):
            return None
        rows, size = residual.shape
        joined = self._ranks.joining(rows, size) or self._ranks.sharing(rows, size, residual.dtype)
        if joined is None:
            return None
        config = self.configs.experts(self.shape, len(x))
        return joined(self._partial(config, x, router(x), self._ranks), None, norm, residual, how)

    def local(self, config: ExpertsConfig, x: Rows, logits: Tensor, *, apart: bool = False) -> Tensor:
        """Return the outputs [tokens, hidden] of this rank alone by the kernels of ``config``.

        Outputs of experts that ranks share are fp32. ``apart``: use the launches of a step with terms. Terms are added
        if a step is described, except the term that joins a token's sum.
        """
        if not self._split:
            return self.by(config, x, logits, apart=apart)
        if apart:
            return self._apart(config, cast(Tensor, x), logits, self._rows.blocks)[0]
        return self._partial(config, x, logits, RankSums())

    def by(self, config: ExpertsConfig, x: Rows, logits: Tensor, *, apart: bool = False) -> Tensor:
        """Return the outputs of experts that no ranks share by the kernels of ``config``.

        ``apart`` as for :meth:`local`.
        """
        with self._counting():
            return combine(*self._rows_of(config, x, logits, self._added if apart else None))

    @property
    def has_slots(self) -> bool:
        """Whether :meth:`unsummed` has rows of all slots: not of experts on several ranks, nor in a step with terms."""
        return self._own is None and not self._split and (self.slots is None or self._rows.blocks is None)

    def unsummed(self, x: Rows, logits: Tensor) -> Unsummed:
        """Return the rows of all slots; see :data:`preheat.backends.base.layers.Close`."""
        with self._counting():
            return self._rows_of(self.configs.experts(self.shape, len(x)), x, logits, None)

    def _rows_of(self, config: ExpertsConfig, x: Rows, logits: Tensor, adding: Adding | None) -> Unsummed:
        """Return the rows of all slots by the kernels of ``config``."""
        config = self._with_biases(config)
        arrangement = self._arranged(config, logits)
        rows = experts_rows(config, x, self._gate_up[0], self._down[0], arrangement, adding, self._between)
        return Unsummed(rows, arrangement)

    def _arranged(self, config: ExpertsConfig, logits: Tensor, own: tuple[int, int] | None = None) -> Arrangement:
        """Return the arrangement of a step's rows for the kernels of ``config``; ``own`` as for :func:`arrange`."""
        counts = self._counts[: self.shape.num_experts] if own is None else self._counts
        streamed = streams(config.gate_up, self._gate_up[0])
        return arrange(logits, self.value.routing, config.block, counts, self._scales, own, largest_first=streamed)

    def _with_biases(self, config: ExpertsConfig) -> ExpertsConfig:
        """Return ``config``, or tiles if these experts have biases."""
        return with_biases(config) if self._between is not None and self._between.gate_up is not None else config

    def _dealt(self, config: ExpertsConfig, x: Rows, logits: Tensor, own: tuple[int, int]) -> Tensor:
        """Return the outputs of experts that are dealt to ranks; this one has the numbers ``own``."""
        config = self._with_biases(config)
        with self._counting():
            arrangement = self._arranged(config, logits, own)
            rows = experts_rows(config, x, self._gate_up[0], self._down[0], arrangement, between=self._between)
            return combine(self._ranks.gather(by_slots(rows, arrangement)), arrangement)

    def _added(self, y: Tensor, x: Tensor, arrangement: Arrangement, first: bool) -> Tensor:
        blocks, slots = self._rows.blocks, cast(RoutedFactors, self.slots)
        if blocks is None:
            return y
        return add_experts(y, x, slots.gate_up if first else slots.down, blocks, arrangement, gathered=first)

    def _with_terms(self, config: ExpertsConfig, x: Tensor, logits: Tensor, blocks: Blocks) -> Tensor:
        """Return the outputs of experts that ranks share in a step with terms."""
        down = cast(RoutedFactors, self.slots).down
        partial, kept = self._apart(config, x, logits, blocks)
        mine = shrink_slots(kept, down, blocks)
        if self._ranks.world == 1:
            return expand_tokens(partial.to(x.dtype), mine[None], kept, down, blocks)
        found = self._ranks.gather(torch.cat((mine.view(-1), partial.view(-1))))
        first = mine.numel()
        y = add_ranks(found[:, first:].unflatten(1, partial.shape), None, x.dtype)
        return expand_tokens(y, found[:, :first], kept, down, blocks)

    def _partial(self, config: ExpertsConfig, x: Rows, logits: Tensor, ranks: RankSums) -> Tensor:
        """Return this rank's share of the sum: fp32 [tokens, hidden]."""
        if len(self._down) == 1:
            with self._counting():
                arrangement = self._arranged(config, logits)
                inner = experts_layer(config.gate_up, x, self._gate_up[0], arrangement, gated=True)
                return combine(self._splits(config.down, inner, self._down[0], arrangement, ranks), arrangement)

        def inner_of(tile: Tile, arrangement: Arrangement) -> Iterator[Tensor]:
            return (experts_product(tile, x, gate_up, arrangement, gated=True) for gate_up in self._gate_up)

        return self._cut(config, logits, inner_of)

    def _apart(self, config: ExpertsConfig, x: Tensor, logits: Tensor, blocks: Blocks | None) -> tuple[Tensor, Kept]:
        """Return this rank's share of the sum with terms before the activation, and tensors for later terms.

        The share is fp32 [tokens, hidden].
        """
        kept: list[Kept] = []
        gate_up = cast(RoutedFactors, self.slots).gate_up

        def inner_of(tile: Tile, arrangement: Arrangement) -> Iterator[Tensor]:
            size = self.shape.inner
            kept.append(Kept(arrangement, x.new_empty(len(self._down), arrangement.rows, size)))
            shrunk = None if blocks is None else shrink_experts(x, gate_up, blocks, arrangement, gathered=True)
            for split, (weight, to) in enumerate(zip(self._gate_up, kept[0].rows, strict=True)):
                y = experts_product(tile, x, weight, arrangement, gated=False, gathered=True)
                if blocks is not None and shrunk is not None:
                    expand_experts(y, shrunk, gate_up, blocks, arrangement, first=split * size)
                yield silu_and_mul(y, to)

        return self._cut(config, logits, inner_of), kept[0]

    def _cut(self, config: ExpertsConfig, logits: Tensor, inner_of: Inner) -> Tensor:
        """Return the sum of the splits of plain experts; ``inner_of`` yields the activations of each."""
        tiles = _TILES if config.gate_up.kind == "wide" else config
        assert tiles.gate_up.kind == "tile" and tiles.down.kind == "tile"
        with self._counting():
            arrangement = self._arranged(tiles, logits)
            sums = list[Tensor]()
            for rows, down in zip(inner_of(tiles.gate_up, arrangement), self._down, strict=True):
                given = experts_product(tiles.down, rows, down, arrangement, gated=False, dtype=torch.float32)
                last = len(sums) == len(self._down) - 1  # its end makes zeros of the counts; others need them
                sums.append(combine(given, arrangement if last else arrangement._replace(counts=self._spare[0])))
        return tree_sum(sums)

    def _splits(
        self, choice: Tile | Wide | Expanded, inner: Tensor, down: Weight, arrangement: Arrangement, ranks: RankSums
    ) -> Tensor:
        """Return each split of ``inner`` times ``down``: fp32 [splits, arranged rows, hidden]."""
        if choice.kind == "expanded":
            assert choice.choice.kind == "tile"
            return _plain_splits(choice.choice, inner, down.plain(), down.splits, arrangement)
        if choice.kind == "wide":
            return _wide_splits(choice, inner, down, arrangement)
        if down.form == "plain" or down.scheme.activations != "token" or ranks.world == 1:
            return experts_splits(choice, inner, down, arrangement)
        places = None if arrangement.block == 1 else arrangement.places
        return experts_splits(choice, quantize_parts(inner, ranks, places), down, arrangement)

    @contextmanager
    def _counting(self) -> Iterator[None]:
        """Make zeros of the counts after an error.

        Memory may have run out between their use and its end.
        """
        try:
            yield
        except BaseException:
            self._counts.zero_()
            raise


def _wide_splits(choice: Wide, inner: Tensor, down: Weight, arrangement: Arrangement) -> Tensor:
    """Return the splits of plain ``down`` by Hopper's kernel for many rows, in a launch for each split."""
    y = down.room(down.splits, arrangement.rows, down.shape[1], dtype=torch.float32)
    for x, part, to in zip(inner.chunk(down.splits, 1), down.plain().chunk(down.splits, 2), y, strict=True):
        wide(choice, x, PlainWeight(part), None, False, to, arrangement.experts, arrangement.starts)
    return y


def _plain_splits(tile: Tile, inner: Tensor, down: Tensor, splits: int, arrangement: Arrangement) -> Tensor:

    def product(x: Tensor, part: Tensor) -> Tensor:
        weight = PlainWeight(part.contiguous())
        return experts_product(tile, x.contiguous(), weight, arrangement, gated=False, dtype=torch.float32)

    return torch.stack([product(*each) for each in zip(inner.chunk(splits, 1), down.chunk(splits, 2), strict=True)])
