"""Collects the training text: Python's standard library and its documentation.

Both are under the PSF licence. Whole files are assigned to training or to the held-out set by a
hash of their path; everything derived from a file (chat examples, snippets) goes the same way,
so that no held-out sentence reaches the model by a side door.
"""

from __future__ import annotations

import hashlib
import json
import random
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath

from . import chat, primer
from .layout import SEED, WorkFolder

# Generated tables, vendored test data and other people's packages teach nothing useful.
LEFT_OUT_FOLDERS = {
    "site-packages",
    "__pycache__",
    "encodings",
    "pydoc_data",
    "encoded_modules",
    "cjkencodings",
    "data",
    "lib-dynload",
}
LEFT_OUT_FILES = re.compile(r"_sysconfigdata|bad_?syntax|badsyntax|test_codecmaps|stringprep")
LARGEST_FILE, LARGEST_TEST = 250_000, 100_000
HELDOUT_ONE_IN = 64
TESTS_ONE_IN = 2


@dataclass(frozen=True)
class Document:
    """A piece of text, where it came from, and which side of the split it is on."""

    source: str
    kind: str
    heldout: bool
    text: str


def path_hash(path: str) -> int:
    return int.from_bytes(hashlib.sha256(path.encode()).digest()[:8], "big")


def is_heldout(path: str) -> bool:
    return path_hash(path) % HELDOUT_ONE_IN == 0


def read_text(path: Path) -> str | None:
    """The file's text, or None for the few test files in other encodings."""
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        return None


def library_files(stdlib: Path) -> Iterator[tuple[str, Path]]:
    """Source files worth reading, with every second file of the test suite."""
    for path in sorted(stdlib.rglob("*.py")):
        relative = path.relative_to(stdlib)
        folders = set(relative.parts[:-1])
        if folders & LEFT_OUT_FOLDERS or relative.parts[0].startswith("config-"):
            continue
        if LEFT_OUT_FILES.search(relative.name):
            continue
        is_test = bool(folders & {"test", "tests"})
        if path.stat().st_size > (LARGEST_TEST if is_test else LARGEST_FILE):
            continue
        name = f"Lib/{PurePosixPath(relative)}"
        if is_test and (path_hash(name) // HELDOUT_ONE_IN) % TESTS_ONE_IN:
            continue
        yield name, path


def documentation_files(docs: Path) -> Iterator[tuple[str, Path]]:
    """The reStructuredText pages, as Sphinx leaves them under ``_sources``."""
    for path in sorted(docs.rglob("*.rst.txt")):
        yield f"Doc/{PurePosixPath(path.relative_to(docs))}".removesuffix(".txt"), path


def library_documents(stdlib: Path, rng: random.Random) -> Iterator[Document]:
    for name, path in library_files(stdlib):
        text = read_text(path)
        if not text or not text.strip():
            continue
        heldout = is_heldout(name)
        yield Document(name, "code", heldout, text)
        if not heldout:
            for _, _, whole, _ in chat.documented_functions(text):
                yield Document(name, "snippet", False, whole)
        for conversation in chat.conversations(list(chat.pairs_from_source(text, rng)), rng):
            yield Document(name, "chat", heldout, conversation)


def documentation_documents(docs: Path, rng: random.Random) -> Iterator[Document]:
    for name, path in documentation_files(docs):
        text = read_text(path)
        if not text or not text.strip():
            continue
        heldout = is_heldout(name)
        yield Document(name, "docs", heldout, text)
        for conversation in chat.conversations(list(chat.pairs_from_docs(text, rng)), rng):
            yield Document(name, "chat", heldout, conversation)


def primer_documents(rng: random.Random) -> Iterator[Document]:
    for text in primer.plain_documents():
        yield Document("primer", "primer", False, text)
    for pair in primer.chat_pairs():
        for conversation in chat.conversations([pair], rng):
            yield Document("primer", "primer_chat", False, conversation)


def build(work: WorkFolder, stdlib: Path, docs: Path) -> None:
    """Write all documents, one JSON object a line, and print what was taken."""
    rng = random.Random(SEED)
    documents = [
        *library_documents(stdlib, rng),
        *documentation_documents(docs, rng),
        *primer_documents(rng),
    ]
    if not any(document.kind == "docs" for document in documents):
        raise SystemExit(f"no *.rst.txt below {docs}: is this Python's documentation?")
    work.root.mkdir(parents=True, exist_ok=True)
    with work.documents.open("w", encoding="utf-8") as out:
        for document in documents:
            out.write(json.dumps(asdict(document)) + "\n")
    _print_summary(documents)


def _print_summary(documents: list[Document]) -> None:
    counts: Counter[tuple[str, str]] = Counter()
    sizes: Counter[tuple[str, str]] = Counter()
    for document in documents:
        key = (document.kind, "held-out" if document.heldout else "train")
        counts[key] += 1
        sizes[key] += len(document.text.encode())
    for kind, split in sorted(counts):
        print(f"{kind:12} {split:8} {counts[kind, split]:7} {sizes[kind, split]:10} bytes")


def load(work: WorkFolder) -> list[Document]:
    with work.documents.open(encoding="utf-8") as lines:
        return [Document(**json.loads(line)) for line in lines]
