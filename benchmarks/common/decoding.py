"""Steps in which all rows decode, and the kernels in a profile of them."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

from torch._C._autograd import DeviceType
from torch.profiler import profile

from preheat import LLM, SamplingParams

WARM = 8
"""Tokens that every row has before anything is measured."""


class DecodingRows:
    """``count`` requests with prompts of ``context`` random tokens, sampled under ``sampling``.

    Inside the ``with`` block all of them decode, for at least ``steps`` more steps; at its end they are aborted.
    """

    def __init__(self, llm: LLM, vocabulary: int, count: int, context: int, steps: int, **sampling: Any) -> None:
        frontend, chance = llm.frontend, random.Random(0)
        tokens = steps + 2 * count + count * context // 2048 + 40
        params = SamplingParams(max_tokens=tokens, ignore_eos=True, detokenize=False, seed=0, **sampling)
        prompts = [[chance.randrange(vocabulary) for _ in range(context)] for _ in range(count)]
        self._llm, self._states = llm, [frontend.prepare(prompt, params) for prompt in prompts]
        frontend.start(self._states)

    def __enter__(self) -> None:
        while len(self._states[-1].choices[0].token_ids) < WARM:
            if any(state.finished for state in self._states):
                raise RuntimeError("a row ended before all of them decoded")
            self._llm.advance()

    def __exit__(self, *_: object) -> None:
        for state in self._states:
            self._llm.frontend.abort(state)
        self._llm.loop.take(0)
        self._llm.loop.finish()
        self._llm.advance()


@dataclass
class Span:
    """One run of a kernel.

    ``start`` and ``end`` are in microseconds since the same moment for all spans.
    """

    name: str
    start: float
    end: float


def spans(found: profile, cuda: bool) -> list[Span]:
    """Return kernels and copies on the device, in order.

    On a CPU, the operations that no other one called.
    """
    wanted = DeviceType.CUDA if cuda else DeviceType.CPU
    listed = found.events()  # type: ignore[no-untyped-call]
    events = [event for event in listed if event.device_type == wanted and (cuda or event.cpu_parent is None)]
    found_spans = [Span(event.name, event.time_range.start, event.time_range.end) for event in events]
    return sorted(found_spans, key=lambda span: span.start)
