"""Fused multiply-add without the instruction: the bits of the C library's, also where a double would round twice."""

from __future__ import annotations

import ctypes
import itertools
from ctypes import CFUNCTYPE, c_float, c_int64, c_void_p
from ctypes.util import find_library

import numpy as np
import pytest

pytest.importorskip("llvmlite", reason="llvmlite is not installed: pip install llvmlite")
from llvmlite import ir

from preheat.backends.cpu.llvm import emit, job, machine, targets
from preheat.backends.cpu.llvm.kinds import COUNTERS, LANES
from preheat.backends.cpu.llvm.memory import zeros

SPECIAL = [0.0, -0.0, 1.0, -1.0, np.inf, -np.inf, np.nan, 2**-149, -(2**-149), 2**-126, 3 * 2**-149, 2**-75,
           float(np.finfo(np.float32).max), 1 + 2**-23, 1 - 2**-24, 2**24 + 2]  # fmt: skip


def triples() -> np.ndarray:
    """Return numbers [3, many]: special ones in all ways, sums that cancel, and sums near the middle of two floats."""
    chance = np.random.default_rng(3)
    special = np.array([*itertools.product(SPECIAL, repeat=3)], np.float32).T
    x, y = ((chance.standard_normal(4096) * 2.0 ** chance.integers(-70, 60, 4096)).astype(np.float32) for _ in range(2))
    with np.errstate(all="ignore"):
        cancelling = np.stack((x, y, -(x * y)))
        far = np.stack((x, y, (x * y * 2.0 ** chance.integers(20, 30, 4096)).astype(np.float32)))
    # Half of z's last place and a bit far below: the sum in double precision is the middle, the exact sum is not.
    scale = 2.0 ** chance.integers(-60, 60, 4096) * chance.choice((-1, 1), 4096)
    half = np.stack(((1 + 2**-12) * 2**-24 * scale, np.full(4096, 1 - 2**-12 + 2**-24)))
    middle = np.stack((*half, (1 + chance.integers(0, 2**23, 4096) * 2**-23) * np.abs(scale))).astype(np.float32)
    return np.concatenate((special, cancelling, far, middle), 1)


def multiplied(given: np.ndarray, monkeypatch: pytest.MonkeyPatch) -> np.ndarray:
    """Return the result of each triple by the code that a processor without the instruction gets."""
    count = -(-given.shape[1] // LANES) * LANES
    arrays = [zeros(count, np.float32) for _ in range(4)]
    for array, line in zip(arrays, given, strict=False):
        array[: len(line)] = line
    monkeypatch.setattr(targets, "here", lambda: targets.TARGETS["sse"]._replace(triple=HERE.triple))
    module = ir.Module("fused")
    module.triple = HERE.triple
    e = emit.Function(module, "fused", [emit.POINTER] * 4 + [emit.LONG])
    with e.denormals_kept(), e.loop(0, e.args[4], LANES) as at:
        e.store(e.fma(*(e.vector(each, at) for each in e.args[:3])), e.args[3], at)
    e.close()
    job.jobs(module, COUNTERS)
    assert "llvm.fma" not in str(module)
    code = machine.Code(machine.compile_code(str(module), None, HERE)[0])
    run = CFUNCTYPE(None, *[c_void_p] * 4, c_int64)(code.address("fused"))
    run(*(array.ctypes.data for array in arrays), count)
    return arrays[3][: given.shape[1]]


HERE = targets.here()


@pytest.mark.parametrize("planted", [False, True])
def test_multiply_add_is_rounded_once(planted, monkeypatch):
    """Control: a sum in double precision that is not rounded to odd."""
    if planted:
        wide = ir.VectorType(ir.DoubleType(), LANES)
        monkeypatch.setattr(emit, "multiply_add", lambda b, x, y, z: b.fptrunc(
            b.fadd(b.fmul(b.fpext(x, wide), b.fpext(y, wide)), b.fpext(z, wide)), emit.FLOATS
        ))  # fmt: skip
    given = triples()
    library = ctypes.CDLL(find_library("m")).fmaf
    library.argtypes, library.restype = [c_float] * 3, c_float
    expected = np.array([library(*map(float, each)) for each in given.T], np.float32)
    found = multiplied(given, monkeypatch)
    both = np.isnan(expected) & np.isnan(found)
    wrong = (found.view(np.int32) != expected.view(np.int32)) & ~both
    assert (int(wrong.sum()) > 0) == planted, given[:, wrong][:, :5].T
