"""One sum for an output, or four interleaved sums: microseconds of a product of one row, on a CPU.

    python -m benchmarks sum_chains [--targets avx512 avx2] [--outputs 256 512 2048] [--inputs 256 1024 4096]

The weight is bfloat16 in panels of 32 outputs, and in the cache. A thread takes units of 2, 4 or 8 vectors of 16
outputs. One sum per output needs many outputs in a unit to keep the multiply-adds busy; four sums, of the inputs
k mod 4, need fewer, so that more threads find a unit. Measured is one thread, the best of many turns. Times of more
threads follow: as many units as the busiest thread gets, for the best size of units.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from ctypes import CFUNCTYPE, c_int64, c_void_p
from typing import Any

import numpy as np
from llvmlite import ir

from benchmarks.common.report import parser, save
from preheat.backends.cpu.llvm import job, machine
from preheat.backends.cpu.llvm.emit import FLOATS, HALF, LANES, LONG, POINTER, WORDS, Function, Value
from preheat.backends.cpu.llvm.kinds import COUNTERS, PANEL
from preheat.backends.cpu.llvm.memory import zeros
from preheat.backends.cpu.llvm.targets import TARGETS, Target

VECTORS, CHAINS, THREADS = (2, 4, 8), (1, 4), (1, 2, 8, 16)
TURNS, TURN_SECONDS = 40, 2e-3


def write(module: ir.Module, name: str, inputs: int, vectors: int, chains: int) -> None:
    """Write a function (weight, x, out, units, times) that computes ``units`` units, and all of it ``times`` times."""
    e = Function(module, name, [POINTER, POINTER, POINTER, LONG, LONG])
    weight, x, out, units, times = e.args
    totals = [[e.variable(e.v(0.0)) for _ in range(vectors)] for _ in range(chains)]

    def weights(unit: Value, k: Value) -> list[Value]:
        found = []
        for panel in range(vectors // 2):
            at = e.mul(e.add(e.mul(e.add(e.mul(unit, vectors // 2), panel), inputs), k), PANEL)
            words = e.b.load(e.at(weight, at, HALF), typ=WORDS, align=4)
            found += [e.b.shl(words, e.w(16)), e.b.and_(words, e.w(-65536))]
        return [e.b.bitcast(each, FLOATS) for each in found]

    with e.loop(0, times), e.loop(0, units) as unit:
        for total in (each for chain in totals for each in chain):
            e.set(total, e.v(0.0))
        with e.loop(0, inputs, chains) as first:
            for number, chain in enumerate(totals):
                k = e.add(first, number)
                factor = e.splat(e.load(x, k))
                for total, each in zip(chain, weights(unit, k), strict=True):
                    e.set(total, e.fma(each, factor, e.get(total)))
        for place in range(vectors):
            found = [e.get(chain[place]) for chain in totals]
            while len(found) > 1:
                found = [e.b.fadd(*pair) for pair in zip(found[::2], found[1::2], strict=True)]
            e.store(found[0], out, e.mul(e.add(e.mul(unit, vectors), place), LANES))
    e.close()


def measure(target: Target, outputs: int, inputs: int) -> dict[str, float]:
    """Return the microseconds of a unit, by "chains x vectors"."""
    module = ir.Module("chains")
    module.triple = target.triple
    ways = [(chains, vectors) for chains in CHAINS for vectors in VECTORS]
    for chains, vectors in ways:
        write(module, f"product{chains}x{vectors}", inputs, vectors, chains)
    job.jobs(module, COUNTERS)
    code = machine.Code(machine.compile_code(str(module), None, target)[0])
    weight, x, out = zeros(outputs * inputs, np.int16), zeros(inputs, np.float32), zeros(outputs, np.float32)
    weight[:], x[:] = 0x3C00, 1.0
    found = {}
    for chains, vectors in ways:
        run = CFUNCTYPE(None, c_void_p, c_void_p, c_void_p, c_int64, c_int64)(
            code.address(f"product{chains}x{vectors}")
        )
        units = outputs // (vectors * LANES)

        def seconds(times: int, run: Any = run, units: int = units) -> float:
            begin = time.perf_counter()
            run(weight.ctypes.data, x.ctypes.data, out.ctypes.data, units, times)
            return (time.perf_counter() - begin) / times

        times = max(1, int(TURN_SECONDS / seconds(1)))
        found[f"{chains}x{vectors}"] = min(seconds(times) for _ in range(TURNS)) / units * 1e6
    return found


def shared(units: dict[str, float], outputs: int, chains: int, threads: int) -> float:
    """Return the microseconds of a product that ``threads`` share, with the best size of units."""
    times = []
    for vectors in VECTORS:
        count = outputs // (vectors * LANES)
        times.append(-(-count // threads) * units[f"{chains}x{vectors}"])
    return round(min(times), 2)


def main(words: Sequence[str]) -> None:
    flags = parser(__doc__, __name__)
    flags.add_argument("--targets", nargs="+", choices=TARGETS, default=["avx512", "avx2"])
    flags.add_argument("--outputs", nargs="+", type=int, default=[256, 512, 2048])
    flags.add_argument("--inputs", nargs="+", type=int, default=[256, 1024, 4096])
    args = flags.parse_args(words)
    figures = []
    for name in args.targets:
        for outputs in args.outputs:
            for inputs in args.inputs:
                units = measure(TARGETS[name], outputs, inputs)
                times = {
                    str(threads): [shared(units, outputs, chains, threads) for chains in CHAINS] for threads in THREADS
                }
                row = {"target": name, "outputs": outputs, "inputs": inputs, "one and four chains by threads": times}
                figures.append(row | {"units": {way: round(each, 3) for way, each in units.items()}})
                print(json.dumps(row), flush=True)
    print(save("sum_chains", figures))
