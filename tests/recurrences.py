"""Recurrences of several rules, with random weights."""

from __future__ import annotations

import torch
from torch import Tensor

from preheat.ops.delta import DeltaWeights
from preheat.ops.values import DELTA, Recurrence, StateRule

MAMBA = StateRule(unit=False, delta=False, betas=False, skip=True, bias=True, gate_first=True, normed=6)
RULES = {
    "delta": DELTA,
    "mamba": MAMBA,
    "mamba with limits": MAMBA._replace(limits=(0.3, 1.2), bias=False, normed=3),
    "delta with skips": DELTA._replace(skip=True, bias=True, limits=(0.1, 0.9)),
    "lengths and no delta": DELTA._replace(delta=False, normed=2, gate_first=True),
}
"""Rules for six value heads, or as many as ``normed`` divides."""


def random_weights(value: Recurrence, device: str | torch.device = "cpu") -> DeltaWeights:
    """Return random weights of a layer, with what its rule adds."""
    draw, rule = torch.Generator().manual_seed(3), value.rule

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=draw).to(device)

    heads = (value.value_heads,) if rule.normed > 1 else ()
    return DeltaWeights(
        value=value, taps=normal(value.channels, value.taps) * 0.6, rate=-normal(value.value_heads).exp() * 0.5,
        bias=normal(value.value_heads), norm=1 + 0.1 * normal(*heads, value.value_dim), eps=1e-6,
        conv_bias=normal(value.channels) * 0.3 if rule.bias else None,
        skip=normal(value.value_heads) if rule.skip else None,
    )  # fmt: skip
