"""Read answers: split their text into reasoning, content and tool calls."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from preheat.frontend.answer_format import AnswerFormat
from preheat.frontend.messages_answer import MessagesAnswer
from preheat.frontend.stream_parser import CallArguments, CallStart, Content, Part, Reasoning
from preheat.utils.reasoning import SPACE, Phase, Sign, phase_after


def parser_of(form: AnswerFormat) -> AnswerParser | MessagesAnswer:
    """Return a parser for one answer in ``form``."""
    in_messages = form.reasoning is not None and form.reasoning.marks.channel
    return MessagesAnswer(form) if in_messages else AnswerParser(form)


class AnswerParser:
    """Reader of one answer: :meth:`push` takes text as it arrives, :meth:`finish` ends it.

    In the reasoning, ``tools`` look for calls too if the calls are the model's own. A model may forget to end its
    reasoning before it calls.
    """

    def __init__(self, form: AnswerFormat) -> None:
        self._form, self._phase = form, form.phase
        self._tools = form.tool_parser()
        self._search = self._tools if form.calls_in_reasoning else None
        self._count = form.reasoning_count()
        self._shown = {ord(mark.char): mark.shown for mark in form.marks}
        self._pieces = form.reasoning_pieces()
        self._thought_frame, self._content_frame = form.frames()
        self._space = ""  # white space of an answer while its first phase is still unknown
        self._leading = form.phase is Phase.WITHIN  # leading white space is neither reasoning nor content
        self._called = False  # a call has ended the reasoning

    def push(self, text: str) -> list[Part]:
        """Return the parts that are certain, given ``text`` more."""
        self._pieces.add(text)
        return self._without_marks(self._taken())

    def finish(self) -> list[Part]:
        """Return the parts that were held back."""
        self._pieces.end()
        parts = self._taken() + self._thought(self._thought_frame.finish())
        space, self._space = self._space, ""
        parts += self._content(self._content_frame.push(space) + self._content_frame.finish())
        return self._without_marks(parts + (self._label(self._tools.finish()) if self._tools else []))

    def reasoning_tokens(self, ids: Sequence[int]) -> int:
        """Return how many of ``ids``, the tokens of the answer, are reasoning."""
        return self._count(ids, self._called) if self._count else 0

    def _taken(self) -> list[Part]:
        """Read the pieces that are certain."""
        parts = list[Part]()
        while found := self._pieces.next(self._phase):
            parts += self._take(*found)
        return parts

    def _take(self, piece: str, sign: Sign) -> list[Part]:
        """Read a ``piece`` of text, or a mark of the reasoning."""
        parts = list[Part]()
        if self._phase is Phase.WITHIN and sign is Sign.END:
            parts = self._thought(self._thought_frame.finish())
            if self._search is not None:
                parts += self._label(self._search.flush())  # text that was held back may turn out to be a call
        elif self._phase is Phase.UNKNOWN and not piece.strip(SPACE):
            sign = Sign.SPACE
        before, self._phase = self._phase, phase_after(self._phase, sign)
        if self._phase is Phase.UNKNOWN:
            self._space += piece
        elif before is not self._phase and self._phase is not Phase.NEVER:
            self._space, self._leading = "", self._phase is Phase.WITHIN or not self._form.exact
        elif not (sign is Sign.START and self._leading and self._phase is Phase.WITHIN):
            text, self._space = self._space + piece, ""
            parts += self._text(text if sign is Sign.TEXT else text.translate(self._shown))
        return parts

    def _text(self, text: str) -> list[Part]:
        """Read text that is no mark of the reasoning."""
        if self._leading:
            text = text.lstrip()
            self._leading = not text
        if not text:
            return []
        if self._phase is Phase.WITHIN:
            return self._thought(self._thought_frame.push(text))
        return self._content(self._content_frame.push(text))

    def _thought(self, text: str) -> list[Part]:
        if self._search is None:
            return [Reasoning(text)] if text else []
        return self._content(text)

    def _content(self, text: str) -> list[Part]:
        if not text:
            return []
        return self._label(self._tools.push(text)) if self._tools else [Content(text)]

    def _label(self, parts: list[Part]) -> list[Part]:
        """Label the parts that the parser of tools found.

        Content before the first call of an answer that still reasons is reasoning.
        """
        found = list[Part]()
        for part in parts:
            if isinstance(part, CallStart) and self._phase is Phase.WITHIN:
                self._phase, self._called = phase_after(self._phase, Sign.CALL), True
            within = self._phase is Phase.WITHIN
            found.append(Reasoning(part.text) if within and isinstance(part, Content) else part)
        return found

    def _without_marks(self, parts: list[Part]) -> list[Part]:
        """Return ``parts`` with the shown text of each mark in place of the mark's character."""
        if not self._shown:
            return parts
        found = list[Part]()
        for part in parts:
            field = "name" if isinstance(part, CallStart) else "text"
            text = getattr(part, field).translate(self._shown)
            if text or field == "name":
                found.append(replace(part, **{field: text}))
        return found


@dataclass
class Block:
    """A stretch of an answer of one kind.

    The text of a call is its arguments: a JSON object, as far as the model wrote it. A call also has an id and the name
    of its tool.
    """

    kind: Literal["reasoning", "content", "call"]
    text: str = ""
    id: str = ""
    name: str = ""


class ParsedAnswer:
    """An answer as blocks, in order."""

    def __init__(self) -> None:
        self.blocks: list[Block] = []

    def add(self, part: Part) -> Block:
        """Add the next part to the last block, or begin a new block. Return the block."""
        match part:
            case CallStart(_, id, name):
                self.blocks.append(Block("call", "", id, name))
            case CallArguments(_, text):
                self.blocks[-1].text += text
            case Content(text) | Reasoning(text):
                if not self.continues(part):
                    self.blocks.append(Block("content" if isinstance(part, Content) else "reasoning"))
                self.blocks[-1].text += text
        return self.blocks[-1]

    def continues(self, part: Part) -> bool:
        """Return whether ``part`` continues the last block."""
        last = self.blocks[-1].kind if self.blocks else None
        match part:
            case Content():
                return last == "content"
            case Reasoning():
                return last == "reasoning"
        return isinstance(part, CallArguments)

    def text(self, kind: str) -> str:
        """Return all text of a kind."""
        return "".join(block.text for block in self.blocks if block.kind == kind)

    @property
    def calls(self) -> list[Block]:
        return [block for block in self.blocks if block.kind == "call"]
