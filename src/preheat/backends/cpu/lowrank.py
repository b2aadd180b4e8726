"""Adapters of layers on a CPU, see :mod:`preheat.ops.matmul`.

The rows of one adapter are gathered and multiplied in products of a fixed number of rows, filled up with zeros. The
number is proven, on this machine, to give a row at any place in the product the bits of ``ROWS`` rows. So every product
has one of a few shapes, which depend only on the layer.
"""

from __future__ import annotations

import functools
import itertools
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from preheat.backends.base.adapters import AdapterStep
from preheat.backends.base.layers import LayerContext
from preheat.errors import NotInvariant
from preheat.ops.matmul import LowRankPair, add_delta, pair_dtype, tree_sum
from preheat.ops.proof import noise, signed_pairs
from preheat.ops.values import PART, TILE, Experts, LowRank, Matmul

ROWS = 8
MORE_ROWS = (64, 32, 16)
"""Larger numbers of rows for a product than ``ROWS``, largest first."""


class Group(NamedTuple):
    """The rows, int64 [n], that have the adapter in ``slot``."""

    slot: int
    rows: Tensor


class Share(NamedTuple):
    """A rank's share of the tiles of first matrices.

    It has every ``world``-th tile, from number ``rank`` on.
    """

    rank: int
    world: int

    def of(self, tiles: int) -> int:
        """Return how many of ``tiles`` tiles the rank has."""
        return len(range(self.rank, tiles, self.world))


ALL_TILES = Share(0, 1)


class Packed(NamedTuple):
    """The tiles of ranks of a part's matrices, as :class:`Factors` hold them."""

    a: Tensor
    b: Tensor
    scale: float
    dtype: torch.dtype


class CpuAdapterRows:
    """The adapter of each row of a step, see :class:`preheat.backends.base.adapters.AdapterRows`."""

    def __init__(self) -> None:
        self._described: dict[AdapterStep, list[Group]] = {}
        self.groups: Sequence[Group] = ()

    def describe(self, turn: int, step: AdapterStep, slots: np.ndarray) -> None:
        found = np.unique(slots[slots >= 0]).tolist()
        self._described[step] = [Group(slot, torch.from_numpy(np.flatnonzero(slots == slot))) for slot in found]

    def use(self, step: AdapterStep | None) -> None:
        self.groups = self._described.get(step, ()) if step else ()

    def groups_of(self, tokens: Tensor) -> list[Group]:
        """Return the groups among the step's ``tokens`` int64 [n].

        Rows are numbered by their place in ``tokens``.
        """
        found = (Group(slot, torch.nonzero(torch.isin(tokens, rows))[:, 0]) for slot, rows in self.groups)
        return [group for group in found if len(group.rows)]


class CpuAdapters:
    """See :class:`preheat.backends.base.adapters.AdapterOps`."""

    def rows(self, tokens: int, slots: int) -> CpuAdapterRows:
        return CpuAdapterRows()


class Shrunk(NamedTuple):
    """Rows shrunk by the ``factors`` of the adapter in ``slot``: fp32 ``sums`` [tiles, rows, TILE].

    Their term is added to the outputs ``columns`` [from, to).
    """

    factors: Factors
    slot: int
    rows: Tensor
    columns: tuple[int, int]
    sums: Tensor


class SlotTable:
    """Adapter matrices of several ``parts``, for all adapter slots.

    ``rows`` describes the rows of a step.
    """

    def __init__(self, parts: Sequence[Factors], rows: CpuAdapterRows) -> None:
        self._parts, self.rows = parts, rows

    @property
    def groups(self) -> Sequence[Group]:
        """The rows of this step that have adapters."""
        return self.rows.groups

    def of_expert(self, number: int) -> tuple[Sequence[Factors], Sequence[Factors]]:
        """Return the parts of an expert's gate and up, and of its down."""
        return self._parts[3 * number : 3 * number + 2], self._parts[3 * number + 2 : 3 * number + 3]

    def shrink(self, x: Tensor) -> list[Shrunk]:
        """See :class:`preheat.backends.layer.Terms`."""
        return shrink(x, self._parts, self.groups)

    def expand(self, y: Tensor, shrunk: Sequence[Shrunk], roots: Sequence[Tensor]) -> None:
        """See :class:`preheat.backends.layer.Terms`."""
        expand(y, shrunk, roots)

    def pack(self, parts: Mapping[int, LowRankPair]) -> list[Packed | None]:
        return [part.pack(parts[number]) if number in parts else None for number, part in enumerate(self._parts)]

    def write(self, slot: int, packed: Sequence[Packed | None]) -> None:
        for part, each in zip(self._parts, packed, strict=True):
            if each is None:
                part.clear(slot)
            else:
                part.write(slot, each)

    def clear(self, slot: int) -> None:
        for part in self._parts:
            part.clear(slot)

    @property
    def bytes(self) -> int:
        return sum(part.bytes for part in self._parts)

    def tensors(self) -> Iterator[Tensor]:
        """See :class:`preheat.backends.layer.Terms`."""
        for part in self._parts:
            yield from part.tensors()


class Embedding:
    """See :class:`preheat.backends.base.layers.Embedding`."""

    def __init__(self, value: Matmul, rows: CpuAdapterRows) -> None:
        self._factors = TokenFactors(value.inputs, value.outputs, value.terms[0].slots, value.terms[0].rank)
        self.slots = SlotTable([self._factors], rows)

    def add(self, tokens: Tensor, slots: Tensor, last_token: Tensor, out: Tensor) -> None:
        """Add the adapters' terms for known tokens.

        Every token is known, as a step has ended when the next one begins.
        """
        for slot, mine in self.slots.groups:
            rows = mine[tokens.index_select(0, mine) >= 0]
            if len(rows) and self._factors.has(slot):
                sums = self._factors.shrink(tokens.index_select(0, rows), slot)
                expand(out, [Shrunk(self._factors, slot, rows, (0, out.shape[1]), sums)], [sums])

    def weights(self) -> Iterable[Tensor]:
        """Return no weights: the table belongs to the model."""
        return ()

    def state(self) -> Iterable[Tensor]:
        """See :class:`preheat.backends.base.layers.HasWeights`."""
        return self.slots.tensors()


def shrink(x: Tensor, parts: Sequence[Factors], groups: Sequence[Group]) -> list[Shrunk]:
    """Shrink the ``groups`` of rows of ``x`` [all rows, inputs].

    Each group is shrunk for each of ``parts`` of its adapter.
    """
    ends, found = list(itertools.accumulate((part.outputs for part in parts), initial=0)), list[Shrunk]()
    for slot, rows in groups:
        wanted = [each for each in zip(parts, itertools.pairwise(ends), strict=True) if each[0].has(slot)]
        mine = x.index_select(0, rows).float() if wanted else x
        found += [Shrunk(part, slot, rows, columns, part.shrink(mine, slot)) for part, columns in wanted]
    return found


def expand(y: Tensor, shrunk: Sequence[Shrunk], roots: Sequence[Tensor]) -> None:
    """Expand ``roots``, and add the results to ``y`` [all rows, outputs of all parts] in place."""
    for (factors, slot, rows, (first, last), _), root in zip(shrunk, roots, strict=True):
        y[rows, first:last] = add_delta(y[rows, first:last], factors.expand(root, slot, y.dtype))


def slots_of(value: Matmul, context: LayerContext) -> SlotTable | None:
    """Return the adapter slots of a layer; None without terms."""
    if not value.terms:
        return None
    (term,) = value.terms
    cuts = tiles_of(term.parts, value.order.tiles)
    ranks = context.ranks if term.shared == "ranks" else None
    share = Share(ranks.rank, ranks.world) if ranks else ALL_TILES
    return SlotTable([_factors(value, term, part, cut, share) for part, cut in enumerate(cuts)], context.rows)


def expert_slots(value: Experts, context: LayerContext) -> SlotTable | None:
    """Return the adapter slots of routed experts; None without terms.

    Each expert has three parts.
    """
    if not value.gate_up.terms:
        return None
    (first,), (last,) = value.gate_up.terms, value.down.terms
    gate, up = tiles_of(first.parts, value.gate_up.order.tiles)
    parts = list[Factors]()
    for _ in range(value.down.groups.experts):
        parts += [_factors(value.gate_up, first, part, cut) for part, cut in enumerate((gate, up))]
        parts.append(_factors(value.down, last, 0))
    return SlotTable(parts, context.rows)


def _factors(
    value: Matmul, term: LowRank, part: int, cut: Sequence[int] = (), share: Share = ALL_TILES
) -> LinearFactors:
    first, second = value.pair(term, part)
    sizes = first.inputs, second.outputs, first.groups.slots, first.outputs
    return LinearFactors(*sizes, k_splits=first.order.own_k_splits, tiles=cut, share=share)


def tiles_of(outputs: Sequence[int], tiles: Sequence[int]) -> Iterator[list[int]]:
    """Yield the ``tiles`` that lie in each of consecutive parts.

    The parts have these ``outputs``. Without tiles, yield the part itself.
    """
    left = list(tiles or outputs)[::-1]
    for size in outputs:
        mine = [left.pop()]
        while sum(mine) < size:
            mine.append(left.pop())
        assert sum(mine) == size, "a tile has rows of two parts"
        yield mine


class Factors(ABC):
    """Both matrices of the adapters in all ``slots``, for one part.

    They are fp32. A subclass lays out the first matrix, in tiles of ranks; a ``share`` of the tiles is here. The second
    matrix is [slots, tiles, outputs, TILE]. ``_tiles`` tiles are in use. The outputs of each size in ``cut`` are one
    product; by default all outputs are.
    """

    def __init__(
        self,
        outputs: int,
        slots: int,
        max_rank: int,
        *tile: int,
        cut: Sequence[int] = (),
        share: Share = ALL_TILES,
    ) -> None:
        self.outputs, self._cut, tiles = outputs, list(cut or [outputs]), -(-max_rank // TILE)
        self._share = share
        self._a = torch.zeros(slots, share.of(tiles), *tile)
        self._b = torch.zeros(slots, tiles, outputs, TILE)
        self._scale, self._tiles, self._dtype = [0.0] * slots, [0] * slots, [torch.float32] * slots
        self._expanded = {size: rows_at_once(TILE, size, torch.get_num_threads()) for size in self._cut}

    @property
    def bytes(self) -> int:
        return self._a.nbytes + self._b.nbytes

    def pack(self, given: LowRankPair) -> Packed:
        """Return ``given`` as an adapter slot holds it."""
        a = self._first(given.a.float())[self._share.rank :: self._share.world]
        return Packed(a.contiguous(), _in_tiles(given.b).contiguous(), given.scale, given.a.dtype)

    def write(self, slot: int, packed: Packed) -> None:
        """Write a packed pair into ``slot``."""
        self._a[slot, : len(packed.a)].copy_(packed.a)
        self._b[slot, : len(packed.b)].copy_(packed.b)
        self._scale[slot], self._tiles[slot], self._dtype[slot] = packed.scale, len(packed.b), packed.dtype

    def clear(self, slot: int) -> None:
        """Leave the part alone for rows of ``slot``."""
        self._tiles[slot] = 0

    def has(self, slot: int) -> bool:
        """Return whether the adapter in ``slot`` adds anything."""
        return self._tiles[slot] > 0

    def tensors(self) -> tuple[Tensor, Tensor]:
        """Return both matrices of all adapter slots."""
        return self._a, self._b

    def shrink(self, x: Tensor, slot: int) -> Tensor:
        """Return the rows ``x`` shrunk, fp32 [tiles in use, rows, TILE], not scaled.

        A share gives equally many tiles on each rank: a tile of zeros is added if other ranks have one more.
        """
        used = self._tiles[slot]
        mine = list(self._shrink(x, self._a[slot, : self._share.of(used)]))
        more = -(-used // self._share.world) - len(mine)
        return torch.stack([*mine, *[torch.zeros(len(x), TILE)] * more])

    def expand(self, shrunk: Tensor, slot: int, dtype: torch.dtype) -> Tensor:
        """Return the sums to add to rows, expanded from ``shrunk``.

        ``dtype`` is the model's.
        """
        used, rounded = self._tiles[slot], pair_dtype(dtype, self._dtype[slot])
        scaled = (shrunk[:used] * self._scale[slot]).to(rounded).float()
        given = zip(scaled, self._b[slot, :used], strict=True)
        return functools.reduce(Tensor.add_, (self._expand(one, b) for one, b in given))

    def _expand(self, shrunk: Tensor, b: Tensor) -> Tensor:
        tiles = [product(shrunk, each, self._expanded[len(each)]) for each in torch.split(b, self._cut)]
        return tiles[0] if len(tiles) == 1 else torch.cat(tiles, 1)

    @abstractmethod
    def _first(self, a: Tensor) -> Tensor:
        """Return fp32 ``a`` [rank, inputs] in tiles of ranks.

        The last tile is filled up with zeros.
        """

    @abstractmethod
    def _shrink(self, x: Tensor, a: Tensor) -> Iterable[Tensor]:
        """Return rows ``x`` shrunk by each tile of ``a``, [rows, TILE]."""


class LinearFactors(Factors):
    """Factors of a linear layer with rows fp32 [rows, inputs].

    The first matrix is [slots, tiles, parts of the inputs, TILE, inputs of a part]. ``k_splits`` is the number of K
    splits of the inputs, by default one; each K split has the same number of parts.
    """

    def __init__(
        self,
        inputs: int,
        outputs: int,
        slots: int,
        max_rank: int,
        *,
        k_splits: int = 1,
        tiles: Sequence[int] = (),
        share: Share = ALL_TILES,
    ) -> None:
        self._split_inputs = inputs // k_splits
        self._width = min(self._split_inputs, PART)
        self._parts = -(-self._split_inputs // self._width)
        self._first_parts = range(0, k_splits * self._parts, self._parts)
        super().__init__(outputs, slots, max_rank, k_splits * self._parts, TILE, self._width, cut=tiles, share=share)
        self._shrunk = rows_at_once(self._width, TILE, torch.get_num_threads())

    def _first(self, a: Tensor) -> Tensor:
        parts = torch.stack(self._inputs(F.pad(a, (0, 0, 0, -len(a) % TILE))), 1)
        return parts.view(-1, TILE, parts.shape[1], self._width).transpose(1, 2)

    def _shrink(self, x: Tensor, a: Tensor) -> Iterable[Tensor]:
        inputs = self._inputs(x)
        return (tree_sum([self._split_sum(inputs, tile, first) for first in self._first_parts]) for tile in a)

    def _split_sum(self, inputs: Sequence[Tensor], a: Tensor, first: int) -> Tensor:
        """Return the sum of a K split's parts from ``first`` on."""
        total = product(inputs[first], a[first], self._shrunk)
        for part in range(first + 1, first + self._parts):
            total += product(inputs[part], a[part], self._shrunk)
        return total

    def _inputs(self, x: Tensor) -> list[Tensor]:
        """Return the columns of each part, filled up with zeros."""
        more = self._parts * self._width - self._split_inputs
        k_splits = (F.pad(split, (0, more)) for split in torch.split(x, self._split_inputs, 1))
        return [part for split in k_splits for part in torch.split(split, self._width, 1)]


class TokenFactors(Factors):
    """Factors of a table of embeddings, with tokens as rows.

    The first matrix is [slots, tiles, vocab, TILE], so that a token's shrunk numbers lie together.
    """

    def __init__(self, vocab: int, hidden: int, slots: int, max_rank: int) -> None:
        super().__init__(hidden, slots, max_rank, vocab, TILE)

    def _first(self, a: Tensor) -> Tensor:
        return _in_tiles(a.T)

    def _shrink(self, x: Tensor, a: Tensor) -> Iterable[Tensor]:
        return (tile.index_select(0, x) for tile in a)


def _in_tiles(ranks: Tensor) -> Tensor:
    """Return ``ranks`` [rows, rank] as fp32 [tiles, rows, TILE], filled up with zeros."""
    return F.pad(ranks.float(), (0, -ranks.shape[1] % TILE)).view(len(ranks), -1, TILE).transpose(0, 1)


def product(x: Tensor, weight: Tensor, most: int) -> Tensor:
    """Multiply ``x`` [rows, inputs] by ``weight`` [outputs, inputs], fp32, at most ``most`` rows at a time."""
    count = len(x)
    size = most if count > ROWS else ROWS
    return _in_parts(F.pad(x, (0, 0, 0, -count % size)), weight, size)[:count]


@functools.cache
def rows_at_once(inputs: int, outputs: int, threads: int) -> int:
    """Return the most rows of a product with the bits of ``ROWS`` rows.

    ``threads`` are torch's. Raises NotInvariant if even ``ROWS`` rows depend on their place.
    """
    rows = signed_pairs(noise(max(MORE_ROWS), inputs, seed=1), -1.0)
    weight = signed_pairs(noise(outputs, inputs), 1.0)
    expected = _in_parts(rows.flip(0), weight, ROWS).flip(0)
    for size in (*MORE_ROWS, ROWS):
        if torch.equal(_in_parts(rows, weight, size), expected):
            return size
    raise NotInvariant(f"a product of {ROWS} rows with [{outputs}, {inputs}] depends on the position of a row")


def _in_parts(rows: Tensor, weight: Tensor, size: int) -> Tensor:
    return torch.cat([part.contiguous() @ weight.T for part in torch.split(rows, size)])
