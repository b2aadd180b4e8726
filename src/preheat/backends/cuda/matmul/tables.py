"""Tables of measured choices, on disk and in the package. No Triton.

A table holds the fastest measured choices. Tables are only read here; :mod:`preheat.backends.cuda.matmul.tuner` fills
them when somebody asks for it. An entry counts for all numbers of rows up to its own, down to the number of the entry
before.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from importlib import resources
from pathlib import Path

import msgspec
import torch

from preheat.backends.cuda.matmul.config import (
    Expanded,
    ExpertsConfig,
    ExpertsShape,
    KernelConfig,
    Library,
    LinearShape,
    Tile,
    Wide,
)
from preheat.ops.kinds import Scheme
from preheat.utils.files import read_file, why_unread

logger = logging.getLogger(__name__)


class Entry(msgspec.Struct, frozen=True, omit_defaults=True):
    """The fastest implementation of a map up to ``rows``: ``tile`` or ``wide``, or cuBLAS where there is neither.

    ``splits``: into so many splits the inputs are cut, of which ranks share the sum; 0: they are not cut. ``ordered``:
    the fastest implementation in the contract's order. If another one is faster, it has an entry of its own. ``own``:
    the fastest one in order besides cuBLAS, where cuBLAS is faster.
    """

    outputs: int
    inputs: int
    rows: int
    microseconds: float
    gated: bool = False
    dtype: str = "bfloat16"
    ordered: bool = True
    own: bool = False
    split: bool = False
    splits: int = 0
    tile: Tile | None = None
    wide: Wide | None = None
    scheme: Scheme | None = None
    shuffled: bool = msgspec.field(default=False, name="dealt")  # the name in stored tables
    expanded: bool = False

    @property
    def choice(self) -> KernelConfig:
        choice = self.tile or self.wide or Library(self.split)
        return Expanded(choice) if self.expanded else choice

    @property
    def shape(self) -> LinearShape:
        """Shape of the layer, without a bias and scales of bfloat16: they make no difference to the choice."""
        dtype = getattr(torch, self.dtype)
        return LinearShape(
            self.outputs, self.inputs, self.gated, dtype, scheme=self.scheme, shuffled=self.shuffled, splits=self.splits
        )

    @classmethod
    def of(
        cls,
        shape: LinearShape,
        rows: int,
        choice: KernelConfig,
        microseconds: float,
        *,
        ordered: bool = True,
        own: bool = False,
    ) -> Entry:
        kernel = choice.multiplies
        return cls(
            outputs=shape.outputs,
            inputs=shape.inputs,
            rows=rows,
            microseconds=round(microseconds, 2),
            gated=shape.gated,
            dtype=str(shape.dtype).removeprefix("torch."),
            ordered=ordered,
            own=own,
            split=kernel.kind == "library" and kernel.split,
            splits=shape.splits,
            tile=kernel if kernel.kind == "tile" else None,
            wide=kernel if kernel.kind == "wide" else None,
            scheme=shape.scheme,
            shuffled=shape.shuffled,
            expanded=choice.kind == "expanded",
        )


class ExpertsEntry(msgspec.Struct, frozen=True, omit_defaults=True):
    """The fastest kernels of both layers of routed experts, gates and ups first, up to ``tokens`` tokens.

    An entry has either ``tiles`` or ``wides``. ``block`` rows of an expert are computed together.
    """

    num_experts: int
    hidden: int
    inner: int
    top_k: int
    tokens: int
    microseconds: float
    block: int
    dtype: str = "bfloat16"
    scheme: Scheme | None = None
    tiles: tuple[Tile, Tile] | None = None
    wides: tuple[Wide, Wide] | None = None

    @property
    def choice(self) -> ExpertsConfig:
        layers = self.tiles or self.wides
        assert layers is not None
        return ExpertsConfig(self.block, *layers)

    @property
    def shape(self) -> ExpertsShape:
        dtype = getattr(torch, self.dtype)
        return ExpertsShape(self.num_experts, self.hidden, self.inner, self.top_k, dtype, self.scheme)

    @classmethod
    def of(cls, shape: ExpertsShape, tokens: int, config: ExpertsConfig, microseconds: float) -> ExpertsEntry:
        gate_up, down, tiles, wides = config.gate_up, config.down, None, None
        if gate_up.kind == "tile" and down.kind == "tile":
            tiles = gate_up, down
        elif gate_up.kind == "wide" and down.kind == "wide":
            wides = gate_up, down
        return cls(
            *shape[:4], tokens, round(microseconds, 2), config.block, str(shape.dtype).removeprefix("torch."),
            shape.scheme, tiles, wides,
        )  # fmt: skip


class Table(msgspec.Struct):
    """Entries that were measured on ``device``, a GPU's name, of this compute capability."""

    device: str
    capability: tuple[int, int]
    entries: list[Entry] = []
    experts: list[ExpertsEntry] = []


def tables_for(device: str, capability: tuple[int, int], folder: Path | None) -> list[Table]:
    """Return the tables for a GPU of this name and compute capability, the best last.

    They are the tables that come with preheat, and the tuner's table in ``folder``. A table of another GPU of the same
    capability is better than none: its choices are right, if not always fastest.
    """
    known = [table for table in shipped() if table.capability == capability]
    own = [table for table in known if table.device == device]
    own += read(place(folder, device)) if folder else []
    if known and not own:
        names = ", ".join(table.device for table in known)
        logger.info(
            "Linear layers use the kernels that were fastest on %s; `preheat tune` measures on this %s", names, device
        )
    return [table for table in known if table.device != device] + own


def shipped() -> list[Table]:
    """Return the tables that come with preheat."""
    folder = resources.files("preheat.backends.cuda") / "tables"
    files = sorted((file for file in folder.iterdir() if file.name.endswith(".json")), key=lambda file: file.name)
    return [msgspec.json.decode(file.read_bytes(), type=Table) for file in files]


def place(folder: Path, device: str) -> Path:
    """Return the path of the tuner's table for a GPU."""
    return folder / f"linear-maps-{re.sub('[^A-Za-z0-9]+', '-', device)}.json"


def read(path: Path) -> list[Table]:
    """Return the tuner's table in ``path``, or nothing if the file is missing or cannot be read."""
    try:
        return [msgspec.json.decode(read_file(path), type=Table)]
    except FileNotFoundError:
        return []
    except (OSError, msgspec.DecodeError, RecursionError) as error:
        logger.warning("%s cannot be read and is ignored: %s", path, why_unread(error))
        return []


def merged(before: Sequence[Table], new: Table) -> Table:
    """Return ``new`` with the entries of the tables ``before`` for shapes that are not in ``new``."""
    known = {entry.shape for entry in new.entries}
    kept = [entry for table in before for entry in table.entries if entry.shape not in known]
    routed = {entry.shape for entry in new.experts}
    experts = [entry for table in before for entry in table.experts if entry.shape not in routed]
    return Table(new.device, new.capability, kept + new.entries, experts + new.experts)


def encode(table: Table) -> bytes:
    """Return the text of a table, one entry a line."""
    head = msgspec.json.encode({"device": table.device, "capability": table.capability}).removesuffix(b"}")
    for name, entries in (("entries", table.entries), ("experts", table.experts)):
        if entries:
            lines = b",\n  ".join(msgspec.json.encode(entry) for entry in entries)
            head += b',"%s":[\n  %s\n]' % (name.encode(), lines)
    return head + b"}\n"
