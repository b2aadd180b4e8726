"""The sets of prompts of ``preheat verify``.

Each has its first run, the reference of the set's paths. Where every run could be wrong in the same way, a set also has
a rule: it finds errors in the answers of the last run, in a few lines.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from msgspec.structs import replace
from torch import Tensor

from preheat.core import Image, SamplingParams, Segment, Stats
from preheat.limits import Limits
from preheat.lora.random import random_adapter
from preheat.verify import texts_in_chunks as chunks
from preheat.verify.compare import Divergence, Seen
from preheat.verify.drive import Answer, Engine, Prompts, in_groups
from preheat.verify.masked import RULES, TEMPERATURES, end_token, texts_of
from preheat.verify.prompts import Prompt, as_pooled

Rule = Callable[[Engine], Iterable[Divergence]]


@dataclass
class PromptSet:
    """A set of prompts with its first run.

    ``first`` are the first run's logits, ``answers`` its answers, and ``stats`` the engine's statistics after it.
    ``kind`` is the set's name in the names of paths. No engine is kept: two at once may not fit into memory.
    """

    prompts: list[Prompt]
    first: list[Seen] = field(default_factory=list)
    answers: list[Answer] = field(default_factory=list)
    stats: Stats | None = None
    kind: str = ""
    rule: Rule = lambda engine: ()

    def seen(self, engine: Engine, first: list[Seen]) -> PromptSet:
        """Return the set with ``first`` as its first run, just made by ``engine``."""
        self.first, self.answers, self.stats = first, engine.answers, engine.stats
        return self


@dataclass(frozen=True)
class Sizes:
    """The sizes of prompts: each is continued by ``outputs`` tokens.

    Prompts for an engine with few blocks have at most ``longest`` tokens. ``texts`` makes the prompts of the set of
    that name.
    """

    outputs: int
    longest: int
    texts: Prompts


Make = Callable[[Engine, Sizes], PromptSet]
"""Makes prompts that fit the limits of an engine, and runs them for the first time."""


def random_tokens(engine: Engine, count: int, length: int, outputs: int) -> list[list[int]]:
    """Return ``count`` prompts of ``length`` tokens.

    They are shorter if that leaves no room for ``outputs``.
    """
    draw = random.Random(length)
    length = max(min(length, engine.ready.max_model_len - outputs), 1)
    return [[draw.randrange(engine.vocab_size) for _ in range(length)] for _ in range(count)]


def prompt_of(tokens: list[int], params: SamplingParams, outputs: int, salt: str = "") -> Prompt:
    """Return the prompt ``tokens``, continued by ``outputs`` tokens."""
    return Prompt(tokens, replace(params, seed=len(tokens), max_tokens=outputs, ignore_eos=True), salt)


def in_turn(outputs: int, number: int) -> SamplingParams:
    """Return greedy and random settings in turn."""
    return SamplingParams(temperature=float(number % 2), seed=number, max_tokens=outputs, ignore_eos=True)


def alone(engine: Engine, prompts: Sequence[Prompt]) -> list[Seen]:
    """Run each of ``prompts`` alone, behind the blocks of the earlier ones."""
    return engine.run(prompts, in_groups([1] * len(prompts)))


def alone_and_cold(engine: Engine, prompts: Sequence[Prompt]) -> list[Seen]:
    """Run each of ``prompts`` alone, without the others' blocks."""
    found, answers = list[Seen](), list[Answer]()
    for prompt in prompts:
        engine.forget_prefixes()
        found += engine.run([prompt])
        answers += engine.answers
    engine.answers = answers
    return found


# ------------------------------------------------------------------------------------------------ texts


def texts(engine: Engine, sizes: Sizes) -> PromptSet:
    """Run the prompts that were asked for, all at once, on a fresh engine."""
    prompts = as_pooled(sizes.texts(engine), of_tokens=engine.encodes) if engine.pools else sizes.texts(engine)
    return PromptSet(prompts).seen(engine, engine.run(prompts))


def texts_in_chunks(engine: Engine, sizes: Sizes) -> PromptSet:
    """Read the chunks of long texts, each alone, for the vectors of the whole texts."""
    prompts = chunks.long_texts(engine)
    return PromptSet(prompts).seen(engine, chunks.by_rule(engine, prompts))


LONG = 1_300
"""Tokens of a prompt longer than any window that a sampler might look back over."""

PENALTIES = SamplingParams(temperature=0.0, repetition_penalty=1.5, frequency_penalty=2.0, presence_penalty=1.0)
CLOSE = 1e-4
"""Penalized logits this close may be drawn in either order.

The rule is computed in another precision.
"""


def long_texts(engine: Engine, sizes: Sizes) -> PromptSet:
    """Run long prompts with penalties and greedy draws.

    Each token must be the best of the penalized logits. The tokens that the model likes stand at the beginning.
    """
    plain, tokens = SamplingParams(temperature=0.0), random_tokens(engine, 3, LONG, sizes.outputs)
    engine.run([prompt_of(each, plain, sizes.outputs) for each in tokens])
    liked = [list(dict.fromkeys(answer.tokens)) for answer in engine.answers]
    liked = [found + list(range(3 * number)) for number, found in enumerate(liked)]  # of lengths of their own
    prompts = [
        prompt_of([*found, *each[len(found) :]][: len(each)], PENALTIES, sizes.outputs)
        for found, each in zip(liked, tokens, strict=True)
    ]
    with engine.keeping_logits() as logits:
        first = engine.run(prompts)

    def rule(engine: Engine) -> Iterable[Divergence]:
        for number, (prompt, answer) in enumerate(zip(prompts, engine.answers, strict=True)):
            place, gap = _not_best(prompt, answer.tokens, logits[number])
            if place >= 0:
                yield Divergence(1, number, place, gap)

    return PromptSet(prompts, rule=rule).seen(engine, first)


def _not_best(prompt: Prompt, output: Sequence[int], logits: Sequence[Tensor]) -> tuple[int, float]:
    """Return the first token that is not the best, and its distance.

    The token is given by its index, -1 if there is none. The best token has the highest penalized logit.
    """
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


CHUNKED = 400
"""Tokens of a prompt that is longer than a step of the engine with few blocks."""

SHORT, COUNT, LEAST = 40, 12, 2
"""Tokens of a short prompt, the number of prompts, and the number of prompts with min_tokens."""


def short_texts(engine: Engine, sizes: Sizes) -> PromptSet:
    """Run prompts with penalties, greedy and at random.

    Two have prompt logprobs, two have min_tokens. The stop ids of prompts with min_tokens are the first tokens of their
    answers without stop ids.
    """
    params = [
        replace(PENALTIES, temperature=float(number % 2), prompt_logprobs=2 if number < 2 else None)
        for number in range(COUNT)
    ]
    lengths = [min(each, sizes.longest) for each in [CHUNKED] * 2 + [SHORT] * (COUNT - 2)]
    tokens = [random_tokens(engine, COUNT, length, sizes.outputs)[number] for number, length in enumerate(lengths)]
    prompts = [prompt_of(*pair, sizes.outputs) for pair in zip(tokens, params, strict=True)]
    engine.run(prompts[-LEAST:])
    for place, answer in enumerate(engine.answers, COUNT - LEAST):
        stops = replace(prompts[place].params, stop_token_ids=answer.tokens[:3], min_tokens=sizes.outputs // 2)
        prompts[place] = Prompt(prompts[place].tokens, stops)
    return PromptSet(prompts).seen(engine, alone(engine, prompts))


# ------------------------------------------------------------------------------------------------ grammars


def masked_texts(engine: Engine, sizes: Sizes) -> PromptSet:
    """Run prompts with grammars, then as many without, each alone.

    The result is empty where there are no grammars.
    """
    if isinstance(engine.loop.grammars, str):
        return PromptSet([])
    draw, end, masked, plain = random.Random(9), end_token(engine), list[Prompt](), list[Prompt]()
    outputs, length = min(sizes.outputs, SHORT), min(2 * SHORT, sizes.longest)
    length = max(min(length, engine.ready.max_model_len - outputs), 1)
    for params, *_ in RULES:
        for temperature in TEMPERATURES:
            tokens = [draw.randrange(engine.vocab_size) for _ in range(length)]
            free = SamplingParams(temperature=temperature, seed=len(masked), max_tokens=outputs, ignore_eos=True)
            held = replace(free, ignore_eos=False, stop_token_ids=[end], structured_outputs=params)
            masked.append(Prompt(tokens, held))
            plain.append(Prompt(tokens, free))

    def rule(engine: Engine) -> Iterable[Divergence]:
        outputs = [answer.tokens for answer in engine.answers[: len(masked)]]
        for number, (text, whole) in enumerate(texts_of(engine, outputs)):
            _, is_whole, may_begin = RULES[number // len(TEMPERATURES)]
            if not (is_whole if whole else may_begin)(text):
                yield Divergence(1, number, 0, 0.0)

    prompts = [*masked, *plain]
    return PromptSet(prompts, rule=rule).seen(engine, alone(engine, prompts))


# ------------------------------------------------------------------------------------------------ images, adapters

TEXT = 40
"""Tokens before an image, and behind it."""

PICTURES = ((0,), (1,), (0,), (2, 1), (1, 2), (2,), (3,))
"""The images of each prompt, by number.

All prompts begin with the same text, and prompts with as many images have the same tokens.
"""


GRIDS = (3, 2), (2, 3), (4, 5), (1, 20)
"""Rows and columns of images of any size: pairs of them have as many positions, and other places."""


def images(engine: Engine, sizes: Sizes) -> PromptSet:
    """Run prompts with images, or with pieces of embeddings.

    There are none if no sequence can hold one.
    """
    encoder = engine.loop.executor.encoder
    if encoder is None:
        return PromptSet([])
    tower, draw, limits = encoder.tower, random.Random(5), engine.loop.scheduler.limits
    text = [[draw.randrange(engine.vocab_size) for _ in range(TEXT)] for _ in range(3)]
    made = [encoder.noise(number, GRIDS[number] if limits.rungs else None) for number in range(4)]
    pictured = [
        _pictured(text, [made[each] for each in pictures], limits, tower.token, in_turn(sizes.outputs, number))
        for number, pictures in enumerate(PICTURES)
    ]
    prompts = [each for each in pictured if len(each.tokens) <= engine.ready.max_model_len - sizes.outputs]
    return PromptSet(prompts, kind=tower.name).seen(engine, alone_and_cold(engine, prompts))


def _pictured(text: list[list[int]], images: list[Image], limits: Limits, token: int, params: SamplingParams) -> Prompt:
    """Return a text, then each image with a text behind it."""
    tokens, segments = list(text[0]), list[Segment]()
    for image, behind in zip(images, text[1:], strict=False):
        size = image.cells or limits.image_tokens
        segments.append(Segment(len(tokens), len(tokens) + size, image))
        tokens += [token] * size + behind
    return Prompt(tokens, params, segments=tuple(segments))


LONGEST = 120
"""Tokens of the longest prompt with an adapter."""

BASE_EVERY = 3
"""One prompt in this many has no adapter."""


def adapters(engine: Engine, sizes: Sizes) -> PromptSet:
    """Run prompts that name adapters in turn, see :func:`names_of`.

    The result is empty where there are no adapters.
    """
    names = names_of(engine)
    if not names:
        return PromptSet([])
    draw, longest = random.Random(6), max(min(LONGEST, engine.ready.max_model_len - sizes.outputs), 1)
    shared = [draw.randrange(engine.vocab_size) for _ in range(longest)]
    prompts = []
    for number in range(COUNT):
        tokens = shared[: longest // 2] + shared[: max(longest * number // COUNT // 2, 1)][::-1]
        name = names[(number + number // BASE_EVERY) % len(names)] if number % BASE_EVERY else ""
        prompts.append(Prompt(tokens[:longest], in_turn(sizes.outputs, number), lora_name=name))
    return PromptSet(prompts, kind="adapters").seen(engine, alone_and_cold(engine, prompts))


def names_of(engine: Engine) -> list[str]:
    """Return the adapters of ``engine``.

    If it has none, serve random ones, one more than adapter slots.
    """
    adapters, adapter_slots = engine.loop.adapters, engine.loop.executor.adapters
    if isinstance(adapters, str) or adapter_slots is None:
        return []
    if not adapters.names:
        for number in range(adapter_slots.count + 1):
            made = random_adapter(adapter_slots, number)
            adapters.serve(made.name, "", made)
    return adapters.names


MAKERS: Mapping[str, Make] = {
    "texts": texts,
    "texts in chunks": texts_in_chunks,
    "long texts": long_texts,
    "short texts": short_texts,
    "grammars": masked_texts,
    "images": images,
    "adapters": adapters,
}
"""The sets by name, in the order in which paths need them."""
