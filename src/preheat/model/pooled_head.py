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

from preheat.model.tensor_specs import HeadActivation


@dataclass(frozen=True, slots=True)
class _OnHost:
    """A part with a ``weight`` and a ``bias``, float32 on the host."""

    weight: Tensor
    bias: Tensor

    def weights(self) -> Iterable[Tensor]:
        """See :class:`preheat.backends.base.layers.HasWeights`."""
        return self.weight, self.bias

    def state(self) -> Iterable[Tensor]:
        """See :class:`preheat.backends.base.layers.HasWeights`."""
        return ()


@dataclass(frozen=True, slots=True)
class HeadLayer(_OnHost):
    """A layer of a head: ``weight`` [outputs, inputs] and ``bias`` [outputs], float32 on the host."""

    activation: HeadActivation | None = None

    def __call__(self, x: np.ndarray) -> np.ndarray:
        """Return float32 [outputs] for ``x`` float32 [inputs]."""
        found = np.multiply(self.weight.numpy(), x, dtype=np.float64).sum(axis=1) + self.bias.numpy()
        if self.activation == "tanh":
            found = np.array(list(map(math.tanh, found.tolist())))
        elif self.activation == "relu":
            found = np.maximum(found, 0.0)
        elif self.activation == "gelu":
            found = np.array([x * 0.5 * (1.0 + math.erf(x * math.sqrt(0.5))) for x in found.tolist()])
        rounded: np.ndarray = found.astype(np.float32)
        return rounded


@dataclass(frozen=True, slots=True)
class HeadNorm(_OnHost):
    """A norm of a head that subtracts the mean: ``weight`` and ``bias`` [size], float32 on the host.

    Mean and variance are exact sums in float64, each rounded once.
    """

    eps: float

    def __call__(self, x: np.ndarray) -> np.ndarray:
        """Return float32 [size] for ``x`` float32 [size]."""
        wide = x.astype(np.float64)
        wide = wide - math.fsum(wide.tolist()) / len(x)
        variance = math.fsum((wide * wide).tolist()) / len(x)
        found = wide / math.sqrt(variance + self.eps) * self.weight.numpy() + self.bias.numpy()
        rounded: np.ndarray = found.astype(np.float32)
        return rounded


def through(head: Sequence[HeadLayer | HeadNorm], size: int, states: bytes) -> bytes:
    """Return the numbers behind ``head`` for states of ``size`` numbers each, both as bytes of float32."""
    return b"".join(_through(head, state) for state in np.frombuffer(states, np.float32).reshape(-1, size))


def _through(head: Sequence[HeadLayer | HeadNorm], found: np.ndarray) -> bytes:
    for layer in head:
        found = layer(found)
    return found.tobytes()
