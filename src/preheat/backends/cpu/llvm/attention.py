"""What compiled attention needs of a step: each token's position, and the address of its row of the block table."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from torch import Tensor

from preheat.backends.base import Attend, AttentionWork, BlockTables, StepInputs, StepRows

ALWAYS = 1 << 30
"""Steps for which work holds: addresses of rows stay, whatever blocks are added to them."""


@dataclass(slots=True)
class LlvmWork(AttentionWork):
    """The address of each token's row of the block table, ``tables`` int64 [tokens]; tokens from ``real`` on pad."""

    tables: np.ndarray
    real: int


class LlvmAttention:
    """Writer of each token's position and table row, for compiled functions.

    The functions read ``positions`` and ``tables``, int64 [tokens]. A token that pads is at position 0 of the pad
    block.
    """

    def __init__(self, positions: np.ndarray, tables: np.ndarray, blocks: int) -> None:
        self._positions, self._tables = positions, tables
        self._pad = np.zeros(blocks, np.int32)

    def list_sizes(self, tokens: int, rows: int, *, width: int) -> tuple[int, ...]:
        """Return none: the work is not read from the step's buffers."""
        return ()

    def plan(self, step: StepRows, tables: BlockTables) -> LlvmWork:
        table = tables.block_table
        assert table.dtype == np.int32, table.dtype
        addresses = np.full(step.tokens, self._pad.ctypes.data, np.int64)
        rows = np.repeat(step.slots, step.extend)
        addresses[: len(rows)] = table.ctypes.data + rows.astype(np.int64) * table.strides[0]
        decodes = step.num_decode == len(step.slots)
        return LlvmWork([], ALWAYS if decodes else -1, -1, addresses, len(rows))

    def write(self, turn: int, tables: BlockTables) -> None:
        """Do nothing: the work holds addresses."""

    def send(self, turn: int, work: AttentionWork, inputs: StepInputs) -> None:
        assert isinstance(work, LlvmWork)
        count = len(work.tables)
        self._tables[:count] = work.tables
        self._positions[: work.real] = inputs.positions[: work.real].numpy()
        self._positions[work.real : count] = 0

    def attend(self, inputs: StepInputs, out: Tensor) -> Attend:
        """Return a function that nobody calls: a layer's compiled function attends."""

        def attend(index: int, qkv: Tensor) -> Tensor:
            raise AssertionError("compiled layers attend themselves")

        return attend

    def clear(self) -> None:
        """Do nothing: no part of a block table is kept."""
