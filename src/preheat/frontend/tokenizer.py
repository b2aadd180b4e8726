"""The tokenizer of a checkpoint on disk: ``tokenizer.json`` and the special tokens that the configs name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from preheat.errors import InvalidRequest, ModelError
from preheat.frontend.detokenize import SILENT, ByteDetokenizer, Detokenizer, PieceDetokenizer, WindowDetokenizer
from preheat.frontend.pieces import BytePieces, TextPieces, decoder_steps, is_byte_level, piece_rules, visible


def read_json(path: Path) -> dict[str, Any]:
    """The object in ``path``; empty when there is no such file. Raises ModelError when it is not a JSON object."""
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ModelError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path} must hold a JSON object")
    return value


def load_backend(folder: Path) -> Backend:
    """The fast tokenizer in ``folder``; transformers converts other formats. Raises ModelError when there is none."""
    path = folder / "tokenizer.json"
    if path.is_file():
        try:
            return Backend.from_file(str(path))
        except Exception as error:  # the library raises plain Exception
            raise ModelError(f"{path} cannot be read: {error}") from error
    try:
        from transformers import AutoTokenizer  # seconds to import, so only for checkpoints that need it
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
    """The text of a special token, written in configs as a string or as an object with ``content``."""
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) else None


def _ids(value: object) -> list[int]:
    """``eos_token_id`` is written as a number, a list or null."""
    return [id for id in (value if isinstance(value, list) else [value]) if isinstance(id, int)]


def _end_ids(generation: dict[str, Any], model_config: dict[str, Any]) -> list[int]:
    """generation_config.json decides, else config.json; the tokenizer's own end token always counts, too."""
    return _ids(generation.get("eos_token_id")) or _ids(model_config.get("eos_token_id"))


class Tokenizer:
    """Encodes, decodes and names the special tokens of the checkpoint in ``folder``.

    ``eos_ids`` end a sequence. ``special_ids`` are hidden from text unless asked for. ``vocab_size`` bounds the token
    ids that the model knows. ``generation`` holds the sampling defaults that the checkpoint recommends.
    """

    speaks = True
    """Whether there is text at all."""

    def __init__(self, folder: str | Path, model_folder: str | Path | None = None) -> None:
        folder = Path(folder)
        model_folder = folder if model_folder is None else Path(model_folder)
        self.folder = folder
        self.config = read_json(folder / "tokenizer_config.json")
        self.generation = read_json(model_folder / "generation_config.json")
        self._backend = load_backend(folder)
        self._backend.no_truncation()
        self._backend.no_padding()
        self.special_tokens = self._named_special_tokens()
        self._mark_special()
        added = self._backend.get_added_tokens_decoder()
        self.special_ids = frozenset(id for id, token in added.items() if token.special)
        model_config = read_json(model_folder / "config.json")
        self.vocab_size = int(model_config.get("vocab_size") or self._backend.get_vocab_size())
        self.bos_id = self._id_of("bos_token")
        own = self._id_of("eos_token")
        self.eos_ids = sorted({*_end_ids(self.generation, model_config), *([] if own is None else [own])})
        self._set_up_pieces()

    def _named_special_tokens(self) -> dict[str, str]:
        """``bos_token``, ``eos_token`` and so on, as the configs name them."""
        named = read_json(self.folder / "special_tokens_map.json") | self.config
        found = {name: _content(token) for name, token in named.items() if name.endswith("_token")}
        return {name: token for name, token in found.items() if token}

    def _mark_special(self) -> None:
        """Tokens that only the configs call special are special, as transformers has it."""
        decoder = self.config.get("added_tokens_decoder") or {}
        listed = [_content(t) for _, t in sorted(decoder.items(), key=lambda item: int(item[0])) if t.get("special")]
        listed += [_content(t) for t in self.config.get("additional_special_tokens") or []]
        listed += self.special_tokens.values()
        special = {str(token) for token in self._backend.get_added_tokens_decoder().values() if token.special}
        missing = [
            AddedToken(t, special=True, normalized=False) for t in dict.fromkeys(listed) if t and t not in special
        ]
        self._backend.add_special_tokens([t for t in missing if self._backend.token_to_id(t.content) is not None])

    def _id_of(self, name: str) -> int | None:
        token = self.special_tokens.get(name)
        id = self._backend.token_to_id(token) if token else None
        return None if id is None else int(id)

    def _set_up_pieces(self) -> None:
        steps = decoder_steps(self._backend)
        self._byte_level, self._rules = is_byte_level(steps), piece_rules(steps)
        self._pieces: dict[bool, BytePieces | TextPieces] = {}
        for skip in (False, True):
            hidden = self.special_ids if skip else ()
            if self._byte_level:
                self._pieces[skip] = BytePieces(self._backend, hidden)
            elif self._rules:
                self._pieces[skip] = TextPieces(self._backend, self._rules, hidden)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of ``text``. Raises InvalidRequest for text that is not Unicode (lone surrogates)."""
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise InvalidRequest(f"The text is not valid Unicode at character {error.start}") from error
        return list(self._backend.encode(text, add_special_tokens=add_special_tokens).ids)

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        """Text of ``ids``; ids without a token add nothing."""
        return str(self._backend.decode(ids, skip_special_tokens=skip_special_tokens))

    def detokenizer(self, prompt: list[int], skip_special_tokens: bool = True) -> Detokenizer:
        """For the tokens that follow ``prompt``: a leading space is text unless no text precedes it."""
        pieces = self._pieces.get(skip_special_tokens)
        if isinstance(pieces, BytePieces):
            return ByteDetokenizer(pieces)
        if isinstance(pieces, TextPieces) and self._rules:
            at_start = self._rules.max_strip > 0 and next(visible(pieces, prompt), None) is None
            return PieceDetokenizer(pieces, self._rules, at_start)
        return WindowDetokenizer(lambda ids: self.decode(ids, skip_special_tokens), prompt)

    def token_bytes(self, id: int) -> bytes:
        """The bytes that ``id`` adds to the text, special tokens written out."""
        pieces = self._pieces.get(False)
        piece = pieces[id] if pieces else self.decode([id], skip_special_tokens=False)
        if isinstance(piece, int):
            return bytes([piece])
        return piece.encode() if isinstance(piece, str) else piece or b""

    def token_text(self, id: int) -> str:
        """The text of ``id`` alone; bytes that are no whole character become U+FFFD."""
        return self.token_bytes(id).decode(errors="replace")


class NoTokenizer(Tokenizer):
    """In the tokenizer's place, for an engine of token ids alone: it knows what the checkpoint's configs say.

    Whatever needs text raises InvalidRequest, saying what to change; a token is shown as ``token_id:5``, as in vLLM.
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
        self.bos_id = next(iter(_ids(model_config.get("bos_token_id"))), None)
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
