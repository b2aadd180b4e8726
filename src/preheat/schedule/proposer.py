"""Speculative decoding: the interface to proposers, which draft tokens for running sequences.

A row with drafts computes its last token and the drafts in one step and samples after each of them. A draft is accepted
if it equals the token sampled at its position, so the output equals plain decoding.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from preheat.schedule.slots import Slots


class Proposer(Protocol):
    """Drafts at most ``num_speculative_tokens`` tokens a row.

    With 0 it is not called. With ``writes_cache`` it keeps keys and values of its own in a row's blocks; the row must
    have the blocks before the proposer is asked.
    """

    num_speculative_tokens: int
    writes_cache: bool

    def propose(self, slots: Slots, rows: np.ndarray, most: np.ndarray) -> Sequence[np.ndarray]:
        """Return up to ``most`` drafts for each of the slots ``rows``.

        ``most`` is int64 [rows]; drafts are int32 [k >= 0]. The slots decode and their tokens are all known. The
        scheduler may use only the first few drafts.
        """

    def ended(self, slots: Slots, stopped: Sequence[int]) -> None:
        """Note that the sequences in the slots ``stopped`` have ended.

        The slots are not given back yet.
        """
