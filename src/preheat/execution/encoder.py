"""The encoder: images become embeddings.

Embeddings are kept on the device for the steps that follow. Embeddings that a request gives for its prompt take the
same way, in pieces: they only need to be copied. A program encodes a few images; its input lies in static buffers, as a
step's does. :mod:`preheat.schedule.images` decides the place of each image.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from preheat.backends.base.backend import Backend
from preheat.backends.base.device import HOST_COPIES
from preheat.core import PIECE, Image
from preheat.limits import Limits
from preheat.plan.programs import Program, encoder_programs

RAW_BYTES = 4
"""Most bytes of one number in a request."""


class Tower(Protocol):
    """A maker of embeddings [images * tokens, hidden] from inputs [images, *shape] in ``dtype``.

    ``token`` is an id that stands for the embeddings in a prompt. ``name`` is used in names of checks and paths.
    """

    @property
    def name(self) -> str: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> torch.dtype: ...
    @property
    def token(self) -> int: ...
    def __call__(self, pixels: Tensor, /) -> Tensor: ...


@dataclass(frozen=True)
class Given:
    """The tower of given embeddings of prompts: it computes nothing.

    ``shape``: positions of a piece, hidden.
    """

    shape: tuple[int, int]
    dtype: torch.dtype
    token: int = 0
    name: str = "embeds"

    @classmethod
    def of(cls, hidden_size: int, dtype: torch.dtype) -> Given:
        """Return the tower for a model with ``hidden_size`` numbers a position."""
        return cls((PIECE, hidden_size), dtype)

    def __call__(self, pixels: Tensor, /) -> Tensor:
        return pixels


class Encoder:
    """Runs ``tower`` and keeps the embeddings of images.

    ``embeddings`` are [places * tokens, hidden of the decoder], in ``dtype``.
    """

    deep: None = None

    def __init__(self, backend: Backend, tower: Tower, limits: Limits, hidden_size: int, dtype: torch.dtype) -> None:
        self.tower, places, device = tower, limits.max_images, backend.device
        self.embeddings = torch.zeros(places * limits.image_tokens, hidden_size, dtype=dtype, device=device)
        self._kept = self.embeddings.view(places, -1)
        largest = encoder_programs(places)[0].size
        self._pixels = torch.zeros(largest, *tower.shape, dtype=tower.dtype, device=device)
        self._places = torch.zeros(largest, dtype=torch.int64, device=device)
        pixels, numbers = self._pixels.new_zeros(places, *tower.shape), self._places.new_zeros(places)
        self._host = [(backend.host_copy(pixels), backend.host_copy(numbers)) for _ in range(HOST_COPIES)]
        self._raw = torch.empty(RAW_BYTES * self._pixels[0].numel(), dtype=torch.uint8)
        self.programs = backend.programs(self._encode)

    def encode(self, turn: int, images: Sequence[tuple[int, Image]]) -> None:
        """Start to encode ``images``, each to its place, from host copy ``turn``."""
        pixels, places = self._host[turn]
        for row, (place, image) in enumerate(images):
            self._write(pixels[row].view(-1), image)
            places[row] = place
        first = 0
        for program in encoder_programs(len(images)):
            count = program.size
            self._pixels[:count].copy_(pixels[first : first + count], non_blocking=True)
            self._places[:count].copy_(places[first : first + count], non_blocking=True)
            self.programs.run(program)
            first += count

    def noise(self, number: int, grid: tuple[int, int] | None = None) -> Image:
        """Return an image of noise, another one for each ``number``. All images have one size: there is no ``grid``."""
        assert grid is None, "images of one size have no grid"
        return noise(self.tower.shape, number)

    def compile(self, program: Program[int]) -> None:
        """Launch the kernels of ``program`` while kernels are built and not run."""
        self._encode(program)

    def _write(self, row: Tensor, image: Image) -> None:
        """Write the numbers of ``image`` to the front of ``row``.

        They are rounded to the input's dtype. A piece may be shorter than the row.
        """
        raw = self._raw[: len(image.pixels)]
        raw.numpy()[:] = np.frombuffer(image.pixels, np.uint8)
        numbers = raw.view(getattr(torch, image.dtype))
        row[: len(numbers)].copy_(numbers)

    def _encode(self, program: Program[int]) -> None:
        count = program.size
        encoded = self.tower(self._pixels[:count])
        self._kept.index_copy_(0, self._places[:count], encoded.view(count, -1))


def noise(shape: tuple[int, ...], number: int, grid: tuple[int, int] | None = None) -> Image:
    """Return an image of noise, another one for each ``number``; its input has this ``shape``."""
    pixels = np.random.default_rng(number).standard_normal(shape, np.float32).tobytes()
    return Image(hashlib.blake2b(b"%r" % (grid,) + pixels, digest_size=16).digest(), pixels, grid=grid)
