"""The sampler of a pooling engine: it reports hidden states."""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from preheat.backends.base.backend import Backend
from preheat.backends.base.device import HOST_COPIES
from preheat.core import Level
from preheat.limits import Limits
from preheat.ops.sampling import SamplingInput


class _Views(NamedTuple):
    """Bounds and sums of some texts, on the host and on the device.

    They are the same where the device's memory is the host's. ``words`` are the bounds on the host.
    """

    words: np.ndarray
    host_bounds: Tensor
    bounds: Tensor
    sums: Tensor
    host_sums: Tensor


class Pooler:
    """A sampler for models that pool. It draws nothing: every token is 0.

    Hidden states come as they are computed, [rows, hidden], and are read in fp32. The device adds up the states of a
    text that lies in one step.
    """

    def __init__(self, backend: Backend, limits: Limits, hidden_size: int, dtype: torch.dtype) -> None:
        self.last_token = torch.zeros(limits.max_num_seqs + 1, dtype=torch.int32, device=backend.device)
        like = torch.zeros(limits.max_sampled, hidden_size, dtype=dtype, device=backend.device)
        self._host = [backend.host_copy(like) for _ in range(HOST_COPIES)]
        self._fetched = [backend.event() for _ in range(HOST_COPIES)]
        self._hidden = like.new_empty(0, hidden_size)
        self._dtype = dtype
        self._backend, texts, device = backend, limits.max_num_seqs, backend.device
        self._sums = torch.zeros(texts, hidden_size, dtype=torch.float32, device=device)
        self._host_sums = [backend.host_copy(self._sums) for _ in range(HOST_COPIES)]
        self._bounds = torch.zeros(texts + 1, dtype=torch.int32, device=device)
        self._host_bounds = [backend.host_copy(self._bounds) for _ in range(HOST_COPIES)]
        self._on_host = backend.facts.on_host
        self._of_texts = cache(self._views)

    def describe(self, turn: int, step: SamplingInput, slots: np.ndarray) -> None:
        """Do nothing: no row is drawn from."""

    def masks(self, turn: int) -> np.ndarray:
        return np.zeros((0, 0), np.int32)

    def sample(self, level: Level, logits: Tensor) -> None:
        """Do nothing."""

    def report(self, logits: Tensor) -> None:
        self._hidden = logits

    def add_up(self, turn: int, bounds: np.ndarray) -> None:
        """Add up the reported states of each text and start the copy of the sums; ``bounds`` int [texts + 1]."""
        views = self._of_texts(turn, len(bounds) - 1)
        views.words[:] = bounds
        if not self._on_host:
            views.bounds.copy_(views.host_bounds, non_blocking=True)
        states = self._hidden.to(self._dtype)  # as all states are read
        self._backend.sum_rows(states, views.bounds, views.sums)
        if not self._on_host:
            views.host_sums.copy_(views.sums, non_blocking=True)

    def _views(self, turn: int, texts: int) -> _Views:
        """Return the parts of all buffers that belong to ``texts`` texts."""
        host_bounds, host_sums = self._host_bounds[turn][: texts + 1], self._host_sums[turn][:texts]
        bounds, sums = host_bounds, host_sums
        if not self._on_host:
            bounds, sums = self._bounds[: texts + 1], self._sums[:texts]
        return _Views(host_bounds.numpy(), host_bounds, bounds, sums, host_sums)

    def digest(self, turn: int, logits: Tensor) -> None:
        """Do nothing: an engine that pools refuses receipts."""

    def digests(self, turn: int, rows: int) -> np.ndarray:
        return np.zeros(rows, np.int64)

    def fetch(self, turn: int, *, tokens: bool, reports: bool) -> None:
        if reports:
            self._host[turn][: len(self._hidden)].copy_(self._hidden, non_blocking=True)
        self._fetched[turn].record()

    def states(self, turn: int, count: int) -> np.ndarray:
        """Return the first ``count`` fetched states, fp32 [count, hidden]."""
        self._fetched[turn].wait()
        found: np.ndarray = self._host[turn][:count].to(torch.float32, copy=True).numpy()
        return found

    def sums(self, turn: int, texts: int) -> np.ndarray:
        """Return the fetched sums of the first ``texts`` texts, fp32 [texts, hidden]."""
        self._fetched[turn].wait()
        found: np.ndarray = self._of_texts(turn, texts).host_sums.numpy().copy()
        return found

    def read(
        self, turn: int, rows: int, reporting: np.ndarray, alternatives: np.ndarray
    ) -> tuple[np.ndarray, list[Any]]:
        """Return zeros [rows], and the states of the ``reporting`` rows, fp32 [hidden] each."""
        return np.zeros(rows, np.int64), list(self.states(turn, rows)[reporting])

    def logprobs(self, logits: Tensor, tokens: np.ndarray, alternatives: int) -> list[Any]:
        """Return no reports: an engine that pools wants states, and no log-probabilities of successors."""
        return []

    def compile(self, logits: Tensor) -> None:
        self._backend.sum_rows(logits[:1], self._bounds[:2], self._sums[:1])

    def clear(self) -> None:
        """Do nothing: the device knows no rows."""

    def forget(self) -> None: ...
