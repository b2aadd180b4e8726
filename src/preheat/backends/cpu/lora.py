"""Linear layers with places for adapters on a CPU, see :mod:`preheat.ops.lora`.

The rows of one adapter are gathered and multiplied so many at a time, filled up with zeros: by a number of rows whose
bits are proven, on this machine, to be those of ``ROWS`` rows at any place among them. Every product therefore has one
of a few shapes, which depend on the layer alone.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from preheat.backends.base import AdapterStep, Experts, ExpertsSize, Linear
from preheat.backends.cpu.linear import finished
from preheat.backends.cpu.moe import CpuExperts, padded
from preheat.errors import NotInvariant
from preheat.ops.activation import silu_and_mul
from preheat.ops.kinds import Activation
from preheat.ops.lora import PART, TILE, LowRank, add_delta
from preheat.ops.moe import combine, route, visits
from preheat.ops.proof import noise, signed_pairs

ROWS = 8
MORE_ROWS = (64, 32, 16)
"""What a product may have in place of ``ROWS``, largest first."""


class Group(NamedTuple):
    """The rows, int64 [n], that have the adapter in ``place``."""

    place: int
    rows: Tensor


class Packed(NamedTuple):
    """The tiles of ranks of a part's matrices, as :class:`Factors` hold them."""

    a: Tensor
    b: Tensor
    scale: float


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


class CpuAdapters:
    """See :class:`preheat.backends.base.AdapterOps`."""

    def rows(self, tokens: int, places: int) -> CpuAdapterRows:
        return CpuAdapterRows()

    def linear(
        self,
        linear: Linear,
        inputs: int,
        outputs: Sequence[int],
        rows: CpuAdapterRows,
        *,
        places: int,
        max_rank: int,
        dtype: torch.dtype,
        activation: Activation | None,
        clip: float | None,
    ) -> AdaptedLinear:
        parts = [Factors(inputs, size, places, max_rank) for size in outputs]
        return AdaptedLinear(linear, parts, rows, activation, clip)

    def embedding(
        self, table: Tensor, rows: CpuAdapterRows, *, places: int, max_rank: int, dtype: torch.dtype
    ) -> AdaptedEmbedding:
        return AdaptedEmbedding(table, rows, places, max_rank)

    def experts(
        self, experts: Experts, size: ExpertsSize, rows: CpuAdapterRows, *, places: int, max_rank: int,
        dtype: torch.dtype,
    ) -> AdaptedExperts | None:  # fmt: skip
        return AdaptedExperts(experts, size, rows, places, max_rank) if isinstance(experts, CpuExperts) else None


class AdaptedEmbedding:
    """See :class:`preheat.backends.base.AdaptedEmbedding`. The first matrix has the ranks of a token together."""

    def __init__(self, table: Tensor, rows: CpuAdapterRows, places: int, max_rank: int) -> None:
        vocab, hidden = table.shape
        self._rows, tiles = rows, -(-max_rank // TILE)
        self._a = torch.zeros(places, tiles, vocab, TILE)
        self._b = torch.zeros(places, tiles, hidden, TILE)
        self._scale, self._tiles = [0.0] * places, [0] * places
        self._expanded = rows_at_once(TILE, hidden, torch.get_num_threads())

    @property
    def bytes(self) -> int:
        return self._a.nbytes + self._b.nbytes

    def pack(self, parts: Mapping[int, LowRank]) -> Packed:
        (a, b, scale), tiles = parts[0], -(-len(parts[0].a) // TILE)
        a, b = (F.pad(each.float(), (0, tiles * TILE - each.shape[1])) for each in (a.T, b))
        a, b = (each.view(len(each), tiles, TILE).transpose(0, 1).contiguous() for each in (a, b))
        return Packed(a, b, scale)

    def write(self, place: int, packed: Packed) -> None:
        tiles = len(packed.a)
        self._a[place, :tiles].copy_(packed.a)
        self._b[place, :tiles].copy_(packed.b)
        self._scale[place], self._tiles[place] = packed.scale, tiles

    def clear(self, place: int) -> None:
        self._tiles[place] = 0

    def add(self, tokens: Tensor, slots: Tensor, last_token: Tensor, out: Tensor) -> None:
        """Every token is known: a step has ended when the next one begins."""
        for place, mine in self._rows.groups:
            rows = mine[tokens.index_select(0, mine) >= 0]
            if self._tiles[place] and len(rows):
                out[rows] = add_delta(out[rows], self._delta(place, tokens.index_select(0, rows)))

    def _delta(self, place: int, tokens: Tensor) -> Tensor:
        """[tokens, hidden]: that of each tile of ranks, added up."""
        given = zip(self._a[place], self._b[place], strict=True)
        deltas = (product(a.index_select(0, tokens) * self._scale[place], b, self._expanded) for a, b in given)
        return functools.reduce(Tensor.add_, itertools.islice(deltas, self._tiles[place]))


class Places:
    """What the adapters in all places have for several ``parts``."""

    def __init__(self, parts: Sequence[Factors], rows: CpuAdapterRows) -> None:
        self._parts, self._rows = parts, rows

    def pack(self, parts: Mapping[int, LowRank]) -> list[Packed | None]:
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


class AdaptedLinear(Places):
    """``linear``, then what the adapters of its rows add to each of its ``parts``, then its activation."""

    def __init__(
        self,
        linear: Linear,
        parts: Sequence[Factors],
        rows: CpuAdapterRows,
        activation: Activation | None,
        clip: float | None,
    ) -> None:
        super().__init__(parts, rows)
        self.inner = linear
        self._finished = finished(self._adapted, activation, clip)

    def __call__(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """``x`` [rows, inputs] -> [rows, outputs], a new tensor."""
        return self._finished(x)

    def _adapted(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        y = self.inner(x)
        for place, rows in self._rows.groups:
            self._add(y, x, place, rows)
        return y

    def _add(self, y: Tensor, x: Tensor, place: int, rows: Tensor) -> None:
        add_parts(y, x, self._parts, place, rows)


def add_parts(y: Tensor, x: Tensor, parts: Sequence[Factors], place: int, rows: Tensor) -> None:
    """Add to ``rows`` of ``y`` [all rows, outputs of all parts], in place, what the adapter in ``place`` makes of
    theirs of ``x`` [all rows, inputs].
    """
    mine, first = x.index_select(0, rows).float(), 0
    for part in parts:
        last = first + part.outputs
        if (more := part.delta(mine, place)) is not None:
            y[rows, first:last] = add_delta(y[rows, first:last], more)
        first = last


class AdaptedExperts(Places):
    """``inner``, and what adapters add for each expert that a row visits, see :mod:`preheat.ops.lora`."""

    def __init__(self, inner: CpuExperts, size: ExpertsSize, rows: CpuAdapterRows, places: int, max_rank: int) -> None:
        shapes = ((size.hidden, size.inner), (size.hidden, size.inner), (size.inner, size.hidden))
        super().__init__([Factors(*shape, places, max_rank) for _ in range(size.num_experts) for shape in shapes], rows)
        self.inner, self._count = inner, size.num_experts

    def __call__(self, x: Tensor, logits: Tensor) -> Tensor:
        """``x`` [tokens, hidden], ``logits`` [tokens, experts] -> [tokens, hidden], a new tensor."""
        if not self._rows.groups:
            return self.inner(x, logits)
        chosen, weights = route(logits, self.inner.routing)
        owners = torch.zeros(len(x), 1, dtype=torch.int64)  # 0: no adapter, as rows that fill up have none
        for place, rows in self._rows.groups:
            owners[rows] = place + 1
        given = x.new_empty(chosen.numel(), x.shape[1])
        for number, mine in visits(chosen, self._count):
            tokens = mine // chosen.shape[1]
            parts = zip(padded(x[tokens]), padded(owners[tokens]), strict=True)
            given[mine] = torch.cat([self._block(number, *part) for part in parts])[: len(mine)]
        return combine(given.view(len(x), chosen.shape[1], -1), weights)

    def _block(self, number: int, x: Tensor, owners: Tensor) -> Tensor:
        """Expert ``number`` of rows whose places, and one more, are ``owners`` [rows, 1]; 0 stands for none."""
        groups = [Group(place, torch.nonzero(owners[:, 0] == place + 1)[:, 0]) for place, _ in self._rows.groups]
        groups = [group for group in groups if len(group.rows)]
        gate, up, down = self._parts[3 * number : 3 * number + 3]
        y = self.inner.gate_up(number, x)
        for place, rows in groups:
            add_parts(y, x, (gate, up), place, rows)
        inner_rows = silu_and_mul(y)
        z = self.inner.down(number, inner_rows)
        for place, rows in groups:
            add_parts(z, inner_rows, (down,), place, rows)
        return z


class Factors:
    """Both matrices of the adapters in all ``places``, for one part of a layer: fp32, ranks in tiles, inputs in parts,
    each of which is one piece of memory. ``_tiles`` of them are in use.
    """

    def __init__(self, inputs: int, outputs: int, places: int, max_rank: int) -> None:
        self.outputs, self._width = outputs, min(inputs, PART)
        tiles, parts = -(-max_rank // TILE), -(-inputs // self._width)
        self._a = torch.zeros(places, tiles, parts, TILE, self._width)
        self._b = torch.zeros(places, tiles, outputs, TILE)
        self._scale, self._tiles = [0.0] * places, [0] * places
        threads = torch.get_num_threads()
        self._shrunk = rows_at_once(self._width, TILE, threads)
        self._expanded = rows_at_once(TILE, outputs, threads)

    @property
    def bytes(self) -> int:
        return self._a.nbytes + self._b.nbytes

    def pack(self, given: LowRank) -> Packed:
        """``given`` as a place holds it."""
        tiles, (_, _, parts, _, width) = -(-len(given.a) // TILE), self._a.shape
        ranks, inputs = tiles * TILE - len(given.a), parts * width - given.a.shape[1]
        a = F.pad(given.a.float(), (0, inputs, 0, ranks)).view(tiles, TILE, parts, width).transpose(1, 2)
        b = F.pad(given.b.float(), (0, ranks)).view(self.outputs, tiles, TILE).transpose(0, 1)
        return Packed(a.contiguous(), b.contiguous(), given.scale)

    def write(self, place: int, packed: Packed) -> None:
        """Put what was packed into ``place``."""
        tiles = len(packed.a)
        self._a[place, :tiles].copy_(packed.a)
        self._b[place, :tiles].copy_(packed.b)
        self._scale[place], self._tiles[place] = packed.scale, tiles

    def clear(self, place: int) -> None:
        """Leave the layer alone for rows of ``place``."""
        self._tiles[place] = 0

    def delta(self, x: Tensor, place: int) -> Tensor | None:
        """What is added to fp32 ``x`` [rows, inputs]; None: nothing is."""
        total: Tensor | None = None
        a, b, scale = self._a[place], self._b[place], self._scale[place]
        inputs = torch.split(F.pad(x, (0, a.shape[1] * self._width - x.shape[1])), self._width, 1)
        for tile in range(self._tiles[place]):
            shrunk = product(inputs[0], a[tile, 0], self._shrunk)
            for part, more in enumerate(inputs[1:], 1):
                shrunk += product(more, a[tile, part], self._shrunk)
            expanded = product(shrunk * scale, b[tile], self._expanded)
            total = expanded if total is None else total.add_(expanded)
        return total


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
