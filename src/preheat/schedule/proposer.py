"""Speculative decoding: who drafts tokens for running sequences.

A drafted row computes its last token and the drafts in one step and samples after each of them. A draft is accepted if
it is the token that was sampled before it, so tokens are those of plain decoding, whatever was drafted.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from preheat.schedule.slots import Slots


class Proposer(Protocol):
    """Drafts at most ``num_speculative_tokens`` tokens a row; with 0 it is never asked."""

    num_speculative_tokens: int

    def propose(self, slots: Slots, rows: np.ndarray) -> Sequence[np.ndarray]:
        """For each of the slots ``rows``, all of which are decoding and know all their tokens, int32 drafts [k >= 0]
        of what follows. The scheduler may use only the first few of them.
        """


class NoProposer:
    """Plain decoding."""

    num_speculative_tokens = 0

    def propose(self, slots: Slots, rows: np.ndarray) -> Sequence[np.ndarray]:
        return [np.empty(0, np.int32)] * len(rows)
