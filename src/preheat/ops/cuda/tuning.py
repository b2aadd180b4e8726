"""Which implementation serves which linear map at which number of rows.

A table says what was measured to be fastest; rules say what is safe where nothing was measured. Both are only ever
read here: they are filled by :mod:`preheat.ops.cuda.tuner`, when somebody asks for it. An entry counts for all numbers
of rows up to its own, down to that of the entry before; above the last one rules take over.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import asdict
from importlib import resources
from pathlib import Path

import msgspec
import torch
from torch import Tensor

from preheat.ops.cuda.linear import REFERENCE, Choice, Library, Shape, Tile

logger = logging.getLogger(__name__)

SHARED_BYTES = 225_000
"""Of one program's tiles in shared memory, on Hopper."""


class Entry(msgspec.Struct, frozen=True, omit_defaults=True):
    """The fastest implementation of a map up to ``rows``: ``tile``, or cuBLAS where there is none.

    ``ordered``: the fastest of those that keep the contract's order; else of all.
    """

    outputs: int
    inputs: int
    rows: int
    microseconds: float
    gated: bool = False
    dtype: str = "bfloat16"
    ordered: bool = True
    split: bool = False
    tile: dict[str, int] | None = None

    @property
    def choice(self) -> Choice:
        return Library(self.split) if self.tile is None else Tile(**self.tile)  # type: ignore[arg-type]

    @property
    def key(self) -> tuple[object, ...]:
        """What it is looked up by."""
        return (self.outputs, self.inputs, self.gated, self.dtype, self.ordered)

    @classmethod
    def of(cls, shape: Shape, rows: int, choice: Choice, microseconds: float, ordered: bool) -> Entry:
        is_tile = isinstance(choice, Tile)
        return cls(
            outputs=shape.outputs,
            inputs=shape.inputs,
            rows=rows,
            microseconds=round(microseconds, 2),
            gated=shape.gated,
            dtype=str(shape.dtype).removeprefix("torch."),
            ordered=ordered,
            split=isinstance(choice, Library) and choice.split,
            tile={name: int(value) for name, value in asdict(choice).items()} if is_tile else None,
        )


class Table(msgspec.Struct):
    """Entries that were measured on devices of these names."""

    devices: list[str]
    entries: list[Entry]


def shipped() -> list[Table]:
    """The tables that come with preheat."""
    folder = resources.files("preheat.ops.cuda") / "tables"
    return [
        msgspec.json.decode(file.read_bytes(), type=Table) for file in folder.iterdir() if file.name.endswith(".json")
    ]


def read(path: Path) -> list[Table]:
    """The table that the tuner wrote to ``path``; what is not there or cannot be read is done without."""
    try:
        return [msgspec.json.decode(path.read_bytes(), type=Table)]
    except FileNotFoundError:
        return []
    except (OSError, msgspec.DecodeError) as error:
        logger.warning("%s cannot be read and is ignored: %s", path, error)
        return []


class Choices:
    """From a map and a number of rows to an implementation.

    Of ``tables`` those of ``device`` count, later ones before earlier ones. ``invariant``: only what keeps the order.
    """

    def __init__(self, tables: Iterable[Table] = (), device: str = "", invariant: bool = True) -> None:
        self.invariant = invariant
        self._entries: dict[tuple[object, ...], dict[int, Choice]] = {}
        self._made: dict[tuple[Shape, int], Choice] = {}
        self._refused: set[tuple[Shape, int]] = set()
        for table in tables:
            for entry in table.entries if device in table.devices else ():
                self._entries.setdefault(entry.key, {})[entry.rows] = entry.choice

    def __call__(self, shape: Shape, rows: int) -> Choice:
        made = self._made.get((shape, rows))
        if made is None:
            made = self._made[shape, rows] = self._find(shape, rows)
        return made

    def _find(self, shape: Shape, rows: int) -> Choice:
        if (shape, rows) in self._refused:
            return tile_rule(shape, rows)
        dtype = str(shape.dtype).removeprefix("torch.")
        found = self._entries.get((shape.outputs, shape.inputs, shape.gated, dtype, self.invariant))
        if not found or rows > max(found):
            return rule(shape, rows)
        return found[min(size for size in found if size >= rows)]

    def refuse(self, shape: Shape, rows: int) -> None:
        """From now on serve ``rows`` rows of ``shape`` by the kernel whose order is beyond doubt."""
        self._refused.add((shape, rows))
        self._made.pop((shape, rows), None)


MANY = 256
"""Rows from which on cuBLAS is the better guess."""


def rule(shape: Shape, rows: int) -> Choice:
    """A guess for what is in no table."""
    return Library() if rows > MANY and shape.dtype != torch.float32 else tile_rule(shape, rows)


def tile_rule(shape: Shape, rows: int) -> Tile:
    """The kernel with tiles as small as the rows allow, and small enough in outputs to keep every processor busy."""
    if shape.dtype == torch.float32:
        return REFERENCE[torch.float32]
    columns = shape.outputs // 2 if shape.gated else shape.outputs
    if rows > 64:
        return Tile(128, 128, 64, 8, 3)
    width = next((width for width in (64, 32) if columns >= width * 96), 16)
    inputs = next(k for k in (128, 64) if shape.inputs % k == 0 or k == 64) * 64 // width
    tall = max(16, 1 << (rows - 1).bit_length())
    if tall > 16:
        width, inputs = 64, 64
    bytes_a_stage = (width * (2 if shape.gated else 1) + tall) * inputs * 2
    stages = max(2, min(6, SHARED_BYTES // bytes_a_stage))
    return Tile(width, tall, inputs, max(1, width // 16), stages)


class CudaLinear:
    """``weight`` [outputs, inputs] and ``bias`` [outputs], used as they lie in memory. ``gated``: see the contract.

    ``choices`` says which implementation serves a number of rows.
    """

    def __init__(
        self, weight: Tensor, bias: Tensor | None = None, gated: bool = False, choices: Choices | None = None
    ) -> None:
        self._weight, self._bias, self._gated = weight, bias, gated
        self._choices = Choices() if choices is None else choices
        self.shape = Shape(len(weight), weight.shape[1], gated, weight.dtype, bias is not None)

    def __call__(self, x: Tensor, out=None) -> Tensor:
        """``x`` [rows, inputs], at least one row -> [rows, outputs], half as many if gated; a new tensor."""
        y = self._choices(self.shape, len(x))(x, self._weight, self._bias, self._gated)
        if out is not None:
            out.copy_(y)
        return y
