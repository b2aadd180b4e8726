"""The check of an engine that pools.

A prompt's pooled states must not depend on how it is cut into chunks.
"""

from __future__ import annotations

import itertools

import numpy as np

from preheat.core import OWN_ID, Request
from preheat.errors import NotInvariant
from preheat.plan.sampler_settings import POOLER_SETTINGS
from preheat.schedule.sequence import Pooled
from preheat.verify.check_runner import CheckRunner
from preheat.verify.context_paths import RAGGED

_, ALL = POOLER_SETTINGS


def check_pooled(runner: CheckRunner, tokens: np.ndarray) -> int:
    """Pool all tokens of a context in several ways.

    ``tokens``, int32, are pooled at once, in ragged chunks and in halves. Returns how many ways were compared. Raises
    NotInvariant.
    """
    whole, chunks = _pooled(runner, tokens, (len(tokens),)), (RAGGED, (-(-len(tokens) // 2),))
    for sizes in chunks:
        if _pooled(runner, tokens, sizes) != whole:
            raise NotInvariant(f"pooled: {len(tokens)} tokens in chunks of {sizes} have another mean than at once")
    return len(chunks)


def _pooled(runner: CheckRunner, tokens: np.ndarray, sizes: tuple[int, ...]) -> bytes:
    """Return the mean over the context, read in chunks of ``sizes``, again and again."""
    found: Pooled | None = None
    with runner.sequence(tokens) as slot:
        runner.slots.describe(slot, Request(OWN_ID, tokens.tolist(), ALL, 0, 1))
        left, size = len(tokens), itertools.cycle(sizes)
        while left:
            count = min(next(size), left)
            states = runner.hidden(slot, count)
            found = found or Pooled(np.zeros_like(states[0]))
            found.add(states)
            left -= count
    assert found is not None
    return found.mean()
