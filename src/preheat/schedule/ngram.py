"""Prompt lookup: drafts from a sequence's own text.

They are the tokens behind an earlier occurrence of its last tokens, in prompt or output. Source: the n-gram method of
vLLM. The longest match wins. Among several of equal length the earliest wins, as it has the most tokens behind it.
There is no state: nothing to follow when sequences come, go or are preempted.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from preheat.schedule.slots import Slots

NOTHING = np.empty(0, np.int32)


class NgramProposer:
    """Matches between ``least`` and ``most`` of the last tokens."""

    writes_cache = False

    def __init__(self, num_speculative_tokens: int, least: int, most: int) -> None:
        self.num_speculative_tokens, self.least, self.most = num_speculative_tokens, least, most

    def propose(self, slots: Slots, rows: np.ndarray, most: np.ndarray) -> list[np.ndarray]:
        """See :class:`preheat.schedule.proposer.Proposer`. One pass over the tokens of each row, in numpy."""
        return [
            self._drafts(slots.tokens[slot, : slots.device_len[slot]], count)
            for slot, count in zip(rows.tolist(), most.tolist(), strict=True)
        ]

    def ended(self, slots: Slots, stopped: Sequence[int]) -> None:
        """Do nothing: no state is kept."""

    def _drafts(self, tokens: np.ndarray, count: int) -> np.ndarray:
        """Return up to ``count`` tokens behind a match.

        The match is of the end of ``tokens`` int32 [n].
        """
        last = len(tokens) - 1
        found, length = (tokens[:last] == tokens[last]).nonzero()[0], 1
        while length < self.most and len(found):
            found_longer = found[found >= length]
            found_longer = found_longer[tokens[found_longer - length] == tokens[last - length]]
            if not len(found_longer):
                break
            found, length = found_longer, length + 1
        if not len(found) or length < self.least:
            return NOTHING
        return tokens[found[0] + 1 : found[0] + 1 + count].copy()
