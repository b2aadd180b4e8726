"""A model's reasoning before its answer (``--reasoning-parser``): the text between a start and an end mark."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

from preheat.core import Thinking
from preheat.errors import InvalidRequest, ModelError
from preheat.frontend.text_marks import TextMarks
from preheat.frontend.tokenizer import Tokenizer
from preheat.frontend.tools import harmony
from preheat.utils.reasoning import SPACE, Phase, Sign, phase_after


@dataclass(frozen=True)
class ReasoningMarks:
    """The marks around a model's reasoning.

    ``open``: an answer begins with reasoning even without ``start``. ``text``: the marks need not be tokens.
    ``others``: other wordings of the start and of the end. ``label``: a text behind the start that is no reasoning.
    ``answer``: the frame around the content. ``channel``: an answer consists of messages, each with a header between
    the marks; all are reasoning except the message of this channel.
    """

    start: str
    end: str
    open: bool = False
    text: bool = False
    others: tuple[tuple[str, ...], tuple[str, ...]] = ((), ())
    label: str = ""
    answer: tuple[str, str] = ("", "")
    channel: str = ""


_THINK = ReasoningMarks("<think>", "</think>")
_OPEN = replace(_THINK, open=True)
_HARMONY = ReasoningMarks(harmony.CHANNEL, harmony.MESSAGE, open=True, channel=harmony.FINAL)
REASONING_PARSERS: Mapping[str, ReasoningMarks] = MappingProxyType(
    {
        "deepseek_r1": _OPEN,
        "deepseek_v3": _THINK,
        "ernie45": replace(_OPEN, answer=("<response>\n", "\n</response>")),
        "gemma4": ReasoningMarks("<|channel>", "<channel|>", label="thought\n"),
        "glm45": _THINK,
        "glm47": _THINK,
        "granite": ReasoningMarks(
            "Here is my thought process:", "Here is my response:", text=True,
            others=(("Here's my thought process:",), ("Here's my response:",)),
        ),
        "hunyuan_a13b": replace(_THINK, text=True, answer=("<answer>\n", "\n</answer>")),
        "kimi_k2": _OPEN,
        "minimax_m2": _OPEN,
        "mistral": ReasoningMarks("[THINK]", "[/THINK]"),
        "olmo3": replace(_THINK, text=True),
        "openai": _HARMONY,
        "openai_gptoss": _HARMONY,
        "qwen3": _THINK,
        "seed_oss": ReasoningMarks("<seed:think>", "</seed:think>", open=True),
        "step3": _OPEN,
    }
)  # fmt: skip
"""The marks, by the values of ``--reasoning-parser``."""


class ReasoningFormat:
    """How a model reasons: the marks and their token ids.

    The ids are -1 where the marks are text. Raises ModelError if marks must be tokens and the tokenizer does not have
    them.
    """

    def __init__(self, name: str, tokenizer: Tokenizer) -> None:
        self.name, self.marks = name, REASONING_PARSERS[name]
        self._tokenizer, self.token_id = tokenizer, tokenizer.token_id
        start, end = map(tokenizer.token_id, (self.marks.start, self.marks.end))
        self.in_text = self.marks.text and (start is None or end is None)
        if not self.in_text and (start is None or end is None):
            raise ModelError(
                f"--reasoning-parser {name} needs the tokens {self.marks.start} and {self.marks.end}, and the "
                "tokenizer does not have them: leave the option out, or choose the model's own parser"
            )
        self.start_id, self.end_id = (-1, -1) if start is None or end is None else (start, end)

    def text_marks(self) -> TextMarks:
        """Return a search for the marks in text."""
        starts, ends = self.marks.others
        return TextMarks((self.marks.start, *starts), (self.marks.end, *ends))

    def phase_behind(self, prompt: str, continued: str) -> Phase:
        """Return how the answer to ``prompt`` begins.

        The end of the prompt may open or close the reasoning. So may any mark in the message ``continued`` there.
        """
        if self.marks.channel:
            header = harmony.begun(prompt)
            final = re.search(rf"{re.escape(self.marks.start)}\s*{self.marks.channel}\b", header)
            return Phase.ENDED if final and header.endswith(self.marks.end) else Phase.WITHIN
        tail = prompt.rstrip()
        if continued and tail.endswith(continued.rstrip()):
            start, end = (continued.rfind(mark) for mark in (self.marks.start, self.marks.end))
            if start != end:
                return Phase.WITHIN if start > end else Phase.ENDED
        if tail.endswith(self.marks.end):
            return Phase.ENDED
        return Phase.WITHIN if self.marks.open or tail.endswith(self.marks.start) else Phase.UNKNOWN

    def named_in(self, *texts: str) -> bool:
        """Return whether one of ``texts`` contains a mark of the reasoning."""
        starts, ends = self.marks.others
        marks = (self.marks.start, self.marks.end, *starts, *ends)
        return any(mark in text for text in texts for mark in marks)

    def check_budget(self) -> None:
        """Raise InvalidRequest unless one token ends the reasoning; without one, its length cannot be limited."""
        if self.in_text or self.marks.channel:
            raise InvalidRequest(
                f"thinking_token_budget counts tokens up to the one that ends the reasoning, and with "
                f"--reasoning-parser {self.name} no single token does: leave it out, and limit max_tokens",
                param="thinking_token_budget",
            )

    def thinking(
        self, budget: int, prompt: Sequence[int], phase: Phase | None = None, call_ids: Sequence[int] = ()
    ) -> Thinking | None:
        """Return the limit on the reasoning of the answer to ``prompt``.

        ``budget`` is the number of reasoning tokens. None if the answer has no reasoning. Reasoning tokens in the
        prompt count, as in vLLM. So an answer that is continued from its first tokens ends its reasoning at the same
        place. ``phase``: how the answer begins; None: by the last mark in the prompt. ``call_ids`` end the reasoning
        too.
        """
        ids = (self.start_id, self.end_id)
        last = next((place for place in range(len(prompt) - 1, -1, -1) if prompt[place] in ids), -1)
        opened = last >= 0 and prompt[last] == self.start_id
        if phase is None:
            phase = Phase.WITHIN if opened else Phase.UNKNOWN
        if phase.is_content:
            return None
        within = phase is Phase.WITHIN
        spent = len(prompt) - 1 - last if within and opened else 0
        end = self.end_id
        return Thinking(max(budget - spent, 0), within, self.start_id, (end, *call_ids), (end,))

    def text_of(self, token: int) -> str:
        """Return the text of ``token`` as a client sees it.

        The text has one character for each byte, and is "" for special tokens. The marks are ASCII, so they look the
        same.
        """
        return "" if token in self._tokenizer.special_ids else self._tokenizer.token_bytes(token).decode("latin-1")

    def sign(self, token: int) -> Sign:
        """Return the meaning of ``token`` at the beginning of an answer."""
        if token == self.start_id:
            return Sign.START
        if token == self.end_id:
            return Sign.END
        hidden = token in self._tokenizer.special_ids or not self._tokenizer.token_bytes(token).strip()
        return Sign.SPACE if hidden else Sign.TEXT


class ReasoningCount:
    """Counter of the reasoning tokens of one answer, without marks.

    ``phase``: how the answer begins. ``call_ids``: tokens that may begin a tool call.
    """

    def __init__(self, form: ReasoningFormat, phase: Phase, call_ids: frozenset[int]) -> None:
        self._form, self._phase, self._call_ids = form, phase, call_ids
        self._looked = self._count = 0
        self._before_call: int | None = None

    def __call__(self, ids: Sequence[int], called: bool) -> int:
        """Return how many of ``ids``, the answer's tokens, are reasoning. ``called``: a call has ended it."""
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
            self._look_for_call(token)
            self._count += 1

    def _look_for_call(self, token: int) -> None:
        if token in self._call_ids and self._before_call is None:
            self._before_call = self._count


class TextReasoningCount(ReasoningCount):
    """Counter of reasoning tokens where the marks are text.

    A token is reasoning if its last byte is. Tokens that may still be part of a mark are not counted yet.
    """

    def __init__(self, form: ReasoningFormat, phase: Phase, call_ids: frozenset[int]) -> None:
        super().__init__(form, phase, call_ids)
        self._marks = form.text_marks()
        self._read = self._added = 0
        self._ends = deque[int]()  # ends of the tokens that are not read yet

    def _add(self, token: int) -> None:
        if self._phase is Phase.WITHIN:
            self._look_for_call(token)
        text = self._form.text_of(token)
        self._added += len(text)
        self._ends.append(self._added)
        self._marks.add(text)
        while found := self._marks.next(self._phase):
            piece, sign = found
            if sign is Sign.TEXT and not piece.strip(SPACE) and self._phase is Phase.UNKNOWN:
                sign = Sign.SPACE
            self._phase = phase_after(self._phase, sign)
            self._read += len(piece)
            while self._ends and self._ends[0] <= self._read:
                self._ends.popleft()
                self._count += self._phase is Phase.WITHIN and sign is Sign.TEXT
