"""The head behind a text's pooled state, on the host.

Contract. For each text by itself: products of float32 in float64; the sum over the inputs is numpy's, in an order fixed
by their number; the bias is added in float64; then the activation, number by number; rounded once to float32 behind
each layer. So the numbers of a text do not depend on other texts.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from preheat.model.specs import HeadActivation


@dataclass(frozen=True, slots=True)
class HeadLayer:
    """A layer of a head: ``weight`` [outputs, inputs] and ``bias`` [outputs], float32 on the host."""

    weight: Tensor
    bias: Tensor
    activation: HeadActivation | None = None

    def __call__(self, x: np.ndarray) -> np.ndarray:
        """Return float32 [outputs] for ``x`` float32 [inputs]."""
        found = np.multiply(self.weight.numpy(), x, dtype=np.float64).sum(axis=1) + self.bias.numpy()
        if self.activation == "tanh":
            found = np.array(list(map(math.tanh, found.tolist())))
        elif self.activation == "relu":
            found = np.maximum(found, 0.0)
        rounded: np.ndarray = found.astype(np.float32)
        return rounded

    def weights(self) -> Iterable[Tensor]:
        """See :class:`preheat.backends.base.HasWeights`."""
        return self.weight, self.bias

    def state(self) -> Iterable[Tensor]:
        """See :class:`preheat.backends.base.HasWeights`."""
        return ()


def through(head: Sequence[HeadLayer], state: bytes) -> bytes:
    """Return the numbers behind ``head`` for a pooled state, both as bytes of float32."""
    found = np.frombuffer(state, np.float32)
    for layer in head:
        found = layer(found)
    return found.tobytes()
