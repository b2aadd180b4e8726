"""What Triton makes of a kernel for a Hopper GPU, compiled where there is none: run as a script, because this process
interprets kernels. Prints the widths in which each kernel's operands are dealt out to threads, by kernel.
"""

import json
import re
import sys
from typing import Any

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from preheat.backends.cuda import attention_tile, linear_quantized, paged_attention

STRIDES = {f"{name}_stride": "i32" for name in ("q", "head", "block", "value", "kv")}
ATTENTION: dict[str, Any] = {
    "q": "*bf16", "table": "*i32", "slots": "*i32", "positions": "*i32", "out": "*bf16", "alibi": None,
    "scale": "fp32", "value_scale": "fp32", "max_blocks": "i32", "HEADS": 32, "KV_HEADS": 8, "DIM": 128, "WIDTH": 128,
    "BLOCK": 64, "SPLIT": 256, "TILE": 64, "WINDOW": 0, "overlap": True, **STRIDES,
}  # fmt: skip
DECODE = dict.fromkeys(("parts", "tops", "totals"), "*fp32") | {
    "work": "*i32", "num_work": "*i32", "arrived": "*i32", "claims": "*i32", "ROWS": 16, "MERGE": True,
}  # fmt: skip
CODES: dict[str, Any] = {
    "x": "*bf16", "scales": "*fp32", "bias": None, "y": "*bf16", "rows": "i32", "outputs": "i32", "inputs": "i32",
    "groups": "i32", "row_bytes": "i32", "OUTPUTS": 32, "ROWS": 16, "gated": False, "overlap": True,
}  # fmt: skip
WHOLE = {"zeros": None, "index": None, "FOUR": False, "GROUP": 0, "EVEN": False}
FOUR_BITS = {"zeros": "*i16", "index": None, "FOUR": True, "GROUP": 128, "EVEN": True}


def kernels() -> dict[str, tuple[Any, dict[str, Any]]]:
    """Kernels whose operands are loaded in eight bits or fewer, and the types or values of what they take."""
    decode, codes = paged_attention._decode, linear_quantized.in_order_codes
    return {
        "attention, e4m3": (decode, ATTENTION | DECODE | {"cache": "*fp8e4nv"}),
        "attention, e5m2": (decode, ATTENTION | DECODE | {"cache": "*fp8e5"}),
        "linear, int8": (codes, CODES | WHOLE | {"codes": "*i8"}),
        "linear, float8": (codes, CODES | WHOLE | {"codes": "*fp8e4nv"}),
        "linear, int4": (codes, CODES | FOUR_BITS | {"codes": "*u8"}),
    }


def widths(kernel: Any, given: dict[str, Any]) -> list[int]:
    """The ``kWidth`` of all operands of ``mma.sync``: neighbouring inputs that a thread holds."""
    types = {name: given[name] if isinstance(given[name], str) else "constexpr" for name in kernel.arg_names}
    values = {(i,): given[name] for i, name in enumerate(kernel.arg_names) if not isinstance(given[name], str)}
    options = {"num_warps": 4, "num_stages": 2, "launch_pdl": True}
    made = triton.compile(ASTSource(kernel, types, values), target=GPUTarget("cuda", 90, 32), options=options)
    return sorted({int(width) for width in re.findall(r"#ttg\.dot_op<\{[^}]*kWidth = (\d+)\}>", made.asm["ttgir"])})


@triton.jit
def seen_through(numbers, dtype: tl.constexpr):
    """``widened`` without what hides where the numbers come from."""
    return numbers.to(dtype)


if __name__ == "__main__":
    if "seen_through" in sys.argv:
        attention_tile.widened = linear_quantized.widened = seen_through
    print(json.dumps({name: widths(*made) for name, made in kernels().items()}))
