"""Tokenizers of GGUF files: the token ids of the tokenizer that the file was made from."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from tokenizers import SentencePieceBPETokenizer
from tokenizers import Tokenizer as Backend

from preheat.errors import ModelError
from preheat.frontend.stored_templates import stored_templates
from preheat.frontend.tokenizer import Tokenizer
from preheat.model.files import BUNDLED_PATH
from preheat.model.gguf.folder import folder_of
from preheat.model.gguf.splits import ALIASES, SPLITS
from tests.gguf_files import file_bytes, tokenizer_fields
from tests.pure.test_gguf_container import FIELDS, TENSORS, plain

ALPHABET = "aB9 \n\t'sé世/.-_$²\r"
TEXTS = [
    "def f(x):\n    return x+1  # it's\n\n\n", "Hello, I'M 12345 years OLD!!  \t\n  ok", "é世界 x²½ ЖжЖ camelCaseWord",
    "a//b/c\r\n\r\n/x ...\n/ y  ", " lead   trail   ", "１２３٣٤ ǅ e\u0301 \u00a0nbsp", "$100^~|<=>+ don'T we'LL", "",
    *("".join(random.Random(seed).choices(ALPHABET, k=40)) for seed in range(50)),
]  # fmt: skip


def opened(folder: Path, fields: dict[str, Any], tokens: int) -> Tokenizer:
    """Return the tokenizer of a GGUF file with these fields."""
    model = {name: value for name, value in FIELDS.items() if not name.startswith("tokenizer")}
    tensors = TENSORS | {"token_embd.weight": plain(tokens, 32)}
    (folder / "m.gguf").write_bytes(file_bytes(model | fields, tensors))
    return Tokenizer(folder_of(folder / "m.gguf", folder / "cache", tokenizer=True))


def test_a_byte_level_tokenizer_is_the_original(tmp_path):
    original = Tokenizer(BUNDLED_PATH)
    found = opened(tmp_path, tokenizer_fields(BUNDLED_PATH), original.vocab_size)
    for text in [*TEXTS, "<|user|> hello<|end|>\n"]:
        for special in (True, False):
            ids = original.encode(text, add_special_tokens=special)
            assert found.encode(text, add_special_tokens=special) == ids
        assert found.decode(ids, skip_special_tokens=False) == original.decode(ids, skip_special_tokens=False)
    assert (found.eos_ids, found.special_ids) == ([1, 6], original.special_ids)
    assert found.special_tokens == {name: original.special_tokens[name] for name in ("bos_token", "eos_token")}
    template = stored_templates(found.folder, found.config)["default"].source
    assert template == stored_templates(original.folder, original.config)["default"].source


def test_templates_by_name(tmp_path):
    more = {"tokenizer.chat_templates": ["tool_use"], "tokenizer.chat_template.tool_use": "{{ tools }}"}
    found = opened(tmp_path, tokenizer_fields(BUNDLED_PATH) | more, 4096)
    assert stored_templates(found.folder, found.config)["tool_use"].source == "{{ tools }}"
    assert len(stored_templates(found.folder, found.config)) == 2


QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
PUBLISHED = {
    "qwen2": QWEN2,
    "llama-bpe": QWEN2.replace(r"|\p{N}|", r"|\p{N}{1,3}|"),
    "tekken": r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|"
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|"
    r"\s*[\r\n]+|\s+(?!\S)|\s+",
}
"""Expressions in the tokenizer.json of published models."""


@pytest.mark.parametrize("name", PUBLISHED)
def test_rules_are_the_published_ones(name, tmp_path):
    assert SPLITS[name].expressions == (PUBLISHED[name],)
    stored = json.loads((BUNDLED_PATH / "tokenizer.json").read_text())
    split = {"type": "Split", "pattern": {"Regex": PUBLISHED[name]}, "behavior": "Isolated", "invert": False}
    bytes_ = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    stored["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [split, bytes_]}
    stored["normalizer"] = {"type": "NFC"} if name == "qwen2" else None
    stored["model"]["ignore_merges"] = name != "qwen2"
    original = Backend.from_str(json.dumps(stored))
    found = opened(tmp_path, tokenizer_fields(BUNDLED_PATH, name), 4096)
    assert all(found.encode(text) == original.encode(text).ids for text in TEXTS)
    other = opened(tmp_path, tokenizer_fields(BUNDLED_PATH, "default"), 4096)
    assert any(other.encode(text) != original.encode(text).ids for text in TEXTS)  # control: another rule is seen


def test_every_rule_makes_a_tokenizer(tmp_path):
    for name in [*SPLITS, *ALIASES]:
        found = opened(tmp_path, tokenizer_fields(BUNDLED_PATH, name), 4096)
        assert all(found.decode(found.encode(text, False)) == text for text in TEXTS if text.isascii())


def sentencepiece() -> tuple[dict[str, Any], dict[str, Any]]:
    """Return a small tokenizer in Llama 2's form of ``tokenizer.json``, and its fields in a GGUF file."""
    made = SentencePieceBPETokenizer()
    texts = [(Path(__file__).parents[2] / f"{name}.md").read_text() for name in ("README", "CONTRIBUTING")]
    made.train_from_iterator(texts, vocab_size=900, special_tokens=[], show_progress=False)
    model = json.loads(made.to_str())["model"]
    merges = [each if isinstance(each, list) else each.split(" ") for each in model["merges"]]
    order = {"".join(pair): place for place, pair in reversed([*enumerate(merges)])}
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    types, scores = [2, 3, 3] + [6] * 256, [0.0] * 259
    words = sorted(model["vocab"], key=lambda token: (order.get(token, len(order)), token))
    for token in words:
        tokens.append(token)
        types.append(1)
        scores.append(-float(order.get(token, len(tokens) + len(order))))
    tokens, types, scores = [*tokens, "<tool>"], [*types, 4], [*scores, 0.0]
    added = [
        {"id": tokens.index(each), "content": each, "special": each != "<tool>", "normalized": False, "lstrip": False,
         "rstrip": False, "single_word": False}
        for each in ("<unk>", "<s>", "</s>", "<tool>")
    ]  # fmt: skip
    replace = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
    original = {
        "version": "1.0", "added_tokens": added, "pre_tokenizer": None, "post_processor": None,
        "normalizer": {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "▁"}, replace]},
        "decoder": {"type": "Sequence", "decoders": [
            {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}, {"type": "ByteFallback"}, {"type": "Fuse"},
            {"type": "Strip", "content": " ", "start": 1, "stop": 0},
        ]},
        "model": {
            "type": "BPE", "unk_token": "<unk>", "fuse_unk": True, "byte_fallback": True, "merges": merges,
            "vocab": {token: id for id, token in enumerate(tokens)},
        },
    }  # fmt: skip
    fields = {
        "model": "llama", "pre": "default", "tokens": tokens, "token_type": types, "scores": scores,
        "bos_token_id": 1, "eos_token_id": 2, "unknown_token_id": 0,
    }  # fmt: skip
    return original, {f"tokenizer.ggml.{name}": value for name, value in fields.items()}


def test_a_sentencepiece_tokenizer_is_the_original(tmp_path):
    stored, fields = sentencepiece()
    original = Backend.from_str(json.dumps(stored))
    found = opened(tmp_path, fields, len(fields["tokenizer.ggml.tokens"]))
    for text in [*TEXTS, "a<tool>b <s> x"]:
        ids = original.encode(text).ids
        assert found.encode(text, add_special_tokens=False) == ids
        assert found.encode(text) == [1, *ids]
        assert found.decode(ids) == original.decode(ids)
    assert found.eos_ids == [2]
    worse = [-score for score in fields["tokenizer.ggml.scores"]]  # control: the order of merges is seen
    other = opened(tmp_path, fields | {"tokenizer.ggml.scores": worse}, found.vocab_size)
    assert any(other.encode(text, False) != original.encode(text).ids for text in TEXTS)


def test_without_a_space_in_front(tmp_path):
    _, fields = sentencepiece()
    found = opened(tmp_path, fields | {"tokenizer.ggml.add_space_prefix": False}, 2000)
    assert found.decode(found.encode("  x y", False)) == "  x y"
    assert found.encode("x", False) != opened(tmp_path, fields, 2000).encode("x", False)


def test_scores_are_needed(tmp_path):
    _, fields = sentencepiece()
    with pytest.raises(ModelError, match=r"tokens and 0 scores; name a folder"):
        opened(tmp_path, {name: value for name, value in fields.items() if "scores" not in name}, 2000)


def test_tokens_are_the_tokens_of_llama_cpp(tmp_path):
    """Every rule splits as llama.cpp does, apart from Qwen2's normalization, which llama.cpp leaves out."""
    llama_cpp = pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")
    _, spm = sentencepiece()
    kinds = {name: (tokenizer_fields(BUNDLED_PATH, name), 4096) for name in [*SPLITS, *ALIASES]}
    kinds["spm"] = spm, len(spm["tokenizer.ggml.tokens"])
    for name, (fields, count) in kinds.items():
        found = opened(tmp_path, fields, count)
        other = llama_cpp.Llama(str(tmp_path / "m.gguf"), vocab_only=True, verbose=False)
        for text in TEXTS:
            if text and (not SPLITS.get(ALIASES.get(name, name), SPLITS["gpt-2"]).nfc or "\u0301" not in text):
                assert found.encode(text) == other.tokenize(text.encode(), add_bos=True, special=True), (name, text)
