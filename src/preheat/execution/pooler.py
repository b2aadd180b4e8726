"""The sampler of a pooling engine: it reports hidden states."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from preheat.backends.base import HOST_COPIES, Backend
from preheat.core import Level
from preheat.limits import Limits
from preheat.ops.sampling import SamplingInput


class Pooler:
    """A sampler for models that pool. It draws nothing: every token is 0.

    Hidden states come as they are computed, [rows, hidden], and are read in fp32.
    """

    def __init__(self, backend: Backend, limits: Limits, hidden_size: int, dtype: torch.dtype) -> None:
        self.last_token = torch.zeros(limits.max_num_seqs + 1, dtype=torch.int32, device=backend.device)
        like = torch.zeros(limits.max_sampled, hidden_size, dtype=dtype, device=backend.device)
        self._host = [backend.host_copy(like) for _ in range(HOST_COPIES)]
        self._fetched = [backend.event() for _ in range(HOST_COPIES)]
        self._size = 0
        self._hidden = like[:0]

    def describe(self, turn: int, step: SamplingInput, slots: np.ndarray) -> None:
        self._size = step.size

    def masks(self, turn: int) -> np.ndarray:
        return np.zeros((0, 0), np.int32)

    def sample(self, level: Level, logits: Tensor) -> None:
        """Do nothing."""

    def report(self, logits: Tensor) -> None:
        self._hidden = logits[: self._size]

    def fetch(self, turn: int, *, tokens: bool, reports: bool) -> None:
        if reports:
            self._host[turn][: self._size].copy_(self._hidden, non_blocking=True)
        self._fetched[turn].record()

    def read(
        self, turn: int, rows: int, reporting: np.ndarray, alternatives: np.ndarray
    ) -> tuple[np.ndarray, list[np.ndarray]]:
        """Return zeros [rows], and the states of the ``reporting`` rows.

        A state is fp32 [hidden]; ``reporting`` are indices.
        """
        self._fetched[turn].wait()
        states = self._host[turn][torch.from_numpy(reporting)].float().numpy()
        return np.zeros(rows, np.int64), list(states)

    def logprobs(self, logits: Tensor, tokens: np.ndarray, alternatives: int) -> list[np.ndarray]:
        """Return the fp32 hidden state [hidden] of each of the first n rows."""
        return list(logits[: len(tokens)].float().cpu().numpy().copy())  # the next step overwrites them

    def compile(self, logits: Tensor) -> None: ...

    def clear(self) -> None:
        self._size = 0

    def forget(self) -> None: ...
