"""Read answers that are messages in channels; see :mod:`preheat.frontend.tools.harmony`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from preheat.frontend.answer_format import AnswerFormat
from preheat.frontend.stream_parser import CallStart, Content, Part
from preheat.frontend.tools.harmony import HarmonyParser


class MessagesAnswer:
    """Reader of one answer, with the interface of :class:`preheat.frontend.answer_parser.AnswerParser`.

    A forced call is the content of the answer; the ``forced`` parser reads it.
    """

    def __init__(self, form: AnswerFormat) -> None:
        self._messages, self._forced = messages_of(form), None if form.auto else form.tool_parser()
        self._shown = {ord(mark.char): mark.shown for mark in form.marks}
        self._count = MessagesCount(form)

    def push(self, text: str) -> list[Part]:
        """Return the parts that are certain, given ``text`` more."""
        return self._passed(self._messages.push(text))

    def finish(self) -> list[Part]:
        """Return the parts that were held back."""
        return self._passed(self._messages.finish()) + (self._forced.finish() if self._forced else [])

    def reasoning_tokens(self, ids: Sequence[int]) -> int:
        """Return how many of ``ids``, the tokens of the answer, are reasoning."""
        return self._count(ids)

    def _passed(self, parts: list[Part]) -> list[Part]:
        """Return ``parts`` with forced calls found in their content, and without the marks' characters."""
        found = list[Part]()
        for part in parts:
            field = "name" if isinstance(part, CallStart) else "text"
            text = getattr(part, field).translate(self._shown)
            if self._forced is not None and isinstance(part, Content):
                found += self._forced.push(text)
            elif text or field == "name":
                found.append(replace(part, **{field: text}))
        return found


class MessagesCount:
    """Counter of the reasoning tokens of one answer, without headers and marks."""

    def __init__(self, form: AnswerFormat) -> None:
        assert form.reasoning is not None
        self._messages, self._text_of = messages_of(form), form.reasoning.text_of
        self._chars = {mark.id: mark.char for mark in form.marks}
        self._looked = self._count = 0

    def __call__(self, ids: Sequence[int]) -> int:
        """Return how many of ``ids``, the answer's tokens so far, are reasoning."""
        for token in ids[self._looked :]:
            before, char = self._messages.kind, self._chars.get(token)
            self._messages.push(char or self._text_of(token))
            self._count += char is None and before == self._messages.kind == "reasoning"
        self._looked = len(ids)
        return self._count


def messages_of(form: AnswerFormat) -> HarmonyParser:
    """Return a parser of the messages of one answer."""
    stands = {mark.text: mark.char for mark in form.marks}
    found = HarmonyParser(
        form.choice.tools, form.choice.parallel, stands, calls=form.auto is not None, held=form.constraint is not None
    )
    found.begin(form.begun)
    return found
