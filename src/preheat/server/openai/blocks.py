"""Answers that are lists of blocks (reasoning, text, calls).

/v1/responses, /v1/messages and Ollama's API use them.
"""

from __future__ import annotations

import json
from abc import abstractmethod
from typing import Any

from starlette.requests import Request

from preheat.errors import PreheatError
from preheat.frontend.answer_format import AnswerFormat
from preheat.frontend.answer_parser import Block, ParsedAnswer, parser_of
from preheat.frontend.request_state import Choice, RequestState
from preheat.frontend.stream_parser import CallStart, Content, Part
from preheat.server.http.stream import Writer
from preheat.server.openai.answers import encode


def named_event(name: str, fields: dict[str, Any]) -> bytes:
    """Encode one server-sent event; ``name`` becomes its name and its ``type``."""
    return b"event: %b\ndata: %b\n\n" % (name.encode(), encode({"type": name, **fields}))


def call_arguments(text: str) -> dict[str, Any]:
    """Parse the arguments of a call.

    Arguments that a limit cut off become an empty dict.
    """
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


class BlocksWriter(Writer):
    """Writer of one request with one choice, as a list of blocks.

    In a stream each block is begun, extended and ended before the next one begins. With ``always_text`` an answer
    without any block gets an empty text block.
    """

    always_text = False

    def __init__(self, request: Request, state: RequestState, form: AnswerFormat, stream: bool) -> None:
        super().__init__(request, [state], stream)
        self.state, self.form = state, form
        self.answer = ParsedAnswer()
        self.parser = parser_of(form)
        self.tokens_read = 0  # tokens that were read

    @abstractmethod
    def begin(self, block: Block) -> bytes:
        """Return the events that begin ``block``, the last one of the answer."""

    @abstractmethod
    def extend(self, block: Block, text: str) -> bytes:
        """Return the event that adds ``text`` to ``block``."""

    @abstractmethod
    def end(self, block: Block) -> bytes:
        """Return the events that end ``block``."""

    @abstractmethod
    def last(self, error: PreheatError | None) -> bytes:
        """Return the events after the last block."""

    @property
    def choice(self) -> Choice:
        return self.state.choices[0]

    @property
    def completion_tokens(self) -> int:
        return len(self.choice.token_ids)

    @property
    def _place(self) -> int:
        """The place of the last block in the answer."""
        return len(self.answer.blocks) - 1

    def read(self) -> list[Part]:
        """Return the new parts of the answer."""
        delta = self.take(self.choice)
        self.tokens_read += len(delta.token_ids)
        parts = self.parser.push(delta.text)
        if not self.choice.sent_end:
            return parts
        parts += self.parser.finish()
        return parts if parts or self.answer.blocks or not self.always_text else [Content("")]

    def read_all(self) -> None:
        """Read the whole answer at once."""
        for part in self.read():
            self.answer.add(part)

    def event(self, _: int, choice: Choice) -> bytes:
        events = b""
        for part in self.read():
            if begins := not self.answer.continues(part):
                events += self._end_last()
            block = self.answer.add(part)
            if begins:
                events += self.begin(block)
            if not isinstance(part, CallStart):
                events += self.extend(block, part.text)
        return events

    def closing(self, error: PreheatError | None) -> bytes:
        return self._end_last() + self.last(error)

    def _end_last(self) -> bytes:
        return self.end(self.answer.blocks[-1]) if self.answer.blocks else b""
