"""The gated activation of the feed-forward block, SwiGLU.

Contract. silu(gate) is rounded to the dtype, then multiplied by up. In bfloat16 torch computes silu in fp32 and rounds,
the same for every element wherever it lies in memory; in fp32 the last few elements of a run go another way than the
rest, so there silu is composed of operations that treat all alike: gate / (1 + exp(-gate)).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from preheat.ops.opaque import opaque


@opaque("(Tensor gate_up) -> Tensor", lambda x: x.new_empty(*x.shape[:-1], x.shape[-1] // 2))
def silu_and_mul(gate_up: Tensor) -> Tensor:
    """silu(gate) * up for ``gate_up`` [tokens, 2 * inner] (gate first); returns [tokens, inner]."""
    gate, up = gate_up.chunk(2, dim=-1)
    if gate.dtype == torch.bfloat16:
        return F.silu(gate).mul_(up)
    return (gate / gate.neg().exp_().add_(1.0)).mul_(up)
