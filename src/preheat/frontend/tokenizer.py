"""The tokenizer of a checkpoint: ``tokenizer.json``, and the special tokens that the config files name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from preheat.errors import InvalidRequest, ModelError
from preheat.frontend.detokenize import SILENT, ByteDetokenizer, Detokenizer, PieceDetokenizer, WindowDetokenizer
from preheat.frontend.pieces import BytePieces, TextPieces, pieces_of


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in ``path``, or {} without such a file. Raises ModelError if the file holds anything else."""
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ModelError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path} must hold a JSON object")
    return value


def _load_backend(folder: Path) -> Backend:
    """The fast tokenizer in ``folder``; transformers converts other formats."""
    path = folder / "tokenizer.json"
    if path.is_file():
        try:
            return Backend.from_file(str(path))
        except Exception as error:  # the library raises plain Exception
            raise ModelError(f"{path} cannot be read: {error}") from error
    try:
        from transformers import AutoTokenizer  # takes seconds to import, so only if needed
    except ImportError as error:
        raise ModelError(f"{folder} has no tokenizer.json; install transformers to convert its tokenizer") from error
    try:
        converted = AutoTokenizer.from_pretrained(str(folder))
    except Exception as error:
        raise ModelError(f"{folder} has no tokenizer that can be read: {error}") from error
    backend = getattr(converted, "backend_tokenizer", None)
    if not isinstance(backend, Backend):
        raise ModelError(f"{folder} has no tokenizer.json and its tokenizer cannot be converted to one")
    return backend


def _content(token: object) -> str | None:
    """The text of a special token: config files have a string or an object with ``content``."""
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) else None


def _ids(value: object) -> list[int]:
    """Token ids in a config file: a number, a list or null."""
    return [id for id in (value if isinstance(value, list) else [value]) if isinstance(id, int)]


def _end_ids(generation: dict[str, Any], model_config: dict[str, Any]) -> list[int]:
    """``eos_token_id`` of generation_config.json, else of config.json."""
    return _ids(generation.get("eos_token_id")) or _ids(model_config.get("eos_token_id"))


class Tokenizer:
    """Encodes and decodes text for the checkpoint in ``folder``; raises ModelError if its files cannot be used.

    ``eos_ids`` end a sequence. ``special_ids`` are left out of text by default. ``vocab_size`` bounds token ids.
    ``generation`` has the sampling defaults that the checkpoint recommends. ``speaks``: there is text at all.
    """

    speaks = True

    def __init__(self, folder: str | Path, model_folder: str | Path | None = None) -> None:
        folder = Path(folder)
        model_folder = folder if model_folder is None else Path(model_folder)
        self.folder = folder
        self.config = read_json(folder / "tokenizer_config.json")
        self.generation = read_json(model_folder / "generation_config.json")
        self._backend = _load_backend(folder)
        self._backend.no_truncation()
        self._backend.no_padding()
        self.special_tokens = self._named_special_tokens()
        self._mark_special()
        added = self._backend.get_added_tokens_decoder()
        self.special_ids = frozenset(id for id, token in added.items() if token.special)
        model_config = read_json(model_folder / "config.json")
        self.vocab_size = int(model_config.get("vocab_size") or self._backend.get_vocab_size())
        eos = self.special_tokens.get("eos_token")  # always counts, whatever the other files say
        own = self._backend.token_to_id(eos) if eos else None
        self.eos_ids = sorted({*_end_ids(self.generation, model_config), *_ids(own)})
        self._pieces = {skip: pieces_of(self._backend, self.special_ids if skip else ()) for skip in (False, True)}

    def _named_special_tokens(self) -> dict[str, str]:
        """``bos_token``, ``eos_token`` and so on: name -> text, from the config files."""
        named = read_json(self.folder / "special_tokens_map.json") | self.config
        found = {name: _content(token) for name, token in named.items() if name.endswith("_token")}
        return {name: token for name, token in found.items() if token}

    def _mark_special(self) -> None:
        """Mark the tokens as special that only the config files call so, as transformers does."""
        decoder = self.config.get("added_tokens_decoder") or {}
        listed = [_content(t) for _, t in sorted(decoder.items(), key=lambda item: int(item[0])) if t.get("special")]
        listed += [_content(t) for t in self.config.get("additional_special_tokens") or []]
        listed += self.special_tokens.values()
        special = {str(token) for token in self._backend.get_added_tokens_decoder().values() if token.special}
        missing = [
            AddedToken(t, special=True, normalized=False) for t in dict.fromkeys(listed) if t and t not in special
        ]
        self._backend.add_special_tokens([t for t in missing if self._backend.token_to_id(t.content) is not None])

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of ``text``. Raises InvalidRequest if the text is not valid Unicode (lone surrogates)."""
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise InvalidRequest(f"The text is not valid Unicode at character {error.start}") from error
        return list(self._backend.encode(text, add_special_tokens=add_special_tokens).ids)

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        """Text of ``ids``; unknown ids add nothing."""
        return str(self._backend.decode(ids, skip_special_tokens=skip_special_tokens))

    def detokenizer(self, prompt: list[int], skip_special_tokens: bool = True) -> Detokenizer:
        """A detokenizer for the tokens that follow ``prompt``."""
        pieces = self._pieces[skip_special_tokens]
        if isinstance(pieces, BytePieces):
            return ByteDetokenizer(pieces)
        if isinstance(pieces, TextPieces):
            at_start = pieces.rules.max_strip > 0 and all(pieces[id] in (None, "") for id in reversed(prompt))
            return PieceDetokenizer(pieces, at_start)
        return WindowDetokenizer(lambda ids: self.decode(ids, skip_special_tokens), prompt)

    def token_bytes(self, id: int) -> bytes:
        """The bytes that ``id`` adds to the text; special tokens are written out."""
        pieces = self._pieces[False]
        piece = self.decode([id], skip_special_tokens=False) if pieces is None else pieces[id]
        if isinstance(piece, int):
            return bytes([piece])
        return piece.encode() if isinstance(piece, str) else piece or b""

    def token_text(self, id: int) -> str:
        """The text of ``id`` alone; incomplete characters become U+FFFD."""
        return self.token_bytes(id).decode(errors="replace")


class NoTokenizer(Tokenizer):
    """Takes the tokenizer's place in an engine that handles token ids only; it reads just the config files.

    What needs text raises InvalidRequest, saying what to change. A token's text is ``token_id:5``, as in vLLM.
    """

    speaks = False

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self.config, self.special_tokens, self.special_ids = {}, {}, frozenset()
        self.generation = read_json(self.folder / "generation_config.json")
        model_config = read_json(self.folder / "config.json")
        if "vocab_size" not in model_config:
            raise ModelError(f"{self.folder}: config.json names no vocab_size, and there is no tokenizer to ask")
        self.vocab_size = int(model_config["vocab_size"])
        self.eos_ids = sorted(_end_ids(self.generation, model_config))

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        raise InvalidRequest(
            "There is no tokenizer (skip_tokenizer_init): give the prompt as token ids", param="prompt"
        )

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        raise InvalidRequest("There is no tokenizer (skip_tokenizer_init), so nothing can be turned into text")

    def detokenizer(self, prompt: list[int], skip_special_tokens: bool = True) -> Detokenizer:
        return SILENT

    def token_bytes(self, id: int) -> bytes:
        return f"token_id:{id}".encode()
