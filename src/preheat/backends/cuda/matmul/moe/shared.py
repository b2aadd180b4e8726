"""The shared expert on CUDA: its gate, and its addition to the routed experts.

Contract. As in :mod:`preheat.ops.moe`. The order of the gate's sum is fixed by the length alone: one program a row.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from preheat.backends.cuda.device.launch import begin
from preheat.backends.cuda.pointwise.norm import layout


@triton.jit
def _add_shared(routed, x, gate, shared, out, SIZE: tl.constexpr, WIDTH: tl.constexpr, overlap: tl.constexpr):
    at = tl.arange(0, WIDTH)
    inside = at < SIZE
    weights = tl.load(gate + at, mask=inside, other=0.0).to(tl.float32)  # no kernel writes weights
    begin(overlap)
    here = tl.program_id(0).to(tl.int64) * SIZE + at
    row = tl.load(x + here, mask=inside, other=0.0)
    score = tl.sum(row.to(tl.float32) * weights, 0).to(row.dtype).to(tl.float32)
    share = (1.0 / (1.0 + tl.exp(-score))).to(row.dtype).to(tl.float32)
    own = (tl.load(shared + here, mask=inside, other=0.0).to(tl.float32) * share).to(row.dtype)
    others = tl.load(routed + here, mask=inside, other=0.0)
    tl.store(out + here, (others.to(tl.float32) + own.to(tl.float32)).to(row.dtype), mask=inside)


def add_shared(routed: Tensor, x: Tensor, gate: Tensor, shared: Tensor) -> Tensor:
    """Return ``routed`` + sigmoid(``x`` . ``gate``) * ``shared``, a new tensor.

    All are [tokens, hidden] and contiguous, but ``gate`` is [1, hidden].
    """
    size, out = x.shape[1], torch.empty_like(x)
    _add_shared[(len(x),)](routed, x, gate, shared, out, SIZE=size, **layout(size))
    return out
