"""The sampler of a CPU: the reference sampler, or a function with the same results; done at its return."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from preheat.backends.base.sampling import SampledRows
from preheat.core import Level, TokenLogprobs, marked, unmarked
from preheat.ops.digest import row_digests
from preheat.ops.logprobs import prompt_entries, token_logprobs
from preheat.ops.order import BestIds, best_ids, finite_rows
from preheat.ops.sampler import HostSampler
from preheat.ops.sampling import SamplingInput, words_of

Draw = Callable[[np.ndarray, SamplingInput], np.ndarray | None]
"""A function that draws from float32 logits [rows, vocab] as :class:`HostSampler` does, or returns None.

Rows beyond the step's size are left out.
"""

RowDigests = Callable[[Tensor], np.ndarray]
"""A function that returns the digests of all rows of the logits of a draw, see :mod:`preheat.ops.digest`."""


def host_digests(logits: Tensor) -> np.ndarray:
    """Return the digests of any logits by the reference."""
    found: np.ndarray = row_digests(logits.float()).numpy()
    return found


class CpuSampler:
    """Sampler of the step that was described last. Rows for which ``draw`` returns None go to the reference sampler."""

    def __init__(
        self, num_slots: int, vocab_size: int, handle_topk_duplicates: bool, *, masked_rows: int = 0,
        draw: Draw = lambda logits, step: None, best: BestIds = best_ids, build: Callable[[], None] = lambda: None,
        digests: RowDigests = host_digests,
    ) -> None:  # fmt: skip
        self.last_token = torch.zeros(num_slots + 1, dtype=torch.int32)  # never read: every token is known to the host
        self._host = HostSampler(num_slots, vocab_size, handle_topk_duplicates)
        self._step, self._draw, self._best = SamplingInput(0, None, None, None), draw, best
        self._build, self._row_digests = build, digests
        self._digests = np.empty(0, np.int64)
        self._tokens = np.empty(0, np.int64)
        self._raw = np.empty((0, 0), np.float32)
        self._given: tuple[Tensor, np.ndarray] | None = None  # static logits, and the same as an array
        self._masks = np.zeros((masked_rows, words_of(vocab_size)), np.int32)

    def describe(self, turn: int, step: SamplingInput, slots: np.ndarray) -> None:
        self._step = step

    def masks(self, turn: int) -> np.ndarray:
        return self._masks

    def sample(self, level: Level, logits: Tensor) -> None:
        step = self._step
        if logits.dtype != torch.float32 or self._given is None or logits is not self._given[0]:
            self._given = logits, _array(logits)
        drawn = self._draw(self._given[1], step)
        if drawn is None:
            given = self._given[1][: step.size]
            tokens = self._host.sample(torch.from_numpy(given), step, self._masks).numpy()
            drawn = marked(tokens, finite_rows(given))
        self._tokens = drawn

    def report(self, logits: Tensor) -> None:
        self._raw = _array(logits)[: self._step.size].copy()  # a prompt's logits take its memory

    def digest(self, turn: int, logits: Tensor) -> None:
        self._digests = self._row_digests(logits)

    def digests(self, turn: int, rows: int) -> np.ndarray:
        return self._digests[:rows].copy()

    def fetch(self, turn: int, *, tokens: bool, reports: bool) -> None:
        """Do nothing: the tokens are on the host."""

    def read(self, turn: int, rows: int, reporting: np.ndarray, alternatives: np.ndarray) -> SampledRows:
        tokens = self._tokens[:rows].copy()
        if not len(reporting):
            return tokens, []
        return tokens, token_logprobs(
            torch.from_numpy(self._raw if len(reporting) == len(self._raw) else self._raw[reporting]),
            unmarked(tokens[reporting]),
            alternatives,
            self._step.logprob_ids_of(reporting),
            self._best,
        )

    def logprobs(self, logits: Tensor, tokens: np.ndarray, alternatives: int) -> list[TokenLogprobs]:
        raw = _array(logits)[: len(tokens)]
        entries = token_logprobs(torch.from_numpy(raw), tokens, np.full(len(tokens), alternatives), (), self._best)
        return prompt_entries(entries, finite_rows(raw))

    def compile(self, logits: Tensor) -> None:
        """Compile or read the functions that draw, if there are any."""
        self._build()

    def clear(self) -> None:
        self._step = SamplingInput(0, None, None, None)

    def forget(self) -> None:
        self._host.forget()


def _array(logits: Tensor) -> np.ndarray:
    """Return logits as float32, without a copy if they are float32."""
    found: np.ndarray = (logits if logits.dtype == torch.float32 else logits.float()).numpy()
    return found
