"""Which implementation serves which linear map at which number of rows.

A table says what was measured to be fastest; a rule says what is safe where nothing was measured. Both are only ever
read here: tables are filled by :mod:`preheat.backends.cuda.tuner`, when somebody asks for it. An entry counts for all
numbers of rows up to its own, down to that of the entry before; above the last one the rule takes over.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import NamedTuple, TypeVar

import msgspec
import torch

from preheat.ops.kinds import Scheme
from preheat.ops.values import Experts, Matmul
from preheat.utils.files import read_file, why_unread

logger = logging.getLogger(__name__)

SHARED_BYTES = 225_000
"""Of one program's tiles in shared memory, on Hopper."""

FEW_ROWS = 24
"""Below so many rows, and below so many outputs of all rows together, cuBLAS that may not cut the inputs into parts can
take ten times as long as tiles."""
FEW_OUTPUTS = 1 << 17


OWN_ROWS = 64
"""Up to so many, layers with adapters are computed by kernels of ours where cuBLAS is a little faster: adapters shrink
beside those, and would wait for it.
"""

ADDED_ROWS = 1024
"""From so many on, the kernel for many rows on Hopper adds what adapters do to its own outputs, by measurement on an
H200: to write these and read them again takes longer then.
"""


ALONE = 4
"""With so many times more experts than slots, hardly two slots share one: each is a block of its own."""


class LinearShape(NamedTuple):
    """Everything about a layer that the choice of its kernel depends on, besides the number of rows.

    ``outputs`` are the rows of W. ``scheme`` says how they are quantized, if they are. ``dealt``: codes of four bits
    lie in the order of Hopper's matrix unit; ``narrow``: and their scales are of bfloat16. ``splits``: into how many
    splits the ``inputs`` of this rank are cut, so that ranks may share them; 0: they are not cut.
    """

    outputs: int
    inputs: int
    gated: bool = False
    dtype: torch.dtype = torch.bfloat16
    bias: bool = False
    scheme: Scheme | None = None
    dealt: bool = False
    narrow: bool = False
    splits: int = 0

    @property
    def columns(self) -> int:
        """Columns of the result."""
        return self.outputs // 2 if self.gated else self.outputs

    @property
    def of_split(self) -> LinearShape:
        """The layer of one split, whose inputs are not cut."""
        return LinearShape(self.outputs, self.inputs // self.splits, dtype=self.dtype, scheme=self.scheme)


class ExpertsShape(NamedTuple):
    """Everything about experts that the choice of their kernels depends on, besides the number of tokens."""

    num_experts: int
    hidden: int
    inner: int
    top_k: int
    dtype: torch.dtype
    scheme: Scheme | None = None

    @property
    def gate_up(self) -> LinearShape:
        """The first layer of one expert."""
        return LinearShape(2 * self.inner, self.hidden, True, self.dtype, scheme=self.scheme)

    @property
    def down(self) -> LinearShape:
        """The second layer of one expert."""
        return LinearShape(self.hidden, self.inner, False, self.dtype, scheme=self.scheme)


class Tile(msgspec.Struct, frozen=True, omit_defaults=True):
    """The Triton kernel with tiles of ``outputs`` x ``rows``, ``inputs`` deep.

    ``bulk``: the copy engine loads them; of quantized weights, :mod:`preheat.backends.cuda.linear_hopper_few`.
    """

    outputs: int
    rows: int
    inputs: int
    warps: int
    stages: int
    bulk: bool = False


class Wide(msgspec.Struct, frozen=True):
    """The kernel for many rows on Hopper, :mod:`preheat.backends.cuda.linear_hopper`, with tiles of ``outputs`` x
    ``rows``.

    ``outputs`` are rows of W: gates and ups both count. At most 128 for 256 rows, 256 for 128.
    """

    outputs: int
    rows: int
    stages: int


class Library(msgspec.Struct, frozen=True):
    """cuBLAS. With ``split`` it may cut the inputs into parts, and so change the bits."""

    split: bool = False


class Expanded(msgspec.Struct, frozen=True):
    """Of quantized weights: they are dequantized into memory, then ``choice`` computes with them."""

    choice: Tile | Wide | Library


KernelConfig = Tile | Wide | Library | Expanded


class ExpertsConfig(NamedTuple):
    """The kernels of both layers of experts. ``block`` rows of an expert are computed together, as many as the rows of
    both tiles; 1: every slot is computed by itself.
    """

    block: int
    gate_up: Tile | Wide | Expanded
    down: Tile | Wide | Expanded


REFERENCE = {torch.bfloat16: Tile(64, 64, 64, 4, 3), torch.float32: Tile(32, 32, 32, 4, 2)}
"""The plain kernel, whose bits are the contract's."""

FP8_REFERENCE = Tile(64, 64, 128, 4, 3)
"""The same of layers with float8 activations."""

PLAIN = {dtype: ExpertsConfig(tile.rows, tile, tile) for dtype, tile in REFERENCE.items()}
"""The same of experts."""

PROCESSORS = 132
"""Of a Hopper GPU."""

MANY_ROWS = 512
"""From so many rows on, quantized weights are dequantized first: reading them is then little beside the product."""


def reference(shape: LinearShape) -> KernelConfig:
    """Return the implementation whose bits are the contract's: of quantized weights, that of the dequantized model."""
    if shape.scheme is None:
        return REFERENCE[shape.dtype]
    return FP8_REFERENCE if shape.scheme.activations else Expanded(REFERENCE[shape.dtype])


def experts_reference(shape: ExpertsShape) -> ExpertsConfig:
    """Return the kernels whose bits are the contract's."""
    if shape.scheme is None:
        return PLAIN[shape.dtype]
    if shape.scheme.activations is not None:
        return ExpertsConfig(64, FP8_REFERENCE, FP8_REFERENCE)
    tile = REFERENCE[shape.dtype]
    return ExpertsConfig(tile.rows, Expanded(tile), Expanded(tile))


class Entry(msgspec.Struct, frozen=True, omit_defaults=True):
    """The fastest implementation of a map up to ``rows``: ``tile`` or ``wide``, or cuBLAS where there is neither.

    ``ordered``: the fastest of those that keep the contract's order. The fastest of all has an entry of its own where
    it is another one. ``own``: the fastest of those but for cuBLAS, where that is faster.
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
    tile: Tile | None = None
    wide: Wide | None = None
    scheme: Scheme | None = None
    dealt: bool = False
    expanded: bool = False

    @property
    def choice(self) -> KernelConfig:
        choice = self.tile or self.wide or Library(self.split)
        return Expanded(choice) if self.expanded else choice

    @property
    def shape(self) -> LinearShape:
        """A bias makes no difference to the choice, nor do narrow scales."""
        dtype = getattr(torch, self.dtype)
        return LinearShape(self.outputs, self.inputs, self.gated, dtype, scheme=self.scheme, dealt=self.dealt)

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
        expanded = isinstance(choice, Expanded)
        if isinstance(choice, Expanded):
            choice = choice.choice
        return cls(
            outputs=shape.outputs,
            inputs=shape.inputs,
            rows=rows,
            microseconds=round(microseconds, 2),
            gated=shape.gated,
            dtype=str(shape.dtype).removeprefix("torch."),
            ordered=ordered,
            own=own,
            split=isinstance(choice, Library) and choice.split,
            tile=choice if isinstance(choice, Tile) else None,
            wide=choice if isinstance(choice, Wide) else None,
            scheme=shape.scheme,
            dealt=shape.dealt,
            expanded=expanded,
        )


class ExpertsEntry(msgspec.Struct, frozen=True, omit_defaults=True):
    """The fastest kernels of both layers of routed experts, gates and ups first, up to ``tokens`` tokens: either
    ``tiles`` or ``wides``; ``block`` rows of an expert are computed together.
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
        tiles, wides = None, None
        if isinstance(config.gate_up, Tile) and isinstance(config.down, Tile):
            tiles = config.gate_up, config.down
        elif isinstance(config.gate_up, Wide) and isinstance(config.down, Wide):
            wides = config.gate_up, config.down
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


class KernelConfigs:
    """From a layer or experts and a number of rows to the kernels that serve them.

    Of several ``tables`` that know a layer the last one counts. ``invariant``: only kernels that keep the contract's
    order. ``hopper``: kernels written for Hopper may be guessed, too.
    """

    def __init__(self, tables: Iterable[Table] = (), *, invariant: bool = True, hopper: bool = False) -> None:
        self.invariant, self._hopper = invariant, hopper
        self._entries: dict[LinearShape, dict[int, KernelConfig]] = {}
        self._own: dict[LinearShape, dict[int, KernelConfig]] = {}
        self._routed: dict[ExpertsShape, dict[int, ExpertsConfig]] = {}
        self._made: dict[tuple[LinearShape, int], KernelConfig] = {}
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
        known = shape._replace(bias=False, narrow=False)
        return _up_to(self._entries, known, rows) or rule(shape, rows, hopper=self._hopper)

    def experts(self, shape: ExpertsShape, tokens: int) -> ExpertsConfig:
        """Return the kernels for ``tokens`` tokens of experts."""
        made = self._made_routed.get((shape, tokens))
        if made is None:
            made = _up_to(self._routed, shape, tokens) or experts_rule(shape, tokens, hopper=self._hopper)
            self._made_routed[shape, tokens] = made
        return made

    def own(self, shape: LinearShape, rows: int) -> KernelConfig:
        """Return the kernel for a layer beside which rows shrink: not cuBLAS up to ``OWN_ROWS`` rows."""
        found = self(shape, rows)
        if rows > OWN_ROWS or not isinstance(found, Library):
            return found
        return _up_to(self._own, shape._replace(bias=False, narrow=False), rows) or tile_rule(shape, rows)

    def wide(self, shape: LinearShape, rows: int) -> Wide | None:
        """Return the kernel that adds low-rank terms itself, for layers and numbers of rows for which it pays.

        It is the kernel for many rows on Hopper, also where cuBLAS is faster, unless it has too few tiles.
        """
        many = self._hopper and rows >= ADDED_ROWS and fits_wide(shape) and not isinstance(self(shape, rows), Tile)
        guesses = wide_guesses(shape, rows) if many else []
        return min(guesses, key=lambda choice: rounds(shape, rows, choice), default=None)

    def used(self, shape: LinearShape, rows: int, *, adapted: bool) -> list[KernelConfig]:
        """Return all kernels that may serve ``rows`` rows of a layer, which has terms if it is ``adapted``."""
        found = [self(shape, rows)]
        if adapted:
            found += [self.own(shape, rows), self.wide(shape, rows) or found[0]]
        return list(dict.fromkeys(found))

    def reject(self, shape: LinearShape | ExpertsShape, rows: int) -> None:
        """From now on serve ``rows`` rows by the kernel whose order is beyond doubt."""
        if isinstance(shape, ExpertsShape):
            self._made_routed[shape, rows] = experts_reference(shape)
        else:
            plain = shape.scheme is None and not shape.splits
            self._made[shape, rows] = tile_rule(shape, rows) if plain else reference(shape)


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


def tables_for(device: str, capability: tuple[int, int], folder: Path | None) -> list[Table]:
    """What is known of a GPU of this name and compute capability, the best last: the tables that come with preheat, and
    the one that the tuner left in ``folder``.

    A table of another GPU of the same capability is better than none: what it prefers is right, if not always fastest.
    """
    known = [table for table in shipped() if table.capability == capability]
    own = [table for table in known if table.device == device]
    own += read(place(folder, device)) if folder else []
    if known and not own:
        names = ", ".join(table.device for table in known)
        logger.info("Linear maps run as measured on %s; `preheat tune` measures on this %s", names, device)
    return [table for table in known if table.device != device] + own


def kernel_configs(
    device: str, capability: tuple[int, int], folder: Path | None, *, invariant: bool = True
) -> KernelConfigs:
    """What serves linear layers on such a GPU."""
    return KernelConfigs(tables_for(device, capability, folder), invariant=invariant, hopper=capability[0] == 9)


def shipped() -> list[Table]:
    """The tables that come with preheat."""
    folder = resources.files("preheat.backends.cuda") / "tables"
    files = sorted((file for file in folder.iterdir() if file.name.endswith(".json")), key=lambda file: file.name)
    return [msgspec.json.decode(file.read_bytes(), type=Table) for file in files]


def place(folder: Path, device: str) -> Path:
    """Where the tuner leaves the table of a GPU."""
    return folder / f"linear-maps-{re.sub('[^A-Za-z0-9]+', '-', device)}.json"


def read(path: Path) -> list[Table]:
    """The table that the tuner wrote to ``path``; what is not there or cannot be read is done without."""
    try:
        return [msgspec.json.decode(read_file(path), type=Table)]
    except FileNotFoundError:
        return []
    except (OSError, msgspec.DecodeError, RecursionError) as error:
        logger.warning("%s cannot be read and is ignored: %s", path, why_unread(error))
        return []


def shape_of(value: Matmul, *, hopper: bool = False) -> LinearShape:
    """Return the shape of a layer; on ``hopper`` codes are dealt where they may be."""
    dtype, scheme = getattr(torch, value.weight.dtype), value.weight.scheme
    dealt = hopper and scheme is not None and may_be_dealt(scheme, value.outputs, value.inputs, dtype)
    gated, splits = value.finish.activation == "silu_and_mul", value.order.own if value.order.is_split else 0
    return LinearShape(
        value.outputs, value.inputs, gated, dtype, value.finish.bias, scheme, dealt and not splits, splits=splits
    )


def experts_shape_of(value: Experts) -> ExpertsShape:
    """Return the shape of experts."""
    down = value.down
    dtype = getattr(torch, down.weight.dtype)
    return ExpertsShape(down.groups.experts, down.outputs, down.inputs, down.groups.top_k, dtype, down.weight.scheme)


def merged(before: Sequence[Table], new: Table) -> Table:
    """``new``, with the entries of the tables ``before`` for shapes that are not in it."""
    known = {entry.shape for entry in new.entries}
    kept = [entry for table in before for entry in table.entries if entry.shape not in known]
    routed = {entry.shape for entry in new.experts}
    experts = [entry for table in before for entry in table.experts if entry.shape not in routed]
    return Table(new.device, new.capability, kept + new.entries, experts + new.experts)


def encode(table: Table) -> bytes:
    """The text of a table, one entry a line."""
    head = msgspec.json.encode({"device": table.device, "capability": table.capability}).removesuffix(b"}")
    for name, entries in (("entries", table.entries), ("experts", table.experts)):
        if entries:
            lines = b",\n  ".join(msgspec.json.encode(entry) for entry in entries)
            head += b',"%s":[\n  %s\n]' % (name.encode(), lines)
    return head + b"}\n"


def fits_wide(shape: LinearShape) -> bool:
    """Whether :mod:`preheat.backends.cuda.linear_hopper` does for a layer, on Hopper."""
    whole = shape.inputs % 8 == shape.columns % 8 == 0  # rows of whole 16 bytes, for TMA
    return shape.scheme is None and shape.dtype.itemsize == 2 and whole


def without_unaligned_copies(config: Tile | Wide | Expanded, shape: LinearShape) -> Tile | Wide | Expanded:
    """Return ``config`` with ordinary loads where the copy engine (TMA) would refuse a plain weight's rows.

    The copy engine takes rows whose length is a multiple of 16 bytes.
    """
    aligned = shape.inputs * shape.dtype.itemsize % 16 == 0
    if isinstance(config, Tile) and config.bulk and shape.scheme is None and not aligned:
        return msgspec.structs.replace(config, bulk=False)
    return config


def wide_float8(shape: LinearShape) -> bool:
    """Whether :mod:`preheat.backends.cuda.linear_hopper_fp8` does for a layer, on Hopper."""
    return (
        shape.scheme is not None
        and shape.scheme.activations in ("token", "static")
        and shape.scheme.scales in ("channel", "tensor")
        and shape.dtype.itemsize == 2
        and shape.inputs % 16 == shape.columns % 8 == 0  # rows of whole 16 bytes, for TMA
    )


def may_be_dealt(scheme: Scheme, outputs: int, inputs: int, dtype: torch.dtype) -> bool:
    """Whether codes of four bits may lie as Hopper's matrix unit takes them: those of groups of whole steps."""
    return (
        scheme.code == "int4"
        and not scheme.indexed
        and dtype == torch.bfloat16
        and outputs % 16 == inputs % 64 == 0
        and (scheme.group == 128 or scheme.group % 256 == 0)
    )


def few_rows(shape: LinearShape) -> bool:
    """Whether :mod:`preheat.backends.cuda.linear_hopper_few` does for a layer, on Hopper."""
    return shape.dealt or (wide_float8(shape) and shape.outputs % 16 == shape.inputs % 128 == 0)


def few_tile(shape: LinearShape, rows: int, stages: int) -> Tile:
    """Of that kernel: of ``rows`` rows, a power of two between 8 and 64."""
    return Tile(64, rows, 128 if wide_float8(shape) else 256, 4, stages, bulk=True)


def few_bytes(shape: LinearShape, tile: Tile) -> int:
    """In shared memory: stages with codes, scales and zero points of two groups, and x."""
    weights = 64 * tile.inputs if wide_float8(shape) else 64 * (tile.inputs // 2 + 2 * 8)
    return tile.stages * (weights + tile.rows * tile.inputs * (1 if wide_float8(shape) else 2) + 16)


def few_rule(shape: LinearShape, rows: int) -> Tile:
    """A guess: as many stages as fit, of all programs that a processor has to run; at least four, where those fit."""
    height = max(8, min(1 << (rows - 1).bit_length(), 64))
    programs = -(-shape.outputs // 64) * -(-rows // height)
    size = few_bytes(shape, few_tile(shape, height, 1))
    room = SHARED_BYTES // min(4, -(-programs // PROCESSORS))
    return few_tile(shape, height, max(min(4, SHARED_BYTES // size), min(16, room // size)))


def rule(shape: LinearShape, rows: int, *, hopper: bool = False) -> KernelConfig:
    """Guess the kernel for a layer that is in no table."""
    if shape.splits:
        return split_rule(shape, rows)
    if hopper and wide_float8(shape) and (wide := wide_guesses(shape, rows)):
        return wide[0]
    if shape.scheme is not None:
        if shape.scheme.activations is None and rows >= MANY_ROWS:
            return Expanded(rule(shape._replace(scheme=None, dealt=False, narrow=False), rows))  # type: ignore[arg-type]  # plain: not expanded again
        return few_rule(shape, rows) if hopper and few_rows(shape) else codes_rule(shape, rows)
    many = rows >= FEW_ROWS and rows * shape.columns >= FEW_OUTPUTS
    return Library() if many and shape.dtype == torch.bfloat16 else tile_rule(shape, rows)


def wide_tiles(shape: LinearShape, rows: int, choice: Wide) -> int:
    """How many of them there are."""
    return -(-shape.outputs // choice.outputs) * -(-rows // choice.rows)


def wide_guesses(shape: LinearShape, rows: int) -> list[Wide]:
    """Tiles of which most processors of a Hopper GPU have one, the largest first."""
    sizes = (Wide(256, 128, 4), Wide(128, 128, 6))
    return [choice for choice in sizes if wide_tiles(shape, rows, choice) >= PROCESSORS * 2 // 3]


def rounds(shape: LinearShape, rows: int, choice: Wide) -> float:
    """What the rounds of a Hopper GPU over all tiles take, in those of the largest; half a tile is guessed
    to take a little more than half.
    """
    return -(-wide_tiles(shape, rows, choice) // PROCESSORS) * (1.0 if choice.outputs == 256 else 0.55)


def tile_rule(shape: LinearShape, rows: int) -> Tile:
    """The kernel with tiles as low as the rows allow, and so narrow that there is one for every processor."""
    if shape.dtype == torch.float32:
        return REFERENCE[torch.float32]
    if rows > 64:
        many = -(-shape.columns // 128) * -(-rows // 128) >= 100
        return Tile(128, 128, 64, 8, 4) if many else Tile(64, 64, 64, 4, 4)
    height = max(16, 1 << (rows - 1).bit_length())
    if height > 16 or 6144 <= shape.columns < 1 << 16:
        width, depth = 64, 128
    else:
        width, depth = (32, 256) if shape.columns < 6144 else (128, 128)
    bytes_a_stage = (width * (2 if shape.gated else 1) + height) * depth * 2
    return Tile(width, height, depth, min(4, width // 16), min(6, SHARED_BYTES // bytes_a_stage))


def codes_rule(shape: LinearShape, rows: int) -> Tile:
    """The kernel that reads codes, with tiles as low as the rows allow. Two accumulators of a gated layer, and what is
    to be added to them, have to fit into registers.

    For few rows the time is that of the weights' bytes, of which each processor has to have tens of kilobytes on their
    way: as many stages as fit, twice where a processor has more than one program; and tiles as deep as the inputs
    allow, since the steps of a program follow each other.
    """
    assert shape.scheme is not None
    if -(-shape.columns // 128) * (rows // 128) >= PROCESSORS * 3 // 4 and shape.scheme.activations:
        return Tile(128, 128, 128, 8, 4)
    height = max(16, min(1 << (rows - 1).bit_length(), 64))
    few = shape.columns * -(-rows // 64) <= 64 * PROCESSORS
    deep = (512, 256) if few and shape.scheme.activations else (256,) if whole_groups(shape.scheme) else ()
    depth = next((depth for depth in deep if shape.inputs % depth == 0), 128)
    width = 64 if shape.scheme.activations or not few else 32
    room = SHARED_BYTES if few else SHARED_BYTES // 2
    stages = max(2, min(8, room // codes_bytes(shape, width, height, depth)))
    return Tile(width, height, depth, width // 16, stages)


def whole_groups(scheme: Scheme) -> bool:
    """Whether all weights that are dequantized at a time are of one group: half a step of four bits, else a step."""
    return not scheme.indexed and scheme.group % (64 if scheme.code == "int4" else 128) == 0


def codes_bytes(shape: LinearShape, width: int, height: int, depth: int) -> int:
    """Of a stage of a tile of codes, and of its inputs, in shared memory."""
    assert shape.scheme is not None
    weights = width * (2 if shape.gated else 1) * depth
    held = weights // (2 if shape.scheme.code == "int4" else 1)
    if not whole_groups(shape.scheme):
        held += weights * (8 if shape.scheme.zeros else 4)  # each weight's scale and zero point
    return held + height * depth * (1 if shape.scheme.activations else shape.dtype.itemsize)


def split_rule(shape: LinearShape, rows: int) -> Tile | Expanded:
    """Guess tiles for a layer whose inputs are cut into splits.

    The copy engine cannot stop inside a tile, so it needs splits that its tiles divide.
    """
    if shape.scheme is None:
        return _plain_split(shape, rows)
    if shape.scheme.activations is None and rows >= MANY_ROWS:
        return Expanded(_plain_split(shape, rows))
    return _codes_split(shape.of_split, rows)


def _codes_split(shape: LinearShape, rows: int) -> Tile:
    """Guess a tile of codes for the layer of one split.

    Sums of other splits wait in registers, of which a thread has 255.
    """
    assert shape.scheme is not None
    if shape.scheme.activations is not None:
        tile = codes_rule(shape, rows)
        return tile if tile.outputs < 128 else Tile(128, 64, 128, 8, 4)
    height = max(16, min(1 << (rows - 1).bit_length(), 64))
    room = SHARED_BYTES // codes_bytes(shape, 64, height, 128)
    return Tile(64, height, 128, 4, max(2, min(room, 8 if height < 64 else 4)))


def _plain_split(shape: LinearShape, rows: int) -> Tile:
    if shape.dtype != torch.bfloat16:
        return REFERENCE[shape.dtype]
    size = shape.inputs // shape.splits
    deep = 128 if size % 128 == 0 else 64
    bulk = size % deep == 0
    if rows <= 16:
        return Tile(64, 16, deep, 4, 6 if deep == 128 else 8, bulk)
    if rows <= 32:
        return Tile(64, 32, deep, 4, 5, bulk)
    if rows <= 64:
        return Tile(64, 64, deep, 4, 4, bulk)
    if rows <= 256:
        return Tile(128, 64, 64, 4, 4, bulk)
    return Tile(128, 128, 64, 8, 4, bulk)


def experts_rule(shape: ExpertsShape, tokens: int, *, hopper: bool = False) -> ExpertsConfig:
    """Guess the kernels for experts and a number of tokens that are in no table."""
    guess = _guess(shape, tokens, hopper=hopper)
    return guess._replace(
        gate_up=without_unaligned_copies(guess.gate_up, shape.gate_up),
        down=without_unaligned_copies(guess.down, shape.down),
    )


def _guess(shape: ExpertsShape, tokens: int, *, hopper: bool) -> ExpertsConfig:
    """Guess the kernels as if every row of weights could be copied in bulk."""
    slots = tokens * shape.top_k
    alone = slots * ALONE <= shape.num_experts
    if shape.scheme is not None:
        rows = 16 if slots <= 16 * shape.num_experts else 64
        deep = 256 if alone and whole_groups(shape.scheme) else 128
        tiles = (_codes_expert(layer, rows, deep) for layer in (shape.gate_up, shape.down))
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
    if mean <= 48 or not (hopper and fits_wide(shape.gate_up) and fits_wide(shape.down)):
        return ExpertsConfig(64, Tile(128, 64, 64, 4, 4, True), Tile(128, 64, 64, 4, 3, True))
    return ExpertsConfig(128, Wide(256, 128, 4), Wide(128, 128, 6) if mean <= 1024 else Wide(256, 128, 4))


def _codes_expert(layer: LinearShape, rows: int, deep: int) -> Tile:
    """A tile of codes with four stages, or as many as fit into shared memory: at least two."""
    room = SHARED_BYTES // codes_bytes(layer, 64, rows, deep)
    return Tile(64, rows, deep, 4, max(2, min(4, room)))
