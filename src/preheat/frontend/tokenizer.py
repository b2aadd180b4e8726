"""The tokenizer of a checkpoint: ``tokenizer.json``, and the special tokens of the config files."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Encoding
from tokenizers import Tokenizer as Backend

from preheat.errors import InvalidRequest, ModelError
from preheat.frontend.detokenize import (
    SILENT,
    ByteDetokenizer,
    Detokenizer,
    MarkedDetokenizer,
    PieceDetokenizer,
    WindowDetokenizer,
)
from preheat.frontend.pairs import Pair
from preheat.frontend.pieces import BytePieces, TextPieces, pieces_of
from preheat.frontend.token_length import chars_per_token
from preheat.utils.contract import digest_of
from preheat.utils.files import TABLE_BYTES, read_file, read_json, regular_file

_OTHERS = {"tekken.json": "mistral-common", "tokenizer.model": "sentencepiece (tiktoken for a tiktoken file)"}
"""Files of other tokenizers, each with the library that converts it."""


def _load_backend(folder: Path) -> Backend:
    """Return the fast tokenizer in ``folder``; transformers converts other formats."""
    path = folder / "tokenizer.json"
    if os.path.lexists(path):
        try:
            return Backend.from_file(str(regular_file(path, most=TABLE_BYTES)))
        except OSError as error:
            raise ModelError(f"{path} cannot be read: {error.strerror}") from error
        except Exception as error:  # the library raises plain Exception
            raise ModelError(f"{path} cannot be read: {error}") from error
    try:
        from transformers import AutoTokenizer  # takes seconds to import, so only if needed
    except ImportError as error:
        raise ModelError(f"{folder} has no tokenizer.json; install transformers to convert its tokenizer") from error
    try:
        for file in folder.iterdir():  # transformers opens any of them
            if not file.is_dir():
                regular_file(file)
        converted = AutoTokenizer.from_pretrained(str(folder))
    except Exception as error:
        raise ModelError(_unreadable(folder, error)) from error
    backend = getattr(converted, "backend_tokenizer", None)
    if not isinstance(backend, Backend):
        raise ModelError(f"{folder} has no tokenizer.json and its tokenizer cannot be converted to one")
    return backend


def _unreadable(folder: Path, error: Exception) -> str:
    """Return the message for a folder without a tokenizer.json; it says how to convert another file."""
    for name, library in _OTHERS.items():
        if (folder / name).is_file():
            return (
                f"{folder} has {name} and no tokenizer.json: convert it once, with transformers and {library}, by "
                f"AutoTokenizer.from_pretrained({str(folder)!r}).save_pretrained({str(folder)!r}), or name a folder "
                "with a tokenizer.json by --tokenizer"
            )
    return f"{folder} has no tokenizer that can be read: {error}"


def _content(token: object) -> str | None:
    """Return the text of a special token: config files have a string or an object with ``content``."""
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) else None


TEXT = {"vocab_size": 32_000}
"""Values for a decoder whose ``text_config`` leaves them out; see :mod:`preheat.model.families.llava`."""


class ModelFiles:
    """The parts of a model's config files that concern text.

    The files are in ``folder``. ``overrides`` replace fields of config.json; ``generation_folder`` holds the
    generation_config.json if it is not in ``folder``. ``vocab_size`` is None if the config names none. Raises
    ModelError for a field of the wrong type.
    """

    def __init__(
        self, folder: Path, overrides: Mapping[str, Any] | None = None, generation_folder: Path | None = None
    ) -> None:
        self.folder = folder
        config = read_json(folder / "config.json") | dict(overrides or {})
        self.generation_path = (generation_folder or folder) / "generation_config.json"
        self.generation = read_json(self.generation_path)
        text = config.get("text_config")  # of models that see images
        if isinstance(text, Mapping):
            config = {**TEXT, **text} | config
        self.vocab_size: int | None = config.get("vocab_size")
        if self.vocab_size is not None and (type(self.vocab_size) is not int or self.vocab_size < 1):
            raise ModelError(f"{folder}: vocab_size of config.json must be a positive integer, got {self.vocab_size!r}")
        self.eos_ids = _token_ids(self.generation, self.generation_path) or _token_ids(config, folder / "config.json")


def _token_ids(config: Mapping[str, Any], path: Path) -> list[int]:
    """Return ``eos_token_id`` of the config in ``path``: a number, a list or null."""
    value = config.get("eos_token_id")
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if any(type(id) is not int for id in ids):
        raise ModelError(f"{path}: eos_token_id must be a token id or a list of them, got {value!r}")
    return ids


def _check_unicode(text: str) -> None:
    """Raise InvalidRequest if ``text`` has lone surrogates."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequest(f"The text is not valid Unicode at character {error.start}") from error


def _is_unicode(text: str) -> bool:
    """Return whether ``text`` has no lone surrogates."""
    try:
        _check_unicode(text)
    except InvalidRequest:
        return False
    return True


def _longest_first(first: int, second: int, room: int) -> tuple[int, int]:
    """Return the lengths of two texts that fit ``room`` after cutting the longer one, token by token."""
    if first + second <= room:
        return first, second
    short = min(first, second, room // 2)
    return (short, room - short) if first <= second else (room - short, short)


class Tokenizer:
    """The tokenizer in ``folder``. Raises ModelError if its files cannot be used.

    ``model`` are the files of the model; unless given, they are in the same folder.
    ``eos_ids`` end a sequence. ``special_ids`` are left out of text by default. ``vocab_size`` bounds token ids.
    ``speaks``: whether there is text at all.
    """

    speaks = True

    def __init__(self, folder: str | Path, model: ModelFiles | None = None) -> None:
        self.folder = folder = Path(folder)
        self.model = model = model or ModelFiles(folder)
        self.config = read_json(folder / "tokenizer_config.json")
        self._backend = _load_backend(folder)
        self._backend.no_truncation()
        self._backend.no_padding()
        self.special_tokens = self._named_special_tokens()
        self._mark_special()
        added = self._backend.get_added_tokens_decoder()
        self.special_ids = frozenset(id for id, token in added.items() if token.special)
        self.vocab_size = model.vocab_size or int(self._backend.get_vocab_size())
        eos = self.special_tokens.get("eos_token")  # always counts, whatever the other files say
        own = self._backend.token_to_id(eos) if eos else None
        self.eos_ids = sorted({*model.eos_ids, *([] if own is None else [own])})
        self._pieces = {skip: pieces_of(self._backend, self.special_ids if skip else ()) for skip in (False, True)}

    def _named_special_tokens(self) -> dict[str, str]:
        """Return ``bos_token``, ``eos_token`` and so on from the config files: name -> text."""
        named = read_json(self.folder / "special_tokens_map.json") | self.config
        found = {name: _content(token) for name, token in named.items() if name.endswith("_token")}
        return {name: token for name, token in found.items() if token}

    def _mark_special(self) -> None:
        """Mark the tokens as special that only the config files call special, as transformers does."""
        decoder = self.config.get("added_tokens_decoder") or {}
        listed = [_content(t) for _, t in sorted(decoder.items(), key=lambda item: int(item[0])) if t.get("special")]
        listed += [_content(t) for t in self.config.get("additional_special_tokens") or []]
        listed += self.special_tokens.values()
        special = {str(token) for token in self._backend.get_added_tokens_decoder().values() if token.special}
        missing = [
            AddedToken(t, special=True, normalized=False) for t in dict.fromkeys(listed) if t and t not in special
        ]
        self._backend.add_special_tokens([t for t in missing if self._backend.token_to_id(t.content) is not None])

    @cached_property
    def digest(self) -> str:
        """The digest of everything that turns text into tokens and back."""
        path = self.folder / "tokenizer.json"
        stored = read_file(path, most=TABLE_BYTES) if path.exists() else self._backend.to_str().encode()
        return digest_of([digest_of(stored), self.special_tokens, sorted(self.special_ids), self.eos_ids])

    @cached_property
    def chars_per_token(self) -> int | None:
        """The most characters of text behind one token; None without such a bound."""
        return chars_per_token(self._backend)

    def encode(
        self, text: str, add_special_tokens: bool = True, check_length: Callable[[int], None] | None = None
    ) -> list[int]:
        """Return the token ids of ``text``. Raises InvalidRequest if the text has lone surrogates.

        ``check_length`` is called with the number of ids before they are listed, and may raise. Other threads run
        meanwhile: unlike ``encode``, the library's ``encode_batch_fast`` releases the GIL.
        """
        _check_unicode(text)
        (encoding,) = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        if check_length is not None:
            check_length(len(encoding))
        ids: list[int] = encoding.ids
        return ids

    def encode_all(self, texts: Sequence[str], most: Sequence[int], add_special_tokens: bool) -> list[list[int] | None]:
        """Return the token ids of each text, encoded by several threads at once if the library may use them.

        The entry of a text with more than its number of ``most`` ids, or with lone surrogates, is None.
        """
        valid = [place for place, text in enumerate(texts) if _is_unicode(text)]
        encodings = self._backend.encode_batch_fast(
            [texts[place] for place in valid], add_special_tokens=add_special_tokens
        )
        found: list[list[int] | None] = [None] * len(texts)
        for place, encoding in zip(valid, encodings, strict=True):
            if len(encoding) <= most[place]:
                found[place] = encoding.ids
        return found

    def pieces(self, text: str, add_special_tokens: bool) -> list[tuple[int, str, bool, int | None, int | None]]:
        """Return the tokens of ``text``: id, text, whether it is special, and the first and last character's place."""
        _check_unicode(text)
        (encoding,) = self._backend.encode_batch([text], add_special_tokens=add_special_tokens)
        columns = zip(encoding.ids, encoding.tokens, encoding.special_tokens_mask, encoding.offsets, strict=True)
        return [
            (id, token, True, None, None) if special else (id, text[start:stop], False, start, stop)
            for id, token, special, (start, stop) in columns
        ]

    def encode_pair(self, pair: Pair, most: int | None = None) -> list[int]:
        """Return the token ids of ``pair``, with special tokens, as the tokenizer's template has them.

        Tokens of a longer pair than ``most`` are cut from the end of the longer text, one by one. Raises InvalidRequest
        if a text has lone surrogates.
        """
        return self._joined(pair, self._plain(*self._texts_of(pair)), most)

    def encode_pairs(self, pairs: Sequence[Pair], most: Sequence[int | None]) -> list[list[int] | None]:
        """Return the token ids of each pair as :meth:`encode_pair` does, texts encoded as in :meth:`encode_all`.

        The entry of a pair with lone surrogates is None.
        """
        valid = [place for place, pair in enumerate(pairs) if _is_unicode(pair.first) and _is_unicode(pair.second)]
        texts = [self._texts_of(pairs[place]) for place in valid]
        plain = iter(self._plain(*(text for each in texts for text in each)))
        found: list[list[int] | None] = [None] * len(pairs)
        for place, each in zip(valid, texts, strict=True):
            found[place] = self._joined(pairs[place], [next(plain) for _ in each], most[place])
        return found

    def _texts_of(self, pair: Pair) -> tuple[str, ...]:
        """Return the texts that are encoded for ``pair``: both of them, or the three parts of its template."""
        template = pair.own_template
        if template is None:
            return pair.first, pair.second
        second = pair.second
        if pair.most_second is not None and (places := self._plain(second)[0].offsets[: pair.most_second]):
            second = second[: places[-1][1]]
        return template.before, template.filled(pair.first, second), template.behind

    def _joined(self, pair: Pair, encodings: Sequence[Encoding], most: int | None) -> list[int]:
        """Return the token ids of ``pair`` from the encodings of its texts; the body of a template is cut."""
        if pair.own_template is not None:
            before, body, behind = (encoding.ids for encoding in encodings)
            return [*before, *(body if most is None else body[: max(most - len(before) - len(behind), 0)]), *behind]
        first, second = encodings
        if pair.most_second is not None:
            second.truncate(pair.most_second)
        if most is not None:
            room = max(most - self._backend.num_special_tokens_to_add(True), 0)
            lengths = _longest_first(len(first), len(second), room)
            first.truncate(lengths[0])
            second.truncate(lengths[1])
        encoding = self._backend.post_process(first, second, True)
        size = self.vocab_size if pair.types > 1 else 0
        return [id + type_id * size for id, type_id in zip(encoding.ids, encoding.type_ids, strict=True)]

    def _plain(self, *texts: str) -> list[Encoding]:
        """Return the encoding of each text without special tokens."""
        for text in texts:
            _check_unicode(text)
        found: list[Encoding] = self._backend.encode_batch(list(texts), add_special_tokens=False)
        return found

    def count(self, text: str) -> int:
        """Return the number of token ids of ``text`` alone, without listing them. Raises as :meth:`encode`."""
        _check_unicode(text)
        return len(self._backend.encode_batch_fast([text], add_special_tokens=False)[0])

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        """Return the text of ``ids``; unknown ids add nothing. Other threads run meanwhile."""
        return str(self._backend.decode_batch([ids], skip_special_tokens=skip_special_tokens)[0])

    def detokenizer(
        self, prompt: list[int], skip_special_tokens: bool = True, marks: Mapping[int, str] | None = None
    ) -> Detokenizer:
        """Return a detokenizer for the tokens behind ``prompt``; ``marks`` are token ids and their characters."""
        plain = self._plain_detokenizer(prompt, skip_special_tokens)
        return MarkedDetokenizer(plain, marks) if marks else plain

    def _plain_detokenizer(self, prompt: list[int], skip_special_tokens: bool) -> Detokenizer:
        pieces = self._pieces[skip_special_tokens]
        if isinstance(pieces, BytePieces):
            return ByteDetokenizer(pieces)
        if isinstance(pieces, TextPieces):
            at_start = pieces.rules.max_strip > 0 and all(pieces[id] in (None, "") for id in reversed(prompt))
            return PieceDetokenizer(pieces, at_start)
        return WindowDetokenizer(lambda ids: self.decode(ids, skip_special_tokens), prompt)

    def token_id(self, text: str) -> int | None:
        """Return the id of the token ``text``; None if there is none."""
        found: int | None = self._backend.token_to_id(text)
        return found

    def token_bytes(self, id: int) -> bytes:
        """Return the bytes that ``id`` adds to the text; special tokens are written out."""
        pieces = self._pieces[False]
        piece = self.decode([id], skip_special_tokens=False) if pieces is None else pieces[id]
        if isinstance(piece, int):
            return bytes([piece])
        return piece.encode() if isinstance(piece, str) else piece or b""

    def token_name(self, id: int) -> str:
        """Return the name of ``id`` in the vocabulary."""
        return str(self._backend.id_to_token(id) or "")

    def token_text(self, id: int) -> str:
        """Return the text of ``id`` alone; incomplete characters become U+FFFD."""
        return self.token_bytes(id).decode(errors="replace")


class NoTokenizer(Tokenizer):
    """Substitute for the tokenizer in an engine that handles token ids only.

    It reads only the config files. Methods that need text raise InvalidRequest, with the remedy. A token's text is
    ``token_id:5``, as in vLLM.
    """

    speaks = False
    chars_per_token = None
    digest = "none"

    def __init__(self, folder: str | Path, model: ModelFiles | None = None) -> None:
        self.folder = Path(folder)
        self.model = model = model or ModelFiles(self.folder)
        self.config, self.special_tokens, self.special_ids = {}, {}, frozenset()
        if model.vocab_size is None:
            raise ModelError(f"{self.folder}: config.json names no vocab_size, and there is no tokenizer to ask")
        self.vocab_size = model.vocab_size
        self.eos_ids = sorted(model.eos_ids)

    def encode(
        self, text: str, add_special_tokens: bool = True, check_length: Callable[[int], None] | None = None
    ) -> list[int]:
        raise InvalidRequest(
            "There is no tokenizer (skip_tokenizer_init): give the prompt as token ids", param="prompt"
        )

    def encode_all(self, texts: Sequence[str], most: Sequence[int], add_special_tokens: bool) -> list[list[int] | None]:
        return [None] * len(texts)

    def encode_pair(self, pair: Pair, most: int | None = None) -> list[int]:
        return self.encode(pair.first)

    def encode_pairs(self, pairs: Sequence[Pair], most: Sequence[int | None]) -> list[list[int] | None]:
        return [None] * len(pairs)

    def count(self, text: str) -> int:
        return len(self.encode(text))

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        raise InvalidRequest("There is no tokenizer (skip_tokenizer_init), so tokens cannot be turned into text")

    def _plain_detokenizer(self, prompt: list[int], skip_special_tokens: bool) -> Detokenizer:
        return SILENT

    def token_id(self, text: str) -> int | None:
        return None

    def token_bytes(self, id: int) -> bytes:
        return f"token_id:{id}".encode()
