"""Warm-up of the loop itself: dummy requests run through it once everything else is warm.

A process's first request is slower than later ones even if nothing is compiled, because the interpreter specializes
the code that it runs. The plan's items warm the packer and the executor; scheduling, launching and processing results
are warmed here. The frontends do the same for themselves (:mod:`preheat.server.frontend_warmup`, :class:`preheat.LLM`).
"""

from __future__ import annotations

from preheat.core import OWN_ID, Request, SamplingParams
from preheat.engine.loop import Loop

ROUNDS = 8
"""About the number of runs after which the interpreter specializes code."""

TOKENS = 3
_GREEDY, _RANDOM = SamplingParams(temperature=0.0), SamplingParams(temperature=1.0)


class Unwatched:
    """A listener that ignores everything."""

    def step(self, event: object) -> None:
        pass

    def report(self) -> bytes:
        return b""


def unwatched(loop: Loop) -> Loop:
    """``loop`` again, without its listener and its trace."""
    return Loop(loop.transport, loop.scheduler, loop.packer, loop.executor, Unwatched(), overlap=loop.overlap)


def rehearse(loop: Loop) -> None:
    """Run requests through ``loop``, whose transport is not read. Its scheduler is idle, and as new afterwards."""
    scheduler = loop.scheduler
    tokens = min(TOKENS, scheduler.limits.max_model_len - 1)
    for number in range(ROUNDS if scheduler.limits.answers else 0):
        for params in (_GREEDY, _RANDOM):
            scheduler.add(Request(OWN_ID - number, [0], params, seed=number, max_tokens=tokens))
            loop.finish()
    scheduler.forget()
