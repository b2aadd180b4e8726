"""The path of ``preheat verify`` through texts longer than the model's window.

The frontend cuts a text into chunks, and adds the vectors of the chunks. The rule reads each chunk alone, as a text.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np

from preheat.frontend.embedding import asked_of, embedding, vector_of
from preheat.verify.compare import Seen
from preheat.verify.drive import Engine
from preheat.verify.prompts import Prompt

HALVES = (1, 2, 5)
"""Lengths of texts, in halves of a chunk. Each text has a token more, so that one chunk has a single token."""


def has_chunks(engine: Engine) -> bool:
    """Return whether ``engine`` reads a text in chunks: they are allowed, and a step has room for a whole one."""
    full, pooling = engine.ready.places - 1, engine.pooling
    room = engine.ready.max_prompt_len is None or engine.ready.max_prompt_len >= full
    return pooling is not None and pooling.max_embed_len is not None and pooling.max_embed_len > full and room


def long_texts(engine: Engine) -> list[Prompt]:
    """Return texts with and without chunks; each text begins as the next one does."""
    pooling = engine.pooling
    assert pooling is not None
    full, most, draw = engine.ready.places - 1, pooling.max_embed_len or 0, random.Random(7)
    lengths = sorted({min(half * full // 2 + 1, most) for half in HALVES})
    tokens = [draw.randrange(engine.vocab_size) for _ in range(lengths[-1])]
    return [Prompt(tokens[:length], asked_of(pooling.type, None, None)) for length in lengths]


def by_rule(engine: Engine, prompts: Sequence[Prompt]) -> list[Seen]:
    """Return the vector of each text by the rule, from its chunks, each read alone."""
    return [_seen(_weighted(engine, prompt)) for prompt in prompts]


def _weighted(engine: Engine, prompt: Prompt) -> np.ndarray:
    """Return the mean of the vectors of all chunks, with their numbers of tokens as weights."""
    total, full = np.zeros(1), engine.ready.places - 1
    for start in range(0, len(prompt.tokens), full):
        chunk = Prompt(prompt.tokens[start : start + full], prompt.params)
        engine.run([chunk])
        total = total + _vector(engine, engine.answers[0].pooled) * len(chunk.tokens)
    mean: np.ndarray = total / len(prompt.tokens)
    return mean.astype(np.float32)


def _vector(engine: Engine, pooled: bytes) -> np.ndarray:
    """Return the vector of one text, float64, from its ``pooled`` state."""
    assert engine.pooling is not None
    return vector_of(pooled, engine.pooling).astype(np.float64)


def served(engine: Engine, prompts: Sequence[Prompt]) -> list[Seen]:
    """Serve the texts all at once, and return the vector of each."""
    assert engine.pooling is not None
    return [_seen(embedding(state, engine.pooling)) for state in engine.serve(prompts)]


def _seen(vector: np.ndarray) -> Seen:
    return Seen([vector.tobytes()], [float(vector.max())])
