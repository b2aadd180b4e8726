"""The sampler of Gaudi: greedy rows on the device, others on the host.

The host uses the reference sampler. A program only writes static tensors: the raw logits, and each row's best token.
Tokens drawn at random, or after penalties and edits, are drawn from these logits on the host, when the step's answers
are fetched.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from preheat.backends.base.sampling import SampledRows
from preheat.backends.hpu.bridge import Bridge
from preheat.core import Level, TokenLogprobs, marked, unmarked
from preheat.ops.digest import row_digests
from preheat.ops.logprobs import prompt_entries, token_logprobs
from preheat.ops.order import finite_rows
from preheat.ops.sampler import HostSampler
from preheat.ops.sampling import SamplingInput, words_of


class HpuSampler:
    """Sampler of up to ``rows`` rows of ``vocab_size`` logits.

    The rows belong to sequences in ``num_slots`` slots.
    """

    def __init__(
        self, num_slots: int, rows: int, vocab_size: int, bridge: Bridge, *, handle_topk_duplicates: bool, masked: bool
    ) -> None:
        device = bridge.device
        self.last_token = torch.zeros(num_slots + 1, dtype=torch.int32, device=device)  # the host knows every token
        self._bridge, self._step = bridge, SamplingInput(0, None, None, None)
        self._raw = torch.zeros(rows, vocab_size, dtype=torch.float32, device=device)
        self._best = torch.zeros(rows, dtype=torch.int64, device=device)
        self._ids = torch.arange(vocab_size, device=device)
        self._host = HostSampler(num_slots, vocab_size, handle_topk_duplicates)
        self._tokens = np.empty(0, np.int64)
        self._masks = np.zeros((rows if masked else 0, words_of(vocab_size)), np.int32)

    def describe(self, turn: int, step: SamplingInput, slots: np.ndarray) -> None:
        self._step = step

    def masks(self, turn: int) -> np.ndarray:
        return self._masks

    def sample(self, level: Level, logits: Tensor) -> None:
        with self._bridge.unit():
            rows = len(logits)
            raw = self._raw[:rows]
            raw.copy_(logits)
            if level is Level.GREEDY:
                self._best[:rows].copy_(_best(raw, self._ids))

    def report(self, logits: Tensor) -> None:
        """Do nothing: the logits are in the static tensor."""

    def digest(self, turn: int, logits: Tensor) -> None:
        """Do nothing: the logits are in the static tensor."""

    def digests(self, turn: int, rows: int) -> np.ndarray:
        found: np.ndarray = row_digests(self._raw[:rows].cpu()).numpy()
        return found

    def fetch(self, turn: int, *, tokens: bool, reports: bool) -> None:
        """Wait for the step, and draw."""
        self._bridge.synchronize()
        size = self._step.size
        if not tokens:
            return
        best = self._best[:size].cpu().numpy()
        if self._step.level is Level.GREEDY and (best < len(self._ids)).all():
            self._tokens = best.copy()
        else:
            raw = self._raw[:size].cpu().clone()
            drawn = self._host.sample(raw, self._step, self._masks).numpy()
            self._tokens = marked(drawn, finite_rows(raw.numpy()))

    def read(self, turn: int, rows: int, reporting: np.ndarray, alternatives: np.ndarray) -> SampledRows:
        tokens = self._tokens[:rows].copy()
        if not len(reporting):
            return tokens, []
        raw = self._raw[: self._step.size].cpu()[torch.from_numpy(reporting)]
        ids = self._step.logprob_ids_of(reporting)
        return tokens, token_logprobs(raw, unmarked(tokens[reporting]), alternatives, ids)

    def logprobs(self, logits: Tensor, tokens: np.ndarray, alternatives: int) -> list[TokenLogprobs]:
        self._bridge.synchronize()
        raw = logits[: len(tokens)].float().cpu()
        entries = token_logprobs(raw, tokens, np.full(len(tokens), alternatives))
        return prompt_entries(entries, finite_rows(raw.numpy()))

    def compile(self, logits: Tensor) -> None:
        """Do nothing: programs launch all operations."""

    def clear(self) -> None:
        self._step = SamplingInput(0, None, None, None)

    def forget(self) -> None:
        self._host.forget()


def _best(raw: Tensor, ids: Tensor) -> Tensor:
    """Return the lowest id of each row's greatest logit.

    If the greatest logit is not finite, return the vocabulary's size: the host then decides.
    """
    peak = raw.amax(-1, keepdim=True)
    first = torch.where(raw == peak, ids, len(ids)).amin(-1)
    return torch.where(peak.isfinite().squeeze(-1), first, len(ids))
