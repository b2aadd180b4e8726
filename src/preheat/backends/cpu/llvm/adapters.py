"""Adapter slots of layers in panels, and the adapter slot of each row of a step. No llvmlite."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import prod
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from preheat.backends.base.adapters import AdapterStep
from preheat.backends.cpu.llvm.kinds import PANEL, TERMS, Product, Terms
from preheat.backends.cpu.llvm.memory import vector, zeros
from preheat.backends.cpu.lowrank import CpuAdapterRows
from preheat.ops.matmul import LowRankPair, pair_dtype
from preheat.ops.values import TILE, LowRank, Matmul

NO_ADAPTER = -1


def terms_of(value: Matmul) -> Terms | None:
    """Return the room for the terms of ``value``; None without."""
    if not value.terms:
        return None
    (term,) = value.terms
    return Terms(len(term.parts), -(-term.rank // TILE))


class PanelAdapterRows(CpuAdapterRows):
    """The adapter slot of each row of a step, where functions read it; at most ``tokens`` rows."""

    def __init__(self, tokens: int) -> None:
        super().__init__()
        names: tuple[AdapterStep, ...] = ("tokens", "sampled")
        self._slots = {step: zeros(tokens, np.int64) for step in names}
        self._none = zeros(tokens, np.int64)
        for slots in (*self._slots.values(), self._none):
            slots[:] = NO_ADAPTER
        self.adapted, self.address = False, self._none.ctypes.data

    def describe(self, turn: int, step: AdapterStep, slots: np.ndarray) -> None:
        super().describe(turn, step, slots)
        mine = self._slots[step]
        mine[: len(slots)], mine[len(slots) :] = slots, NO_ADAPTER

    def use(self, step: AdapterStep | None) -> None:
        super().use(step)
        self.adapted = step is not None and bool(self.groups)
        self.address = (self._slots[step] if step is not None and self.adapted else self._none).ctypes.data


class PanelAdapters:
    """See :class:`preheat.backends.base.adapters.AdapterOps`."""

    def rows(self, tokens: int, slots: int) -> PanelAdapterRows:
        return PanelAdapterRows(tokens)


class PackedPart(NamedTuple):
    """The matrices of one part as a slot holds them: ``a`` [tiles, inputs, 16] and ``b`` [tiles, 16, outputs]."""

    a: Tensor
    b: Tensor
    scale: float
    rounded: bool


Packed = Sequence[PackedPart | None]
"""The parts of a layer as a slot holds them, matrix by matrix; None: the adapter leaves the part alone."""


class PanelSlots:
    """The adapter slots of a layer, float32; the layer has ``matrices`` matrices, experts each one.

    First matrices are [slots, matrices, parts, tiles, inputs, 16]: for each input a tile's ranks side by side. Second
    matrices are [slots, matrices, tiles, 16, outputs], with the outputs of all parts in the order of the panels.
    ``frame`` has the addresses for functions.
    """

    def __init__(self, value: Matmul, how: Product, rows: PanelAdapterRows, matrices: int = 1) -> None:
        assert how.terms is not None
        (term,) = value.terms
        self.rows, self.parts, self._matrices = rows, how.terms.parts, matrices
        self._dtype, self._places = getattr(torch, value.weight.dtype), _places(term, how)
        parts, tiles = how.terms
        shape = term.slots, matrices, parts
        self._a = torch.zeros(*shape, tiles, how.inputs, TILE)
        self._b = torch.zeros(term.slots, matrices, tiles, TILE, how.padded)
        self._tiles, self._rounded = (zeros(prod(shape), np.int64).reshape(shape) for _ in range(2))
        self._scales = zeros(prod(shape), np.float32).reshape(shape)
        self._lanes = _lanes(self._places, how.padded)
        self._parts = _parts(self._lanes)
        self.frame = zeros(len(TERMS), np.int64)
        arrays = {"tiles": self._tiles, "scales": self._scales, "rounded": self._rounded}
        arrays |= {"parts": self._parts, "lanes": self._lanes}
        for name, array in arrays.items():
            self.frame[TERMS[name]] = array.ctypes.data
        self.frame[TERMS["first"]], self.frame[TERMS["second"]] = self._a.data_ptr(), self._b.data_ptr()

    @property
    def bytes(self) -> int:
        return self._a.nbytes + self._b.nbytes

    def pack(self, parts: Mapping[int, LowRankPair]) -> Packed:
        """See :class:`preheat.backends.base.adapters.AdapterSlots`; matrix m has the parts from m * parts on."""
        count = self._matrices * self.parts
        return [self._packed(parts[part]) if part in parts else None for part in range(count)]

    def _packed(self, given: LowRankPair) -> PackedPart:
        more = -len(given.a) % TILE
        a = F.pad(given.a.float(), (0, 0, 0, more))
        b = F.pad(given.b.float(), (0, more))
        rounded = pair_dtype(self._dtype, given.a.dtype) == torch.bfloat16
        tiles = a.view(-1, TILE, a.shape[1]).transpose(1, 2).contiguous()
        return PackedPart(tiles, b.T.contiguous().view(-1, TILE, len(b)), given.scale, rounded)

    def write(self, slot: int, packed: Packed) -> None:
        for number, each in enumerate(packed):
            matrix, part = divmod(number, self.parts)
            self._tiles[slot, matrix, part] = 0 if each is None else len(each.a)
            if each is not None:
                self._a[slot, matrix, part, : len(each.a)].copy_(each.a)
                self._b[slot, matrix, : len(each.b)].index_copy_(2, self._places[part], each.b)
                self._scales[slot, matrix, part], self._rounded[slot, matrix, part] = each.scale, each.rounded

    def clear(self, slot: int) -> None:
        self._tiles[slot] = 0

    def tensors(self) -> Iterator[Tensor]:
        """Return the matrices of all adapter slots."""
        yield from (self._a, self._b)


class ExpertSlots:
    """The adapter slots of routed experts. An expert has the parts gate, up and down."""

    def __init__(self, gate_up: PanelSlots, down: PanelSlots) -> None:
        self.gate_up, self.down, self.rows = gate_up, down, gate_up.rows

    @property
    def bytes(self) -> int:
        return self.gate_up.bytes + self.down.bytes

    def pack(self, parts: Mapping[int, LowRankPair]) -> tuple[Packed, Packed]:
        """See :class:`preheat.backends.base.adapters.AdapterSlots`."""
        gated = {2 * (part // 3) + part % 3: each for part, each in parts.items() if part % 3 < 2}
        down = {part // 3: each for part, each in parts.items() if part % 3 == 2}
        return self.gate_up.pack(gated), self.down.pack(down)

    def write(self, slot: int, packed: tuple[Packed, Packed]) -> None:
        for slots, each in zip((self.gate_up, self.down), packed, strict=True):
            slots.write(slot, each)

    def clear(self, slot: int) -> None:
        self.gate_up.clear(slot)
        self.down.clear(slot)

    def tensors(self) -> Iterator[Tensor]:
        """Return the matrices of all adapter slots."""
        yield from self.gate_up.tensors()
        yield from self.down.tensors()


def _places(term: LowRank, how: Product) -> list[Tensor]:
    """Return the places of each part's outputs among the outputs in panels."""
    order = vector(how, torch.arange(1, sum(term.parts) + 1)).long() - 1  # -1: no output
    place = torch.empty(sum(term.parts), dtype=torch.int64)
    real = order >= 0
    place[order[real]] = torch.nonzero(real)[:, 0]
    return list(torch.split(place, list(term.parts)))


def _lanes(places: Sequence[Tensor], outputs: int) -> np.ndarray:
    """Return the part of each of the ``outputs`` in panels, int32; -1: no output."""
    found = zeros(outputs, np.int32)
    found[:] = -1
    for part, mine in enumerate(places):
        found[mine.numpy()] = part
    return found


def _parts(lanes: np.ndarray) -> np.ndarray:
    """Return the parts of each panel, int64 [panels, 2]: from, to."""
    panels, last = lanes.reshape(-1, PANEL), np.iinfo(np.int32).max
    found = zeros(2 * len(panels), np.int64).reshape(-1, 2)
    found[:, 0], found[:, 1] = np.where(panels < 0, last, panels).min(1), panels.max(1) + 1
    return found
