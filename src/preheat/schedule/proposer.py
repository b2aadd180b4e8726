"""Speculative decoding: the interface to what drafts tokens for running sequences.

A row with drafts computes its last token and the drafts in one step and samples after each of them. A draft is accepted
if it equals the token sampled at its position, so the output is that of plain decoding.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from preheat.schedule.slots import Slots


class Proposer(Protocol):
    """Drafts at most ``num_speculative_tokens`` tokens a row; with 0 it is not called."""

    num_speculative_tokens: int

    def propose(self, slots: Slots, rows: np.ndarray) -> Sequence[np.ndarray]:
        """Drafts int32 [k >= 0] for each of the slots ``rows``, all of them decoding, with all tokens known. The
        scheduler may use only the first few of them.
        """
