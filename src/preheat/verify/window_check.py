"""The check of sliding windows.

Cached values just outside a window change no bit, values just within it do. The check writes to the cache, so a window
may be as long as a sequence: the tokens before the last ones need not be computed.
"""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
import torch
from torch import Tensor

from preheat.errors import CheckFailed
from preheat.plan.item import NothingToRun
from preheat.verify.check_runner import ZEROS, CheckRunner
from preheat.verify.names import BEHIND_WINDOW, READ


def check_windows(runner: CheckRunner) -> int:
    """Check each window of the model that a sequence can exceed.

    Returns how many results were compared. Raises CheckFailed for a window of the wrong length, NothingToRun if no
    sequence is that long.
    """
    layers, count = runner.executor.decoder.spec.layer_windows, 0
    room = runner.pool.num_free // runner.slots.tables.shape[1] * runner.slots.block_size
    for window in sorted({each for each in layers if each is not None}):
        if window + BEHIND_WINDOW <= min(runner.slots.max_model_len - 1, room):
            with_it = [index for index, each in enumerate(layers) if each == window]
            _check(runner, window, with_it, is_last=with_it == [len(layers) - 1])
            count += 1
    if not count:
        raise NothingToRun("no sequence is longer than a window")
    return count


def _check(runner: CheckRunner, window: int, layers: list[int], *, is_last: bool) -> None:
    """Check one window from two kinds of last tokens.

    The last token runs alone, then as the first of several tokens read in one step. If ``is_last``, nothing reads what
    the first of several tokens sees within the last layer.
    """
    last = window + BEHIND_WINDOW - 1
    for lacking, seen in ((1, True), (READ, not is_last)):
        behind = last + 1 - lacking - window
        how = "decodes" if lacking == 1 else f"is the first of {lacking} that are read"
        plain = _logits(runner, last + 1, lacking)
        if not _same(plain, _logits(runner, last + 1, lacking, behind, layers)):
            raise CheckFailed(f"windows: a token that {how} sees more than its window of {window} tokens")
        if seen and _same(plain, _logits(runner, last + 1, lacking, behind + 1, layers)):
            raise CheckFailed(f"windows: a token that {how} sees less than its window of {window} tokens")


def _logits(
    runner: CheckRunner, length: int, lacking: int, great: int | None = None, layers: Collection[int] = ()
) -> Tensor:
    """Return the logits after ``length`` tokens, computing the last ``lacking`` of them.

    The other tokens have zeros in the cache, except great values in ``layers`` at the position ``great``.
    """
    slots, size = runner.slots, runner.slots.block_size
    tokens = np.arange(length, dtype=np.int32) % runner.vocab_size
    with runner.sequence(tokens) as slot:
        for block in runner.blocks_of(slot):
            runner.executor.fill_block(block, ZEROS)
        if great is not None:
            for layer in layers:
                group = runner.executor.cache.group_of_layer[layer]
                runner.executor.fill_values([layer], int(slots.tables[slot, group, great // size]), great % size)
        slots.cached_len[slot] = length - lacking
        return runner.step(slot)


def _same(one: Tensor, other: Tensor) -> bool:
    return torch.equal(one.view(torch.int32), other.view(torch.int32))
