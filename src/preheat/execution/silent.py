"""The sampler of a rank that draws nothing.

Where the host samples, the first rank draws for all.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from preheat.backends.base.sampling import SampledRows
from preheat.core import Level, TokenLogprobs
from preheat.ops.sampling import SamplingInput


class SilentSampler:
    """A sampler that ignores logits.

    The tokens come with the next step's input.
    """

    def __init__(self, num_slots: int, device: torch.device) -> None:
        self.last_token = torch.zeros(num_slots + 1, dtype=torch.int32, device=device)

    def describe(self, turn: int, step: SamplingInput, slots: np.ndarray) -> None: ...

    def masks(self, turn: int) -> np.ndarray:
        return np.zeros((0, 0), np.int32)

    def sample(self, level: Level, logits: Tensor) -> None: ...

    def report(self, logits: Tensor) -> None: ...

    def digest(self, turn: int, logits: Tensor) -> None: ...

    def digests(self, turn: int, rows: int) -> np.ndarray:
        return np.zeros(rows, np.int64)

    def fetch(self, turn: int, *, tokens: bool, reports: bool) -> None: ...

    def read(self, turn: int, rows: int, reporting: np.ndarray, alternatives: np.ndarray) -> SampledRows:
        return np.zeros(rows, np.int64), []

    def logprobs(self, logits: Tensor, tokens: np.ndarray, alternatives: int) -> list[TokenLogprobs]:
        return []

    def compile(self, logits: Tensor) -> None: ...

    def clear(self) -> None: ...

    def forget(self) -> None: ...
