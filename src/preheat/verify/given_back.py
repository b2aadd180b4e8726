"""The check of blocks that were given back because they left a window.

Only the pad block stands in their columns, and another sequence may have filled them: here they are full of NaN. The
last tokens must have the bits that they have with all blocks in place. The check writes to the cache, so the tokens
before need not be computed.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product

import numpy as np
import torch
from torch import Tensor

from preheat.errors import CheckFailed
from preheat.plan.item import NothingToRun
from preheat.verify.check_runner import NOT_NUMBERS, ZEROS, CheckRunner, Row
from preheat.verify.names import READ, given_back_ends

SOME = 0x3C
"""A byte of the cached numbers. They are small and not zero, so that the pad block in their place shows."""


def check_given_back(runner: CheckRunner) -> int:
    """Compare tokens behind given-back blocks with the same tokens behind all blocks; return how often.

    Raises CheckFailed for other bits, NothingToRun if no sequence gives a block back.
    """
    count = 0
    for end, lacking in product(given_back_ends(runner.plan.limits), (1, READ)):
        if runner.bucket_of([Row(end, lacking)]) is None:
            continue
        right, found = (_logits(runner, end, lacking, gives=gives) for gives in (False, True))
        if not torch.equal(right.view(torch.uint8), found.view(torch.uint8)):
            tokens = "a token" if lacking == 1 else f"{lacking} tokens"
            raise CheckFailed(f"given back: {tokens} behind {end} others read a block that was given back")
        count += 1
    if not count:
        raise NothingToRun("no sequence gives a block back")
    return count


def _logits(runner: CheckRunner, end: int, lacking: int, *, gives: bool) -> Tensor:
    """Return the logits after ``end`` tokens in the cache, and ``lacking`` computed tokens behind them.

    With ``gives`` the blocks that left their windows before are given back.
    """
    slots = runner.slots
    tokens = np.arange(end + lacking, dtype=np.int32) % runner.vocab_size
    with runner.sequence(tokens) as slot:
        own = runner.blocks_of(slot)
        try:
            for block in own:
                runner.executor.fill_block(block, SOME)
            slots.cached_len[slot] = end
            if not gives:
                return runner.step(slot)
            with _given_back(runner, slot, end):
                return runner.step(slot)
        finally:
            for block in own:
                runner.executor.fill_block(block, ZEROS)


@contextmanager
def _given_back(runner: CheckRunner, slot: int, end: int) -> Iterator[None]:
    """Take the blocks that no token from ``end`` on reads from the tables of ``slot``, and fill them with NaN."""
    slots, taken = runner.slots, []
    for group, each in enumerate(runner.plan.limits.groups):
        columns = slice(int(each.behind(np.array(end), slots.block_size)))
        blocks = slots.tables[slot, group, columns].tolist()
        for block in blocks:
            runner.executor.fill_block(block, NOT_NUMBERS)
        slots.set_blocks(slot, columns, 0, group)
        taken.append((group, columns, blocks))
    try:
        yield
    finally:  # the sequence releases the blocks of its tables
        for group, columns, blocks in taken:
            slots.set_blocks(slot, columns, blocks, group)
