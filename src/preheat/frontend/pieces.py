"""The text that each token adds, for decoders that concatenate such pieces.

Two families cover the models that we run. A *byte-level* decoder joins the tokens' bytes and reads them as UTF-8. A
*SentencePiece-like* decoder replaces a marker by a space, reads runs of byte tokens (``<0x0A>``) as UTF-8, and may
strip leading spaces. The rules come from the ``tokenizers`` library, so the pieces agree with its ``decode``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from tokenizers import Tokenizer as Backend

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def _byte_alphabet() -> dict[str, int]:
    """Return the printable characters of the 256 bytes in byte-level BPE (GPT-2's table)."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


_BYTE_OF = _byte_alphabet()


@dataclass(frozen=True)
class PieceRules:
    """The steps of a SentencePiece-like decoder: replacements, then byte runs, then ``strip`` at the front."""

    replace: tuple[tuple[str, str], ...] = ()
    byte_fallback: bool = False
    strip: str = ""
    max_strip: int = 0


def _piece_rules(steps: list[dict[str, Any]]) -> PieceRules | None:
    """Return the rules of a SentencePiece-like decoder; None if the decoder is of another kind."""
    replace: list[tuple[str, str]] = []
    remaining = [step for step in steps if step["type"] != "Fuse"]
    fused = len(remaining) < len(steps)
    while remaining and remaining[0]["type"] == "Replace" and "String" in remaining[0]["pattern"]:
        step = remaining.pop(0)
        replace.append((step["pattern"]["String"], step["content"]))
    byte_fallback = bool(remaining) and remaining[0]["type"] == "ByteFallback"
    remaining = remaining[byte_fallback:]
    strip, max_strip = "", 0
    if fused and len(remaining) == 1 and remaining[0]["type"] == "Strip" and remaining[0]["stop"] == 0:
        step = remaining.pop()
        strip, max_strip = step["content"], step["start"]
    if remaining or not fused or steps[len(replace) + byte_fallback]["type"] != "Fuse":
        return None
    return PieceRules(tuple(replace), byte_fallback, strip, max_strip)


class BytePieces(dict[int, bytes]):
    """id -> the bytes that the token adds; none for ``hidden`` and unknown ids. Computed on first use."""

    def __init__(self, backend: Backend, hidden: Iterable[int] = ()) -> None:
        super().__init__((id, b"") for id in hidden)
        self._backend = backend

    def __missing__(self, id: int) -> bytes:
        token = self._backend.id_to_token(id) or ""
        try:
            piece = bytes([_BYTE_OF[char] for char in token])
        except KeyError:  # an added token may have characters outside the alphabet; it is taken literally
            piece = token.encode()
        self[id] = piece
        return piece


class TextPieces(dict[int, str | int | None]):
    """id -> the text or the byte that the token adds; None for ``hidden`` and unknown ids."""

    def __init__(self, backend: Backend, rules: PieceRules, hidden: Iterable[int] = ()) -> None:
        super().__init__((id, None) for id in hidden)
        self._backend, self.rules = backend, rules

    def __missing__(self, id: int) -> str | int | None:
        piece: str | int | None = self._backend.id_to_token(id)
        if isinstance(piece, str):
            for old, new in self.rules.replace:
                piece = piece.replace(old, new)
            if self.rules.byte_fallback and (byte := _BYTE_TOKEN.fullmatch(piece)):
                piece = int(byte[1], 16)
        self[id] = piece
        return piece


def pieces_of(backend: Backend, hidden: Iterable[int]) -> BytePieces | TextPieces | None:
    """Return the pieces of ``backend``'s tokens; None if its decoder is of neither family."""
    decoder: dict[str, Any] = json.loads(backend.decoder.__getstate__()) if backend.decoder else {"type": ""}
    steps = list(decoder["decoders"]) if decoder["type"] == "Sequence" else [decoder]
    if [step["type"] for step in steps] == ["ByteLevel"]:
        return BytePieces(backend, hidden)
    rules = _piece_rules(steps)
    return TextPieces(backend, rules, hidden) if rules else None
