"""A sequence: one request in progress.

It keeps its state while it has no slot.
"""

from __future__ import annotations

from functools import cached_property

import numpy as np

from preheat.core import BACKGROUND_PRIORITY, Request, TokenLogprobs
from preheat.schedule.adapters import BASE, Adapter
from preheat.schedule.grammar import GrammarState
from preheat.schedule.pooled import Pooled, pool_of


class Sequence:
    """A request that waits in the queue or runs in a slot.

    ``tokens`` int32 are the tokens known when it was last queued: the prompt, and the output before a preemption or a
    resume. While it runs, the slots' arrays are ahead. ``block_hashes`` are the hashes of its leading full blocks.
    ``grammar`` is the state after the processed tokens. ``adapter`` stays the same, even if its name is given to
    another adapter.
    """

    def __init__(self, request: Request, grammar: GrammarState | None = None, adapter: Adapter | None = None) -> None:
        self.request, self.grammar, self.adapter = request, grammar, adapter
        self.adapter_digest = BASE if adapter is None else adapter.digest
        self.rank = request.priority, 0  # priority and arrival: the lower one goes first
        self.yields = request.priority >= BACKGROUND_PRIORITY
        self.started = False  # stays True after a preemption
        self.branch = 0  # blocks at the start that were found in groups without a window
        self.block_hashes: list[bytes] = []
        self.prompt_logprobs: list[TokenLogprobs | None] = [None]  # nothing precedes the first token
        self.pooled: Pooled | None = None
        # Prompt logprobs are delivered with the first token.
        self.owes_prompt_logprobs = request.params.prompt_logprobs is not None and not request.delivered

    @cached_property
    def tokens(self) -> np.ndarray:  # made when it is about to run: a queued request keeps its prompt once
        return np.array([*self.request.prompt, *self.request.delivered], np.int32)

    def preempted(self, tokens: np.ndarray) -> None:
        """Keep a copy of all known ``tokens``.

        The prompt logprobs are computed again.
        """
        self.tokens = tokens.copy()
        self.prompt_logprobs = [None]
        self.pooled = None

    def pool(self, states: np.ndarray, summed: int | None = None) -> Pooled:
        """Add the hidden states of the next tokens to the pool.

        States are fp32 [tokens, hidden], or the sum of ``summed`` tokens, all of the text, [1, hidden]. Returns the
        pool.
        """
        self.pooled = self.pooled or pool_of(self.request.params.prompt_logprobs, states[0])
        if summed is None:
            self.pooled.add(states)
        else:
            self.pooled.take(states[0], summed)
        return self.pooled
