"""Incremental detokenization: token ids to text, one at a time.

The bytes of a character may be spread over several tokens. It is held back until it is complete, and nothing longer is
held back. So the text of a sequence never depends on later tokens, and every token costs the same time. The deltas,
joined, equal the ``decode`` of all tokens where the bytes are UTF-8. Bytes that belong to no character become U+FFFD.
The class :class:`PieceDetokenizer` describes the one difference.
"""

from __future__ import annotations

import codecs
from codecs import utf_8_decode
from collections.abc import Callable, Mapping

from preheat.frontend.pieces import BytePieces, TextPieces

_REPLACEMENT = "\ufffd"
_LONGEST = 4
"""Bytes of the longest character, and so the most tokens that one character is spread over."""


class Detokenizer:
    """Maker of one sequence's text, token by token; the base class makes no text."""

    __slots__ = ()

    def push(self, token: int) -> str:
        """Return the text that is certain with ``token``; often empty."""
        return ""

    def finish(self) -> str:
        """Return the text that is still buffered, at the end of the sequence."""
        return ""


SILENT = Detokenizer()
"""The detokenizer of requests with ``detokenize`` off."""


class _Utf8:
    """Reader of bytes in pieces; ``errors`` handles bytes that belong to no character."""

    __slots__ = ("_buffer", "_errors")

    def __init__(self, errors: str) -> None:
        self._errors, self._buffer = errors, b""

    def push(self, data: bytes) -> str:
        """Return the text that is certain with ``data`` more."""
        data = self._buffer + data
        text, used = utf_8_decode(data, self._errors, False)
        self._buffer = data[used:]
        return text

    def finish(self) -> str:
        """Return the text of the bytes that were held back."""
        if not self._buffer:
            return ""
        data, self._buffer = self._buffer, b""
        return data.decode("utf-8", self._errors)


def _replace_each(error: UnicodeError) -> tuple[str, int]:
    """Return one U+FFFD for each byte; Python's "replace" gives one for the beginning of a character."""
    assert isinstance(error, UnicodeDecodeError)
    return _REPLACEMENT * (error.end - error.start), error.end


_EACH = "preheat.replace_each"
codecs.register_error(_EACH, _replace_each)


class ByteDetokenizer(Detokenizer):
    """Detokenizer of byte-level decoders: joins the bytes and reads them as UTF-8."""

    __slots__ = ("_pieces", "_utf8")

    def __init__(self, pieces: BytePieces) -> None:
        self._pieces, self._utf8 = pieces, _Utf8("replace")

    def push(self, token: int) -> str:
        return self._utf8.push(self._pieces[token])

    def finish(self) -> str:
        return self._utf8.finish()


class PieceDetokenizer(Detokenizer):
    """Detokenizer of SentencePiece-like decoders.

    Byte tokens are read as UTF-8, and a byte that belongs to no character becomes one U+FFFD. ``decode`` differs: it
    writes one U+FFFD for each byte of a whole run of bytes that is not UTF-8. It does so for the characters in the run
    too, but here they were sent before the run was over. ``at_start``: no text precedes the sequence, so the decoder
    strips its beginning.
    """

    __slots__ = ("_pieces", "_strip", "_strip_left", "_utf8")

    def __init__(self, pieces: TextPieces, at_start: bool) -> None:
        self._pieces, self._utf8 = pieces, _Utf8(_EACH)
        self._strip = pieces.rules.strip
        self._strip_left = pieces.rules.max_strip if at_start else 0

    def push(self, token: int) -> str:
        piece = self._pieces[token]
        if piece is None:
            return ""
        text = self._utf8.push(bytes((piece,))) if isinstance(piece, int) else self._utf8.finish() + piece
        return self._stripped(text) if self._strip_left else text

    def finish(self) -> str:
        return self._stripped(self._utf8.finish())

    def _stripped(self, text: str) -> str:
        while self._strip_left and text:
            if text[0] != self._strip:
                self._strip_left = 0
            else:
                self._strip_left -= 1
                text = text[1:]
        return text


class WindowDetokenizer(Detokenizer):
    """Detokenizer of all other decoders.

    It decodes a window of the last tokens and returns the added text. It is exact for decoders that only append. A
    decoder that rewrites earlier text (WordPiece's clean-up) may differ from decoding all tokens at once.
    """

    __slots__ = ("_decode", "_known", "_text", "_window")

    def __init__(self, decode: Callable[[list[int]], str], prompt: list[int]) -> None:
        self._decode = decode
        self._window = prompt[-8:]
        self._known = len(self._window)
        self._text = decode(self._window)

    def push(self, token: int) -> str:
        self._window.append(token)
        text = self._decode(self._window)
        if len(text) > len(self._text) and not text.endswith(_REPLACEMENT):
            return self._advance(len(self._window), text)
        if len(self._window) - self._known < _LONGEST:
            return ""
        return self._advance(self._known + 1)  # no character begins with this token and is still incomplete

    def finish(self) -> str:
        return self._advance(len(self._window))

    def _advance(self, end: int, text: str | None = None) -> str:
        """Return the text that the window adds up to ``end``; it becomes known.

        ``text`` is the text of the window up to ``end``, if it was decoded already.
        """
        added = (self._decode(self._window[:end]) if text is None else text)[len(self._text) :]
        if added:
            self._window, self._known = self._window[self._known :], end - self._known
            self._text = self._decode(self._window[: self._known])
        else:  # tokens without a text say nothing about the beginning of the next token
            del self._window[self._known : end]
        return added


class MarkedDetokenizer(Detokenizer):
    """Detokenizer with one character for each token of ``marks``, and ``plain`` for all others."""

    __slots__ = ("_marks", "_plain")

    def __init__(self, plain: Detokenizer, marks: Mapping[int, str]) -> None:
        self._plain, self._marks = plain, marks

    def push(self, token: int) -> str:
        mark = self._marks.get(token)
        return self._plain.push(token) if mark is None else self._plain.finish() + mark

    def finish(self) -> str:
        return self._plain.finish()
