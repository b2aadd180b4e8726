"""The parser of gpt-oss; its answers are messages in channels, OpenAI's harmony format."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from preheat.frontend.stream_parser import Content, Reading, Reasoning
from preheat.frontend.tools.base import Tool, ToolParser
from preheat.frontend.tools.json_object import JsonObject

START, CHANNEL, CONSTRAIN, MESSAGE = "<|start|>", "<|channel|>", "<|constrain|>", "<|message|>"
END, CALL, RETURN = "<|end|>", "<|call|>", "<|return|>"
FINAL, ANALYSIS = "final", "analysis"
"""The channels of the answer itself and of the model's thoughts."""

_RECIPIENT = re.compile(r"(?<!\S)to=([^\s<\ud800-\udfff]*)")
_ROLE = re.compile(r"\s*\w*")

Kind = Literal["reasoning", "content", "call"]


@dataclass(frozen=True)
class Header:
    """The header of a message: its channel and its recipient.

    ``whole``: the header goes up to the mark of the message. ``rest``: text in a header that is not whole. A model that
    forgets the mark wrote its message there.
    """

    channel: str = ""
    recipient: str = ""
    whole: bool = True
    rest: str = ""

    @property
    def function(self) -> str:
        """The function that the message calls; "" if it calls none."""
        return self.recipient.removeprefix("functions.") if self.recipient.startswith("functions.") else ""


class HarmonyParser(ToolParser):
    """``<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a": 1}<|call|>``: gpt-oss.

    It reads whole answers. Messages in the channel ``analysis``, and to tools that are no functions, are reasoning. All
    other messages are content. ``calls``: functions may be called; else their arguments are content. ``held``: a
    grammar holds the message in the channel ``final``, so all other messages are reasoning.
    """

    MARKS = (CHANNEL, START, CONSTRAIN, MESSAGE, END, CALL, RETURN)
    REASONING = "openai_gptoss"

    def __init__(
        self, tools: Sequence[Tool] = (), parallel: bool = True, stands: Mapping[str, str] = MappingProxyType({}),
        *, calls: bool = True, held: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(tools, parallel, stands)
        self._may_call, self._constrained = calls, held
        self.kind: Kind | None = None
        """Kind of the message that is being read; None while a header is read."""
        self._kinds = set[Kind]()  # the kinds of the messages so far
        self._start, self._channel, self._constrain, self._message = (
            stands.get(mark, mark) for mark in (START, CHANNEL, CONSTRAIN, MESSAGE)
        )
        self._ends = tuple(stands.get(mark, mark) for mark in (START, END, CALL, RETURN))
        self._channel_field = re.compile(rf"{re.escape(self._channel)}\s*(\w*)")
        self._type_field = re.compile(rf"{re.escape(self._constrain)}\s*\w*")

    def begin(self, header: str) -> None:
        """Read a header that the prompt has begun for the answer; its marks are text."""
        for mark, char in self._stands.items():
            header = header.replace(mark, char)
        self.push(header)

    def parse(self) -> Reading[None]:
        mark: str | None = ""
        if not (yield from self._is_header()):
            mark = yield from self._read(Header())
        while mark is not None:
            header, mark = yield from self._header(mark)
            if header.whole:
                mark = yield from self._read(header)
            elif header.rest:
                self._say(self._kind(header), header.rest, first=True)

    def _is_header(self) -> Reading[bool]:
        """Return whether the answer begins with a header, as usual behind the prompt of such a model."""
        start = self._at
        yield from self.space()
        found = not (yield from self.peek())
        for begin in (self._channel, self._start, self._constrain, self._message, "to="):
            found = found or (yield from self.take(begin))
        self._at = start
        return found

    def _header(self, before: str) -> Reading[tuple[Header, str | None]]:
        """Read a header behind the mark ``before``. Return it and the mark at its end; None at the end of the text."""
        start, ends = self._at, (self._message, *self._ends)
        yield from self.before_any(ends)
        text, mark = self._text[start : self._at], None
        for end in ends:
            if mark is None and (yield from self.take(end)):
                mark = end
        self.forget()
        if before == self._channel:
            text = before + text
        channels, recipients = self._channel_field.findall(text), _RECIPIENT.findall(text)
        found = Header(channels[-1] if channels else "", recipients[-1] if recipients else "", mark == self._message)
        return (found if found.whole else self._broken(found, text, before)), mark

    def _broken(self, header: Header, text: str, before: str) -> Header:
        """Return an incomplete ``header`` with the rest of its ``text`` behind the mark ``before``."""
        rest = _ROLE.sub("", text, count=1) if before == self._start else text
        for field in (self._channel_field, _RECIPIENT, self._type_field):
            rest = field.sub("", rest)
        return Header(header.channel, header.recipient, False, self.bare(rest).strip())

    def _kind(self, header: Header) -> Kind:
        if self._constrained:
            return "content" if header.whole and header.channel == FINAL else "reasoning"
        if header.function:
            return "call" if header.whole and self._may_call else "content"
        return "reasoning" if header.recipient or header.channel == ANALYSIS else "content"

    def _read(self, header: Header) -> Reading[str | None]:
        """Read a message. Return the mark at its end; None at the end of the text."""
        mark: str | None = ""
        first = True
        self.kind = self._kind(header)
        if self.kind == "call" and not (yield from self._is_object()):
            self.kind = "content"
        if self.kind == "call":
            call, read = self.start_call(header.function), JsonObject()
        while mark == "":
            text, mark = yield from self.until_any((*self._ends, self._channel))
            if self.kind == "call":
                self.arguments(call, read.text(self.bare(text)))
            elif text:
                self._say(self.kind, text, first)
                first = False
        if self.kind == "call":
            self.arguments(call, read.rest())
        self.kind = None
        return mark

    def _is_object(self) -> Reading[bool]:
        """Return whether the message begins like a JSON object."""
        start = self._at
        yield from self.space()
        if (yield from self.peek()) == "{":
            return True
        self._at = start
        return False

    def _say(self, kind: Kind, text: str, first: bool) -> None:
        """Add ``text`` of a message; ``first``: it begins the message. Messages of one kind become lines."""
        text = f"\n{text}" if first and kind in self._kinds else text
        self._kinds.add(kind)
        self.add(Reasoning(text) if kind == "reasoning" else Content(text))


def begun(prompt: str) -> str:
    """Return the header that ``prompt`` has begun for the answer, without the role.

    "" if the prompt has begun nothing but the role.
    """
    last = prompt.rpartition(START)[2]
    head, mark, said = last.partition(MESSAGE)
    over = any(end in said for end in (END, CALL, RETURN))
    return "" if over or CHANNEL not in head else head.removeprefix("assistant") + mark
