"""The protocol of the sampler."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

if TYPE_CHECKING:
    from torch import Tensor

    from preheat.core import Level
    from preheat.ops.sampling import SamplingInput


class Sampler(Protocol):
    """Draws tokens and reports log-probabilities.

    Its state is the penalties' token counts and ``last_token``, int32 [slots + 1], the latest token of each slot.
    """

    last_token: Tensor

    def describe(self, turn: int, step: SamplingInput, slots: np.ndarray) -> None:
        """Describe the rows to sample to the device; they belong to the sequences in ``slots`` [step.size]."""

    def masks(self, turn: int) -> np.ndarray:
        """Return host copy ``turn`` of the masks, int32 [rows, words].

        Bit i % 32 of word i // 32 says whether token i is allowed. :meth:`describe` sends the masks of ``step.masked``,
        so write them before.
        """

    def sample(self, level: Level, logits: Tensor) -> None:
        """Draw a token for each row of ``logits`` [rows, vocab] as described.

        Rows beyond ``step.size`` are padding.
        """

    def report(self, logits: Tensor) -> None:
        """Compute log-probabilities of the drawn and the most likely tokens, of raw ``logits`` [rows, vocab]."""

    def digest(self, turn: int, logits: Tensor) -> None:
        """Compute the digests of raw ``logits`` [rows, vocab]; the next :meth:`fetch` sends them, too."""

    def digests(self, turn: int, rows: int) -> np.ndarray:
        """Return fetched digests of the first ``rows`` rows, int64 [rows], a new array. Call it after :meth:`read`."""

    def fetch(self, turn: int, *, tokens: bool, reports: bool) -> None:
        """Send the wanted answers to the host; returns before they arrive."""

    def read(self, turn: int, rows: int, reporting: np.ndarray, alternatives: np.ndarray) -> SampledRows:
        """Wait for fetched answers; return tokens and reports.

        Tokens are of the first ``rows`` rows. Reports are of the rows at the places ``reporting``, with
        ``alternatives`` most likely tokens each.
        """

    def logprobs(self, logits: Tensor, tokens: np.ndarray, alternatives: int) -> list[Any]:
        """Return reports of ``tokens`` int32 [n] under the first n rows of raw ``logits``.

        Waits for the device.
        """

    def compile(self, logits: Tensor) -> None:
        """Build the kernels that no program launches."""

    def clear(self) -> None:
        """Tell the device that the current step has no rows."""

    def forget(self) -> None:
        """Reset all state, as after creation."""


SampledRows = tuple[np.ndarray, "list[Any]"]
"""Sampled tokens and the requested reports.

Tokens are integers [rows], marked as by :func:`preheat.core.marked`. Reports are TokenLogprobs or, where an engine
pools the hidden states of tokens, fp32 [hidden].
"""
