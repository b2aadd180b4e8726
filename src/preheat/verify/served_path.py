"""The path of ``preheat verify`` through the frontend.

Requests of every kind are compared with the contract. Every run of an engine could be wrong in the same way, so tokens,
lengths and reasons are compared with the rule itself.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from msgspec.structs import replace
from torch import Tensor

from preheat.core import Request, SamplingParams
from preheat.frontend.request_state import Choice
from preheat.verify.compare import Divergence, PathResult
from preheat.verify.drive import Engine
from preheat.verify.prompts import Prompt
from preheat.verify.rule import drawn

SHORT, MOST = 40, 24
"""Tokens of a prompt, and of an answer."""

ASKED = (
    SamplingParams(temperature=1.0, seed=2**63 + 2**33 + 1, n=3),
    SamplingParams(temperature=1.0, seed=-(2**40) - 7),
    SamplingParams(temperature=2.0, seed=2**32 + 3, top_k=2),
    SamplingParams(temperature=2.0, seed=4, top_p=0.7),
    SamplingParams(temperature=2.0, seed=5, min_p=0.3),
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=0.0, repetition_penalty=1.5, presence_penalty=0.5),
    SamplingParams(temperature=1.0, seed=6, frequency_penalty=0.7),
)
LIKED = (
    (SamplingParams(temperature=0.0, frequency_penalty=2.0), 12.0),
    (SamplingParams(temperature=1.0, seed=2**34, min_tokens=5), 100.0),
    (SamplingParams(temperature=0.0), 100.0),
)
"""Settings with a bias towards one token.

It is drawn again and again, or ends the text as soon as it may.
"""


class _Case(NamedTuple):
    """A request and a choice of its answer.

    ``logits`` are at each of the choice's positions.
    """

    request: Request
    choice: Choice
    logits: list[Tensor]


def served(engine: Engine, outputs: int) -> PathResult:
    """Serve answers of up to ``outputs`` tokens twice.

    Each slot then has had another kind of request before.
    """
    prompts = _prompts(engine, min(outputs, MOST))
    return by_contract("served, by the contract", engine, [prompts, prompts[::-1]])


def by_contract(path: str, engine: Engine, turns: Sequence[Sequence[Prompt]]) -> PathResult:
    """Serve each of ``turns`` at once and compare with the contract.

    All choices of each answer are compared.
    """
    wrong, clear, total, count = list[Divergence](), 0, 0, 0
    for turn, asked in enumerate(turns, 1):
        for number, case in enumerate(_answered(engine, asked)):
            place, gap, sure = _first_wrong(case)
            clear, total, count = clear + sure, total + len(case.choice.token_ids), count + 1
            if place >= 0:
                wrong.append(Divergence(turn, number, place, gap))
    note = f"{clear:,} of {total:,} draws are clear cases"
    return PathResult(path, count, 1, count - len(wrong), next(iter(wrong), None), note)


def _prompts(engine: Engine, outputs: int) -> list[Prompt]:
    draw = random.Random(11)
    length = max(min(SHORT, engine.ready.max_model_len - outputs), 1)
    liked = draw.randrange(engine.vocab_size)
    asked = [replace(each, ignore_eos=True) for each in ASKED if not (each.top_k and engine.keeps_ties)]
    for params, bias in LIKED:
        stops = None if params.frequency_penalty else [liked]
        asked.append(replace(params, logit_bias={liked: bias}, stop_token_ids=stops, ignore_eos=True))
    return [
        Prompt([draw.randrange(engine.vocab_size) for _ in range(length)], _fitting(params, outputs))
        for params in asked
    ]


def _fitting(params: SamplingParams, outputs: int) -> SamplingParams:
    return replace(params, max_tokens=outputs, min_tokens=min(params.min_tokens, outputs - 1))


def _answered(engine: Engine, prompts: Sequence[Prompt]) -> Iterator[_Case]:
    """Yield each choice of each prompt, with the contract's request for it."""
    with engine.keeping_logits() as logits:
        states = engine.serve(prompts)
    for prompt, state in zip(prompts, states, strict=True):
        params, seed = prompt.params, (prompt.params.seed or 0) % 2**64
        for index, choice in enumerate(state.choices):
            stops, most = params.stop_token_ids or [], params.max_tokens or 0
            request = Request(choice.id, prompt.tokens, params, seed, most, index, stops)
            yield _Case(request, choice, logits.get(choice.id, []))


def _first_wrong(case: _Case) -> tuple[int, float, int]:
    """Return the first token that breaks the contract.

    The result is its index, or -1, its gap, and the number of clear cases.
    """
    request, choice, logits = case
    output, clear, ids = choice.token_ids, 0, np.arange(len(logits[0]) if logits else 0)
    if (length := _length(request, output)) != len(output) or len(logits) < len(output):
        return min(length, len(output)), float("inf"), clear
    for place, token in enumerate(output):
        line = logits[place].numpy()
        right, sure = drawn(line, ids, request, output[:place])
        clear += sure
        if sure and token != right:
            return place, abs(float(line[right] - line[token])), clear
    ended = "stop" if output[-1] in request.stop_ids and len(output) > request.params.min_tokens else "length"
    return (-1, 0.0, clear) if choice.finish_reason == ended else (len(output) - 1, 0.0, clear)


def _length(request: Request, output: Sequence[int]) -> int:
    """Return how many tokens there should be, if the given ones are right."""
    ends = (
        place
        for place, token in enumerate(output, 1)
        if place == request.max_tokens or (token in request.stop_ids and place > request.params.min_tokens)
    )
    return next(ends, request.max_tokens)
