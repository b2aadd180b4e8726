"""The paths of ``preheat verify`` for models with states.

A state is a value like a block of keys. So a context may be cut anywhere, and a prompt may go on from the end of any
block.
"""

from __future__ import annotations

import numpy as np

from preheat.verify.cache_paths import OUTPUTS, as_seen, compared, drawn_tokens, greedy_prompt
from preheat.verify.compare import PathResult, compare
from preheat.verify.context_paths import in_steps
from preheat.verify.drive import Engine
from preheat.verify.prompts import FULL, Size

MOST, FEW = 512, 128
"""Tokens of the largest chunk, by default and where prompts are few."""

ENDS = 8
"""Block ends where prompts are few."""


def keeps_states(engine: Engine) -> bool:
    """Return whether layers of the model keep a state of each sequence."""
    return engine.loop.executor.decoder.spec.has_states


def any_chunks(path: str, engine: Engine, size: Size) -> PathResult | None:
    """Compute a context in chunks of each size, or in some sizes of chunks for a small ``size``.

    Returns None where no step computes two tokens.
    """
    limits, every = engine.loop.scheduler.limits, size == FULL
    most = min(
        MOST if every else FEW, size.longest, limits.max_num_batched_tokens - 1, limits.max_model_len - 2,
        limits.columns * limits.block_size - 1,
    )  # fmt: skip
    if most < 1:
        return None
    tokens = np.array(drawn_tokens(engine, most + 1, 42), np.int32)
    sizes = chunk_sizes(most, every=every)
    with engine.unwatched() as runner:
        first, *found = (
            [as_seen(logits)]
            for count in (len(tokens), *sizes)
            for logits in in_steps(runner, tokens, [count] * (most // count))
        )
    return compare(path, first, found, f"{len(sizes)} sizes up to {most} tokens")


def chunk_sizes(most: int, *, every: bool) -> list[int]:
    """Return the sizes of chunks up to ``most``: ``every`` one, or the powers of two with their neighbors."""
    beside = {(1 << power) + more for power in range(most.bit_length() + 1) for more in (-1, 0, 1)}
    return [size for size in range(1, most + 1) if every or size in beside]


def any_end(path: str, engine: Engine, size: Size) -> PathResult | None:
    """Run prompts that end beside each block's end, then prompts that branch off there; few ends for a small ``size``.

    Returns None where nothing is kept, or where no prompt has two blocks.
    """
    limits, block = engine.loop.scheduler.limits, engine.loop.scheduler.limits.block_size
    count = (min(limits.max_model_len, limits.columns * block) - OUTPUTS - 1) // block
    if not engine.loop.scheduler.prefix.enabled or count < 2:
        return None
    ends = [block * at for at in range(1, count + 1)][: None if size == FULL else ENDS]
    tokens = drawn_tokens(engine, ends[-1] + 1, 43)
    texts = [tokens[: end + more] for end in ends for more in (-1, 0, 1)]
    texts += [[*tokens[:end], (tokens[end] + 1) % engine.vocab_size] for end in ends[::-1]]
    return compared(path, engine, [greedy_prompt(text) for text in texts])
