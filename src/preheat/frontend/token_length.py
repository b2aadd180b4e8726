"""Bound on the characters behind one token, to refuse a long text before it is encoded."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from tokenizers import Tokenizer as Backend
from tokenizers import models, pre_tokenizers

_COMPOSED = 4
"""Characters that a Unicode normal form may compose into one, at most."""

_FACTORS = {"NFC": _COMPOSED, "NFKC": _COMPOSED, "NFD": 1, "NFKD": 1, "Lowercase": 1, "Prepend": 1, "ByteLevel": 1}
_SPLITTERS = {"ByteLevel", "Metaspace", "Digits", "Split", "Punctuation", "UnicodeScripts"}


def chars_per_token(backend: Backend) -> int | None:
    """Return the most characters of text behind one token.

    None if the tokenizer may drop text, or may fuse any amount of it into one token.
    """
    normalizers, splitters = list(_steps(backend.normalizer)), list(_steps(backend.pre_tokenizer))
    factors = [_factor(step) for step in normalizers]
    keeps = all(step["type"] in _SPLITTERS and step.get("behavior") != "Removed" for step in splitters)
    absorbs = any(token.lstrip or token.rstrip for token in backend.get_added_tokens_decoder().values())
    if None in factors or not keeps or absorbs:
        return None
    vocabulary = backend.get_vocab()
    by_bytes = any(step["type"] == "ByteLevel" for step in (*normalizers, *splitters))
    if not _covers(backend.model, vocabulary, by_bytes):
        return None
    longest = max(map(len, vocabulary), default=1)
    return max(longest, 1) * max((factor for factor in factors if factor), default=1)


def _steps(part: Any) -> Iterator[dict[str, Any]]:
    """Yield the steps of a normalizer or pre-tokenizer, sequences flattened."""
    waiting = [json.loads(part.__getstate__())] if part is not None else []
    while waiting:
        step = waiting.pop()
        inner = step.get("normalizers") or step.get("pretokenizers")
        if inner is None:
            yield step
        else:
            waiting += inner


def _factor(step: dict[str, Any]) -> int | None:
    """Return how many characters a normalizer may turn into one; None if any number, or if unknown."""
    if step["type"] == "Replace" and "String" in step["pattern"]:
        return 1 if len(step["content"]) >= len(step["pattern"]["String"]) else None
    return _FACTORS.get(step["type"])


def _covers(model: Any, vocabulary: dict[str, int], by_bytes: bool) -> bool:
    """Return whether every character becomes a part of a token: no unknown ones are dropped or fused."""
    if not isinstance(model, models.BPE):
        return False
    if by_bytes and all(byte in vocabulary for byte in pre_tokenizers.ByteLevel.alphabet()):
        return True
    if model.byte_fallback and all(f"<0x{byte:02X}>" in vocabulary for byte in range(256)):
        return True
    return model.unk_token is not None and not model.fuse_unk
