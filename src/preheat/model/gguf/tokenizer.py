"""The tokenizer of a GGUF file, as ``tokenizer.json`` and ``tokenizer_config.json``.

A file has a vocabulary, the kinds of tokens and, for byte-level BPE, the merges. The rest is known by name:
``tokenizer.ggml.pre`` names the rule that splits text (:data:`SPLITS`). ``llama`` is SentencePiece's BPE with scores.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from preheat.errors import ModelError
from preheat.model.gguf.description import Description
from preheat.model.gguf.ends import CONTROL
from preheat.model.gguf.splits import ALIASES, BEGINS, SPLITS, Split

OTHER = "name a folder with the model's tokenizer.json with --tokenizer"

NORMAL, UNKNOWN, USER, UNUSED, BYTE = 1, 2, 4, 5, 6
"""Kinds of tokens, beside control tokens."""

_SPACE = "\u2581"
_SPECIAL = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}


class Vocabulary:
    """The tokens of a file with their kinds, and the rules beside them.

    Raises ModelError for a tokenizer that cannot be built.
    """

    def __init__(self, model: Description) -> None:
        self._model = model
        self.kind = model.field("tokenizer.ggml.model", str)
        if self.kind not in ("gpt2", "llama"):
            known = "gpt2 (byte-level BPE) and llama (SentencePiece)"
            raise model.wrong(f"the tokenizer {self.kind!r} is not supported; supported are {known}", OTHER)
        self.pre = model.field("tokenizer.ggml.pre", str, "default")
        self.tokens = self._list("tokens", str)
        types = self._list("token_type", int) or [NORMAL] * len(self.tokens)
        if len(types) != len(self.tokens) or not self.tokens:
            raise self._wrong(f"it has {len(self.tokens):,} tokens and {len(types):,} kinds of tokens")
        self.ids = {token: id for id, token in reversed([*enumerate(self.tokens)])}
        self.types = types
        self.special = {name: self._special(theirs) for name, theirs in _SPECIAL.items()}

    def _wrong(self, what: str) -> ModelError:
        return self._model.wrong(what, OTHER)

    def _list(self, name: str, kind: type) -> list[Any]:
        values = self._model.field(f"tokenizer.ggml.{name}", list) or []
        if values and not all(type(value) is kind for value in values):
            raise self._wrong(f"tokenizer.ggml.{name} holds something other than {kind.__name__}")
        return list(values)

    def _special(self, name: str) -> str | None:
        id = self._model.field(f"tokenizer.ggml.{name}_token_id", int)
        if id is None:
            return None
        if not 0 <= id < len(self.tokens):
            raise self._wrong(f"tokenizer.ggml.{name}_token_id is {id:,}, and there are {len(self.tokens):,} tokens")
        return str(self.tokens[id])

    def flag(self, name: str, default: bool) -> bool:
        """Return a switch of the tokenizer."""
        return bool(self._model.field(f"tokenizer.ggml.{name}", (bool, int), default))

    def tokenizer(self) -> dict[str, Any]:
        """Return the contents of ``tokenizer.json``."""
        parts = self._byte_level() if self.kind == "gpt2" else self._sentencepiece()
        return {
            "version": "1.0", "truncation": None, "padding": None, "added_tokens": self._added(),
            "post_processor": self._post_processor(), **parts,
        }  # fmt: skip

    def _added(self) -> list[dict[str, Any]]:
        """Return the tokens that are found in text before it is split."""
        whole = (CONTROL, USER, *([UNKNOWN] if self.kind == "llama" else []))
        strips = self._model.name == "phi3" and self.kind == "llama"
        return [
            {
                "id": id, "content": token, "single_word": False, "lstrip": False, "normalized": False,
                "rstrip": strips and token.startswith("<|") and token != "<|endoftext|>", "special": kind != USER,
            }
            for id, (token, kind) in enumerate(zip(self.tokens, self.types, strict=True))
            if token and self.ids[token] == id and kind in whole
        ]  # fmt: skip

    def _post_processor(self) -> dict[str, Any] | None:
        """Return the rule that puts the begin and end of a text around it."""
        around = {
            "bos": self.flag("add_bos_token", self.kind == "llama" or self.pre in BEGINS),
            "eos": self.flag("add_eos_token", False),
        }
        used = {name: token for name, token in self.special.items() if around.get(name) and token is not None}
        if not used:
            return None
        text: list[Mapping[str, Any]] = [{"Sequence": {"id": "A", "type_id": 0}}]
        before = [{"SpecialToken": {"id": used["bos"], "type_id": 0}}] if "bos" in used else []
        after = [{"SpecialToken": {"id": used["eos"], "type_id": 0}}] if "eos" in used else []
        single = [*before, *text, *after]
        return {
            "type": "TemplateProcessing", "single": single,
            "pair": [*single, *before, {"Sequence": {"id": "B", "type_id": 1}}, *after],
            "special_tokens": {
                token: {"id": token, "ids": [self.ids[token]], "tokens": [token]} for token in used.values()
            },
        }  # fmt: skip

    def _byte_level(self) -> dict[str, Any]:
        split: Split | None = SPLITS.get(ALIASES.get(self.pre, self.pre))
        if split is None:
            raise self._wrong(f"the rule {self.pre!r} that splits text is not known; known are {', '.join(SPLITS)}")
        merges = self._list("merges", str)
        if not merges or (bad := next((each for each in merges if each.count(" ") != 1), None)) is not None:
            raise self._wrong("tokenizer.ggml.merges is missing" if not merges else f"{bad!r} is no pair of a merge")
        pairs = [pair for pair in (merge.split(" ") for merge in merges) if self._known(pair)]
        return {
            "normalizer": {"type": "NFC"} if split.nfc else None,
            "pre_tokenizer": split.pre_tokenizer(),
            "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
            "model": self._bpe(pairs, ignore_merges=split.whole_tokens, byte_fallback=False, unknown=None),
        }

    def _known(self, pair: Sequence[str]) -> bool:
        return pair[0] in self.ids and pair[1] in self.ids and "".join(pair) in self.ids

    def _sentencepiece(self) -> dict[str, Any]:
        prefix = self.flag("add_space_prefix", True)
        replaced = {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}
        normalizers = [{"type": "Prepend", "prepend": _SPACE}, replaced] if prefix else [replaced]
        decoders: list[Mapping[str, Any]] = [
            {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "},
            {"type": "ByteFallback"}, {"type": "Fuse"},
        ]  # fmt: skip
        if prefix:
            decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
        return {
            "normalizer": {"type": "Sequence", "normalizers": normalizers},
            "pre_tokenizer": None,
            "decoder": {"type": "Sequence", "decoders": decoders},
            "model": self._bpe(
                self._scored_merges(), ignore_merges=False, byte_fallback=BYTE in self.types,
                unknown=self.special["unk"] or self._first_unknown(),
            ),
        }  # fmt: skip

    def _first_unknown(self) -> str | None:
        return next((token for token, kind in zip(self.tokens, self.types, strict=True) if kind == UNKNOWN), None)

    def _scored_merges(self) -> list[list[str]]:
        """Return the merges behind SentencePiece's scores.

        A pair merges into a token with the score of the token, the best first. Splits of one token are in the order of
        their parts in the vocabulary, as in the conversion of transformers.
        """
        scores = self._list("scores", float)
        if len(scores) != len(self.tokens):
            raise self._wrong(f"it has {len(self.tokens):,} tokens and {len(scores):,} scores")
        ids, found = self.ids, []
        for id, (token, kind) in enumerate(zip(self.tokens, self.types, strict=True)):
            if kind not in (NORMAL, USER, UNUSED) or len(token) > _LONGEST or ids[token] != id:
                continue
            for cut in range(1, len(token)):
                left, right = ids.get(token[:cut]), ids.get(token[cut:])
                if left is not None and right is not None:
                    found.append((-scores[id], id, left, right))
        found.sort()
        return [[self.tokens[left], self.tokens[right]] for _, _, left, right in found]

    def _bpe(
        self, merges: Sequence[Sequence[str]], *, ignore_merges: bool, byte_fallback: bool, unknown: str | None
    ) -> dict[str, Any]:
        return {
            "type": "BPE", "dropout": None, "unk_token": unknown, "continuing_subword_prefix": None,
            "end_of_word_suffix": None, "fuse_unk": unknown is not None, "byte_fallback": byte_fallback,
            "ignore_merges": ignore_merges, "vocab": self.ids, "merges": merges,
        }  # fmt: skip

    def config(self) -> dict[str, Any]:
        """Return the contents of ``tokenizer_config.json``, with the chat templates."""
        found: dict[str, Any] = {f"{name}_token": token for name, token in self.special.items() if token is not None}
        found["tokenizer_class"] = "PreTrainedTokenizerFast"
        default = self._model.field("tokenizer.chat_template", str)
        names = self._list_of_templates()
        named = {name: self._model.field(f"tokenizer.chat_template.{name}", str) for name in names}
        templates = {name: text for name, text in {"default": default, **named}.items() if text is not None}
        if templates:
            found["chat_template"] = (
                default
                if [*templates] == ["default"]
                else [{"name": name, "template": text} for name, text in templates.items()]
            )
        return found

    def _list_of_templates(self) -> list[str]:
        names = self._model.field("tokenizer.chat_templates", list) or []
        return [name for name in names if isinstance(name, str)]


_LONGEST = 256
"""Characters of a token with merges; a longer one is no word."""
