"""The paths of ``preheat verify`` with answers that are continued.

The law of :mod:`preheat.schedule.resume`: going on behind the first k tokens of an answer changes nothing. Digests of
logits, tokens, log-probabilities and reasons are compared with the uninterrupted answer.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence
from dataclasses import replace as changed

from msgspec.structs import replace

from preheat.core import RepetitionDetectionParams, SamplingParams, TokenLogprobs
from preheat.frontend.request_state import RequestState
from preheat.verify.compare import PathResult, Seen, compare
from preheat.verify.drive import Answer, Engine
from preheat.verify.prompt_sets import PromptSet
from preheat.verify.prompts import Prompt

SHORT, MOST = 40, 24
"""Tokens of a prompt, and of an answer, that is served."""

EVERY = 5
"""One step in this many loses all requests."""

REPEATED = RepetitionDetectionParams(max_pattern_size=2, min_count=3)
SERVED = (
    SamplingParams(temperature=1.0, seed=2**40 + 7, n=3, logprobs=2),
    SamplingParams(temperature=0.0, logprobs=1, prompt_logprobs=1),
    SamplingParams(temperature=1.0, seed=8, top_p=0.9, top_k=40, min_p=0.01),
    SamplingParams(temperature=0.7, seed=9, n=2, presence_penalty=0.5, frequency_penalty=0.5),
    SamplingParams(temperature=0.0, repetition_penalty=1.5),
    SamplingParams(temperature=0.0, repetition_detection=REPEATED),
)
ENDING = SamplingParams(temperature=1.0, seed=10, min_tokens=7)
"""A request that ends as soon as it may, by a bias towards its stop token."""


def continued(path: str, engine: Engine, prompts: PromptSet, runs: int) -> PathResult:
    """Continue each answer of ``prompts`` behind some of its tokens, ``runs`` times.

    The first time the cache is warm, later it is empty.
    """
    draw, whole, found, tokens = random.Random(17), whole_of(prompts), list[list[Seen]](), 0
    for run in range(runs):
        if run:
            engine.forget_prefixes()
        cuts = [_cut(draw, len(answer.tokens)) for answer in prompts.answers]
        tokens += sum(cuts)
        found.append(behind(engine, prompts.prompts, prompts.answers, whole, cuts))
    return compare(path, whole, found, f"behind {tokens:,} tokens")


def behind(
    engine: Engine, prompts: Sequence[Prompt], answers: Sequence[Answer], whole: Sequence[Seen], cuts: Sequence[int]
) -> list[Seen]:
    """Return each answer with its own first tokens, ``cuts[i]`` of them, and the engine's tokens behind them."""
    asked = [
        changed(prompt, delivered=tuple(answer.tokens[:cut]))
        for prompt, answer, cut in zip(prompts, answers, cuts, strict=True)
    ]
    rest = [_seen(*pair) for pair in zip(engine.run(asked), engine.answers, strict=True)]
    return [
        Seen([*first.bits[:cut], *seen.bits], [*first.levels[:cut], *seen.levels])
        for first, seen, cut in zip(whole, rest, cuts, strict=True)
    ]


def _cut(draw: random.Random, length: int) -> int:
    """Return a number of tokens that leaves at least one; 0 for an answer of a single token."""
    return draw.randrange(1, length) if length > 1 else 0


def whole_of(prompts: PromptSet) -> list[Seen]:
    """Return the uninterrupted answers, for :func:`behind`."""
    return [_seen(*pair) for pair in zip(prompts.first, prompts.answers, strict=True)]


def _seen(seen: Seen, answer: Answer) -> Seen:
    """Return digests with tokens and log-probabilities, by position."""
    return Seen(_bits(seen, answer.tokens, answer.logprobs), seen.levels)


def _bits(seen: Seen, tokens: Sequence[int], logprobs: Sequence[TokenLogprobs] | None) -> list[object]:
    reported = map(repr, logprobs) if logprobs else itertools.repeat("", len(tokens))
    return [*zip(seen.bits, tokens, reported, strict=True)]


def moved_while_served(path: str, engine: Engine, outputs: int) -> PathResult:
    """Serve clients twice; the second time the engine loses all requests again and again."""
    prompts, steps, count = _served_prompts(engine, min(outputs, MOST)), 0, 0

    def moves() -> bool:
        nonlocal steps, count
        steps += 1
        count += (lost := steps % EVERY == 0)
        return lost

    first = [seen for state in engine.serve(prompts) for seen in _choices(engine, state)]
    again = [seen for state in engine.serve(prompts, moves) for seen in _choices(engine, state)]
    return compare(path, first, [again], f"all requests moved {count:,} times")


def _served_prompts(engine: Engine, outputs: int) -> list[Prompt]:
    draw = random.Random(18)
    length = max(min(SHORT, engine.ready.max_model_len - outputs), 1)
    stop = draw.randrange(engine.vocab_size)
    asked = [replace(each, ignore_eos=True) for each in SERVED]
    asked.append(replace(ENDING, logit_bias={stop: 100.0}, stop_token_ids=[stop], ignore_eos=True))
    return [
        Prompt(
            [draw.randrange(engine.vocab_size) for _ in range(length)],
            replace(each, max_tokens=outputs, min_tokens=min(each.min_tokens, outputs - 1)),
        )
        for each in asked
    ]


def _choices(engine: Engine, state: RequestState) -> Iterator[Seen]:
    """Yield each choice: its positions, then its end and the prompt's log-probabilities."""
    for choice in state.choices:
        seen = engine.seen_of(choice)
        bits = _bits(seen, choice.token_ids, choice.logprobs)
        end = (choice.finish_reason, choice.stop_reason, repr(state.prompt_logprobs))
        yield Seen([*bits, end], [*seen.levels, 0.0])
