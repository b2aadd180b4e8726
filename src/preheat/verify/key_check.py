"""The check of the prefix cache's keys, on the host alone.

A prompt finds its own published blocks and no others. A block is the prompt's own if it has its tokens behind the same
tokens, with the same salt, images and adapter.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from preheat.core import OWN_ID, Image, Request, Segment
from preheat.errors import CheckFailed
from preheat.schedule.blocks import BlockPool
from preheat.schedule.prefix import PrefixCache
from preheat.schedule.sequence import Sequence as Waiting
from preheat.warmup.dummy_batch import GREEDY


@dataclass(frozen=True)
class _Adapter:
    """A fake adapter, see :class:`preheat.schedule.adapters.Adapter`."""

    digest: str
    packed: Any = None
    source: Any = None


def check_keys(size: int) -> None:
    """Publish blocks and look them up by several prompts.

    There are two blocks of ``size`` tokens, and the second one again behind another first block. Raises CheckFailed for
    a prompt that does not find exactly its own blocks.
    """
    cache, tokens = PrefixCache(BlockPool(9, size)), list(range(1, 2 * size + 4))
    changed = {at: [*tokens[:at], 0, *tokens[at + 1 :]] for at in (0, size - 1, size, 2 * size - 1, 2 * size)}
    _publish(cache, _sequence(tokens))
    _publish(cache, _sequence([-1, *tokens[1:size], *tokens[:size], *tokens[:3]]))
    _publish(cache, _sequence(tokens, salt="published"))
    _expect(cache, "the same tokens", 2, _sequence(tokens))
    _expect(cache, "no token behind its blocks", 1, _sequence(tokens[: 2 * size]))
    for at, others in changed.items():
        _expect(cache, f"another token at {at}", at // size, _sequence(others))
    _expect(cache, "another block before", 1, _sequence([*tokens[:size], *tokens[:size], 0]))
    _expect(cache, "a salt", 0, _sequence(tokens, salt="other"))
    _expect(cache, "an adapter", 0, _sequence(tokens, adapter=_Adapter("other")))
    pictures = [Segment(size, size + 1, Image(name, b"")) for name in (b"one", b"another")]
    _expect(cache, "an image", 1, _sequence(tokens, pictures[:1]))
    _publish(cache, _sequence(tokens, pictures[:1]))
    _expect(cache, "another image", 1, _sequence(tokens, pictures[1:]))


def _sequence(
    tokens: list[int], segments: Sequence[Segment] = (), *, salt: str = "", adapter: _Adapter | None = None
) -> Waiting:
    request = Request(OWN_ID, tokens, GREEDY, 0, 1, cache_salt=salt, segments=list(segments))
    return Waiting(request, adapter=adapter)


def _publish(cache: PrefixCache, sequence: Waiting) -> None:
    """Publish two blocks of the sequence's own.

    Blocks that are published already stay.
    """
    blocks = cache.pool.allocate(2)
    cache.publish(sequence, sequence.tokens, np.array([blocks], np.int32), 0, 2)


def _expect(cache: PrefixCache, what: str, count: int, sequence: Waiting) -> None:
    found = cache.lookup(sequence).columns
    if found != count:
        raise CheckFailed(f"prefix hit: a prompt with {what} finds {found} blocks, and {count} are its own")
