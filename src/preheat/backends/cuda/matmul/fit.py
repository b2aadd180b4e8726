"""Choices of kernels cut to a card. No Triton.

Rules and tables know Hopper GPUs. Another card may have less shared memory, and no copy engine. A choice then gets
fewer stages, and shallower tiles if that is not enough. Neither changes bits.
"""

from __future__ import annotations

from msgspec.structs import replace

from preheat.backends.cuda.device.card import Card
from preheat.backends.cuda.matmul.config import (
    Expanded,
    ExpertsConfig,
    ExpertsShape,
    KernelConfig,
    LinearShape,
    Tile,
    codes_bytes,
)

LEAST_STAGES = 2
"""Stages before a tile becomes shallower: with one stage nothing is loaded ahead."""


def shared_bytes(tile: Tile, shape: LinearShape) -> int:
    """Return the bytes of all stages of ``tile`` in shared memory.

    Weights of codes that become numbers have a buffer less than stages, unless the sum is split.
    """
    if shape.scheme is None:
        numbers = (tile.outputs * (2 if shape.gated else 1) + tile.rows) * tile.inputs
        return numbers * shape.dtype.itemsize * tile.stages
    whole = shape.scheme.activations or shape.splits > 1
    buffers = tile.stages if whole else max(tile.stages - 1, 1)
    return codes_bytes(shape, tile.outputs, tile.rows, tile.inputs) * buffers


def fits(choice: KernelConfig, shape: LinearShape, card: Card) -> bool:
    """Return whether ``choice`` runs on ``card`` without a change."""
    return fitted(choice, shape, card) == choice


def fitted(choice: KernelConfig, shape: LinearShape, card: Card) -> KernelConfig:
    """Return ``choice`` with as many stages, up to its own, and as deep as ``card`` has room for.

    Choices for Hopper stay as they are.
    """
    if choice.kind == "expanded":
        return Expanded(fitted(choice.choice, shape._replace(scheme=None, shuffled=False), card).multiplies)
    if card.is_hopper or choice.kind != "tile":
        return choice
    return _cut(choice if card.copy_engine or not choice.bulk else replace(choice, bulk=False), shape, card)


def _cut(tile: Tile, shape: LinearShape, card: Card) -> Tile:
    shallowest = 32 if shape.scheme is None else 128
    while tile.stages > 1 and shared_bytes(tile, shape) > card.room:
        if tile.stages > LEAST_STAGES or tile.inputs <= shallowest:
            tile = replace(tile, stages=tile.stages - 1)
        else:
            tile = replace(tile, inputs=tile.inputs // 2, stages=2 * tile.stages)
    return tile


def fitted_experts(config: ExpertsConfig, shape: ExpertsShape, card: Card) -> ExpertsConfig:
    """Return the kernels of experts cut to ``card``."""
    gate_up, down = fitted(config.gate_up, shape.gate_up, card), fitted(config.down, shape.down, card)
    return config._replace(gate_up=gate_up, down=down)  # type: ignore[arg-type]  # experts have no cuBLAS
