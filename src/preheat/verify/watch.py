"""The watch: a digest of the logits at every position that an engine samples, by request."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import numpy as np
import torch
from torch import Tensor

from preheat.core import Schedule
from preheat.engine.loop import Loop
from preheat.execution.input_batch import InputBatch
from preheat.ops.digest import row_digests
from preheat.verify.compare import Seen


class Watch:
    """Looks at every step of ``loop`` from now on. Nothing waits for the device before :meth:`take`."""

    def __init__(self, loop: Loop) -> None:
        self._pack = loop.packer.pack
        self._sampling: dict[int, tuple[np.ndarray, np.ndarray]] = {}  # of batches that are on their way
        self._seen: list[tuple[np.ndarray, np.ndarray, Tensor, Tensor]] = []
        loop.packer.pack = self._packed  # type: ignore[method-assign]  # whose rows a batch holds, only its packer knows
        executor: Any = loop.executor  # of whatever platform
        executor.watch_logits(self._look)

    def _packed(self, schedule: Schedule) -> InputBatch:
        batch: InputBatch = self._pack(schedule)
        self._sampling[id(batch)] = schedule.ids[schedule.samples], schedule.ends[schedule.samples]
        return batch

    def _look(self, logits: Tensor, batch: InputBatch) -> None:
        self._seen.append((*self._sampling.pop(id(batch)), row_digests(logits), logits.amax(1)))

    def take(self) -> dict[int, Seen]:
        """By request, what was seen since the last call, in the order of positions: digests and greatest logits."""
        found: dict[int, list[tuple[int, int, float]]] = defaultdict(list)
        for owners, *columns in self._seen:
            rows = zip(*(torch.as_tensor(column).tolist() for column in columns), strict=True)
            for owner, row in zip(owners, rows, strict=True):
                found[owner].append(row)
        self._seen.clear()
        return {owner: _in_order(rows) for owner, rows in found.items()}


def _in_order(rows: list[tuple[int, int, float]]) -> Seen:
    rows.sort(key=lambda row: row[0])
    return Seen(np.array([row[1] for row in rows]).tolist(), [row[2] for row in rows])
