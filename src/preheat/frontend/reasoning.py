"""What a model thinks before it answers (``--reasoning-parser``): all between a start and an end token."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from types import MappingProxyType

from preheat.errors import ModelError
from preheat.frontend.stream_parser import Content, Reading, Reasoning, StreamParser
from preheat.frontend.tokenizer import Tokenizer


@dataclass(frozen=True)
class Marks:
    """The tokens around a model's reasoning. ``open``: an answer begins with reasoning even without ``start``."""

    start: str
    end: str
    open: bool = False


REASONING_PARSERS: Mapping[str, Marks] = MappingProxyType(
    {
        "qwen3": Marks("<think>", "</think>"),
        "deepseek_r1": Marks("<think>", "</think>", open=True),
        "glm45": Marks("<think>", "</think>"),
        "mistral": Marks("[THINK]", "[/THINK]"),
    }
)
"""By the names that ``--reasoning-parser`` takes."""


class Begins(Enum):
    """Whether an answer begins within the reasoning; if that is unknown, its own first token says so."""

    OUTSIDE = "outside"
    WITHIN = "within"
    UNKNOWN = "unknown"


class ReasoningFormat:
    """How a model reasons: its marks and their token ids. Raises ModelError if the tokenizer does not have them."""

    def __init__(self, name: str, tokenizer: Tokenizer) -> None:
        self.marks = REASONING_PARSERS[name]
        ids = [tokenizer.token_id(mark) for mark in (self.marks.start, self.marks.end)]
        if None in ids:
            raise ModelError(
                f"--reasoning-parser {name} looks for the tokens {self.marks.start} and {self.marks.end}, which the "
                "tokenizer does not have: leave it out, or choose the model's own"
            )
        self.start_id, self.end_id = ids

    def begins(self, prompt: str) -> Begins:
        """How the answer to ``prompt`` begins: its end may open or close the reasoning."""
        tail = prompt.rstrip()
        if tail.endswith(self.marks.end):
            return Begins.OUTSIDE
        return Begins.WITHIN if self.marks.open or tail.endswith(self.marks.start) else Begins.UNKNOWN

    def count(self, ids: Sequence[int], begins: Begins) -> int:
        """How many of the tokens of an answer are reasoning, marks left out."""
        begin = 0
        if begins is Begins.OUTSIDE:
            return 0
        if self.start_id in ids[:_LOOK_AT]:
            begin = ids.index(self.start_id) + 1
        elif begins is Begins.UNKNOWN:
            return 0
        end = ids.index(self.end_id) if self.end_id in ids else len(ids)
        return max(end - begin, 0)


_LOOK_AT = 4
"""White space may come before the start token."""


class ReasoningParser(StreamParser):
    """Splits an answer into reasoning and content; white space at the beginning of either is dropped."""

    def __init__(self, marks: Marks, begins: Begins) -> None:
        super().__init__()
        self._marks, self._begins = marks, begins

    def parse(self) -> Reading[None]:
        start = self._at
        yield from self.space()
        if self._begins is Begins.OUTSIDE or not (
            (yield from self.take(self._marks.start)) or self._begins is Begins.WITHIN
        ):
            self._at = start
        else:
            yield from self.space()
            marker: str | None = ""
            while marker == "":
                text, marker = yield from self.until_any((self._marks.end,))
                if text:
                    self.add(Reasoning(text))
            yield from self.space()
        while (yield from self.peek()):
            self.add(Content(self._text[self._at :]))
            self._at = len(self._text)
            self.forget()
