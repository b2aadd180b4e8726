"""The gated activation on CUDA. Placeholder until the branch that owns it is merged."""

import triton
import triton.language as tl
from torch import Tensor

from preheat.ops.cuda.elementwise import silu_mul
from preheat.ops.cuda.launch import begin, options


@triton.jit(do_not_specialize=["inner"])
def _silu_and_mul(gate_up, y, inner, BLOCK: tl.constexpr, overlap: tl.constexpr):
    begin(overlap)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    token = tl.program_id(0).to(tl.int64)
    gate = tl.load(gate_up + token * 2 * inner + at, at < inner)
    up = tl.load(gate_up + token * 2 * inner + inner + at, at < inner)
    tl.store(y + token * inner + at, silu_mul(gate, up), at < inner)


def silu_and_mul(gate_up: Tensor) -> Tensor:
    inner = gate_up.shape[1] // 2
    y = gate_up.new_empty(len(gate_up), inner)
    _silu_and_mul[(len(gate_up), triton.cdiv(inner, 2048))](gate_up, y, inner, BLOCK=2048, **options(num_warps=4))
    return y
