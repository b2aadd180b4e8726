"""The table of kernels of linear layers, and the choice of a kernel. No Triton.

A row says whether a kernel serves a layer, guesses its tiles if no measurement knows the layer, and lists candidates
for measurements. The rule, the tuner and the proof walk these rows; :mod:`preheat.backends.cuda.matmul.linear` launches
them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import NamedTuple, TypeVar

import torch

from preheat.backends.cuda.device.card import PORTABLE, Card, card_of
from preheat.backends.cuda.device.sizes import next_power_of_2
from preheat.backends.cuda.matmul.config import (
    REFERENCE,
    SHARED_BYTES,
    Expanded,
    ExpertsConfig,
    ExpertsShape,
    KernelConfig,
    Library,
    LinearShape,
    Tile,
    Wide,
    codes_bytes,
    experts_reference,
    fits_small_m,
    fits_wide,
    reference,
    small_m_bytes,
    small_m_tile,
    whole_groups,
    wide_float8,
)
from preheat.backends.cuda.matmul.fit import fits, fitted
from preheat.backends.cuda.matmul.rules import (
    FEW_OUTPUTS,
    FEW_ROWS,
    MANY_ROWS,
    codes_rule,
    experts_rule,
    heads_rule,
    large_tiles,
    narrow_wide,
    rounds,
    small_m_rule,
    split_rule,
    split_tile,
    tile_rule,
    wide_guesses,
    wide_split,
)
from preheat.backends.cuda.matmul.tables import Table, tables_for

OWN_ROWS = 64
"""Up to so many rows, layers with adapters use our kernels even if cuBLAS is a little faster: rows shrink beside our
kernels, and would wait for cuBLAS.
"""

ADDED_ROWS = 1024
"""From so many rows on, the kernel for many rows on Hopper adds terms to its own outputs, by measurement on an H200: to
write the outputs and read them again takes longer.
"""

NARROW = [(16, 256), (16, 512), (32, 128), (32, 256), (32, 512), (64, 64), (64, 128), (64, 256), (128, 64), (128, 128)]
MIDDLE = [(64, 64), (64, 128), (128, 64), (128, 128)]
BROAD = [(64, 64), (128, 64), (256, 64)]
WIDE = [Wide(256, 128, 4), Wide(128, 256, 4), Wide(128, 128, 6), Wide(64, 128, 6)]


class Kernel(NamedTuple):
    """A row of the table.

    ``serves`` says whether the kernel can run a layer; ``hopper``: only on Hopper. ``guess`` gives its tiles for a
    number of rows, or None if another kernel is better. ``candidates`` are worth measuring.
    """

    name: str
    serves: Callable[[LinearShape], bool]
    guess: Callable[[LinearShape, int], KernelConfig | None]
    candidates: Callable[[LinearShape, int], Iterable[KernelConfig]]
    hopper: bool = False


def _none(shape: LinearShape, rows: int) -> tuple[KernelConfig, ...]:
    """Try nothing."""
    return ()


def _expanded(shape: LinearShape, rows: int) -> Expanded | None:
    """Guess the kernel of the dequantized layer for ``MANY_ROWS`` rows or more."""
    if rows < MANY_ROWS:
        return None
    return Expanded(rule(shape._replace(scheme=None, shuffled=False, bf16_scales=False), rows).multiplies)


def _library(shape: LinearShape, rows: int) -> Library | None:
    many = rows >= FEW_ROWS and rows * shape.columns >= FEW_OUTPUTS
    return Library() if many and shape.dtype == torch.bfloat16 else None


def _tiles(shape: LinearShape, rows: int) -> Iterator[Tile]:
    """Yield tiles of plain weights, with the copy engine and without."""
    if rows > 2048 or shape.dtype == torch.float32:
        return
    for height, (outputs, inputs), stages, bulk in product(*_sizes(rows), (False, True)):
        yield from fitting_tiles(shape, height, outputs, inputs, stages, bulk=bulk)


def fitting_tiles(
    shape: LinearShape, rows: int, outputs: int, inputs: int, stages: int, *, bulk: bool
) -> Iterator[Tile]:
    """Yield a tile of these sizes with each number of warps, if it divides the inputs and fits into a processor."""
    for warps in _warps(outputs, rows, shape.gated):
        tile = Tile(outputs, rows, inputs, warps, stages, bulk)
        if shape.inputs % inputs == 0 and _fits(tile, shape.gated):
            yield tile


def _on_codes(shape: LinearShape, rows: int) -> Iterator[Tile]:
    """Yield tiles of codes. Tiles that multiply in float8 have at least 64 outputs and four warps."""
    if shape.scheme is None or shape.shuffled:
        return
    height = min(max(16, next_power_of_2(rows)), 256)
    widths = (64, 128) if shape.scheme.activations or rows > 64 else (16, 32, 64, 128)
    depths = (128, 256, 512) if rows <= 32 else (128, 256) if rows <= 64 else (128,)
    if shape.scheme.activations is None:  # deeper ones take the compiler half a minute
        depths = depths[:2] if whole_groups(shape.scheme) else (128,)
    heights = sorted({height, min(height, 64), min(height, 128)})
    for outputs, each, depth, stages in product(widths, heights, depths, (2, 3, 4, 6, 8)):
        registers = outputs * each * (3 if shape.gated else 2) <= 192 * 256  # accumulators, and products to add
        memory = codes_bytes(shape, outputs, each, depth) * stages
        if registers and (depth == 128 or shape.inputs % depth == 0) and 24_000 < memory < SHARED_BYTES:
            fewest = 8 if outputs * each > 64 * 64 else min(4, outputs // 16)
            # codes that become numbers keep more threads busy than the product alone
            for warps in (fewest,) if shape.scheme.activations else sorted({fewest, 4, 8} - set(range(fewest))):
                yield Tile(outputs, each, depth, warps, stages)


def _streamed(shape: LinearShape, rows: int) -> Iterator[Tile]:
    """Yield tiles of the kernel for few rows on Hopper; of four bits only the rule's.

    Alone, as measured, shallow rings are as fast; in a model they are slower, where a ring fills while the kernels
    ahead run.
    """
    if rows > 256:
        return
    if shape.shuffled:
        yield small_m_rule(shape, rows)
        return
    for height in sorted({max(8, min(next_power_of_2(rows), most)) for most in (32, 64)}):
        for stages in (2, 3, 4, 6, 8, 12, 16):
            tile = small_m_tile(shape, height, stages)
            if small_m_bytes(shape, tile) < SHARED_BYTES:
                yield tile


def _sizes(rows: int) -> tuple[Sequence[int], Sequence[tuple[int, int]], Sequence[int]]:
    """Rows of a tile; its outputs and inputs; stages."""
    if rows <= 64:
        return [max(16, next_power_of_2(rows))], NARROW if rows <= 16 else MIDDLE, (3, 4, 6, 8)
    if rows <= 384:
        return [height for height in (64, 128, 256) if height < 2 * rows], BROAD, (3, 4)
    return [128, 256], BROAD[1:], (3, 4)


def _warps(outputs: int, height: int, gated: bool) -> tuple[int, ...]:
    """Return numbers of warps that keep an accumulator in registers and give each warp sixteen outputs."""
    numbers = outputs * height * (2 if gated else 1)
    if numbers > 64 * 512:
        return ()
    if numbers >= 16 * 1024:
        return (8,)
    return (4, 8) if outputs >= 128 and height >= 32 else (max(1, min(4, outputs // 16)),)


def _fits(tile: Tile, gated: bool) -> bool:
    size = (tile.outputs * (2 if gated else 1) + tile.rows) * tile.inputs * 2 * tile.stages
    return 60_000 < size < SHARED_BYTES


def _plain(shape: LinearShape) -> bool:
    return shape.scheme is None and not shape.splits


def _codes(shape: LinearShape) -> bool:
    return shape.scheme is not None and not shape.splits


def _splits(shape: LinearShape, rows: int) -> Iterator[KernelConfig]:
    """Yield kernels for a layer with splits of its inputs.

    cuBLAS is none of them where Hopper's kernel serves many rows: ranks exchange the sums of one part of the rows while
    that kernel computes the next one.
    """
    if shape.scheme is not None:
        yield from _on_codes(shape.of_split, rows)
        return
    if shape.dtype != torch.bfloat16:
        return
    if wide_split(shape, rows) is None and shape.inputs // shape.splits % 8 == shape.outputs % 8 == 0:
        yield Library()
    if rows <= 2048:
        for height, (outputs, inputs), stages, bulk in product(*_sizes(rows), (False, True)):
            for warps in _warps(outputs, height, True):  # sums of two splits
                tile = Tile(outputs, height, inputs, warps, stages, bulk)
                if shape.inputs // shape.splits % inputs == 0 and _fits(tile, False):
                    yield tile


def _wide_float8(shape: LinearShape, rows: int) -> Iterator[Wide]:
    """Yield tiles of Hopper's kernel for many rows in float8."""
    if rows >= 64:
        yield from large_tiles(shape)


def _wide_splits(shape: LinearShape, rows: int) -> Iterator[Wide]:
    """Yield tiles of Hopper's kernel for many rows whose registers have room for the sums of two splits."""
    if rows >= 128 and shape.splits in (1, 2) and shape.inputs // shape.splits % 64 == 0:
        yield from (Wide(128, 128, 6), Wide(64, 128, 6))


KERNELS = (
    Kernel(
        "splits, many rows", lambda shape: shape.splits > 0 and fits_wide(shape), wide_split, _wide_splits, hopper=True
    ),
    Kernel(
        "float8, many rows", wide_float8, lambda shape, rows: next(iter(wide_guesses(shape, rows)), None),
        _wide_float8, hopper=True,
    ),
    Kernel(
        "dequantized", lambda shape: _codes(shape) and shape.scheme.activations is None,  # type: ignore[union-attr]
        _expanded,
        lambda shape, rows: [Expanded(Library())] if rows >= 128 else [],
    ),
    Kernel("codes, few rows", fits_small_m, small_m_rule, _streamed, hopper=True),
    Kernel("splits", lambda shape: shape.splits > 0, split_rule, _splits),
    Kernel("codes", _codes, codes_rule, _on_codes),
    Kernel("cuBLAS", _plain, _library, lambda shape, rows: (Library(), Library(split=True))),
    Kernel(
        "many rows", lambda shape: fits_wide(shape) and not shape.splits, narrow_wide,
        lambda shape, rows: WIDE if rows >= 128 else (), hopper=True,
    ),
    Kernel("tiles", _plain, tile_rule, _tiles),
)  # fmt: skip
"""The rule asks kernels in this order."""


def serving(shape: LinearShape, card: Card) -> Iterator[Kernel]:
    """Yield the kernels that serve a layer on ``card``, best guesses first."""
    return (kernel for kernel in KERNELS if (card.is_hopper or not kernel.hopper) and kernel.serves(shape))


def rule(shape: LinearShape, rows: int, *, card: Card = PORTABLE) -> KernelConfig:
    """Guess the kernel for a layer that is in no table."""
    guesses = (kernel.guess(shape, rows) for kernel in serving(shape, card))
    return fitted(next(guess for guess in guesses if guess is not None), shape, card)


def candidates(shape: LinearShape, rows: int, *, card: Card = PORTABLE) -> Iterator[KernelConfig]:
    """Yield everything worth measuring for ``rows`` rows of a layer on ``card``, the rule's guess first."""
    guess = rule(shape, rows, card=card)
    yield guess
    for kernel in serving(shape, card):
        found = (choice for choice in kernel.candidates(shape, rows) if fits(choice, shape, card))
        yield from (choice for choice in found if choice != guess)


class KernelConfigs:
    """From a layer or experts and a number of rows to the kernels that serve them.

    Of several ``tables`` that know a layer the last one counts. ``invariant``: only kernels that keep the contract's
    order. Guesses are for ``card``.
    """

    def __init__(self, tables: Iterable[Table] = (), *, invariant: bool = True, card: Card = PORTABLE) -> None:
        self.invariant, self._card = invariant, card
        self._entries: dict[LinearShape, dict[int, KernelConfig]] = {}
        self._own: dict[LinearShape, dict[int, KernelConfig]] = {}
        self._routed: dict[ExpertsShape, dict[int, ExpertsConfig]] = {}
        self._made: dict[tuple[LinearShape, int], KernelConfig] = {}
        self._made_heads: dict[tuple[LinearShape, int, int], Tile] = {}
        self._made_routed: dict[tuple[ExpertsShape, int], ExpertsConfig] = {}
        for table in tables:
            self._entries |= _by_shape(table, invariant)
            self._own |= _by_shape(table, invariant, own=True)
            routed: dict[ExpertsShape, dict[int, ExpertsConfig]] = {}
            for entry in table.experts:
                routed.setdefault(entry.shape, {})[entry.tokens] = entry.choice
            self._routed |= routed

    def __call__(self, shape: LinearShape, rows: int) -> KernelConfig:
        """Return the kernel for ``rows`` rows of a layer."""
        made = self._made.get((shape, rows))
        if made is None:
            made = self._made[shape, rows] = self._find(shape, rows)
        return made

    def _find(self, shape: LinearShape, rows: int) -> KernelConfig:
        known = shape._replace(bias=False, bf16_scales=False)
        return _up_to(self._entries, known, rows) or rule(shape, rows, card=self._card)

    def experts(self, shape: ExpertsShape, tokens: int) -> ExpertsConfig:
        """Return the kernels for ``tokens`` tokens of experts."""
        made = self._made_routed.get((shape, tokens))
        if made is None:
            made = _up_to(self._routed, shape, tokens) or experts_rule(shape, tokens, card=self._card)
            self._made_routed[shape, tokens] = made
        return made

    def heads(self, shape: LinearShape, rows: int, heads: int) -> Tile:
        """Return the kernel for ``rows`` rows of layers of ``heads`` heads, each of ``shape``."""
        made = self._made_heads.get((shape, rows, heads))
        if made is None:
            guess = fitted(heads_rule(shape, rows, heads), shape, self._card)
            assert guess.kind == "tile"
            made = self._made_heads[shape, rows, heads] = guess
        return made

    def own(self, shape: LinearShape, rows: int) -> KernelConfig:
        """Return the kernel if rows shrink beside it: not cuBLAS up to ``OWN_ROWS`` rows."""
        found = self(shape, rows)
        if rows > OWN_ROWS or found.kind != "library":
            return found
        known = _up_to(self._own, shape._replace(bias=False, bf16_scales=False), rows)
        return known or fitted(tile_rule(shape, rows), shape, self._card)

    def wide(self, shape: LinearShape, rows: int) -> Wide | None:
        """Return the kernel for many rows on Hopper, if it pays that it adds low-rank terms itself.

        It is used even if cuBLAS is faster, unless it has too few tiles.
        """
        many = self._card.is_hopper and rows >= ADDED_ROWS and fits_wide(shape) and self(shape, rows).kind != "tile"
        guesses = wide_guesses(shape, rows) if many else []
        return min(guesses, key=lambda choice: rounds(shape, rows, choice), default=None)

    def used(self, shape: LinearShape, rows: int, *, adapted: bool) -> list[KernelConfig]:
        """Return all kernels that may serve ``rows`` rows of a layer; an ``adapted`` layer has terms."""
        found = [self(shape, rows)]
        if adapted:
            found += [self.own(shape, rows), self.wide(shape, rows) or found[0]]
        return list(dict.fromkeys(found))

    def reject(self, shape: LinearShape, rows: int) -> None:
        """Serve ``rows`` rows by the reference, or of plain weights by the best guess besides cuBLAS, from now on."""
        if shape.scheme is not None:
            self._made[shape, rows] = reference(shape)
            return
        guesses = [split_tile] if shape.splits else [kernel.guess for kernel in serving(shape, self._card)]
        ours = [each for guess in guesses if (each := guess(shape, rows)) is not None and each.kind != "library"]
        left = (each for each in ours if each != self(shape, rows))
        self._made[shape, rows] = fitted(next(left, ours[-1]), shape, self._card)

    def reject_experts(self, shape: ExpertsShape, tokens: int) -> None:
        """Serve ``tokens`` tokens of experts by the reference from now on."""
        self._made_routed[shape, tokens] = experts_reference(shape)

    def reject_heads(self, shape: LinearShape, rows: int, heads: int) -> None:
        """Serve ``rows`` rows of layers of heads by the reference from now on."""
        self._made_heads[shape, rows, heads] = REFERENCE[shape.dtype]

    def withdraw(self, shape: LinearShape, rows: int) -> None:
        """Serve ``rows`` rows by the reference from now on: the chosen kernel does not compile."""
        self._made[shape, rows] = reference(shape)


S = TypeVar("S")
C = TypeVar("C")


def _up_to(entries: Mapping[S, Mapping[int, C]], shape: S, rows: int) -> C | None:
    """Return the choice that was measured for the least number of rows that is no less than ``rows``."""
    found = entries.get(shape, {})
    size = min((size for size in found if size >= rows), default=None)
    return None if size is None else found[size]


def _by_shape(table: Table, invariant: bool, *, own: bool = False) -> dict[LinearShape, dict[int, KernelConfig]]:
    found: dict[LinearShape, dict[int, KernelConfig]] = {}
    for entry in sorted(table.entries, key=lambda entry: not entry.ordered):
        if entry.own == own and (entry.ordered or not invariant):
            found.setdefault(entry.shape, {})[entry.rows] = entry.choice
    return found


def kernel_configs(
    device: str, capability: tuple[int, int], folder: Path | None, *, invariant: bool = True
) -> KernelConfigs:
    """Return the choices for linear layers on a GPU of this name and compute capability."""
    card = card_of(capability)
    assert card is not None, "obstacle refuses other cards"
    return KernelConfigs(tables_for(device, capability, folder), invariant=invariant, card=card)
