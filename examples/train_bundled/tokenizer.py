"""Trains the byte-level BPE tokenizer and turns the corpus into token streams."""

from __future__ import annotations

import json
import random
from collections import Counter, defaultdict

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from .corpus import Document, load
from .layout import (
    BEGIN,
    END_OF_TEXT,
    SEED,
    SPECIAL_TOKENS,
    TOKEN_ID,
    VOCAB_SIZE,
    WorkFolder,
)

# How often one pass over the training text shows each kind: the hand-written primer is tiny and
# would drown otherwise.
REPEATS = {"code": 1, "docs": 1, "snippet": 1, "chat": 1, "primer": 12, "primer_chat": 8}
ENCODE_BATCH = 512


def train_tokenizer(texts: list[str]) -> Tokenizer:
    """Byte-level BPE: all 256 bytes are in the alphabet, so every string survives unchanged."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.Sequence(
        [
            processors.ByteLevel(trim_offsets=False),
            processors.TemplateProcessing(
                single=f"{BEGIN} $A",
                pair=f"{BEGIN} $A $B",
                special_tokens=[(BEGIN, TOKEN_ID[BEGIN])],
            ),
        ]
    )
    return tokenizer


def encode(tokenizer: Tokenizer, documents: list[Document]) -> list[list[int]]:
    """Ids of each document between its opening and its ending token."""
    ending = TOKEN_ID[END_OF_TEXT]
    encoded: list[list[int]] = []
    for start in range(0, len(documents), ENCODE_BATCH):
        texts = [document.text for document in documents[start : start + ENCODE_BATCH]]
        encoded.extend([*result.ids, ending] for result in tokenizer.encode_batch(texts))
    return encoded


def stream(pieces: list[list[int]]) -> np.ndarray:
    return np.concatenate([np.asarray(piece, dtype=np.uint16) for piece in pieces])


def build(work: WorkFolder) -> None:
    """Train the tokenizer on the training text, then write the streams and a manifest."""
    documents = load(work)
    train = [document for document in documents if not document.heldout]
    heldout = [document for document in documents if document.heldout]
    tokenizer = train_tokenizer([d.text for d in train if d.kind != "snippet"])
    work.encoded.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(work.tokenizer))
    manifest = {
        "train": _write_train(work, tokenizer, train),
        "heldout": _write_heldout(work, tokenizer, heldout),
    }
    work.manifest.write_text(json.dumps(manifest, indent=1) + "\n")
    print(json.dumps(manifest, indent=1))


def _write_train(work: WorkFolder, tokenizer: Tokenizer, documents: list[Document]) -> dict[str, dict[str, int]]:
    """One shuffled stream of all training documents; returns what it holds."""
    pieces: list[list[int]] = []
    tokens: Counter[str] = Counter()
    text_bytes: Counter[str] = Counter()
    for document, ids in zip(documents, encode(tokenizer, documents), strict=True):
        pieces.extend([ids] * REPEATS[document.kind])
        tokens[document.kind] += len(ids)
        text_bytes[document.kind] += len(document.text.encode())
    random.Random(SEED).shuffle(pieces)
    np.save(work.train_tokens, stream(pieces))
    files = {kind: len({d.source for d in documents if d.kind == kind}) for kind in tokens}
    return {
        kind: {
            "files": files[kind],
            "bytes": text_bytes[kind],
            "tokens": tokens[kind],
            "repeats": REPEATS[kind],
        }
        for kind in sorted(tokens)
    }


def _write_heldout(work: WorkFolder, tokenizer: Tokenizer, documents: list[Document]) -> dict[str, dict[str, int]]:
    """A stream for each kind, so that each kind's loss can be told."""
    by_kind: defaultdict[str, list[Document]] = defaultdict(list)
    for document in documents:
        by_kind[document.kind].append(document)
    listed = {}
    for kind, members in sorted(by_kind.items()):
        tokens = stream(encode(tokenizer, members))
        np.save(work.heldout_tokens(kind), tokens)
        listed[kind] = {
            "files": len({document.source for document in members}),
            "bytes": sum(len(document.text.encode()) for document in members),
            "tokens": len(tokens),
        }
    return listed
