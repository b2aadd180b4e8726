"""Linear layers with places for adapters on a CPU, see :mod:`preheat.ops.matmul`.

The rows of one adapter are gathered and multiplied so many at a time, filled up with zeros: by a number of rows whose
bits are proven, on this machine, to be those of ``ROWS`` rows at any place among them. Every product therefore has one
of a few shapes, which depend on the layer alone.
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

from preheat.backends.base import AdapterStep, Collective, Linear
from preheat.backends.cpu.linear import finished
from preheat.backends.shards import LeafLinear
from preheat.errors import NotInvariant
from preheat.ops.kinds import Activation
from preheat.ops.matmul import LowRankPair, add_delta, pair_dtype, tree_sum
from preheat.ops.proof import noise, signed_pairs
from preheat.ops.values import PART, TILE

ROWS = 8
MORE_ROWS = (64, 32, 16)
"""What a product may have in place of ``ROWS``, largest first."""


class Group(NamedTuple):
    """The rows, int64 [n], that have the adapter in ``place``."""

    place: int
    rows: Tensor


class Share(NamedTuple):
    """Of the tiles of first matrices a rank has every ``world``-th one, from number ``rank`` on."""

    rank: int
    world: int

    def of(self, tiles: int) -> int:
        """How many of so many."""
        return len(range(self.rank, tiles, self.world))


ALL_TILES = Share(0, 1)


class Packed(NamedTuple):
    """The tiles of ranks of a part's matrices, as :class:`Factors` hold them."""

    a: Tensor
    b: Tensor
    scale: float
    dtype: torch.dtype


class CpuAdapterRows:
    """Which adapter each row of a step has, see :class:`preheat.backends.base.AdapterRows`."""

    def __init__(self) -> None:
        self._described: dict[AdapterStep, list[Group]] = {}
        self.groups: Sequence[Group] = ()

    def describe(self, turn: int, step: AdapterStep, places: np.ndarray) -> None:
        found = np.unique(places[places >= 0]).tolist()
        self._described[step] = [Group(place, torch.from_numpy(np.flatnonzero(places == place))) for place in found]

    def use(self, step: AdapterStep | None) -> None:
        self.groups = self._described.get(step, ()) if step else ()

    def among(self, tokens: Tensor) -> list[Group]:
        """The groups of the step's ``tokens`` int64 [n], rows being numbered as these are."""
        found = (Group(place, torch.nonzero(torch.isin(tokens, rows))[:, 0]) for place, rows in self.groups)
        return [group for group in found if len(group.rows)]


class Places:
    """What the adapters in all places have for several ``parts``."""

    def __init__(self, parts: Sequence[Factors], rows: CpuAdapterRows) -> None:
        self._parts, self._rows = parts, rows

    def pack(self, parts: Mapping[int, LowRankPair]) -> list[Packed | None]:
        return [part.pack(parts[number]) if number in parts else None for number, part in enumerate(self._parts)]

    def write(self, place: int, packed: Sequence[Packed | None]) -> None:
        for part, each in zip(self._parts, packed, strict=True):
            if each is None:
                part.clear(place)
            else:
                part.write(place, each)

    def clear(self, place: int) -> None:
        for part in self._parts:
            part.clear(place)

    @property
    def bytes(self) -> int:
        return sum(part.bytes for part in self._parts)


class AdaptedEmbedding(Places):
    """See :class:`preheat.backends.base.AdaptedEmbedding`."""

    def __init__(self, table: Tensor, rows: CpuAdapterRows, places: int, max_rank: int) -> None:
        vocab, hidden = table.shape
        super().__init__([TokenFactors(vocab, hidden, places, max_rank)], rows)

    def add(self, tokens: Tensor, slots: Tensor, last_token: Tensor, out: Tensor) -> None:
        """Every token is known: a step has ended when the next one begins."""
        for place, mine in self._rows.groups:
            rows = mine[tokens.index_select(0, mine) >= 0]
            if len(rows) and (more := self._parts[0].delta(tokens.index_select(0, rows), place, out.dtype)) is not None:
                out[rows] = add_delta(out[rows], more)


class AdaptedLinear(Places):
    """``linear``, then what the adapters of its rows add to each of its ``parts``, then its activation. The ranks
    whose first matrices are divided ``among`` them gather what rows shrink to.
    """

    def __init__(
        self,
        linear: Linear,
        parts: Sequence[Factors],
        rows: CpuAdapterRows,
        activation: Activation | None,
        clip: float | None,
        *,
        among: Collective | None = None,
    ) -> None:
        super().__init__(parts, rows)
        self.inner, self._among = linear, among
        self._finished = finished(self._adapted, activation, clip)

    def __call__(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """``x`` [rows, inputs] -> [rows, outputs], a new tensor."""
        return self._finished(x)

    def _adapted(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        y = self.inner(x)
        if self._among is not None:
            self._add_gathered(y, x, self._among)
            return y
        for place, rows in self._rows.groups:
            add_parts(y, x, self._parts, place, rows)
        return y

    def _add_gathered(self, y: Tensor, x: Tensor, among: Collective) -> None:
        """The same in place, with one exchange for all groups of rows and all parts."""
        ends = list(itertools.accumulate((part.outputs for part in self._parts), initial=0))
        parts = list(zip(self._parts, itertools.pairwise(ends), strict=True))
        wanted = [(*group, *part) for group in self._rows.groups for part in parts if part[0].has(group.place)]
        mine = [part.shrink(x.index_select(0, rows).float(), place) for place, rows, part, _ in wanted]
        if not mine:
            return
        found = among.gather(torch.cat([each.reshape(-1) for each in mine]))
        sizes = [each.numel() for each in mine]
        for (place, rows, part, (first, last)), all_ranks, own in zip(
            wanted, torch.split(found, sizes, 1), mine, strict=True
        ):
            shrunk = in_order(all_ranks.view(-1, *own.shape))
            y[rows, first:last] = add_delta(y[rows, first:last], part.expand(shrunk, place, y.dtype))


class AdaptedLeafLinear(Places):
    """``inner``, whose inputs ranks share, then what the adapters of its rows add. What their inputs shrink to on each
    rank travels with the layer's own sums.
    """

    def __init__(self, inner: LeafLinear, factors: Factors, rows: CpuAdapterRows) -> None:
        super().__init__([factors], rows)
        self.inner, self._factors = inner, factors

    def __call__(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """``x`` [rows, inputs of this rank] -> [rows, outputs], a new tensor, the same on all ranks."""
        factors = self._factors
        groups = [group for group in self._rows.groups if factors.has(group.place)]
        if not groups:
            return self.inner(x)
        shrunk = [factors.shrink(x.index_select(0, rows).float(), place) for place, rows in groups]
        y, shrunk = self.inner.with_others(x, shrunk)
        for (place, rows), each in zip(groups, shrunk, strict=True):
            y[rows] = add_delta(y[rows], factors.expand(each, place, y.dtype))
        return y


def in_order(shrunk: Tensor) -> Tensor:
    """What rows ``shrunk`` to on each rank, [ranks, tiles of a rank, rows, TILE], by the tiles' numbers."""
    return shrunk.transpose(0, 1).flatten(0, 1)


def tiles_of(outputs: Sequence[int], tiles: Sequence[int]) -> Iterator[list[int]]:
    """For parts of so many ``outputs`` each, one after the other, those of the ``tiles`` that lie in it; without any,
    the part itself.
    """
    left = list(tiles or outputs)[::-1]
    for size in outputs:
        mine = [left.pop()]
        while sum(mine) < size:
            mine.append(left.pop())
        assert sum(mine) == size, "a tile has rows of two parts"
        yield mine


def add_parts(y: Tensor, x: Tensor, parts: Sequence[Factors], place: int, rows: Tensor) -> None:
    """Add to ``rows`` of ``y`` [all rows, outputs of all parts], in place, what the adapter in ``place`` makes of
    theirs of ``x`` [all rows, inputs].
    """
    mine, first = x.index_select(0, rows).float(), 0
    for part in parts:
        last = first + part.outputs
        if (more := part.delta(mine, place, y.dtype)) is not None:
            y[rows, first:last] = add_delta(y[rows, first:last], more)
        first = last


class Factors(ABC):
    """Both matrices of the adapters in all ``places``, for one part of a module: fp32, the first as a subclass lays it
    out, tile by tile of the ranks, of which it has its ``share``, the second [places, tiles, outputs, TILE]. ``_tiles``
    of them are in use. The outputs of each size in ``cut`` are one product, by default all of them.
    """

    def __init__(
        self,
        outputs: int,
        places: int,
        max_rank: int,
        *tile: int,
        cut: Sequence[int] = (),
        share: Share = ALL_TILES,
    ) -> None:
        self.outputs, self._cut, tiles = outputs, list(cut or [outputs]), -(-max_rank // TILE)
        self._share = share
        self._a = torch.zeros(places, share.of(tiles), *tile)
        self._b = torch.zeros(places, tiles, outputs, TILE)
        self._scale, self._tiles, self._dtype = [0.0] * places, [0] * places, [torch.float32] * places
        self._expanded = {size: rows_at_once(TILE, size, torch.get_num_threads()) for size in self._cut}

    @property
    def bytes(self) -> int:
        return self._a.nbytes + self._b.nbytes

    def pack(self, given: LowRankPair) -> Packed:
        """``given`` as a place holds it."""
        a = self._first(given.a.float())[self._share.rank :: self._share.world]
        return Packed(a.contiguous(), _in_tiles(given.b).contiguous(), given.scale, given.a.dtype)

    def write(self, place: int, packed: Packed) -> None:
        """Put what was packed into ``place``."""
        self._a[place, : len(packed.a)].copy_(packed.a)
        self._b[place, : len(packed.b)].copy_(packed.b)
        self._scale[place], self._tiles[place], self._dtype[place] = packed.scale, len(packed.b), packed.dtype

    def clear(self, place: int) -> None:
        """Leave the part alone for rows of ``place``."""
        self._tiles[place] = 0

    def has(self, place: int) -> bool:
        """Whether the adapter in ``place`` adds anything."""
        return self._tiles[place] > 0

    def delta(self, x: Tensor, place: int, dtype: torch.dtype) -> Tensor | None:
        """What is added to rows ``x`` of a model of this dtype; None: nothing is."""
        return self.expand(self.shrink(x, place), place, dtype) if self.has(place) else None

    def shrink(self, x: Tensor, place: int) -> Tensor:
        """What rows ``x`` shrink to: fp32 [tiles in use, rows, TILE], not scaled. Of a share as many on each rank: one
        of zeros where others have one more.
        """
        used = self._tiles[place]
        mine = list(self._shrink(x, self._a[place, : self._share.of(used)]))
        more = -(-used // self._share.world) - len(mine)
        return torch.stack([*mine, *[torch.zeros(len(x), TILE)] * more])

    def expand(self, shrunk: Tensor, place: int, dtype: torch.dtype) -> Tensor:
        """What is added to rows of a model of this dtype that ``shrunk`` to this."""
        used, rounded = self._tiles[place], pair_dtype(dtype, self._dtype[place])
        scaled = (shrunk[:used] * self._scale[place]).to(rounded).float()
        given = zip(scaled, self._b[place, :used], strict=True)
        return functools.reduce(Tensor.add_, (self._expand(one, b) for one, b in given))

    def _expand(self, shrunk: Tensor, b: Tensor) -> Tensor:
        tiles = [product(shrunk, each, self._expanded[len(each)]) for each in torch.split(b, self._cut)]
        return tiles[0] if len(tiles) == 1 else torch.cat(tiles, 1)

    @abstractmethod
    def _first(self, a: Tensor) -> Tensor:
        """Fp32 ``a`` [rank, inputs] in tiles of ranks, those that fill up the last one being zeros."""

    @abstractmethod
    def _shrink(self, x: Tensor, a: Tensor) -> Iterable[Tensor]:
        """What rows ``x`` shrink to by each tile of ``a``, [rows, TILE]."""


class LinearFactors(Factors):
    """Of a linear layer, whose rows are fp32 [rows, inputs]: the first matrix [places, tiles, parts of the inputs,
    TILE, inputs of a part]. Inputs are in ``leaves``, by default one; each leaf has the same number of parts.
    """

    def __init__(
        self,
        inputs: int,
        outputs: int,
        places: int,
        max_rank: int,
        *,
        leaves: int = 1,
        tiles: Sequence[int] = (),
        share: Share = ALL_TILES,
    ) -> None:
        self._leaf = inputs // leaves
        self._width = min(self._leaf, PART)
        self._parts = -(-self._leaf // self._width)
        self._leaves = range(0, leaves * self._parts, self._parts)
        super().__init__(outputs, places, max_rank, leaves * self._parts, TILE, self._width, cut=tiles, share=share)
        self._shrunk = rows_at_once(self._width, TILE, torch.get_num_threads())

    def _first(self, a: Tensor) -> Tensor:
        parts = torch.stack(self._inputs(F.pad(a, (0, 0, 0, -len(a) % TILE))), 1)
        return parts.view(-1, TILE, parts.shape[1], self._width).transpose(1, 2)

    def _shrink(self, x: Tensor, a: Tensor) -> Iterable[Tensor]:
        inputs = self._inputs(x)
        return (tree_sum([self._leaf_sum(inputs, tile, first) for first in self._leaves]) for tile in a)

    def _leaf_sum(self, inputs: Sequence[Tensor], a: Tensor, first: int) -> Tensor:
        """The sum of the parts of a leaf, of which ``first`` is the first."""
        leaf = product(inputs[first], a[first], self._shrunk)
        for part in range(first + 1, first + self._parts):
            leaf += product(inputs[part], a[part], self._shrunk)
        return leaf

    def _inputs(self, x: Tensor) -> list[Tensor]:
        """The columns of each part, filled up with zeros."""
        more = self._parts * self._width - self._leaf
        leaves = (F.pad(leaf, (0, more)) for leaf in torch.split(x, self._leaf, 1))
        return [part for leaf in leaves for part in torch.split(leaf, self._width, 1)]


class TokenFactors(Factors):
    """Of a table of embeddings, whose rows are tokens: the first matrix [places, tiles, vocab, TILE], so that what a
    token shrinks to lies together.
    """

    def __init__(self, vocab: int, hidden: int, places: int, max_rank: int) -> None:
        super().__init__(hidden, places, max_rank, vocab, TILE)

    def _first(self, a: Tensor) -> Tensor:
        return _in_tiles(a.T)

    def _shrink(self, x: Tensor, a: Tensor) -> Iterable[Tensor]:
        return (tile.index_select(0, x) for tile in a)


def _in_tiles(ranks: Tensor) -> Tensor:
    """``ranks`` [rows, rank] as fp32 [tiles, rows, TILE], filled up with zeros."""
    return F.pad(ranks.float(), (0, -ranks.shape[1] % TILE)).view(len(ranks), -1, TILE).transpose(0, 1)


def product(x: Tensor, weight: Tensor, most: int) -> Tensor:
    """``x`` [rows, inputs] times ``weight`` [outputs, inputs], fp32, at most ``most`` rows at a time."""
    count = len(x)
    size = most if count > ROWS else ROWS
    return _in_parts(F.pad(x, (0, 0, 0, -count % size)), weight, size)[:count]


@functools.cache
def rows_at_once(inputs: int, outputs: int, threads: int) -> int:
    """The most rows of a product that have the bits of ``ROWS`` rows. ``threads`` are torch's. Raises NotInvariant if
    even those depend on their place.
    """
    rows = signed_pairs(noise(max(MORE_ROWS), inputs, seed=1), -1.0)
    weight = signed_pairs(noise(outputs, inputs), 1.0)
    expected = _in_parts(rows.flip(0), weight, ROWS).flip(0)
    for size in (*MORE_ROWS, ROWS):
        if torch.equal(_in_parts(rows, weight, size), expected):
            return size
    raise NotInvariant(f"a product of {ROWS} rows with [{outputs}, {inputs}] depends on the place of a row")


def _in_parts(rows: Tensor, weight: Tensor, size: int) -> Tensor:
    return torch.cat([part.contiguous() @ weight.T for part in torch.split(rows, size)])
