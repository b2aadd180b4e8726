"""The watch: a digest of the logits at every position that an engine samples, by request."""

from __future__ import annotations

from collections import defaultdict

import numpy as np
import torch
from torch import Tensor

from preheat.execution.executor import Executor
from preheat.execution.input_batch import InputBatch
from preheat.verify.compare import Seen


class LogitWatcher:
    """Looks at every step of ``executor`` from now on. Nothing waits for the device before :meth:`take`."""

    def __init__(self, executor: Executor) -> None:
        self._backend = executor.backend
        self._seen: list[tuple[np.ndarray, np.ndarray, Tensor, Tensor]] = []
        executor.watch_logits(self._look)

    def _look(self, logits: Tensor, batch: InputBatch) -> None:
        rows, positions = batch.schedule.sampled()
        digests = self._backend.row_digests(logits)
        self._seen.append((batch.schedule.ids[rows], positions, digests, logits.amax(1)))

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
