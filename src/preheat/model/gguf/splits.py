"""Rules that split text before byte-level BPE, by their names in GGUF files.

A name stands for regular expressions in llama.cpp's code. The expressions here stand in the models' own
``tokenizer.json``; llama.cpp's were made from them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_WORD = "[\\p{Lu}\\p{Lt}\\p{Lm}\\p{Lo}\\p{M}]"
_LOWER = "[\\p{Ll}\\p{Lm}\\p{Lo}\\p{M}]"
_ENDINGS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = "\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+"


def _cased(ending: str, digits: str) -> str:
    """Return the rule that splits words at a change from lower to upper case."""
    before = "[^\\r\\n\\p{L}\\p{N}]?"
    return (
        f"{before}{_WORD}*{_LOWER}+{ending}|{before}{_WORD}+{_LOWER}*{ending}|{digits}"
        f"| ?[^\\s\\p{{L}}\\p{{N}}]+[\\r\\n/]*|{_SPACES}"
    )


def _words(endings: str, digits: str) -> str:
    """Return the rule of Llama 3 and Qwen2."""
    return f"{endings}|[^\\r\\n\\p{{L}}\\p{{N}}]?\\p{{L}}+|{digits}| ?[^\\s\\p{{L}}\\p{{N}}]+[\\r\\n]*|{_SPACES}"


_GPT2 = "'s|'t|'re|'ve|'m|'ll|'d| ?\\p{L}+| ?\\p{N}+| ?[^\\s\\p{L}\\p{N}]+|\\s+(?!\\S)|\\s+"


@dataclass(frozen=True)
class Split:
    """A rule: regular ``expressions``, applied one after another.

    ``nfc``: text is normalized first. ``whole_tokens``: a piece that is a token is not built by merges.
    """

    expressions: tuple[str, ...]
    nfc: bool = False
    whole_tokens: bool = False

    def pre_tokenizer(self) -> dict[str, Any]:
        """Return the pre-tokenizer of ``tokenizer.json``."""
        splits = [
            {"type": "Split", "pattern": {"Regex": each}, "behavior": "Isolated", "invert": False}
            for each in self.expressions
        ]
        bytes_ = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
        return {"type": "Sequence", "pretokenizers": [*splits, bytes_]}


SPLITS: Mapping[str, Split] = {
    "gpt-2": Split((_GPT2,)),
    "default": Split(("[\\p{P}\\$\\+<=>\\^~\\|]+", _GPT2, "\\p{N}+", "[0-9][0-9][0-9]")),
    "llama-bpe": Split((_words(_ENDINGS, "\\p{N}{1,3}"),), whole_tokens=True),
    "qwen2": Split((_words(_ENDINGS, "\\p{N}"),), nfc=True),
    "smollm": Split(("\\p{N}", _GPT2)),
    "tekken": Split((_cased("", "\\p{N}"),), whole_tokens=True),
    "gpt-4o": Split((_cased(f"{_ENDINGS}?", "\\p{N}{1,3}"),)),
    "dbrx": Split((_words(_ENDINGS, "\\p{N}{1,3}"),)),
}
"""Rules by name; "default" is llama.cpp's rule for files that name none."""

ALIASES = {
    "llama3": "llama-bpe", "llama-v3": "llama-bpe", "falcon3": "llama-bpe", "mpt": "gpt-2", "olmo": "gpt-2",
    "phi-2": "gpt-2", "deepseek-r1-qwen": "qwen2", "stablelm2": "qwen2", "starcoder": "smollm", "refact": "smollm",
    "command-r": "smollm", "codeshell": "smollm", "exaone": "smollm", "minerva-7b": "smollm", "smaug-bpe": "dbrx",
    "llama4": "gpt-4o",
}  # fmt: skip
"""Other names of a rule."""

BEGINS = ("llama-bpe", "llama3", "llama-v3", "falcon3", "tekken")
"""Rules of tokenizers that put a begin token before a text, if the file does not say."""
