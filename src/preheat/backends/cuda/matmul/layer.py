"""The linear layer of a value on CUDA: product, terms, exchange between ranks, and finish.

Terms. Rows shrink (:mod:`preheat.backends.cuda.matmul.lora.shrink`) beside the layer's own product: it does not read
the result. Behind both they are expanded (:mod:`preheat.backends.cuda.matmul.lora.expand`), and the activation is
applied. Rows without an adapter get nothing added. The memory of a term is taken before the memory of the product,
because kernels begin before the kernels ahead of them have ended. The number of outputs changes no bit of a term: a sum
is a part of the inputs, or a tile of ranks, in the order of the matrix unit, whatever else is in the launch.

Ranks. If ranks share the inputs of a layer, each rank adds its own splits, and the ranks exchange the fp32 sums. Shrunk
rows lie ahead of the sums in memory, so one exchange moves both. Every rank expands all outputs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import cast

import torch
from torch import Tensor

from preheat.backends.base.layers import ALONE, FusedInput, LayerContext, LayerWeights, Norm
from preheat.backends.cuda.device.hopper import is_hopper
from preheat.backends.cuda.matmul.config import KernelConfig, LinearShape, rows_at_once, shape_of
from preheat.backends.cuda.matmul.kernels import KernelConfigs
from preheat.backends.cuda.matmul.linear import apply
from preheat.backends.cuda.matmul.lora.blocks import BLOCK, Blocks, CudaAdapterRows
from preheat.backends.cuda.matmul.lora.expand import Expansion, expand
from preheat.backends.cuda.matmul.lora.slots import Factors
from preheat.backends.cuda.matmul.weights import DeviceWeight, PlainWeight, Weight, can_be_shuffled
from preheat.backends.cuda.pointwise.activation import activate, cap, clip, scaled
from preheat.backends.cuda.pointwise.norm import CudaNorm, QuantizedInput, normed_rows
from preheat.backends.cuda.pointwise.quantize import quantize_parts
from preheat.backends.cuda.ranks.collective import Carrier, Landing, RankSums, add_ranks
from preheat.backends.layer import stored_among
from preheat.ops.quantization import QuantizedRows, QuantizedWeight, plain_rows
from preheat.ops.values import Matmul, SumOrder


def stored(weight: Tensor | QuantizedWeight, order: SumOrder) -> Weight:
    """Return a layer's ``weight`` as the kernels read it; a plain one as it lies in memory."""
    splits = order.own_k_splits if order.is_split else 1
    if isinstance(weight, Tensor):
        return PlainWeight(weight, splits)
    if order.is_split:
        return DeviceWeight.of(weight, splits=splits)
    return DeviceWeight.of(weight, shuffled=is_hopper(weight.codes.device) and can_be_shuffled(weight))


class Layer:
    """The layer of ``value``; ``configs`` choose the kernel for a number of rows.

    A step without adapters launches the kernels of an engine without adapters.
    """

    def __init__(
        self,
        value: Matmul,
        weights: LayerWeights,
        configs: KernelConfigs,
        device: torch.device,
        context: LayerContext = ALONE,
    ) -> None:
        finish, self._weight, self._bias = value.finish, stored(weights.weight, value.order), weights.bias
        self.value, self.configs = value, configs
        self._gated = finish.activation == "silu_and_mul"
        self._activation, self._limit = None if self._gated else finish.activation, finish.clip
        self._factor, self._cap = finish.factor, finish.cap
        self._split, self._ranks = value.order.is_split, cast(RankSums, context.ranks or RankSums())
        self.shape = shape_of(value)._replace(
            bias=self._bias is not None and not self._split,
            shuffled=self._weight.shuffled,
            bf16_scales=self._weight.bf16_scales,
        )
        self._rows: CudaAdapterRows = context.rows
        self.slots = Factors.of(value, device, context.ranks) if value.terms else None

    @property
    def shapes(self) -> tuple[LinearShape, ...]:
        """The keys of kernel choices: the layer, and with terms also its product before the activation."""
        return (self.shape,) if self.slots is None or self._split else (self.shape, self._product)

    @property
    def adapted(self) -> bool:
        """Whether rows may shrink beside kernels of the layer, or inside of them."""
        return self.slots is not None and not self._split

    @property
    def _product(self) -> LinearShape:
        """The shape of the layer's product, before a term and an activation."""
        return self.shape._replace(gated=False)

    def weights(self) -> Iterator[Tensor]:
        """See :class:`preheat.backends.base.layers.HasWeights`."""
        yield from self._weight.tensors
        if self._bias is not None:
            yield self._bias

    def state(self) -> tuple[Tensor, ...]:
        """See :class:`preheat.backends.base.layers.HasWeights`."""
        return () if self.slots is None else self.slots.matrices

    def stored(self) -> tuple[Tensor, Tensor | None]:
        """See :class:`preheat.backends.base.layers.Layer`."""
        return stored_among(self.value, self.weights())

    @property
    def fused_input(self) -> QuantizedInput | None:
        """How the norm before the layer may quantize its rows; terms read them plain.

        Ranks that share the inputs quantize them after an exchange.
        """
        found = None if self._split else self._weight.quantized_input
        return found if found is None or self.slots is None else found.beside_plain()

    def __call__(self, x: Tensor | QuantizedRows, out: Tensor | None = None) -> Tensor:
        """``x`` [rows, inputs of this rank], at least one row -> [rows, outputs], half as many if gated.

        The result is a new tensor, or ``out`` where at most a factor or a cap follows the sum. Both are contiguous.
        """
        blocks = None if self.slots is None else self._rows.blocks_for(len(x))
        room = out if self._activation is None and self._limit is None else None
        if self._split:
            y = self._shared(cast(Tensor, x), blocks)
        elif blocks is None:
            y = self.by(self.configs(self.shape, len(x)), x, room)
        else:
            y = self._with_terms(x, blocks, room)
        if self._activation is not None:
            y = activate(y, self._activation)
        if self._factor is not None:
            return scaled(y, self._factor, out)
        if self._cap is not None:
            return cap(y, self._cap, out)
        return y if self._limit is None else clip(y, self._limit)

    def by(
        self, choice: KernelConfig, x: Tensor | QuantizedRows, out: Tensor | None = None,
        terms: Expansion | None = None, *, gated: bool | None = None,
    ) -> Tensor:  # fmt: skip
        """Return the product by the kernel ``choice``; the kernel adds ``terms``.

        ``gated`` overrides the gate of the layer.
        """
        return apply(choice, x, self._weight, self._bias, self._gated if gated is None else gated, out, terms)

    def _with_terms(self, x: Tensor | QuantizedRows, blocks: Blocks, out: Tensor | None) -> Tensor:
        slots, rows = cast(Factors, self.slots), plain_rows(x)
        given, to = slots.room(rows, blocks)  # before the product takes memory
        wide = self.configs.wide(self.shape, len(x)) if blocks.size > BLOCK else None
        if wide is not None and slots.fit(wide):
            slots.shrink(given, to, blocks, beside=False)
            return self.by(wide, rows, out, slots.gathered(to))
        choice, beside = self._choice(len(x))
        y = self.by(choice, x, None if self._gated else out, gated=False)
        return slots.add(y, given, to, blocks, beside=beside, gated=self._gated, out=out)

    def _choice(self, rows: int) -> tuple[KernelConfig, bool]:
        """Return the kernel of the product, and whether rows shrink beside it.

        cuBLAS lets nothing begin before it ends. Kernels of quantized layers that stream weights let the next kernel
        begin before they have waited for x.
        """
        choice = self.configs.own(self._product, rows)
        if choice.kind == "tile":
            return choice, self.shape.scheme is None or not choice.bulk
        return choice, choice.kind == "wide"

    def _shared(self, x: Tensor, blocks: Blocks | None) -> Tensor:
        """Return the outputs if ranks share the inputs of the layer, equal on all ranks."""
        size = len(x), self.shape.outputs
        if blocks is None and self._ranks.world > 1:
            return self._exchanged(x)
        if blocks is None:
            return self._sum(x, self._bias, x.new_empty(size))
        slots = cast(Factors, self.slots)
        given, to = slots.room(x, blocks)  # before the product takes memory
        if self._ranks.world == 1:
            return slots.add(self._sum(x, self._bias, x.new_empty(size)), given, to, blocks, beside=True)
        first = to.shrunk.numel()
        mine = x.new_empty(first + len(x) * self.shape.outputs, dtype=torch.float32)
        shrunk = mine[:first].view(to.shrunk.shape)
        self.partial(x, mine[first:].view(size))
        slots.shrink(given, to._replace(shrunk=shrunk), blocks, beside=True, scaled=False)
        found = self._ranks.gather(mine)
        slots.add_roots(found[:, :first], to)
        y = add_ranks(found[:, first:].unflatten(1, size), self._bias, x.dtype)
        return expand(y, to, slots.bounds)

    def _exchanged(self, x: Tensor) -> Tensor:
        """Return the sum over ranks."""
        size = len(x), self.shape.outputs
        carrier = self._ranks.carrier
        if carrier is None or not (landings := self._landings(carrier, len(x))):
            return self._ranks.sum(self.partial(x, x.new_empty(size, dtype=torch.float32)), self._bias, x.dtype)
        out = x.new_empty(size)
        for landing in self._sent(x, carrier, landings):
            carrier.add(landing, self._bias, out)
        return out

    def _landings(self, carrier: Carrier, rows: int) -> list[Landing]:
        """Return how sums of many rows travel to the rank that adds them while others are computed."""
        at_once = rows_at_once(self.configs(self.shape, rows), self.shape.outputs)
        return [] if at_once is None else carrier.landings(rows, self.shape.outputs, at_once)

    def _sent(self, x: Tensor, carrier: Carrier, landings: Iterable[Landing]) -> Iterator[Landing]:
        """Compute and send this rank's sums of each landing, and yield it."""
        rows, choice = self._quantized(x), self.configs(self.shape, len(x))
        for landing in landings:
            for part, sums in carrier.places(landing, self.shape.outputs):
                apply(choice, rows[part], self._weight, None, False, sums)
            yield landing

    def join(self, x: Tensor, norm: Norm, residual: Tensor, how: FusedInput | None) -> Tensor | None:
        """See :data:`preheat.backends.base.layers.Join`; only for a layer of several ranks without rows of adapters."""
        plain = self._activation is None and self._limit is None and self._factor is None and self._cap is None
        adapted = self.slots is not None and self._rows.blocks_for(len(x)) is not None
        if not self._split or not plain or adapted:
            return None
        assert isinstance(norm, CudaNorm) and (how is None or isinstance(how, QuantizedInput))
        joined, carrier = self._ranks.joining(*residual.shape), self._ranks.carrier
        if joined is None and carrier is not None and (landings := self._landings(carrier, len(x))):
            to = normed_rows(residual, how)
            for landing in self._sent(x, carrier, landings):
                carrier.norm(landing, self._bias, norm, residual, to, how)
            return cast(Tensor, to)
        rows, size = residual.shape
        joined = joined or self._ranks.sharing(rows, size, residual.dtype)
        if joined is None:
            return None
        mine = self.partial(x, x.new_empty(residual.shape, dtype=torch.float32))
        return cast(Tensor, joined(mine, self._bias, norm, residual, how))

    def partial(self, x: Tensor, y: Tensor) -> Tensor:
        """Write to ``y`` fp32 [rows, outputs] the sum of this rank's splits, without the bias."""
        return self._sum(x, None, y)

    def _sum(self, x: Tensor, bias: Tensor | None, y: Tensor) -> Tensor:
        return apply(self.configs(self.shape, len(x)), self._quantized(x), self._weight, bias, False, y)

    def _quantized(self, x: Tensor) -> Tensor | QuantizedRows:
        """Quantize rows that lie on several ranks, if one scale is of a whole row."""
        scheme = self.shape.scheme
        whole = scheme is not None and scheme.activations == "token" and self._ranks.world > 1
        return quantize_parts(x, self._ranks) if whole else x


class Embedding:
    """The term of a table of embeddings, see :class:`preheat.backends.base.layers.Embedding`.

    A token shrinks to a column of the first matrix.
    """

    def __init__(self, value: Matmul, device: torch.device, context: LayerContext) -> None:
        self.slots, self._rows = Factors.of(value, device), cast(CudaAdapterRows, context.rows)

    def weights(self) -> Iterator[Tensor]:
        """See :class:`preheat.backends.base.layers.HasWeights`."""
        return iter(())

    def state(self) -> tuple[Tensor, ...]:
        """See :class:`preheat.backends.base.layers.HasWeights`."""
        return self.slots.matrices

    def add(self, tokens: Tensor, slots: Tensor, last_token: Tensor, out: Tensor) -> None:
        """See :class:`preheat.backends.base.layers.Embedding`."""
        blocks = self._rows.blocks
        if blocks is not None:
            expand(out, self.slots.gather(tokens, slots, last_token, blocks), self.slots.bounds, chosen=True)
