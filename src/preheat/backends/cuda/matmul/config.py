"""Shapes of layers, and the choices of kernels for them. No Triton."""

from __future__ import annotations

from typing import ClassVar, Literal, NamedTuple

import msgspec
import torch

from preheat.backends.cuda.device.card import HOPPER
from preheat.ops.kinds import Scheme
from preheat.ops.values import Experts, Matmul

SHARED_BYTES = HOPPER.room
"""Of one program's tiles in shared memory, on Hopper."""


class LinearShape(NamedTuple):
    """Everything about a layer that the choice of its kernel depends on, besides the number of rows.

    ``outputs`` are the rows of W. ``scheme`` says how they are quantized, if they are. ``shuffled``: codes of four bits
    lie in the order of Hopper's matrix unit. ``bf16_scales``: the scales of shuffled codes are of bfloat16. ``splits``:
    into how many splits the ``inputs`` of this rank are cut, so that ranks may share them; 0: they are not cut.
    """

    outputs: int
    inputs: int
    gated: bool = False
    dtype: torch.dtype = torch.bfloat16
    bias: bool = False
    scheme: Scheme | None = None
    shuffled: bool = False
    bf16_scales: bool = False
    splits: int = 0

    @property
    def columns(self) -> int:
        """Columns of the result."""
        return self.outputs // 2 if self.gated else self.outputs

    @property
    def of_split(self) -> LinearShape:
        """The layer of one split, as a layer of its own."""
        return LinearShape(self.outputs, self.inputs // self.splits, dtype=self.dtype, scheme=self.scheme)


class ExpertsShape(NamedTuple):
    """Everything about experts that the choice of their kernels depends on, besides the number of tokens.

    ``splits``: into how many splits the ``inner`` numbers of this rank are cut, so that ranks may share the sums; 0:
    they are not cut.
    """

    num_experts: int
    hidden: int
    inner: int
    top_k: int
    dtype: torch.dtype
    scheme: Scheme | None = None
    splits: int = 0

    @property
    def gate_up(self) -> LinearShape:
        """The first layer of one expert."""
        return LinearShape(2 * self.inner, self.hidden, True, self.dtype, scheme=self.scheme)

    @property
    def down(self) -> LinearShape:
        """The second layer of one expert, or of one of its splits."""
        return LinearShape(self.hidden, self.inner // max(self.splits, 1), False, self.dtype, scheme=self.scheme)


class Tile(msgspec.Struct, frozen=True, omit_defaults=True):
    """The Triton kernel with tiles of ``outputs`` x ``rows``, ``inputs`` deep.

    ``bulk``: the copy engine loads them. :mod:`preheat.backends.cuda.matmul.hopper.small_m` is then the kernel of
    quantized weights, and :mod:`preheat.backends.cuda.matmul.hopper.mxfp4_experts` that of experts in MXFP4.
    """

    outputs: int
    rows: int
    inputs: int
    warps: int
    stages: int
    bulk: bool = False
    kind: ClassVar[Literal["tile"]] = "tile"

    @property
    def multiplies(self) -> Tile:
        """The kernel that multiplies: this one."""
        return self


# Stored tables and oracles name this kernel "wide", hence neither large_m nor LargeM.
class Wide(msgspec.Struct, frozen=True):
    """The kernel for many rows on Hopper, with tiles of ``outputs`` x ``rows``.

    It is in :mod:`preheat.backends.cuda.matmul.hopper.large_m`. ``outputs`` are rows of W: gates and ups both count. A
    tile has at most 128 outputs for 256 rows, and 256 outputs for 128 rows.
    """

    outputs: int
    rows: int
    stages: int
    kind: ClassVar[Literal["wide"]] = "wide"
    bulk: ClassVar[bool] = False

    @property
    def multiplies(self) -> Wide:
        """The kernel that multiplies: this one."""
        return self


class Library(msgspec.Struct, frozen=True):
    """cuBLAS. With ``split`` it may cut the inputs into parts, and so change the bits."""

    split: bool = False
    kind: ClassVar[Literal["library"]] = "library"
    bulk: ClassVar[bool] = False

    @property
    def multiplies(self) -> Library:
        """The kernel that multiplies: this one."""
        return self


class Expanded(msgspec.Struct, frozen=True):
    """Of quantized weights: they are dequantized into memory, then ``choice`` computes with them."""

    choice: Tile | Wide | Library
    kind: ClassVar[Literal["expanded"]] = "expanded"

    @property
    def multiplies(self) -> Tile | Wide | Library:
        """The kernel that multiplies by the dequantized weights."""
        return self.choice


KernelConfig = Tile | Wide | Library | Expanded


def rows_at_once(choice: KernelConfig, outputs: int) -> int | None:
    """Return the rows whose tiles keep all processors of a Hopper GPU busy once, in a layer of ``outputs`` outputs.

    None for cuBLAS: it may choose other sums for other numbers of rows.
    """
    if choice.kind == "library" or choice.kind == "expanded":
        return None
    return max(PROCESSORS // -(-outputs // choice.outputs), 1) * choice.rows


class ExpertsConfig(NamedTuple):
    """The kernels of both layers of experts.

    ``block`` rows of an expert are computed together: as many as the rows of both tiles. With ``block`` 1 every slot is
    computed by itself.
    """

    block: int
    gate_up: Tile | Wide | Expanded
    down: Tile | Wide | Expanded


REFERENCE = {torch.bfloat16: Tile(64, 64, 64, 4, 3), torch.float32: Tile(32, 32, 32, 4, 2)}
"""Tiles of the plain kernel; its bits define the contract."""


FP8_REFERENCE = Tile(64, 64, 128, 4, 3)
"""The reference tile of layers with float8 activations."""


PLAIN = {dtype: ExpertsConfig(tile.rows, tile, tile) for dtype, tile in REFERENCE.items()}
"""The reference kernels of experts with plain weights."""


PROCESSORS = HOPPER.processors
"""Of a Hopper GPU."""


def reference(shape: LinearShape) -> KernelConfig:
    """Return the kernel that defines the bits of a layer.

    For quantized weights without quantized activations it is the plain kernel on dequantized weights.
    """
    if shape.scheme is None:
        return REFERENCE[shape.dtype]
    return FP8_REFERENCE if shape.scheme.activations else Expanded(REFERENCE[shape.dtype])


def experts_reference(shape: ExpertsShape) -> ExpertsConfig:
    """Return the kernels that define the bits of experts."""
    if shape.scheme is None:
        return PLAIN[shape.dtype]
    if shape.scheme.activations is not None:
        return ExpertsConfig(64, FP8_REFERENCE, FP8_REFERENCE)
    tile = REFERENCE[shape.dtype]
    return ExpertsConfig(tile.rows, Expanded(tile), Expanded(tile))


def shape_of(value: Matmul, *, hopper: bool = False) -> LinearShape:
    """Return the shape of a layer; on ``hopper`` codes are shuffled where they may be."""
    dtype, scheme = getattr(torch, value.weight.dtype), value.weight.scheme
    shuffled = hopper and scheme is not None and may_be_shuffled(scheme, value.outputs, value.inputs, dtype)
    gated, splits = value.finish.activation == "silu_and_mul", value.order.own_k_splits if value.order.is_split else 0
    return LinearShape(
        value.outputs, value.inputs, gated, dtype, value.finish.bias, scheme, shuffled and not splits, splits=splits
    )


def experts_shape_of(value: Experts) -> ExpertsShape:
    """Return the shape of experts.

    Tiles of codes end at a split by themselves.
    """
    down, scheme = value.down, value.down.weight.scheme
    dtype, splits = getattr(torch, down.weight.dtype), down.order.own_k_splits if down.order.is_split else 0
    sizes = down.groups.experts, down.outputs, down.inputs, down.groups.top_k
    return ExpertsShape(*sizes, dtype, scheme, 0 if scheme else splits)


def fits_wide(shape: LinearShape) -> bool:
    """Whether :mod:`preheat.backends.cuda.matmul.hopper.large_m` does for a layer, on Hopper."""
    whole = shape.inputs % 8 == shape.columns % 8 == 0  # rows of whole 16 bytes, for TMA
    return shape.scheme is None and shape.dtype.itemsize == 2 and whole


def fits_streamed(shape: ExpertsShape) -> bool:
    """Whether :mod:`preheat.backends.cuda.matmul.hopper.mxfp4_experts` does for experts, on Hopper."""
    whole = shape.hidden % 64 == shape.inner % 64 == 0  # pieces of rows, and eights of outputs, for TMA
    return shape.scheme is not None and shape.scheme.powers and shape.dtype == torch.bfloat16 and whole


def without_unaligned_copies(config: Tile | Wide | Expanded, shape: LinearShape) -> Tile | Wide | Expanded:
    """Return ``config`` with ordinary loads where the copy engine (TMA) would refuse a plain weight's rows.

    The copy engine takes rows of multiples of 16 bytes.
    """
    aligned = shape.inputs * shape.dtype.itemsize % 16 == 0
    if config.kind == "tile" and config.bulk and shape.scheme is None and not aligned:
        return msgspec.structs.replace(config, bulk=False)
    return config


def wide_float8(shape: LinearShape) -> bool:
    """Whether :mod:`preheat.backends.cuda.matmul.hopper.large_m_fp8` does for a layer, on Hopper.

    Splits of its inputs, at most two of them, are whole steps.
    """
    return (
        shape.scheme is not None
        and shape.scheme.activations in ("token", "static")
        and shape.scheme.scales in ("channel", "tensor")
        and shape.dtype.itemsize == 2
        and shape.inputs % 16 == shape.columns % 8 == 0  # rows of whole 16 bytes, for TMA
        and (not shape.splits or (shape.splits <= 2 and shape.inputs // shape.splits % 128 == 0))
    )


def may_be_shuffled(scheme: Scheme, outputs: int, inputs: int, dtype: torch.dtype) -> bool:
    """Whether codes of four bits may lie in the order of Hopper's matrix unit.

    Their groups have to be whole steps.
    """
    return (
        scheme.code == "int4"
        and not scheme.indexed
        and dtype == torch.bfloat16
        and outputs % 16 == inputs % 64 == 0
        and (scheme.group == 128 or scheme.group % 256 == 0)
    )


def fits_small_m(shape: LinearShape) -> bool:
    """Whether :mod:`preheat.backends.cuda.matmul.hopper.small_m` does for a layer, on Hopper."""
    return shape.shuffled or (wide_float8(shape) and shape.outputs % 16 == shape.inputs % 128 == 0)


def small_m_tile(shape: LinearShape, rows: int, stages: int) -> Tile:
    """Return a tile of the kernel for few rows with ``rows`` rows, a power of two between 8 and 64."""
    return Tile(64, rows, 128 if wide_float8(shape) else 256, 4, stages, bulk=True)


def small_m_bytes(shape: LinearShape, tile: Tile) -> int:
    """In shared memory: stages with codes, scales and zero points of two groups, and x."""
    weights = 64 * tile.inputs if wide_float8(shape) else 64 * (tile.inputs // 2 + 2 * 8)
    return tile.stages * (weights + tile.rows * tile.inputs * (1 if wide_float8(shape) else 2) + 16)


def whole_groups(scheme: Scheme) -> bool:
    """Whether all weights that are dequantized at a time are of one group: half a step of four bits, else a step."""
    return not scheme.indexed and scheme.group % (64 if scheme.bits == 4 else 128) == 0


def codes_bytes(shape: LinearShape, width: int, height: int, depth: int) -> int:
    """Of a stage of a tile of codes, and of its inputs, in shared memory."""
    assert shape.scheme is not None
    weights = width * (2 if shape.gated else 1) * depth
    held = weights * shape.scheme.bits // 8
    if shape.scheme.powers:
        held += weights // 128 * 4  # the exponents of a step's four groups
    elif not whole_groups(shape.scheme):
        held += weights * (8 if shape.scheme.zeros else 4)  # each weight's scale and zero point
    return held + height * depth * (1 if shape.scheme.activations else shape.dtype.itemsize)
