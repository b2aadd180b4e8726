"""Linear maps on a GPU: the serving kernels against cuBLAS.

    python -m benchmarks gemm [--model bundled] [--rows 1 8 32 64 128 256 1024] [--replays 9]

The kernels run with and without leave to cut the inputs into parts. Microseconds of one map, from a CUDA graph that
walks copies of the weights larger than the L2 cache; medians. "bytes" is the share of the device's bandwidth that
reading the weights once would need in that time, where --bandwidth (GB/s) is given.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from benchmarks.common.report import parser, save
from preheat.backends.cuda.matmul.bench import Bench
from preheat.backends.cuda.matmul.config import Library, LinearShape, shape_of
from preheat.backends.cuda.matmul.kernels import KernelConfigs, kernel_configs
from preheat.backends.cuda.matmul.prove import prove
from preheat.backends.registry import pick_backend
from preheat.model.families import read_spec
from preheat.model.files import find_checkpoint, read_config
from preheat.model.values import matmul_of
from preheat.settings import Settings


def measure(
    shape: LinearShape, rows: list[int], found: KernelConfigs, replays: int, bandwidth: float | None
) -> list[dict[str, Any]]:
    """Return one line for each number of rows."""
    proven, bench, lines = prove(found, [shape], rows), Bench(shape, max(rows)), []
    weights = shape.outputs * shape.inputs * shape.dtype.itemsize
    for size in rows:
        taken = bench.microseconds(found(shape, size), size, replays)
        lines.append(
            {
                "map": {**shape._asdict(), "dtype": str(shape.dtype)},
                "rows": size,
                "choice": repr(found(shape, size)),
                "first choice kept the order": proven[shape, size],
                "us": round(taken, 2),
                "cublas in order us": round(bench.microseconds(Library(), size, replays), 2),
                "cublas us": round(bench.microseconds(Library(split=True), size, replays), 2),
                "teraflops": round(2 * size * shape.outputs * shape.inputs / taken / 1e6, 1),
                **({"bytes": round(weights / bandwidth / 1e3 / taken, 3)} if bandwidth else {}),
            }
        )
        print(*lines[-1].values(), flush=True)
    return lines


def main(words: Sequence[str]) -> None:
    flags = parser(__doc__, __name__)
    flags.add_argument("--model", default="bundled")
    flags.add_argument("--rows", type=int, nargs="+", default=[1, 8, 16, 32, 64, 128, 256, 1024])
    flags.add_argument("--replays", type=int, default=9)
    flags.add_argument("--bandwidth", type=float, help="of the device's memory, in GB/s")
    args = flags.parse_args(words)
    pick_backend("cuda").prepare(Settings(), "eager", None)
    found = kernel_configs(torch.cuda.get_device_name(), torch.cuda.get_device_capability(), None)
    spec = read_spec(read_config(find_checkpoint(args.model, None, with_weights=False)))
    layers = dict.fromkeys(shape_of(matmul_of(linear, "bfloat16")) for _, linear in spec.linears())
    lines = [line for shape in layers for line in measure(shape, args.rows, found, args.replays, args.bandwidth)]
    save("gemm", {"model": args.model, "maps": lines})
