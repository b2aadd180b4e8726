"""What more than one kernel computes of single elements: one text, so that all give the same bits."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def silu_mul(gate, up):
    """silu(``gate``) * ``up``: silu in fp32, rounded to the dtype of both; the product rounded again."""
    wide = gate.to(tl.float32)
    silu = (wide / (1.0 + tl.exp(-wide))).to(gate.dtype)
    return (silu.to(tl.float32) * up.to(tl.float32)).to(gate.dtype)
