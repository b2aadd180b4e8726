"""The keys of programs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, Literal, NamedTuple, TypeVar

from preheat.core import Image, Level
from preheat.plan.buckets import Bucket
from preheat.utils.rungs import rung_of

Kind = Literal["forward", "sampler", "head", "encoder", "swap", "offload"]
S_co = TypeVar("S_co", covariant=True)


class Program(NamedTuple, Generic[S_co]):
    """The key of a program: all values that decide its launches.

    ``size`` depends on the kind: the bucket of a forward step, the rows of the sampler or of the head, the images of
    the encoder, or the cells of the rung of an image of any size. For a swap it is the pairs of blocks, for an offload
    its direction. ``level`` is the sampler's. ``adapted``: some rows have adapters. ``draft``: the draft model runs it.
    """

    kind: Kind
    size: S_co
    level: Level | None = None
    adapted: bool = False
    draft: bool = False

    def __str__(self) -> str:
        """Return the name that items and records have for it."""
        size = str(self.size)[1:-1] if isinstance(self.size, Bucket) else f"{self.kind}, {self.size}"
        level = "" if self.level is None else f", {self.level.name.lower()}"
        return f"({'draft, ' * self.draft}{'lora, ' * self.adapted}{size}{level})"


class Part(NamedTuple):
    """Some ``layers`` of a forward program, captured as one graph.

    The first part begins with the tokens, any other where the part before it ended.
    """

    program: Program[Bucket]
    layers: range


ENCODER_SIZES = (4, 2, 1)
"""How many images are encoded at once, largest first."""


def programs_of_images(images: Sequence[Image]) -> list[Program[int]]:
    """Return the programs that encode ``images``: an image of any size by itself, padded to its rung."""
    if images and images[0].grid is not None:
        return [Program("encoder", rung_of(image.cells)) for image in images]
    return encoder_programs(len(images))


def encoder_programs(images: int) -> list[Program[int]]:
    """Return the programs that encode ``images`` images one after the other, without padding."""
    found = []
    for size in ENCODER_SIZES:
        found += [Program("encoder", size)] * (images // size)
        images %= size
    return found
