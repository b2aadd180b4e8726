"""The prompts of ``preheat verify``.

They are the same on every machine, each with its own sampling setting.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from preheat.core import POOLS, BlockSource, Request, Resume, SamplingParams, Segment
from preheat.errors import InvalidRequest
from preheat.plan.sampler_settings import POOLER_SETTINGS, SAMPLER_SETTINGS

LONGEST = 1_900
SHARED = 3
"""One prompt in this many shares its beginning with another.

The prefix cache then has hits.
"""

FAMILIES = 8


@dataclass(frozen=True)
class Size:
    """The amount of work.

    There are ``runs`` of ``prompts`` of at most ``longest`` tokens, each continued by ``outputs``.
    """

    prompts: int
    runs: int
    outputs: int
    longest: int


FULL = Size(prompts=1_492, runs=4, outputs=128, longest=LONGEST)
REDUCED = Size(prompts=32, runs=2, outputs=24, longest=400)

SETTINGS = tuple(params for name, params in SAMPLER_SETTINGS.items() if name != "prompt_logprobs" and not params.greedy)
"""The settings of every second prompt, in turn; the others are greedy.

Prompts with prompt_logprobs are left out: they do not use the prefix cache.
"""


@dataclass(frozen=True)
class Prompt:
    """``tokens`` and how to continue them.

    ``params`` have a seed and a length. ``salt`` is the prefix cache's, ``segments`` are the places of images,
    ``lora_name`` is the adapter's. ``delivered`` is output that the request goes on behind. ``source`` is an engine
    that has read the prompt.
    """

    tokens: list[int]
    params: SamplingParams
    salt: str = ""
    segments: tuple[Segment, ...] = ()
    lora_name: str = ""
    delivered: tuple[int, ...] = ()
    source: BlockSource | None = None

    def request(self, id: int) -> Request:
        """Return the prompt as a request."""
        params = self.params
        assert params.seed is not None
        assert params.max_tokens is not None
        stop_ids = params.stop_token_ids or []
        return Request(
            id, self.tokens, params, params.seed, params.max_tokens, stop_ids=stop_ids, cache_salt=self.salt,
            segments=list(self.segments), lora_name=self.lora_name,
            resume=Resume(list(self.delivered)) if self.delivered else None, source=self.source,
        )  # fmt: skip


def make_prompts(size: Size, vocab_size: int, max_model_len: int) -> list[Prompt]:
    """Return prompts of random tokens below ``vocab_size``.

    Most are short, four in ten are longer than 256 tokens. At least one has a single token and one the greatest length.
    """
    draw = random.Random(4)
    longest = min(size.longest, max_model_len - size.outputs)
    if longest < 1:
        raise InvalidRequest(f"max_model_len {max_model_len} leaves no room for {size.outputs} tokens of output")
    power = 4 if size.longest == LONGEST else 1.5  # of a uniform number: higher means shorter prompts
    lengths = [1 + int((longest - 1) * draw.random() ** power) for _ in range(size.prompts)]
    lengths[:2] = [longest, 1][: size.prompts]
    families = [[draw.randrange(vocab_size) for _ in range(longest)] for _ in range(FAMILIES)]
    found = []
    for number, length in enumerate(lengths):
        shared = families[number % FAMILIES][: length * draw.randrange(1, 5) // 4] if number % SHARED == 0 else []
        found.append([*shared, *(draw.randrange(vocab_size) for _ in range(length - len(shared)))])
    return with_settings(found, size.outputs)


def with_settings(prompts: Sequence[list[int]], outputs: int) -> list[Prompt]:
    """Return ``prompts`` with settings.

    Every second prompt is greedy, the others are seeded, with all settings in turn.
    """
    found = []
    for number, tokens in enumerate(prompts):
        params = SETTINGS[number // 2 % len(SETTINGS)] if number % 2 else SamplingParams(temperature=0.0)
        params = msgspec.structs.replace(params, seed=number, max_tokens=outputs, ignore_eos=True)
        found.append(Prompt(tokens, params))
    return found


def as_pooled(prompts: Sequence[Prompt], *, of_tokens: bool) -> list[Prompt]:
    """Return ``prompts`` for an engine that pools.

    They ask in turn for the mean, for the last token, and with ``of_tokens`` for all tokens. The state, or each of
    them, goes through the model's head.
    """
    last, mean = [msgspec.structs.replace(each, seed=0, max_tokens=1, ignore_eos=True) for each in POOLER_SETTINGS]
    asked = [mean, last, *[msgspec.structs.replace(mean, prompt_logprobs=POOLS.index("ALL"))] * of_tokens]
    return [Prompt(prompt.tokens, asked[number % len(asked)]) for number, prompt in enumerate(prompts)]
