"""The engine's own rehearsal: requests of nobody's through the loop, once all else is warm.

A process's first request is slower than later ones even where nothing is compiled, because the interpreter specializes
what it runs. Warm-up takes care of the packer and the executor; what schedules, launches and settles is run here. The
front doors rehearse by themselves (:mod:`preheat.server.frontend_warmup`, :class:`preheat.LLM`).
"""

from __future__ import annotations

from typing import Any

from preheat.core import OWN_ID, Request, SamplingParams
from preheat.engine.loop import Loop

ROUNDS = 8
"""About as often as the interpreter wants to see code before it specializes it."""

TOKENS = 3
_GREEDY, _RANDOM = SamplingParams(temperature=0.0), SamplingParams(temperature=1.0)


class Unwatched:
    """An observer whom nothing surprises."""

    def step(self, event: Any) -> None:
        """A step is no news yet."""

    def report(self) -> bytes:
        return b""


def unwatched(loop: Loop) -> Loop:
    """``loop`` again, with nobody who looks at its steps."""
    return Loop(loop.transport, loop.scheduler, loop.packer, loop.executor, Unwatched(), overlap=loop.overlap)


def rehearse(loop: Loop) -> None:
    """Run requests through ``loop``, whose mailbox nobody reads. Its scheduler is idle, and as new afterwards."""
    scheduler = loop.scheduler
    tokens = min(TOKENS, scheduler.limits.max_model_len - 1)
    for number in range(ROUNDS if scheduler.limits.answers else 0):
        for params in (_GREEDY, _RANDOM):
            scheduler.add(Request(OWN_ID - number, [0], params, seed=number, max_tokens=tokens))
            loop.finish()
    scheduler.forget()
