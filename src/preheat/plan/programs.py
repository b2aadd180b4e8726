"""The keys of runnable programs. A forward program's key is its `Bucket`."""

from __future__ import annotations

from typing import NamedTuple

from preheat.core import Level, Transfer
from preheat.plan.buckets import Bucket


class SamplerProgram(NamedTuple):
    """Computes the logits of ``rows`` positions and draws one token from each."""

    rows: int
    level: Level

    def __str__(self) -> str:
        return f"(sampler, {self.rows}, {self.level.name.lower()})"


class DraftProgram(NamedTuple):
    """A program of the draft model."""

    program: Bucket | SamplerProgram

    def __str__(self) -> str:
        return f"(draft, {str(self.program)[1:]}"


class AdaptedProgram(NamedTuple):
    """A program of a step in which some rows have adapters."""

    program: Bucket | SamplerProgram

    def __str__(self) -> str:
        return f"(lora, {str(self.program)[1:]}"


class SwapProgram(NamedTuple):
    """Swaps ``pairs`` pairs of blocks, padding included."""

    pairs: int

    def __str__(self) -> str:
        return f"(swap, {self.pairs})"


class EncoderProgram(NamedTuple):
    """Encodes ``images`` images."""

    images: int

    def __str__(self) -> str:
        return f"(encoder, {self.images})"


class TransferProgram(NamedTuple):
    """Copies a block to the host ("store"), or back ("load")."""

    transfer: Transfer

    def __str__(self) -> str:
        return f"(offload, {self.transfer})"


ENCODER_SIZES = (4, 2, 1)
"""How many images are encoded at once, largest first."""


def encoder_programs(images: int) -> list[EncoderProgram]:
    """The programs that encode ``images`` images, one after the other: none pads."""
    found = []
    for size in ENCODER_SIZES:
        found += [EncoderProgram(size)] * (images // size)
        images %= size
    return found


ForwardProgram = Bucket | AdaptedProgram
"""A forward step, with adapters or without."""

Program = Bucket | SamplerProgram | SwapProgram | DraftProgram | EncoderProgram | AdaptedProgram | TransferProgram
