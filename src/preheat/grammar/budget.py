"""A budget of reasoning (``thinking_token_budget``): the tokens left, and the tokens that end the reasoning."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from preheat.core import Thinking
from preheat.utils.reasoning import Phase, Sign, phase_after


class _Spent(NamedTuple):
    """A state: ``left`` tokens of the budget, and ``said`` tokens of the forced end of the reasoning."""

    phase: Phase
    left: int
    said: int = 0


class Budget:
    """The budget of one text, followed token by token.

    ``is_space`` says whether a token is white space. The state is a function of ``thinking`` and the tokens, so a text
    may continue elsewhere from any token.
    """

    def __init__(self, thinking: Thinking, is_space: Callable[[int], bool]) -> None:
        self._last, self._is_space = thinking.last, is_space
        self._signs = dict.fromkeys(thinking.ends, Sign.END) | {thinking.start: Sign.START}
        self._spent = _Spent(Phase.WITHIN if thinking.within else Phase.UNKNOWN, thinking.left)

    def accept(self, token: int) -> None:
        """Move on behind ``token``."""
        self._spent = self._after(self._spent, token)

    def forced(self, drafts: Sequence[int]) -> int | None:
        """Return the token that must follow ``drafts``; None: any token may follow."""
        spent = self._spent
        for draft in drafts:
            spent = self._after(spent, draft)
        return self._last[spent.said] if spent.phase is Phase.WITHIN and not spent.left else None

    def _after(self, spent: _Spent, token: int) -> _Spent:
        phase, left, said = spent
        if phase.is_content:
            return spent
        if phase is Phase.WITHIN and not left:
            return _Spent(phase if said + 1 < len(self._last) else Phase.ENDED, 0, said + 1)
        sign = self._signs.get(token, Sign.TEXT)
        if phase is Phase.UNKNOWN and sign is Sign.TEXT and self._is_space(token):
            sign = Sign.SPACE
        after = phase_after(phase, sign)
        return _Spent(after, left - (phase is after is Phase.WITHIN))
