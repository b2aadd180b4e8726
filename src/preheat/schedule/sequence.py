"""A sequence: one request in progress, and what must be remembered of it while it owns no slot."""

from __future__ import annotations

from functools import cached_property

import numpy as np

from preheat.core import Request, TokenLogprobs


class Sequence:
    """Waits in the queue, runs in a slot, and may go back and forth between the two.

    ``tokens`` int32 is everything known when it last began to wait: the prompt, and after a preemption the output
    too. While it runs, the slots' arrays are ahead of it. ``block_hashes`` are those of its leading full blocks.
    """

    def __init__(self, request: Request) -> None:
        self.request = request
        self.started = False  # it ran before: a resumed sequence does not start again
        self.block_hashes: list[bytes] = []
        self.prompt_logprobs: list[TokenLogprobs | None] = [None]  # nothing precedes the first token
        self.owes_prompt_logprobs = request.params.prompt_logprobs is not None

    @cached_property
    def tokens(self) -> np.ndarray:  # only made when it is about to run: a queued request costs its prompt once
        return np.array(self.request.prompt, np.int32)

    def preempted(self, tokens: np.ndarray) -> None:
        """Keep ``tokens``, all that is known, and forget what must be computed again."""
        self.tokens = tokens.copy()
        self.prompt_logprobs = [None]
