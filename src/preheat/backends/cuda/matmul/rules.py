"""Guesses for layers and experts that no table knows: safe, if not always fastest. No Triton."""

from __future__ import annotations

import torch
from msgspec.structs import replace

from preheat.backends.cuda.device.card import PORTABLE, Card
from preheat.backends.cuda.device.sizes import next_power_of_2
from preheat.backends.cuda.matmul.config import (
    PLAIN,
    PROCESSORS,
    REFERENCE,
    SHARED_BYTES,
    Expanded,
    ExpertsConfig,
    ExpertsShape,
    Library,
    LinearShape,
    Tile,
    Wide,
    codes_bytes,
    fits_streamed,
    fits_wide,
    small_m_bytes,
    small_m_tile,
    whole_groups,
    without_unaligned_copies,
)
from preheat.backends.cuda.matmul.fit import fitted_experts

FEW_ROWS = 33
"""Few rows for cuBLAS that may not cut the inputs into parts. Below this bound tiles were faster for each of fourteen
layers of six models on an H200. Below ``FEW_OUTPUTS`` outputs of all rows together, it can take ten times as long."""


FEW_OUTPUTS = 1 << 17


ALONE = 4
"""With so many times more experts than slots, hardly two slots share one: each is a block of its own."""


SPLIT_ROWS = 64
"""From so many rows on, cuBLAS multiplies the splits of a layer: its tiles are faster than ours with several sums."""


SPLIT_TILES = PROCESSORS * 2 // 3
"""From so many tiles on, Hopper's kernel for many rows multiplies the splits of a layer, and adds them in registers."""


MANY_ROWS = 512
"""From so many rows on, quantized weights are dequantized first: reading them is then little beside the product."""


def small_m_rule(shape: LinearShape, rows: int) -> Tile:
    """Guess a tile with as many stages as fit for all programs of a processor.

    A tile has at least four stages, if four fit.
    """
    height = max(8, min(next_power_of_2(rows), 64))
    programs = -(-shape.outputs // 64) * -(-rows // height)
    size = small_m_bytes(shape, small_m_tile(shape, height, 1))
    room = SHARED_BYTES // min(4, -(-programs // PROCESSORS))
    return small_m_tile(shape, height, max(min(4, SHARED_BYTES // size), min(16, room // size)))


def wide_tiles(shape: LinearShape, rows: int, choice: Wide) -> int:
    """Return the number of tiles of ``choice``."""
    return -(-shape.outputs // choice.outputs) * -(-rows // choice.rows)


def large_tiles(shape: LinearShape) -> tuple[Wide, ...]:
    """Return tiles of Hopper's kernel for many rows, the largest first.

    A thread has no registers for the sums of two splits of 256 outputs.
    """
    narrow = Wide(128, 128, 6)
    return (narrow,) if shape.splits == 2 else (Wide(256, 128, 4), narrow)


def wide_guesses(shape: LinearShape, rows: int) -> list[Wide]:
    """Return tiles, the largest first, that keep most processors of a Hopper GPU busy."""
    return [choice for choice in large_tiles(shape) if wide_tiles(shape, rows, choice) >= PROCESSORS * 2 // 3]


def narrow_wide(shape: LinearShape, rows: int) -> Wide | None:
    """Guess tiles of 64 outputs for a few hundred rows, where most processors of a Hopper GPU get one filled tile.

    They serve where cuBLAS has other bits: on an H200, two layers of an 8B model take less time with them than with
    tiles of the Triton kernel. A last tile of 64 rows or fewer takes as long as a whole one.
    """
    tile = Wide(64, 128, 6)
    filled = not 0 < rows % tile.rows <= tile.rows // 2
    one_each = PROCESSORS * 2 // 3 <= wide_tiles(shape, rows, tile) <= PROCESSORS
    plain = shape.dtype == torch.bfloat16 and not shape.gated and not shape.splits
    return tile if plain and filled and one_each else None


def rounds(shape: LinearShape, rows: int, choice: Wide) -> float:
    """Return the time that a Hopper GPU takes for all tiles, in rounds of the largest tiles.

    Half a tile is guessed to take a little more than half.
    """
    return -(-wide_tiles(shape, rows, choice) // PROCESSORS) * (1.0 if choice.outputs == 256 else 0.55)


def tile_rule(shape: LinearShape, rows: int) -> Tile:
    """Guess a tile of the Triton kernel for plain weights.

    The tile is as low as the rows allow, and so narrow that there is one for every processor.
    """
    if shape.dtype == torch.float32:
        return REFERENCE[torch.float32]
    if rows > 16 and (tile := _few_outputs(shape, rows)) is not None:
        return tile
    if rows > 64:
        return _many_rows(shape, rows)
    height = max(16, next_power_of_2(rows))
    if height == 16:
        return _few_rows(shape)
    bytes_a_stage = (64 * (2 if shape.gated else 1) + height) * 128 * 2
    tile = Tile(64, height, 128, 4, min(6, SHARED_BYTES // bytes_a_stage))
    beside = SHARED_BYTES // 2 // bytes_a_stage  # stages that let two programs share a processor
    several = _programs(shape, rows, tile) > PROCESSORS and beside >= 3
    return replace(tile, stages=beside) if several else tile


def _few_outputs(shape: LinearShape, rows: int) -> Tile | None:
    """Guess the smallest tile with at most one program for each processor; None: outputs are many.

    Routers and shared experts have few outputs. The steps of a program follow each other, so a few large tiles take as
    long as many would, on few processors. Measured with ten layers of four models on an H200: at 256 rows a router of
    2,880 inputs takes 5.4 us in place of 12.3. Up to 64 rows a wider tile would read weights several times.
    """
    narrow, low = Tile(16, 16, 256, 2, 6), Tile(16, 32, 256, 2, 4) if shape.gated else Tile(32, 16, 256, 2, 4)
    guesses = (narrow, low) if rows <= 64 else (narrow, low, Tile(64, 16, 128, 4, 4))
    return next((each for each in guesses if _programs(shape, rows, each) <= PROCESSORS), None)


def _many_rows(shape: LinearShape, rows: int) -> Tile:
    """Guess the smallest tile with at most one program for each processor, or the largest one.

    The steps of a program follow each other, so they are deep. Measured with seven layers on an H200, from 96 to 384
    rows: 256 rows of 4,096 inputs and 2,048 outputs take 13.6 us in place of 20.4. Of two large tiles, the one that is
    filled is better.
    """
    tall, wide = Tile(64, 128, 64, 4, 6), Tile(128, 64, 128, 8, 4)
    larger = (wide, tall) if 0 < rows % 128 <= 64 else (tall, wide)
    guesses = (Tile(64, 32, 128, 4, 6), Tile(64, 64, 128, 4, 6), *larger)
    found = next((each for each in guesses if _programs(shape, rows, each) <= PROCESSORS), None)
    if found is None:
        return Tile(128, 128, 64, 8, 4)
    bytes_a_stage = (found.outputs * (2 if shape.gated else 1) + found.rows) * found.inputs * 2
    return replace(found, stages=min(found.stages, SHARED_BYTES // bytes_a_stage))


def _programs(shape: LinearShape, rows: int, tile: Tile) -> int:
    """Return the number of programs of ``tile``."""
    return -(-shape.columns // tile.outputs) * -(-rows // tile.rows)


def _few_rows(shape: LinearShape) -> Tile:
    """Guess a tile for up to 16 rows, with room for several programs on a processor: none then waits for another.

    Measured with eighteen layers of three models on an H100. Few outputs need the narrowest tiles. A program that has
    a processor to itself and many steps fills it: 8,192 outputs of 2,816 inputs then take 12.9 us on an H200 in place
    of 14.9. With few steps, the model takes longer: 5,120 outputs of 768 inputs 6.9 us in place of 4.4.
    """
    if shape.columns < 4608:
        return Tile(16, 16, 256, 2, 4)
    alone = shape.columns <= 64 * PROCESSORS and shape.inputs >= 2048
    return Tile(64, 16, 128, 4, 6 if alone or shape.columns >= 1 << 14 else 4)


def heads_rule(shape: LinearShape, rows: int, heads: int) -> Tile:
    """Guess a tile for layers of ``heads`` heads, each of ``shape``; together they are as wide as one layer.

    A tile is at most as deep as divides the inputs, if a depth of 16 or more does.
    """
    tile = tile_rule(shape._replace(outputs=shape.outputs * heads), rows)
    depth = tile.inputs
    while shape.inputs % depth and shape.inputs % 16 == 0:
        depth //= 2
    return replace(tile, inputs=depth, stages=min(6, tile.stages * (tile.inputs // depth)))


def codes_rule(shape: LinearShape, rows: int) -> Tile:
    """Guess a tile of the kernel that reads codes, as low as the rows allow.

    The two accumulators of a gated layer, and the products to be added to them, have to fit into registers.

    For few rows the bytes of the weights set the time, and each processor has to have tens of kilobytes on their way.
    So there are as many stages as fit, twice where a processor has more than one program. Tiles are as deep as the
    inputs allow, since the steps of a program follow each other.
    """
    assert shape.scheme is not None
    if -(-shape.columns // 128) * (rows // 128) >= PROCESSORS * 3 // 4 and shape.scheme.activations:
        return Tile(128, 128, 128, 8, 4)
    height = max(16, min(next_power_of_2(rows), 64))
    few = shape.columns * -(-rows // 64) <= 64 * PROCESSORS
    deep = (512, 256) if few and shape.scheme.activations else (256,) if whole_groups(shape.scheme) else ()
    depth = next((depth for depth in deep if shape.inputs % depth == 0), 128)
    width = 64 if shape.scheme.activations or not few else 32
    room = SHARED_BYTES if few else SHARED_BYTES // 2
    stages = max(2, min(8, room // codes_bytes(shape, width, height, depth)))
    return Tile(width, height, depth, width // 16, stages)


def split_rule(shape: LinearShape, rows: int) -> Tile | Expanded | Library:
    """Guess the kernel for a layer with splits of its inputs.

    cuBLAS serves splits of whole 16 bytes.
    """
    if shape.scheme is None:
        return _of_splits(shape, rows)
    if shape.scheme.activations is None and rows >= MANY_ROWS:
        return Expanded(_of_splits(shape, rows))
    return _codes_split(shape.of_split, rows)


def wide_split(shape: LinearShape, rows: int) -> Wide | None:
    """Guess a tile of Hopper's kernel for many rows: a thread has the sums of two splits of 128 outputs in registers.

    None if there are too few tiles, and where a split is no whole number of steps.
    """
    whole = shape.splits in (1, 2) and shape.inputs // shape.splits % 64 == 0
    tile = Wide(128, 128, 6)
    return tile if whole and wide_tiles(shape, rows, tile) >= SPLIT_TILES else None


def _of_splits(shape: LinearShape, rows: int) -> Tile | Library:
    """Guess the kernel for a layer with plain weights and splits of its inputs."""
    aligned = shape.inputs // shape.splits % 8 == shape.outputs % 8 == 0
    many = rows >= SPLIT_ROWS and rows * shape.outputs >= FEW_OUTPUTS
    if many and aligned and shape.dtype == torch.bfloat16 and shape.splits <= 4:
        return Library()
    return split_tile(shape, rows)


def _codes_split(shape: LinearShape, rows: int) -> Tile:
    """Guess a tile of codes for the layer of one split.

    Sums of other splits wait in registers; a thread has 255 of them.
    """
    assert shape.scheme is not None
    if shape.scheme.activations is not None:
        tile = codes_rule(shape, rows)
        return tile if tile.outputs < 128 else Tile(128, 64, 128, 8, 4)
    height = max(16, min(next_power_of_2(rows), 64))
    room = SHARED_BYTES // codes_bytes(shape, 64, height, 128)
    return Tile(64, height, 128, 4, max(2, min(room, 8 if height < 64 else 4)))


def split_tile(shape: LinearShape, rows: int) -> Tile:
    """Guess a tile for a layer with plain weights and splits of its inputs.

    The copy engine cannot stop inside a tile, so it needs splits that its tiles divide.
    """
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


def experts_rule(shape: ExpertsShape, tokens: int, *, card: Card = PORTABLE) -> ExpertsConfig:
    """Guess the kernels for experts and a number of tokens that are in no table."""
    guess = _guess(shape, tokens, hopper=card.is_hopper)
    if shape.splits:
        guess = guess._replace(down=ending_at_splits(guess.down, shape))
    aligned = guess._replace(
        gate_up=without_unaligned_copies(guess.gate_up, shape.gate_up),
        down=without_unaligned_copies(guess.down, shape.down),
    )
    return fitted_experts(aligned, shape, card)


def ending_at_splits(choice: Tile | Wide | Expanded, shape: ExpertsShape) -> Tile | Wide | Expanded:
    """Return the kernel of the second layer with tiles that end where a split does: the copy engine cannot stop inside.

    Shallower tiles have as many bytes on their way, in more stages. Hopper's kernel for many rows gets the numbers of
    one split. It has room for the fp32 sums of 128 outputs, not of 256.
    """
    if choice.kind == "wide":
        return Wide(128, 128, 6)
    if choice.kind != "tile":
        return choice
    depth = choice.inputs
    while shape.down.inputs % depth and depth > 16:
        depth //= 2
    if not choice.bulk or shape.down.inputs % depth:
        return replace(choice, bulk=False)
    return replace(choice, inputs=depth, stages=min(6, choice.stages * (choice.inputs // depth)))


def _guess(shape: ExpertsShape, tokens: int, *, hopper: bool) -> ExpertsConfig:
    """Guess the kernels as if every row of weights could be copied in bulk."""
    slots = tokens * shape.top_k
    alone = slots * ALONE <= shape.num_experts
    if shape.scheme is not None:
        if shape.scheme.powers:
            return _powers_experts(0 if alone else slots / shape.num_experts, hopper, hopper and fits_streamed(shape))
        rows = 16 if slots <= 16 * shape.num_experts else 64
        deep = 256 if alone and whole_groups(shape.scheme) else 128
        tiles = (_codes_expert(layer, rows, deep) for layer in (shape.gate_up, shape.down))
        return ExpertsConfig(1 if alone else rows, *tiles)
    if shape.dtype != torch.bfloat16:
        return ExpertsConfig(1 if alone else PLAIN[shape.dtype].block, *PLAIN[shape.dtype][1:])
    mean = slots / shape.num_experts
    if alone:  # a tile that ends inside of a row is loaded with a mask
        down = Tile(128, 16, 128 if shape.down.inputs % 128 == 0 else 64, 4, 4, True)
        return ExpertsConfig(1, Tile(128, 16, 64, 4, 6, True), down)
    if mean <= 12:
        return ExpertsConfig(16, Tile(64, 16, 128, 4, 3, True), Tile(128, 16, 128, 4, 3, True))
    if mean <= 24:
        return ExpertsConfig(32, Tile(128, 32, 128, 4, 3, True), Tile(128, 32, 64, 4, 3, True))
    if mean <= 48 or not (hopper and fits_wide(shape.gate_up) and fits_wide(shape.down)):
        return ExpertsConfig(64, Tile(128, 64, 64, 4, 4, True), Tile(128, 64, 64, 4, 3, True))
    return ExpertsConfig(128, Wide(256, 128, 4), Wide(128, 128, 6) if mean <= 1024 else Wide(256, 128, 4))


def _codes_expert(layer: LinearShape, rows: int, deep: int) -> Tile:
    """Guess a tile of codes with 4 stages, or as many as fit into shared memory: at least two."""
    room = SHARED_BYTES // codes_bytes(layer, 64, rows, deep)
    return Tile(64, rows, deep, 4, max(2, min(4, room)))


def _powers_experts(mean: float, hopper: bool, streamed: bool) -> ExpertsConfig:
    """Guess tiles of MXFP4 for ``mean`` rows an expert, or 0 for rows alone.

    Weights are made of codes once for each block of rows. Only on Hopper have registers room for the sums of 128 gates
    and 128 ups. The tiles are the fastest of all that an H200 tried at gpt-oss's sizes. ``streamed``: Hopper's kernel
    serves the experts; for fewer rows than its narrowest tile has, ordinary tiles are faster.
    """
    if mean == 0:
        return ExpertsConfig(1, Tile(32, 8, 128, 2, 4), Tile(32, 8, 128, 2, 4))
    if mean <= 12:  # two warps: half a tile, for up to 8 rows, is then one of its own
        return ExpertsConfig(16, Tile(64, 16, 128, 2, 3), Tile(64, 16, 128, 2, 4))
    if streamed:
        rows, warps, stages = (32, 4, 6) if mean <= 24 else (64, 4, 4) if mean <= 128 else (128, 8, 3)
        gates = Tile(16 * warps, rows, 128, warps, stages, bulk=True)
        return ExpertsConfig(rows, gates, replace(gates, outputs=2 * gates.outputs))
    if mean <= 24:
        return ExpertsConfig(32, Tile(64, 32, 128, 4, 3), Tile(128, 32, 128, 4, 4))
    if mean <= 64:
        return ExpertsConfig(64, Tile(64, 64, 128, 4, 3), Tile(128, 64, 128, 8, 3))
    if not hopper:
        return ExpertsConfig(128, Tile(64, 128, 128, 8, 3), Tile(128, 128, 128, 8, 3))
    return ExpertsConfig(128, Tile(128, 128, 128, 8, 3), Tile(128, 128, 128, 4, 3))
