"""The paths of ``preheat verify`` for what single requests ask for: penalties, min_tokens, logprobs, salts, beams.

Where every run could be wrong in the same way, what comes out is compared with the rule itself, said in a few lines.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from msgspec.structs import replace
from torch import Tensor

from preheat.core import SamplingParams
from preheat.verify.beam_path import beam_search
from preheat.verify.cache_paths import answers_as_prompts
from preheat.verify.compare import Divergence, PathResult, Seen, compare
from preheat.verify.crowded_paths import crowded
from preheat.verify.drive import Answer, Engine, in_groups
from preheat.verify.masked import MaskedPrompts
from preheat.verify.prompts import Prompt

LONG = 1_300
"""Tokens of a prompt that is longer than what a sampler might look back over."""

CHUNKED = 400
"""More than a step of the engine with few blocks has."""

SHORT, COUNT = 40, 12
CLOSE = 1e-4
"""Penalised logits this close may be drawn in either order: the rule is computed in another precision."""

PENALTIES = SamplingParams(temperature=0.0, repetition_penalty=1.5, frequency_penalty=2.0, presence_penalty=1.0)


@dataclass
class Features:
    """Each prompt is continued by ``outputs`` tokens; those that an engine with few blocks takes have ``longest`` at
    most. No engine is kept: two at once may not fit into memory.
    """

    outputs: int
    longest: int
    _short: list[Prompt] = field(default_factory=list, init=False)
    _first: list[Seen] = field(default_factory=list, init=False)
    _said: list[Answer] = field(default_factory=list, init=False)
    _masked: MaskedPrompts | None = field(default=None, init=False)

    def as_asked(self, engine: Engine) -> Iterator[PathResult]:
        """The paths of the engine as asked; the first run of the short prompts, which others are compared with."""
        yield from self._long_penalties(engine)
        yield self._salts(engine)
        self._short = self._short_prompts(engine)
        self._first = engine.run(self._short, in_groups([1] * len(self._short)))
        self._said = engine.answers
        yield self._min_tokens(engine)
        yield self._given_logprobs(engine)
        yield beam_search(engine, min(CHUNKED, self.longest))
        if not isinstance(engine.loop.grammars, str):
            self._masked = MaskedPrompts.of(engine, min(self.outputs, SHORT), min(2 * SHORT, self.longest))
            yield self._masked.beside_others(engine)

    def tight(self, engine: Engine) -> Iterator[PathResult]:
        """The same with small steps and few blocks."""
        before = engine.stats.preemptions
        seen = engine.run(self._short)
        note = f"{engine.stats.preemptions - before:,} preemptions"
        yield compare("penalties, few blocks", self._first, [seen], note)
        yield self._prompt_logprobs(engine)
        if self._masked is not None:
            yield self._masked.few_blocks(engine)
        yield from crowded(engine, self.outputs)

    def without_drafts(self, engine: Engine) -> Iterator[PathResult]:
        """An engine in which nothing drafts, neither what grammars force."""
        if self._masked is not None:
            yield self._masked.without_drafts(engine)

    def _draw(self, engine: Engine, count: int, length: int) -> list[list[int]]:
        draw = random.Random(length)
        length = max(min(length, engine.ready.max_model_len - self.outputs), 1)
        return [[draw.randrange(engine.vocab_size) for _ in range(length)] for _ in range(count)]

    def _prompt(self, tokens: list[int], params: SamplingParams, salt: str = "") -> Prompt:
        return Prompt(tokens, replace(params, seed=len(tokens), max_tokens=self.outputs, ignore_eos=True), salt)

    def _long_penalties(self, engine: Engine) -> Iterator[PathResult]:
        """Greedy draws, which are the best of the penalised logits; what the model likes stands at the beginning. Then
        the answers as prompts, whose last tokens are far behind the first ones.
        """
        plain = SamplingParams(temperature=0.0)
        tokens = self._draw(engine, 3, LONG)
        engine.run([self._prompt(each, plain) for each in tokens])
        liked = [list(dict.fromkeys(answer.tokens)) for answer in engine.answers]
        liked = [found + list(range(3 * number)) for number, found in enumerate(liked)]  # of lengths of their own
        prompts = [
            self._prompt([*found, *each[len(found) :]][: len(each)], PENALTIES)
            for found, each in zip(liked, tokens, strict=True)
        ]
        with engine.keeping_logits() as logits:
            first = engine.run(prompts)
        result = compare(
            "penalties, long prompts", first, [engine.run(prompts, in_groups([1] * 3))], f"{len(tokens[0]):,} tokens"
        )
        wrong = [
            Divergence(1, number, place, gap)
            for number, (prompt, answer) in enumerate(zip(prompts, engine.answers, strict=True))
            for place, gap in [_not_best(prompt, answer.tokens, logits[number])]
            if place >= 0
        ]
        yield result.with_wrong(wrong)
        yield answers_as_prompts("long answers as prompts", engine, prompts, first)

    def _salts(self, engine: Engine) -> PathResult:
        """One prompt under several salts: only an equal salt finds it in the prefix cache, all answers are equal."""
        (tokens,) = self._draw(engine, 1, LONG // 2)
        salts = ("a", "b", "a", "")
        prompts = [self._prompt(tokens, SamplingParams(temperature=0.0), salt) for salt in salts]
        seen = engine.run(prompts, in_groups([1] * len(salts)))
        cached = [answer.cached for answer in engine.answers]
        result = compare("cache salts", [seen[0]] * len(salts), [seen], f"{cached[2]:,} tokens from an equal salt")
        wrong = [Divergence(1, number, 0, float(count)) for number, count in enumerate(cached) if count and number != 2]
        return result.with_wrong(wrong)

    def _short_prompts(self, engine: Engine) -> list[Prompt]:
        """With penalties, greedy and at random; two of them with prompt logprobs, two with min_tokens, whose stop ids
        are what they would begin with.
        """
        params = [
            replace(PENALTIES, temperature=float(number % 2), prompt_logprobs=2 if number < 2 else None)
            for number in range(COUNT)
        ]
        lengths = [CHUNKED] * 2 + [SHORT] * (COUNT - 2)
        tokens = [self._draw(engine, COUNT, min(length, self.longest))[number] for number, length in enumerate(lengths)]
        prompts = [self._prompt(*pair) for pair in zip(tokens, params, strict=True)]
        engine.run(prompts[-2:])
        for place, answer in enumerate(engine.answers, COUNT - 2):
            stops = replace(prompts[place].params, stop_token_ids=answer.tokens[:3], min_tokens=self.outputs // 2)
            prompts[place] = Prompt(prompts[place].tokens, stops)
        return prompts

    def _min_tokens(self, engine: Engine) -> PathResult:
        """No stop id before min_tokens, and with fewer tokens no end."""
        prompts = self._short[-2:]
        again = engine.run(self._short)[-2:]
        result = compare("min_tokens", self._first[-2:], [again])
        wrong = []
        for number, (prompt, answer) in enumerate(zip(prompts, engine.answers[-2:], strict=True)):
            least, stops = prompt.params.min_tokens, prompt.params.stop_token_ids or []
            early = [place for place, token in enumerate(answer.tokens[:least]) if token in stops]
            if early or len(answer.tokens) < least:
                wrong.append(Divergence(1, number, early[0] if early else len(answer.tokens), 0.0))
        return result.with_wrong(wrong)

    def _given_logprobs(self, engine: Engine) -> PathResult:
        """Of ``logprob_token_ids``, each request's own and one with none: alone, then together."""
        params = [
            SamplingParams(temperature=float(number % 2), logprobs=3, logprob_token_ids=[*range(5 * number)][::-1])
            for number in range(4)
        ]
        prompts = [self._prompt(*pair) for pair in zip(self._draw(engine, 4, SHORT), params, strict=True)]
        found = list[list[Seen]]()
        for groups in ([1] * 4, [4]):
            engine.run(prompts, in_groups(groups))
            found.append([Seen([repr(each) for each in a.logprobs], [0.0] * len(a.logprobs)) for a in engine.answers])
        wrong = [
            Divergence(1, number, place, 0.0)
            for number, answer in enumerate(engine.answers)
            for place, entry in enumerate(answer.logprobs)
            if number and [token for token, _ in entry.top] != params[number].logprob_token_ids
        ]
        result = compare("logprobs of given tokens", found[0], [found[1]], f"{5 * 3} of one")
        return result.with_wrong(wrong)

    def _prompt_logprobs(self, engine: Engine) -> PathResult:
        """Of the last run of ``engine``, whose steps are smaller than the prompts: one entry a token but the first."""
        name, prompts = "prompt logprobs, chunks", self._short[:2]
        first, chunked = (
            [Seen([repr(entry) for entry in answer.prompt_logprobs], [0.0] * len(answer.prompt_logprobs))
             for answer in answers[:2]]
            for answers in (self._said, engine.answers)
        )  # fmt: skip
        result = compare(name, first, [chunked], f"{len(prompts[0].tokens):,} tokens")
        wrong = [
            Divergence(1, number, len(seen.bits), 0.0)
            for number, (prompt, seen) in enumerate(zip(prompts, chunked, strict=True))
            if len(seen.bits) != len(prompt.tokens)
        ]
        return result.with_wrong(wrong)


def _not_best(prompt: Prompt, output: Sequence[int], logits: Sequence[Tensor]) -> tuple[int, float]:
    """The place of the first token that is not the best of the penalised logits, and by how much; else -1."""
    params = prompt.params
    for place, token in enumerate(output):
        line, done = logits[place].double(), output[:place]
        seen = torch.tensor(sorted({*prompt.tokens, *done}))
        line[seen] = torch.where(
            line[seen] > 0, line[seen] / params.repetition_penalty, line[seen] * params.repetition_penalty
        )
        for other in set(done):
            line[other] -= params.frequency_penalty * done.count(other) + params.presence_penalty
        gap = float(line.max() - line[token])
        if gap > CLOSE:
            return place, gap
    return -1, 0.0
