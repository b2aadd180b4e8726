"""The checks of an engine that pools.

A prompt's pooled states must not depend on how it is cut into chunks. An encoder cuts no text: the states of all tokens
must not depend on the other rows of the step.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import msgspec
import numpy as np

from preheat.core import OWN_ID, POOLS, Request
from preheat.errors import NotInvariant
from preheat.plan.sampler_settings import POOLER_SETTINGS
from preheat.schedule.pooled import Pooled
from preheat.verify.check_runner import CheckRunner, Row
from preheat.verify.context_paths import RAGGED

_, MEAN = POOLER_SETTINGS
ALL = msgspec.structs.replace(MEAN, prompt_logprobs=POOLS.index("ALL"))
"""The device adds up the states of a mean; all states are reported as they are."""


def check_pooled(runner: CheckRunner, tokens: np.ndarray) -> int:
    """Pool all tokens of a context in several ways.

    ``tokens``, int32, are pooled at once, in ragged chunks and in halves. Returns how many ways were compared. Raises
    NotInvariant.
    """
    whole, chunks = _pooled(runner, tokens, (len(tokens),)), (RAGGED, (-(-len(tokens) // 2),))
    for sizes in chunks:
        if _pooled(runner, tokens, sizes) != whole:
            raise NotInvariant(f"pooled: {len(tokens)} tokens in chunks of {sizes} have another mean than at once")
    _check_sum(runner, tokens, whole)
    return len(chunks) + 1


def check_whole_texts(runner: CheckRunner, tokens: np.ndarray) -> int:
    """Compute the states of all tokens of a context alone, and in front of and behind other texts.

    ``tokens`` are int32. Other texts are longer and shorter. Returns how many ways were compared. Raises NotInvariant.
    """
    rows = [Row(0, len(tokens) + 3), Row(0, 2)]
    while rows and not runner.bucket_of([Row(0, len(tokens)), *rows]):
        rows.pop(0)
    found, ways = _states(runner, tokens), 0
    for before in (True, False) if rows else ():
        if _states(runner, tokens, rows, before=before) != found:
            raise NotInvariant(f"whole texts: {len(tokens)} tokens have other states beside other texts than alone")
        ways += 1
    _check_sum(runner, tokens, _mean_of(np.stack([np.frombuffer(state, np.float32) for state in found])))
    return ways + 1


def _check_sum(runner: CheckRunner, tokens: np.ndarray, mean: bytes) -> None:
    """Raise NotInvariant unless the states that the device adds up have this ``mean``."""
    with runner.sequence(tokens) as slot:
        runner.slots.describe(slot, Request(OWN_ID, tokens.tolist(), MEAN, 0, 1))
        total = runner.hidden(slot, len(tokens))
        found = Pooled(total[0])
        found.take(total[0], len(tokens))
    if len(total) != 1 or found.result() != mean:
        raise NotInvariant(f"pooled: the device's sum of {len(tokens)} tokens is another one than the host's")


def _mean_of(states: np.ndarray) -> bytes:
    """Return the mean of ``states`` [tokens, hidden], added up by the host."""
    found = Pooled(states[0])
    found.add(states)
    return found.result()


def _states(
    runner: CheckRunner, tokens: np.ndarray, others: Sequence[Row] = (), *, before: bool = False
) -> list[bytes]:
    """Return the states of the context, read in one step with the rows ``others``."""
    with runner.sequence(tokens) as slot, runner.neighbours(others) as taken:
        runner.slots.describe(slot, Request(OWN_ID, tokens.tolist(), ALL, 0, 1))
        states = runner.states(slot, taken if before else [], [] if before else taken)
    return [state.tobytes() for state in states]


def _pooled(runner: CheckRunner, tokens: np.ndarray, sizes: tuple[int, ...]) -> bytes:
    """Return the mean over the context, read in chunks of ``sizes``, again and again."""
    found: Pooled | None = None
    with runner.sequence(tokens) as slot:
        runner.slots.describe(slot, Request(OWN_ID, tokens.tolist(), ALL, 0, 1))
        left, size = len(tokens), itertools.cycle(sizes)
        while left:
            count = min(next(size), left)
            states = runner.hidden(slot, count)
            found = found or Pooled(states[0])
            found.add(states)
            left -= count
    assert found is not None
    return found.result()
