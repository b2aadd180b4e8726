"""Routed experts on CUDA, see :mod:`preheat.ops.moe`: route, arrange, two linear layers of all experts, combine.
In steps with adapters these add to what each layer gives, and the activation is a launch of its own between them: every
row goes through the same kernels, whether it has an adapter or not.

Every expert's rows go through the contract of linear layers (:mod:`preheat.backends.cuda.linear`), so that a token has
the same bits alone, where each slot is a block of its own and nothing is arranged, and among thousands. The host never
waits for the choice of experts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from preheat.backends.cuda.activation import silu_and_mul
from preheat.backends.cuda.linear_hopper import fits, wide
from preheat.backends.cuda.matmul.gemm import experts_product
from preheat.backends.cuda.matmul.weights import DeviceWeight, dequantized_experts, quantized_input, tensors_of
from preheat.backends.cuda.moe_route import Arrangement, arrange, combine, spread
from preheat.backends.cuda.norm import QuantizedInput
from preheat.backends.cuda.quantize import silu_and_quantize
from preheat.backends.cuda.tuning import (
    FP8_REFERENCE,
    REFERENCE,
    SHARED_BYTES,
    Expanded,
    ExpertsEntry,
    LinearShape,
    Table,
    Tile,
    Wide,
    codes_bytes,
    whole_groups,
    without_unaligned_copies,
)
from preheat.ops.kinds import Scheme
from preheat.ops.quantization import QuantizedRows, plain_rows
from preheat.ops.values import Routing

ALONE = 4
"""With so many times more experts than slots, hardly two slots share one: each is a block of its own."""


class ExpertsShape(NamedTuple):
    """What the choice of kernels depends on, but for the number of tokens."""

    num_experts: int
    hidden: int
    inner: int
    top_k: int
    dtype: torch.dtype
    scheme: Scheme | None = None

    @classmethod
    def of(cls, entry: ExpertsEntry) -> ExpertsShape:
        dtype = getattr(torch, entry.dtype)
        return cls(entry.num_experts, entry.hidden, entry.inner, entry.top_k, dtype, entry.scheme)

    @property
    def gate_up(self) -> LinearShape:
        """Of one expert."""
        return LinearShape(2 * self.inner, self.hidden, True, self.dtype, scheme=self.scheme)

    @property
    def down(self) -> LinearShape:
        return LinearShape(self.hidden, self.inner, False, self.dtype, scheme=self.scheme)


class ExpertsConfig(NamedTuple):
    """The kernels of both layers. ``block``: rows of an expert that are computed together, those of both tiles; 1:
    every slot is computed by itself.
    """

    block: int
    gate_up: Tile | Wide | Expanded
    down: Tile | Wide | Expanded

    def entry(self, shape: ExpertsShape, tokens: int, microseconds: float) -> ExpertsEntry:
        """As a table has it."""
        tiles, wides = None, None
        if isinstance(self.gate_up, Tile) and isinstance(self.down, Tile):
            tiles = self.gate_up, self.down
        elif isinstance(self.gate_up, Wide) and isinstance(self.down, Wide):
            wides = self.gate_up, self.down
        return ExpertsEntry(
            *shape[:4], tokens, round(microseconds, 2), self.block, str(shape.dtype).removeprefix("torch."),
            shape.scheme, tiles, wides,
        )  # fmt: skip

    @classmethod
    def of(cls, entry: ExpertsEntry) -> ExpertsConfig:
        """What a table has."""
        layers = entry.tiles or entry.wides
        assert layers is not None
        return cls(entry.block, *layers)


def experts_config(shape: ExpertsShape, tokens: int) -> ExpertsConfig:
    """Guess the kernels for experts and a number of tokens that are in no table."""
    guess = _guess(shape, tokens)
    return guess._replace(
        gate_up=without_unaligned_copies(guess.gate_up, shape.gate_up),
        down=without_unaligned_copies(guess.down, shape.down),
    )


def _guess(shape: ExpertsShape, tokens: int) -> ExpertsConfig:
    """Guess the kernels as if every row of weights could be copied in bulk."""
    slots = tokens * shape.top_k
    alone = slots * ALONE <= shape.num_experts
    if shape.scheme is not None:
        rows = 16 if slots <= 16 * shape.num_experts else 64
        deep = 256 if alone and whole_groups(shape.scheme) else 128
        tiles = (_codes_tile(layer, rows, deep) for layer in (shape.gate_up, shape.down))
        return ExpertsConfig(1 if alone else rows, *tiles)
    if shape.dtype != torch.bfloat16:
        return ExpertsConfig(1 if alone else PLAIN[shape.dtype].block, *PLAIN[shape.dtype][1:])
    mean = slots / shape.num_experts
    if alone:
        return ExpertsConfig(1, Tile(128, 16, 64, 4, 6, True), Tile(128, 16, 128, 4, 4, True))
    if mean <= 12:
        return ExpertsConfig(16, Tile(64, 16, 128, 4, 3, True), Tile(128, 16, 128, 4, 3, True))
    if mean <= 24:
        return ExpertsConfig(32, Tile(128, 32, 128, 4, 3, True), Tile(128, 32, 64, 4, 3, True))
    if mean <= 48 or not (fits(shape.gate_up) and fits(shape.down)):
        return ExpertsConfig(64, Tile(128, 64, 64, 4, 4, True), Tile(128, 64, 64, 4, 3, True))
    return ExpertsConfig(128, Wide(256, 128, 4), Wide(128, 128, 6) if mean <= 1024 else Wide(256, 128, 4))


def _codes_tile(layer: LinearShape, rows: int, deep: int) -> Tile:
    """A tile of codes with four stages, or as many as fit into shared memory: at least two."""
    room = SHARED_BYTES // codes_bytes(layer, 64, rows, deep)
    return Tile(64, rows, deep, 4, max(2, min(4, room)))


PLAIN = {dtype: ExpertsConfig(tile.rows, tile, tile) for dtype, tile in REFERENCE.items()}
"""The plain kernel, whose bits are the contract's."""


def plain_config(shape: ExpertsShape) -> ExpertsConfig:
    """What ``shape`` is compared with."""
    if shape.scheme is None:
        return PLAIN[shape.dtype]
    if shape.scheme.activations is not None:
        return ExpertsConfig(64, FP8_REFERENCE, FP8_REFERENCE)
    tile = REFERENCE[shape.dtype]
    return ExpertsConfig(tile.rows, Expanded(tile), Expanded(tile))


class ExpertsConfigs:
    """From experts and a number of tokens to the kernels that serve them. Of several ``tables`` that know experts the
    last one counts.
    """

    def __init__(self, tables: Iterable[Table] = ()) -> None:
        self._entries: dict[ExpertsShape, dict[int, ExpertsConfig]] = {}
        self._made: dict[tuple[ExpertsShape, int], ExpertsConfig] = {}
        for table in tables:
            found: dict[ExpertsShape, dict[int, ExpertsConfig]] = {}
            for entry in table.experts:
                found.setdefault(ExpertsShape.of(entry), {})[entry.tokens] = ExpertsConfig.of(entry)
            self._entries |= found

    def __call__(self, shape: ExpertsShape, tokens: int) -> ExpertsConfig:
        made = self._made.get((shape, tokens))
        if made is None:
            made = self._made[shape, tokens] = self._find(shape, tokens)
        return made

    def _find(self, shape: ExpertsShape, tokens: int) -> ExpertsConfig:
        found = self._entries.get(shape, {})
        size = min((size for size in found if size >= tokens), default=None)
        return experts_config(shape, tokens) if size is None else found[size]

    def reject(self, shape: ExpertsShape, tokens: int) -> None:
        """From now on serve ``tokens`` tokens by the kernel whose order is beyond doubt."""
        self._made[shape, tokens] = plain_config(shape)


Weights = Tensor | DeviceWeight
Rows = Tensor | QuantizedRows
Adding = Callable[[Tensor, Tensor, Arrangement, bool], Tensor]
"""What adds to a layer's outputs, in arranged rows, given its plain inputs; whether it is the first, of tokens."""


def experts_forward(
    config: ExpertsConfig, x: Rows, logits: Tensor, gate_up: Weights, down: Weights, routing: Routing, counts: Tensor,
    adding: Adding | None = None,
) -> Tensor:  # fmt: skip
    """``x`` [tokens, hidden] through the experts by the kernels of ``config``; ``counts`` as for :func:`arrange`.
    ``adding``: to what both layers give, before the activation and before rows are weighted.
    """
    arrangement = arrange(logits, routing, config.block, counts)
    if adding is None:
        inner = experts_layer(config.gate_up, x, gate_up, arrangement, gated=True)
        return combine(experts_layer(config.down, inner, down, arrangement, gated=False), arrangement)
    y = experts_layer(config.gate_up, x, gate_up, arrangement, gated=False, gathered=True)
    rows = activated(adding(y, plain_rows(x), arrangement, True), down)
    z = experts_layer(config.down, rows, down, arrangement, gated=False)
    return combine(adding(z, plain_rows(rows), arrangement, False), arrangement)


def activated(gate_up: Tensor, down: Weights) -> Rows:
    """silu(gate) * up of ``gate_up`` [rows, 2 * inner], as the layer ``down`` reads it, and plain."""
    how = quantized_input(down)
    return silu_and_mul(gate_up) if how is None else silu_and_quantize(gate_up, how.kind, how.static)


def experts_layer(
    choice: Tile | Wide | Expanded, x: Rows, weight: Weights, arrangement: Arrangement, *, gated: bool,
    gathered: bool | None = None,
) -> Tensor:  # fmt: skip
    """One of both layers by the kernel ``choice``, see :func:`preheat.backends.cuda.matmul.gemm.experts_product`."""
    gathered = gated if gathered is None else gathered
    if isinstance(choice, Tile):
        return experts_product(choice, x, weight, arrangement, gated=gated, gathered=gathered)
    assert isinstance(x, Tensor)
    if isinstance(choice, Expanded):
        assert isinstance(weight, DeviceWeight)
        plain = dequantized_experts(weight)
        return experts_layer(choice.choice, x, plain, arrangement, gated=gated, gathered=gathered)  # type: ignore[arg-type]
    assert isinstance(weight, Tensor)
    rows = spread(x, arrangement) if gathered else x
    y = x.new_empty(arrangement.rows, weight.shape[1] // 2 if gated else weight.shape[1])
    wide(choice, rows, weight, None, gated, y, arrangement.experts, arrangement.starts)
    return y


class CudaExperts:
    """The experts of ``gate_up`` [experts, 2 * inner, hidden] and ``down`` [experts, hidden, inner], plain or
    quantized, used as they lie in memory. ``configs`` say which kernels serve a number of tokens.
    """

    slots = None

    def __init__(self, gate_up: Weights, down: Weights, routing: Routing, configs: ExpertsConfigs) -> None:
        self._gate_up, self._down, self._routing, self.configs = gate_up, down, routing, configs
        num_experts, hidden, inner = down.shape
        scheme, codes = (down.scheme, down.codes) if isinstance(down, DeviceWeight) else (None, down)
        self.shape = ExpertsShape(num_experts, hidden, inner, routing.top_k, down.dtype, scheme)
        self._counts = torch.zeros(num_experts, dtype=torch.int32, device=codes.device)

    def weights(self) -> Iterator[Tensor]:
        """See :class:`preheat.backends.base.HasWeights`."""
        return tensors_of(self._gate_up, self._down)

    def state(self) -> tuple[Tensor, ...]:
        """See :class:`preheat.backends.base.HasWeights`."""
        return (self._counts,)

    @property
    def fused_input(self) -> QuantizedInput | None:
        """Of experts with float8 activations: their norm may give them."""
        return quantized_input(self._gate_up)

    def __call__(self, x: Rows, logits: Tensor) -> Tensor:
        """``x`` [tokens, hidden] and ``logits`` [tokens, experts], contiguous -> a new tensor [tokens, hidden]."""
        return self.by(self.configs(self.shape, len(x)), x, logits)

    def local(self, config: ExpertsConfig, x: Rows, logits: Tensor) -> Tensor:
        """What this rank computes by itself: all of it."""
        return self.by(config, x, logits)

    def by(self, config: ExpertsConfig, x: Rows, logits: Tensor, adding: Adding | None = None) -> Tensor:
        """The same by the kernels of ``config``, and with what is ``adding`` to both layers."""
        weights = self._gate_up, self._down
        try:
            return experts_forward(config, x, logits, *weights, self._routing, self._counts, adding)
        except BaseException:
            self._counts.zero_()  # memory may have run out between its use and its end
            raise
