"""What a model thinks before it answers (``--reasoning-parser``): all between a start and an end token."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from preheat.errors import ModelError
from preheat.frontend.tokenizer import Tokenizer
from preheat.utils.reasoning import Phase, Sign, phase_after


@dataclass(frozen=True)
class ReasoningMarks:
    """The tokens around a model's reasoning. ``open``: an answer begins with reasoning even without ``start``."""

    start: str
    end: str
    open: bool = False


REASONING_PARSERS: Mapping[str, ReasoningMarks] = MappingProxyType(
    {
        "qwen3": ReasoningMarks("<think>", "</think>"),
        "deepseek_r1": ReasoningMarks("<think>", "</think>", open=True),
        "glm45": ReasoningMarks("<think>", "</think>"),
        "mistral": ReasoningMarks("[THINK]", "[/THINK]"),
    }
)
"""By the names that ``--reasoning-parser`` takes."""


class ReasoningFormat:
    """How a model reasons: its marks and their token ids. Raises ModelError if the tokenizer does not have them."""

    def __init__(self, name: str, tokenizer: Tokenizer) -> None:
        self.marks = REASONING_PARSERS[name]
        self._tokenizer, self.token_id = tokenizer, tokenizer.token_id
        start, end = map(tokenizer.token_id, (self.marks.start, self.marks.end))
        if start is None or end is None:
            raise ModelError(
                f"--reasoning-parser {name} looks for the tokens {self.marks.start} and {self.marks.end}, which the "
                "tokenizer does not have: leave it out, or choose the model's own"
            )
        self.start_id, self.end_id = start, end

    def phase_behind(self, prompt: str, continued: str = "") -> Phase:
        """How the answer to ``prompt`` begins: its end may open or close the reasoning, as may anything in a message
        that is ``continued`` there.
        """
        tail = prompt.rstrip()
        if continued and tail.endswith(continued.rstrip()):
            start, end = (continued.rfind(mark) for mark in (self.marks.start, self.marks.end))
            if start != end:
                return Phase.WITHIN if start > end else Phase.ENDED
        if tail.endswith(self.marks.end):
            return Phase.ENDED
        return Phase.WITHIN if self.marks.open or tail.endswith(self.marks.start) else Phase.UNKNOWN

    def sign(self, token: int) -> Sign:
        """What ``token`` means at the beginning of an answer."""
        if token == self.start_id:
            return Sign.START
        if token == self.end_id:
            return Sign.END
        hidden = token in self._tokenizer.special_ids or not self._tokenizer.token_bytes(token).strip()
        return Sign.SPACE if hidden else Sign.TEXT


class ReasoningCount:
    """Counts the tokens of one answer that are reasoning, marks left out. ``phase``: how the answer begins.
    ``call_ids``: tokens with which a call of a tool may begin.
    """

    def __init__(self, form: ReasoningFormat, phase: Phase, call_ids: frozenset[int]) -> None:
        self._form, self._phase, self._call_ids = form, phase, call_ids
        self._looked = self._count = 0
        self._before_call: int | None = None

    def __call__(self, ids: Sequence[int], called: bool) -> int:
        """How many of ``ids``, the answer's tokens so far, are reasoning. ``called``: a call has ended it."""
        for token in ids[self._looked :]:
            if self._phase.is_content:
                break
            self._add(token)
        self._looked = len(ids)
        return self._before_call if called and self._before_call is not None else self._count

    def _add(self, token: int) -> None:
        marks = {self._form.start_id: Sign.START, self._form.end_id: Sign.END}
        sign = marks.get(token, Sign.TEXT) if self._phase is Phase.WITHIN else self._form.sign(token)
        self._phase = phase_after(self._phase, sign)
        if self._phase is Phase.WITHIN and sign is Sign.TEXT:
            if token in self._call_ids and self._before_call is None:
                self._before_call = self._count
            self._count += 1
