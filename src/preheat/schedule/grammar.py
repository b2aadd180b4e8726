"""What the scheduler knows of a grammar: the state that a sequence carries, and that every token moves it on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class GrammarState(Protocol):
    """The state of one sequence's grammar behind the tokens that it has generated. It stays with the sequence while
    that waits after a preemption.
    """

    def accept(self, token: int) -> str:
        """Move on behind ``token``. What is wrong with it, "" if nothing: the sequence must end then, because no later
        token can be held to the grammar.
        """

    def forced(self) -> Sequence[int]:
        """The tokens with which the text must go on, as far as that is known; none where there is a choice."""
