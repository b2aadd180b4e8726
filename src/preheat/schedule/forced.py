"""Forced tokens: drafts where a grammar allows one continuation.

They are drafted whatever else drafts, and treated like any other drafts: verified in one step, and kept if they equal
the model's draws through the masks.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from preheat.schedule.slots import Slots

NOTHING = np.empty(0, np.int32)


def forced_drafts(slots: Slots, rows: np.ndarray, most: np.ndarray) -> dict[int, np.ndarray]:
    """Return the forced tokens of slots in ``rows``, by row.

    They are int32 [k >= 1], at most ``most`` int [rows] each.
    """
    found: dict[int, np.ndarray] = {}
    if not slots.grammars:
        return found
    for place in (slots.has_grammar[rows] & (most > 0)).nonzero()[0].tolist():
        state = slots.grammars.get(int(rows[place]))
        if state is not None and (tokens := state.forced()):
            found[place] = np.array(tokens[: int(most[place])], np.int32)
    return found


class GrammarProposer:
    """The method ``grammar``: drafts nothing itself, so only tokens forced by grammars are drafted."""

    writes_cache = False

    def __init__(self, num_speculative_tokens: int) -> None:
        self.num_speculative_tokens = num_speculative_tokens

    def propose(self, slots: Slots, rows: np.ndarray, most: np.ndarray) -> list[np.ndarray]:
        """See :class:`preheat.schedule.proposer.Proposer`."""
        return [NOTHING] * len(rows)

    def ended(self, slots: Slots, stopped: Sequence[int]) -> None:
        """Do nothing: no state is kept."""
