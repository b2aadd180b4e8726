"""Collects the training text, Python's standard library and documentation, and turns it into tokens.

Both are under the PSF license. A hash of its path assigns each file to training or to the held-out text. The texts made
of a file (chat examples, snippets) follow the file, so that no held-out sentence is trained on.
"""

from __future__ import annotations

import hashlib
import json
import random
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from . import chat, primer
from .common import BEGIN, END_OF_TEXT, SEED, SPECIAL_TOKENS, TOKEN_ID, VOCAB_SIZE, WorkFolder

# Generated tables, vendored test data and other people's packages teach nothing useful.
LEFT_OUT_FOLDERS = set(
    "site-packages __pycache__ encodings pydoc_data encoded_modules cjkencodings data lib-dynload".split()
)
LEFT_OUT_FILES = re.compile(r"_sysconfigdata|bad_?syntax|badsyntax|test_codecmaps|stringprep")
LARGEST_FILE, LARGEST_TEST = 250_000, 100_000
HELDOUT_ONE_IN, TESTS_ONE_IN = 64, 2

# How often one pass shows each kind, if not once: the hand-written primer is tiny and would drown otherwise.
REPEATS = {"primer": 12, "primer_chat": 8}
ENCODE_BATCH = 512


class Document(NamedTuple):
    """A piece of text, its source, and its side of the split."""

    source: str
    kind: str
    heldout: bool
    text: str


def path_hash(path: str) -> int:
    return int.from_bytes(hashlib.sha256(path.encode()).digest()[:8], "big")


def library_files(stdlib: Path) -> Iterator[tuple[str, Path]]:
    """Return source files worth reading, with every second file of the test suite."""
    for path in sorted(stdlib.rglob("*.py")):
        relative = path.relative_to(stdlib)
        folders, name = set(relative.parts[:-1]), f"Lib/{relative.as_posix()}"
        if folders & LEFT_OUT_FOLDERS or relative.parts[0].startswith("config-"):
            continue
        is_test = bool(folders & {"test", "tests"})
        is_large = path.stat().st_size > (LARGEST_TEST if is_test else LARGEST_FILE)
        is_skipped_test = is_test and path_hash(name) // HELDOUT_ONE_IN % TESTS_ONE_IN
        if not (LEFT_OUT_FILES.search(relative.name) or is_large or is_skipped_test):
            yield name, path


def documents_of(kind: str, name: str, path: Path, rng: random.Random) -> Iterator[Document]:
    """Yield a file's text and the texts made of it.

    Empty files and the few in other encodings give nothing.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        return
    if not text.strip():
        return
    heldout = path_hash(name) % HELDOUT_ONE_IN == 0
    yield Document(name, kind, heldout, text)
    if kind == "code" and not heldout:
        yield from (Document(name, "snippet", False, whole) for _, _, whole, _ in chat.documented_functions(text))
    pairs = chat.pairs_from_source(text, rng) if kind == "code" else chat.pairs_from_docs(text, rng)
    yield from (Document(name, "chat", heldout, each) for each in chat.conversations(list(pairs), rng))


def build(work: WorkFolder, stdlib: Path, docs: Path) -> None:
    """Write all documents, one JSON array a line.

    ``docs`` holds the pages as Sphinx leaves them in ``_sources``.
    """
    rng = random.Random(SEED)
    pages = sorted(docs.rglob("*.rst.txt"))
    if not pages:
        raise SystemExit(f"no *.rst.txt below {docs}: is this Python's documentation?")
    documents = [each for name, path in library_files(stdlib) for each in documents_of("code", name, path, rng)]
    for path in pages:
        name = f"Doc/{path.relative_to(docs).as_posix()}".removesuffix(".txt")
        documents += documents_of("docs", name, path, rng)
    documents += [Document("primer", "primer", False, text) for text in primer.plain_documents()]
    for pair in primer.chat_pairs():
        documents += [Document("primer", "primer_chat", False, text) for text in chat.conversations([pair], rng)]
    work.documents.write_text("".join(json.dumps(each) + "\n" for each in documents), encoding="utf-8")
    print(f"{len(documents)} documents, {sum(len(each.text.encode()) for each in documents)} bytes")


def train_tokenizer(texts: list[str]) -> Tokenizer:
    """Train byte-level BPE: all 256 bytes are in the alphabet, so every string survives unchanged."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE, special_tokens=SPECIAL_TOKENS, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    opening = processors.TemplateProcessing(
        single=f"{BEGIN} $A", pair=f"{BEGIN} $A $B", special_tokens=[(BEGIN, TOKEN_ID[BEGIN])]
    )
    tokenizer.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=False), opening])
    return tokenizer


def encode(work: WorkFolder) -> None:
    """Train the tokenizer on the training text, and write the tokens.

    There is a shuffled stream of the training text, a stream of each kind of held-out text, and a manifest of their
    sizes.
    """
    with work.documents.open(encoding="utf-8") as lines:
        documents = [Document(*json.loads(line)) for line in lines]
    tokenizer = train_tokenizer([each.text for each in documents if not each.heldout and each.kind != "snippet"])
    tokenizer.save(str(work.tokenizer))
    kinds: defaultdict[tuple[str, str], list[tuple[Document, np.ndarray]]] = defaultdict(list)
    pieces = []
    for document, ids in zip(documents, _encoded(tokenizer, documents), strict=True):
        kinds["heldout" if document.heldout else "train", document.kind].append((document, ids))
        if not document.heldout:
            pieces += [ids] * REPEATS.get(document.kind, 1)
    random.Random(SEED).shuffle(pieces)
    np.save(work.train_tokens, np.concatenate(pieces))
    manifest: dict[str, dict[str, dict[str, int]]] = {"train": {}, "heldout": {}}
    for (split, kind), members in sorted(kinds.items()):
        manifest[split][kind] = {
            "files": len({document.source for document, _ in members}),
            "bytes": sum(len(document.text.encode()) for document, _ in members),
            "tokens": sum(len(ids) for _, ids in members),
        }
        if split == "train":
            manifest[split][kind]["repeats"] = REPEATS.get(kind, 1)
        else:
            np.save(work.heldout_tokens(kind), np.concatenate([ids for _, ids in members]))
    work.manifest.write_text(json.dumps(manifest, indent=1) + "\n")
    print(json.dumps(manifest, indent=1))


def _encoded(tokenizer: Tokenizer, documents: list[Document]) -> Iterator[np.ndarray]:
    """Return ids of each document between its opening and its ending token."""
    for start in range(0, len(documents), ENCODE_BATCH):
        for result in tokenizer.encode_batch([each.text for each in documents[start : start + ENCODE_BATCH]]):
            yield np.asarray([*result.ids, TOKEN_ID[END_OF_TEXT]], np.uint16)
