"""What compiled attention needs of a step: each token's position, its row of the block table, and its row's end."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from torch import Tensor

from preheat.backends.base.attention import Attend, AttentionWork, BlockTables, StepInputs, StepRows

ALWAYS = 1 << 30
"""Steps for which work holds: addresses of rows stay, whatever blocks are added to them."""


@dataclass(slots=True)
class LlvmWork(AttentionWork):
    """The address of each token's row of the block table, ``tables`` int64 [tokens]; tokens that pad have none.

    ``ends`` int64 [tokens] are the lengths of the tokens' rows; None if all layers are causal.
    """

    tables: np.ndarray
    ends: np.ndarray | None


class LlvmAttention:
    """Writer of each token's position and table row, for compiled functions.

    The functions read ``positions``, ``tables`` and ``ends``, int64 [tokens], of the first ``rows`` tokens. The tokens
    behind them pad the step and are not computed. Nothing reads ``ends`` where all layers are causal.
    """

    def __init__(self, positions: np.ndarray, tables: np.ndarray, ends: np.ndarray | None = None) -> None:
        self._positions, self._tables, self._ends = positions, tables, ends
        self._work: LlvmWork | None = None
        self._table: tuple[np.ndarray, int] | None = None  # the block table, and its address
        self._given: tuple[Tensor, np.ndarray] | None = None  # a program's positions, and the same as an array
        self.rows = 0

    def list_sizes(self, tokens: int, rows: int, *, width: int) -> tuple[int, ...]:
        """Return none: the work is not read from the step's buffers."""
        return ()

    def plan(self, step: StepRows, tables: BlockTables) -> LlvmWork:
        table = tables.block_table
        if self._table is None or table is not self._table[0]:
            assert table.dtype == np.int32, table.dtype
            self._table = table, table.ctypes.data
        addresses = (self._table[1] + step.slots.astype(np.int64) * table.strides[0]).repeat(step.extend)
        if self._ends is not None:
            ends = (step.first.astype(np.int64) + step.extend).repeat(step.extend)
            return LlvmWork([], -1, -1, addresses, ends)
        decodes = step.num_decode == len(step.slots)
        return LlvmWork([], ALWAYS if decodes else -1, -1, addresses, None)

    def write(self, turn: int, tables: BlockTables) -> None:
        """Do nothing: the work holds addresses."""

    def send(self, turn: int, work: AttentionWork, inputs: StepInputs) -> None:
        assert isinstance(work, LlvmWork)
        if work is not self._work:
            self._work, self.rows = work, len(work.tables)
            self._tables[: self.rows] = work.tables
            if self._ends is not None:
                self._ends[: self.rows] = work.ends
        if self._given is None or inputs.positions is not self._given[0]:
            self._given = inputs.positions, inputs.positions.numpy()
        self._positions[: self.rows] = self._given[1][: self.rows]

    def attend(self, inputs: StepInputs, out: Tensor) -> Attend:
        """Return a function that nobody calls: a layer's compiled function attends."""

        def attend(index: int, qkv: Tensor) -> Tensor:
            raise AssertionError("compiled layers attend themselves")

        return attend

    def clear(self) -> None:
        """Do nothing: no part of a block table is kept."""
