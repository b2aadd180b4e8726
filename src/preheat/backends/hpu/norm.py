"""Norms on Gaudi: :mod:`preheat.ops.norm` as lazy graphs.

A norm is a graph of its own unless it is part of another graph.
"""

from __future__ import annotations

import torch
from torch import Tensor

from preheat.backends.hpu.bridge import Bridge
from preheat.ops.kinds import NormKind
from preheat.ops.norm import RMSNorm


class HpuNorm:
    """``norm`` as a unit of ``bridge``."""

    def __init__(self, norm: RMSNorm, bridge: Bridge) -> None:
        self._norm, self._bridge = norm, bridge
        self.weight, self.eps = norm.weight, norm.eps
        self.kind: NormKind = norm.kind

    def __call__(self, x: Tensor) -> Tensor:
        if torch.compiler.is_compiling():
            return self._norm(x)
        with self._bridge.unit():
            return self._norm(x)

    def add(self, x: Tensor, residual: Tensor) -> Tensor:
        if torch.compiler.is_compiling():
            return self._norm.add(x, residual)
        with self._bridge.unit():
            return self._norm.add(x, residual)
