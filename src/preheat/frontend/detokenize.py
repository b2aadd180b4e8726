"""Token ids to text, one at a time.

The law: the deltas of a sequence, joined, are the ``decode`` of all its tokens. A character whose bytes come in
several tokens is held back until it is complete, and bytes that can never become one turn into U+FFFD exactly where
``decode`` puts it.
"""

from __future__ import annotations

from codecs import utf_8_decode
from collections.abc import Callable
from typing import Protocol

from preheat.frontend.pieces import BytePieces, PieceRules, TextPieces

_REPLACEMENT = "\ufffd"


class Detokenizer(Protocol):
    """Turns the tokens of one sequence into text as they come."""

    def push(self, token: int) -> str:
        """The text that became certain with ``token``; often empty."""

    def finish(self) -> str:
        """What was held back, now that no token follows."""


class SilentDetokenizer:
    """For requests with ``detokenize`` off: there is no text."""

    def push(self, token: int) -> str:
        return ""

    def finish(self) -> str:
        return ""


SILENT = SilentDetokenizer()


class ByteDetokenizer:
    """For byte-level decoders: bytes are joined and read as UTF-8."""

    __slots__ = ("_held", "_pieces")

    def __init__(self, pieces: BytePieces) -> None:
        self._pieces = pieces
        self._held = b""

    def push(self, token: int) -> str:
        data = self._held + self._pieces[token]
        text, used = utf_8_decode(data, "replace", False)
        self._held = data[used:]
        return text

    def finish(self) -> str:
        data, self._held = self._held, b""
        return data.decode("utf-8", "replace")


class PieceDetokenizer:
    """For SentencePiece-like decoders.

    A run of byte tokens is either valid UTF-8 as a whole or one U+FFFD per byte, so it is held until the run ends.
    ``at_start``: no text precedes the sequence, so that the decoder's stripping applies to it.
    """

    __slots__ = ("_pieces", "_run", "_strip", "_strip_left")

    def __init__(self, pieces: TextPieces, rules: PieceRules, at_start: bool) -> None:
        self._pieces = pieces
        self._run = bytearray()
        self._strip = rules.strip
        self._strip_left = rules.max_strip if at_start else 0

    def push(self, token: int) -> str:
        piece = self._pieces[token]
        if piece is None:
            return ""
        if isinstance(piece, int):
            self._run.append(piece)
            return ""
        if self._run:
            piece = self._end_run() + piece
        return self._stripped(piece) if self._strip_left else piece

    def finish(self) -> str:
        return self._stripped(self._end_run())

    def _end_run(self) -> str:
        run, self._run = self._run, bytearray()
        try:
            return run.decode()
        except UnicodeDecodeError:
            return _REPLACEMENT * len(run)

    def _stripped(self, text: str) -> str:
        while self._strip_left and text:
            if text[0] != self._strip:
                self._strip_left = 0
            else:
                self._strip_left -= 1
                text = text[1:]
        return text


class WindowDetokenizer:
    """For every other decoder: decodes a window of the last tokens and returns what it gained.

    Exact for decoders that only ever append; one that rewrites earlier text (WordPiece's clean-up) may differ from
    the whole decode at the joints.
    """

    def __init__(self, decode: Callable[[list[int]], str], prompt: list[int]) -> None:
        self._decode = decode
        self._window = prompt[-8:]
        self._known = len(self._window)
        self._text = decode(self._window)

    def push(self, token: int) -> str:
        self._window.append(token)
        text = self._decode(self._window)
        if text.endswith(_REPLACEMENT) or len(text) <= len(self._text):
            return ""
        return self._gain(text)

    def finish(self) -> str:
        return self._gain(self._decode(self._window))

    def _gain(self, text: str) -> str:
        gain = text[len(self._text) :]
        self._window = self._window[self._known :]
        self._known = len(self._window)
        self._text = self._decode(self._window)
        return gain
