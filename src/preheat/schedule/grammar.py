"""The scheduler's view of a grammar.

Each sequence has a state, advanced by every token.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class GrammarState(Protocol):
    """The state of a sequence's grammar after its generated tokens.

    It stays with the sequence while that waits after a preemption.
    """

    def accept(self, token: int) -> str:
        """Advance by ``token`` and return the error, or "" if there is none.

        The sequence must end on an error, because no later token can be held to the grammar.
        """

    def forced(self) -> Sequence[int]:
        """Return the tokens with which the text must go on.

        They reach as far as known; there are none where there is a choice.
        """
