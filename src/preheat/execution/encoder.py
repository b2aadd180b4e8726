"""The encoder: images become embeddings, which are kept on the device for the steps that follow.

A program encodes a few images; its input lies in static buffers, as a step's does. Which image goes where is decided in
:mod:`preheat.schedule.images`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from preheat.backends.base import HOST_COPIES, Backend
from preheat.core import Image
from preheat.limits import Limits
from preheat.model.vision import VisionTower
from preheat.plan.programs import EncoderProgram, encoder_programs


class Encoder:
    """Runs ``tower``. ``embeddings`` [places * tokens, hidden of the decoder] are those of the images that are kept."""

    def __init__(self, backend: Backend, tower: VisionTower, limits: Limits, hidden_size: int) -> None:
        self.tower = tower
        weights, places = tower.weights, limits.max_images
        dtype, device = weights.cls.dtype, backend.device
        self.embeddings = torch.zeros(places * limits.image_tokens, hidden_size, dtype=dtype, device=device)
        self._kept = self.embeddings.view(places, -1)
        largest = encoder_programs(places)[0].images
        self._pixels = torch.zeros(largest, *tower.spec.pixel_shape, device=device)
        self._places = torch.zeros(largest, dtype=torch.int64, device=device)
        pixels, numbers = self._pixels.new_zeros(places, *tower.spec.pixel_shape), self._places.new_zeros(places)
        self._host = [(backend.host_copy(pixels), backend.host_copy(numbers)) for _ in range(HOST_COPIES)]
        self.programs = backend.programs(self._encode)

    def encode(self, turn: int, images: Sequence[tuple[int, Image]]) -> None:
        """Start to encode ``images``, each for its place, from host copy ``turn``."""
        pixels, places = self._host[turn]
        for row, (place, image) in enumerate(images):
            pixels[row].view(-1).numpy()[:] = np.frombuffer(image.pixels, np.float32)
            places[row] = place
        first = 0
        for program in encoder_programs(len(images)):
            count = program.images
            self._pixels[:count].copy_(pixels[first : first + count], non_blocking=True)
            self._places[:count].copy_(places[first : first + count], non_blocking=True)
            self.programs.run(program)
            first += count

    def compile(self, program: EncoderProgram) -> None:
        """Launch the kernels of ``program`` where they are built and not run."""
        self._encode(program)

    def _encode(self, program: EncoderProgram) -> None:
        count = program.images
        encoded = self.tower(self._pixels[:count])
        self._kept.index_copy_(0, self._places[:count], encoded.view(count, -1))
