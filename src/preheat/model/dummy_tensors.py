"""Tensors of a model without a checkpoint, from a random generator."""

from __future__ import annotations

import zlib

import torch
from torch import Tensor

from preheat.model.reading import Piece
from preheat.model.sources import SCALES

DUMMY_CODES = 16.0
"""Standard deviation of dummy weights stored in float8."""

DUMMY_EXPONENT = 127 - 10
"""Exponent of the power of two of dummy weights whose scales are exponents: the scale of other dummy codes."""


class DummyTensors:
    """Random weights that behave like a model's.

    They are normal with std 1/sqrt(inputs), norms around 1. A tensor depends only on its name, shape, dtype, the seed
    and the kind of device, not on the order of loading.
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._whole: tuple[str, Tensor] | None = None

    def fill(self, name: str, out: Tensor, piece: Piece | None = None) -> None:
        """Fill ``out`` at random.

        A piece is cut from the whole tensor, so it is the same on any number of ranks.
        """
        if piece is not None and piece.shape != tuple(out.shape):
            if self._whole is None or self._whole[0] != name:
                self._whole = name, out.new_empty(piece.shape)
                self.fill(*self._whole)
            out.copy_(self._whole[1][piece.index])
            return
        generator = torch.Generator(out.device).manual_seed(zlib.crc32(f"{self._seed} {name}".encode()))
        if not out.is_floating_point() or name.endswith(SCALES):
            _fill_code(name, out, generator)
        elif out.itemsize == 1:
            out.copy_(torch.empty_like(out, dtype=torch.bfloat16).normal_(std=DUMMY_CODES, generator=generator))
        elif name.endswith(".A_log.weight"):  # decays of some tokens to some hundred, as trained ones
            out.normal_(mean=-3.0, std=1.5, generator=generator)
        elif name.endswith((".bias", "_bias")):
            out.normal_(std=0.1, generator=generator)
        elif out.dim() == 1:
            out.normal_(mean=1.0, std=0.1, generator=generator)
        else:
            out.normal_(std=(out.numel() // len(out)) ** -0.5, generator=generator)


def _fill_code(name: str, out: Tensor, generator: torch.Generator) -> None:
    """Fill ``out`` with random codes, middle zero points or equal scales."""
    if out.is_floating_point():
        out.fill_(1.0 if name.endswith("global_scale") else 2.0**-10)
    elif name.endswith(("zeros", "zero_point")):
        out.fill_(-0x77777778)  # the nibble 8, eight times
    elif name.endswith("g_idx"):
        out.fill_(-1)
    elif out.dtype == torch.uint8:
        out.fill_(DUMMY_EXPONENT) if name.endswith(SCALES) else out.random_(0, 256, generator=generator)
    elif out.dtype == torch.int8:
        out.random_(-8, 8, generator=generator)  # fits four bits, too
    else:
        out.random_(-(2**31), 2**31 - 1, generator=generator)
