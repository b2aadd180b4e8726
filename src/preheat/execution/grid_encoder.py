"""The encoder of images of any size.

An image is encoded by itself, padded to its rung (:mod:`preheat.utils.rungs`): a program for each rung. Embeddings are
kept as by :mod:`preheat.execution.encoder`. A place has room for the largest rung, so padding is written too, and never
read. Padded patches keep the numbers of earlier images. They get no weight in attention.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from preheat.backends.base.backend import Backend
from preheat.backends.base.device import HOST_COPIES
from preheat.core import Image
from preheat.execution.deep import DeepEmbeddings
from preheat.execution.encoder import noise
from preheat.limits import Limits
from preheat.model.grid_specs import GridVisionSpec
from preheat.model.grid_vision import GridInput, GridTower, interpolated, patch_places
from preheat.plan.programs import Program, programs_of_images

GRIDS = 64
"""Grids of the latest images: the host keeps their numbers."""


class GridEncoder:
    """Runs ``tower`` and keeps the embeddings of images.

    ``embeddings`` are [places * cells, hidden of the decoder], in ``dtype``; ``deep`` are the embeddings for the layers
    behind the first.
    """

    def __init__(
        self, backend: Backend, tower: GridTower, limits: Limits, hidden_size: int, dtype: torch.dtype
    ) -> None:
        self.tower, self._backend, device, spec = tower, backend, backend.device, tower.spec
        rows, patches = limits.max_images * limits.image_tokens, limits.image_tokens * spec.cell_patches
        self._room = limits.image_tokens
        self.embeddings = torch.zeros(rows, hidden_size, dtype=dtype, device=device)
        self.deep = DeepEmbeddings(len(spec.deep), self.embeddings) if spec.deep else None
        self._input = GridInput(
            pixels=torch.zeros(max(spec.patches.frames, 1), patches, tower.patch, dtype=tower.dtype, device=device),
            places=torch.zeros(4, patches, dtype=torch.int64, device=device),
            shares=torch.zeros(4, patches, device=device),
            at=torch.zeros(2, patches, dtype=torch.int64, device=device),
            number=torch.ones(1, dtype=torch.int64, device=device),
        )
        self._place = torch.zeros(1, dtype=torch.int64, device=device)
        self._cells = torch.arange(limits.image_tokens, device=device)
        self._host = [[self._copies() for _ in range(limits.max_images)] for _ in range(HOST_COPIES)]
        self._grid = lru_cache(GRIDS)(lambda grid: _numbers(spec, grid))
        self.programs = backend.programs(self._encode)

    def encode(self, turn: int, images: Sequence[tuple[int, Image]]) -> None:
        """Start to encode ``images``, each to its place, from host copy ``turn``."""
        programs = programs_of_images([image for _, image in images])
        for own, program, (place, image) in zip(self._host[turn], programs, images, strict=False):
            self._send(own, place, image)
            self.programs.run(program)

    def noise(self, number: int, grid: tuple[int, int] | None = None) -> Image:
        """Return an image of noise with this ``grid``, another one for each ``number``; by default a small image."""
        rows, columns = grid = grid or (2 + number % 2, 3 - number % 2)
        return noise((rows * columns * self.tower.spec.cell_patches, self.tower.patch), number, grid)

    def compile(self, program: Program[int]) -> None:
        """Launch the kernels of ``program`` while kernels are built and not run."""
        self._encode(program)

    def _copies(self) -> tuple[GridInput, Tensor]:
        """Return a host copy of an image's input, and of its place."""
        return GridInput(*map(self._backend.host_copy, self._input)), self._backend.host_copy(self._place)

    def _send(self, own: tuple[GridInput, Tensor], place: int, image: Image) -> None:
        """Write the input of ``image`` to its host copy, and start to send it."""
        assert image.grid is not None, "an image of any size has a grid"
        host, at = own
        count = image.cells * self.tower.spec.cell_patches
        frames = torch.from_numpy(np.frombuffer(image.pixels, np.float32).copy()).view(-1, count, self.tower.patch)
        for number, device in enumerate(self._input.pixels):
            if number < len(frames):
                host.pixels[number, :count].copy_(frames[number])
                device[:count].copy_(host.pixels[number, :count], non_blocking=True)
            else:  # an image stands still
                device[:count].copy_(self._input.pixels[0, :count], non_blocking=True)
        for device, copy, each in zip(self._input[1:-1], host[1:-1], self._grid(image.grid), strict=True):
            part = copy[:, :count]
            part.copy_(each.view(part.shape))
            device[:, :count].copy_(part, non_blocking=True)
        host.number[0], at[0] = count, place * self._room
        self._input.number.copy_(host.number, non_blocking=True)
        self._place.copy_(at, non_blocking=True)

    def _encode(self, program: Program[int]) -> None:
        cells = program.size
        patches = cells * self.tower.spec.cell_patches
        pixels, places, shares, at, number = self._input
        image = GridInput(pixels[:, :patches], places[:, :patches], shares[:, :patches], at[:, :patches], number)
        first, *deep = self.tower(image)
        rows = self._cells[:cells] + self._place
        self.embeddings.index_copy_(0, rows, first)
        if self.deep is not None:
            self.deep.keep(rows, deep)


def _numbers(spec: GridVisionSpec, grid: tuple[int, int]) -> tuple[Tensor, Tensor, Tensor]:
    """Return the places in the table of positions, their weights, and rows and columns of a grid's patches."""
    at = patch_places(*grid, spec.merge)
    places, shares = interpolated(at, (grid[0] * spec.merge, grid[1] * spec.merge), spec.side)
    return torch.from_numpy(places), torch.from_numpy(shares), torch.from_numpy(at)
