"""A made-up tokenizer of the size of a published one: byte-level BPE, its tokens like those of text and JSON."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path

SPECIAL = 256
"""Special tokens at the end, as in Llama 3.1: the first begins a text, the second ends it."""

LETTERS, DIGITS, MARKS = "etaoinshrdlcumwfgypbvk", "0123456789", '"{}[]:,._-/\\()=<>'
LONGEST = 12


def write_tokenizer(folder: Path, tokens: int) -> None:
    """``tokenizer.json`` and ``tokenizer_config.json`` of ``tokens`` tokens; the same ones in every run."""
    alphabet = list(byte_letters())
    texts, merges = dict.fromkeys(alphabet), list[tuple[str, str]]()
    for left, right in _pairs(random.Random(0)):
        if len(texts) == tokens - SPECIAL:
            break
        if left in texts and right in texts and left + right not in texts and len(left + right) <= LONGEST:
            texts[left + right] = None
            merges.append((left, right))
    ids = {text: id for id, text in enumerate(texts)}
    names = ["<|begin_of_text|>", "<|end_of_text|>", *(f"<|reserved_{n}|>" for n in range(SPECIAL - 2))]
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    added = [{"id": len(ids) + n, "content": name, **flags} for n, name in enumerate(names)]
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    model = {"type": "BPE", "vocab": ids, "merges": [f"{left} {right}" for left, right in merges]}
    made = {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": added, "normalizer": None,
        "pre_tokenizer": level, "post_processor": None, "decoder": level, "model": model,
    }  # fmt: skip
    (folder / "tokenizer.json").write_text(json.dumps(made, ensure_ascii=False), encoding="utf-8")
    (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": names[0], "eos_token": names[1]}))


def byte_letters() -> Iterator[str]:
    """The 256 letters in which byte-level tokenizers write bytes: printable ones stand for themselves."""
    others = 0
    for byte in range(256):
        if 33 <= byte <= 126 or 161 <= byte <= 172 or byte >= 174:
            yield chr(byte)
        else:
            yield chr(256 + others)
            others += 1


def _pairs(chance: random.Random) -> Iterator[tuple[str, str]]:
    """Merges to try, for ever: short pairs within letters, digits and marks, then words that grow."""
    space = "Ġ"
    for kind in (LETTERS, DIGITS, MARKS):
        yield from ((left, right) for left in kind for right in kind)
    yield from ((space, each) for each in (*LETTERS, *LETTERS.upper(), *MARKS))
    yield from ((left, right) for left in LETTERS.upper() for right in LETTERS)
    yield from ((a + b, c) for a in DIGITS for b in DIGITS for c in DIGITS)
    yield from ((a + b, c) for a in MARKS for b in MARKS for c in (*MARKS, *LETTERS))
    words = [left + right for left in (*LETTERS, *LETTERS.upper(), space) for right in LETTERS]
    while True:
        left, right = chance.choice(words), chance.choice(words[:1000])
        if not right.startswith(space):
            words.append(left + right)
            yield left, right
