"""The paths of ``preheat verify`` for models that see images: alone and together, cold and from the prefix cache, in
chunks. The same for prompts that are embeddings, which are compared with tokens too. Other engines take none.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import torch

from preheat.core import Image, SamplingParams, Segment
from preheat.execution.encoder import Given, noise
from preheat.frontend.prompt_embeds import PromptEmbeds
from preheat.verify.compare import PathResult, Seen, compare
from preheat.verify.drive import Engine, in_groups
from preheat.verify.prompts import Prompt

TEXT = 40
"""Tokens before an image, and as many as follow."""

PICTURES = ((0,), (1,), (0,), (2, 1), (1, 2), (2,), (3,))
"""The images of each prompt, by number. All prompts begin with the same text, and those with as many images have the
same tokens."""


@dataclass
class ImagePaths:
    """``prompts`` have images; empty: the model sees none, or no sequence can hold one."""

    prompts: list[Prompt]
    name: str = ""
    _first: list[Seen] = field(default_factory=list, init=False)

    @classmethod
    def of(cls, engine: Engine, outputs: int) -> ImagePaths:
        """Prompts that fit the limits of ``engine``, each continued by ``outputs`` tokens."""
        encoder = engine.loop.executor.encoder
        if encoder is None:
            return cls([])
        tower, draw, size = encoder.tower, random.Random(5), engine.loop.scheduler.limits.image_tokens
        text = [[draw.randrange(engine.vocab_size) for _ in range(TEXT)] for _ in range(3)]
        images = [noise(tower, number) for number in range(4)]
        room = engine.ready.max_model_len - outputs
        found = []
        for number, pictures in enumerate(PICTURES):
            params = SamplingParams(temperature=float(number % 2), seed=number, max_tokens=outputs, ignore_eos=True)
            prompt = _prompt(text, [images[each] for each in pictures], size, tower.token, params)
            if len(prompt.tokens) <= room:
                found.append(prompt)
        return cls(found, tower.name)

    def as_asked(self, engine: Engine) -> Iterator[PathResult]:
        """The paths of the engine as asked. What is compared with is computed one by one, each without the others'
        blocks.
        """
        if not self.prompts:
            return
        for prompt in self.prompts:
            engine.forget_prefixes()
            self._first += engine.run([prompt])
        engine.forget_prefixes()
        yield compare(f"{self.name}, together", self._first, [engine.run(self.prompts)])
        engine.forget_prefixes()
        hits = engine.stats.prefix_hits
        runs = [engine.run(self.prompts, in_groups([1] * len(self.prompts))) for _ in range(2)]
        note = f"{engine.stats.prefix_hits - hits:,} tokens from the prefix cache"
        yield compare(f"{self.name}, prefix cache", self._first, runs, note)

        encoder = engine.loop.executor.encoder
        if encoder is not None and isinstance(encoder.tower, Given):
            yield self._as_tokens(engine)

    def _as_tokens(self, engine: Engine) -> PathResult:
        """The texts as tokens, and as their rows of the table."""
        table = engine.loop.executor.decoder.weights.embedding
        reads, given = PromptEmbeds(table.shape[1], lambda: engine.ready.max_model_len), list[Prompt]()
        texts = [replace(prompt, segments=()) for prompt in self.prompts]
        for prompt in texts:
            embedded = reads.of_tensor(table[torch.tensor(prompt.tokens, device=table.device)])
            given.append(replace(prompt, tokens=embedded.ids, segments=tuple(embedded.segments)))
        engine.forget_prefixes()
        return compare(f"{self.name}, as tokens", engine.run(texts), [engine.run(given)])

    def tight(self, engine: Engine) -> Iterator[PathResult]:
        """The same with small steps and few blocks."""
        if not self.prompts:
            return
        before = engine.stats.preemptions
        seen = engine.run(self.prompts)
        note = f"{engine.stats.preemptions - before:,} preemptions"
        yield compare(f"{self.name}, chunks, few blocks", self._first, [seen], note)


def _prompt(text: list[list[int]], images: list[Image], size: int, token: int, params: SamplingParams) -> Prompt:
    """A text, then each image with a text behind it."""
    tokens, segments = list(text[0]), list[Segment]()
    for image, behind in zip(images, text[1:], strict=False):
        segments.append(Segment(len(tokens), len(tokens) + size, image))
        tokens += [token] * size + behind
    return Prompt(tokens, params, segments=tuple(segments))
