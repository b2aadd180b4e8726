"""Incremental detokenization: token ids to text, one at a time.

The deltas of a sequence, joined, equal the ``decode`` of all its tokens. A character whose bytes are spread over
several tokens is buffered until it is complete. Invalid bytes become U+FFFD exactly where ``decode`` puts it.
"""

from __future__ import annotations

from codecs import utf_8_decode
from collections.abc import Callable

from preheat.frontend.pieces import BytePieces, TextPieces

_REPLACEMENT = "\ufffd"


class Detokenizer:
    """Turns the tokens of one sequence into text as they arrive. The base class makes no text."""

    __slots__ = ()

    def push(self, token: int) -> str:
        """The text that is certain now that ``token`` is known; often empty."""
        return ""

    def finish(self) -> str:
        """The text that is still buffered, at the end of the sequence."""
        return ""


SILENT = Detokenizer()
"""For requests with ``detokenize`` off."""


class ByteDetokenizer(Detokenizer):
    """For byte-level decoders: joins the bytes and reads them as UTF-8."""

    __slots__ = ("_buffer", "_pieces")

    def __init__(self, pieces: BytePieces) -> None:
        self._pieces = pieces
        self._buffer = b""

    def push(self, token: int) -> str:
        data = self._buffer + self._pieces[token]
        text, used = utf_8_decode(data, "replace", False)
        self._buffer = data[used:]
        return text

    def finish(self) -> str:
        data, self._buffer = self._buffer, b""
        return data.decode("utf-8", "replace")


class PieceDetokenizer(Detokenizer):
    """For SentencePiece-like decoders.

    A run of byte tokens is buffered until it ends, because it decodes as a whole: to UTF-8 if it is valid, else to one
    U+FFFD for each byte. ``at_start``: no text precedes the sequence, so the decoder strips its beginning.
    """

    __slots__ = ("_pieces", "_run", "_strip", "_strip_left")

    def __init__(self, pieces: TextPieces, at_start: bool) -> None:
        self._pieces = pieces
        self._run = bytearray()
        self._strip = pieces.rules.strip
        self._strip_left = pieces.rules.max_strip if at_start else 0

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


class WindowDetokenizer(Detokenizer):
    """For all other decoders: decodes a window of the last tokens and returns the text that was added.

    Exact for decoders that only append. One that rewrites earlier text (WordPiece's clean-up) may differ from decoding
    all tokens at once.
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
        return self._advance(text)

    def finish(self) -> str:
        return self._advance(self._decode(self._window))

    def _advance(self, text: str) -> str:
        added = text[len(self._text) :]
        self._window = self._window[self._known :]
        self._known = len(self._window)
        self._text = self._decode(self._window)
        return added
