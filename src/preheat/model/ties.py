"""Output heads stored although the config ties them to the embeddings."""

from __future__ import annotations

import logging
import re
from dataclasses import replace

import torch

from preheat.model.reading import Piece
from preheat.model.sources import StoredTensors
from preheat.model.specs import ModelSpec, Rename
from preheat.model.tensor_specs import TIED_HEAD

logger = logging.getLogger(__name__)

HEAD = f"{TIED_HEAD}.weight"
_ROWS = 8192
"""Rows of a table that are compared at a time."""


def with_stored_head(spec: ModelSpec, stored: StoredTensors, dtype: torch.dtype) -> ModelSpec:
    """Return ``spec`` with the output head of the checkpoint.

    The rule is transformers'. The head is the table of embeddings if the two are equal in ``dtype``. If only one of
    them is stored, it stands for both. A head that differs is used as it is stored.
    """
    table = f"{spec.embedding.name}.weight"
    if not spec.tied or HEAD not in stored.shapes:
        return spec
    assert spec.head is not None
    if table not in stored.shapes:
        name, _ = stored.place(HEAD)
        return replace(spec, renames=(Rename(re.escape(name), (table,)), *spec.renames))
    if same_rows(stored, HEAD, table, dtype):
        return spec
    logger.warning(
        "tie_word_embeddings is true, but the checkpoint has a %s that differs from %s: both are used, and they are "
        "not tied", HEAD, table,
    )  # fmt: skip
    return replace(spec, head=replace(spec.head, parts=((TIED_HEAD, spec.vocab_size),)))


def same_rows(stored: StoredTensors, one: str, other: str, dtype: torch.dtype) -> bool:
    """Whether two stored tables hold the same numbers in ``dtype``.

    Only a few rows are read at a time.
    """
    shape = stored.shapes[one]
    if shape != stored.shapes[other]:
        return False
    for start in range(0, shape[0], _ROWS):
        piece = Piece(shape, (start, min(start + _ROWS, shape[0])))
        if not torch.equal(stored.read(one, piece).to(dtype), stored.read(other, piece).to(dtype)):
            return False
    return True
