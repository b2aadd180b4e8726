"""Facts of the CPU backend, without torch."""

from __future__ import annotations

import os
import shutil
from importlib.util import find_spec

from preheat.backends.base.facts import (
    DEQUANTIZED,
    NO_BRIDGE,
    NO_LAZY_BRIDGE,
    NO_PEERS,
    Facts,
    Machine,
    Mode,
    Modes,
    QuantizedKernel,
)


def modes() -> Modes:
    """Return the modes that run on this machine.

    `compile` needs the compiler that Inductor looks for.
    """
    runs: dict[Mode, str] = {
        "eager": "torch runs one operation after another",
        "compile": "torch.compile, each kind of layer once for each number of tokens",
        "llvm": "a layer is two functions that LLVM compiles",
        "graphs": "like eager: a CPU has no graphs, so the bytes that graphs would take are counted",
    }
    rejected: dict[Mode, str] = {"lazy": NO_LAZY_BRIDGE}
    if shutil.which(os.environ.get("CXX", "g++")) is None:
        del runs["compile"]
        rejected["compile"] = "it needs a C++ compiler: install g++, or name yours in the variable CXX"
    if find_spec("llvmlite") is None:
        del runs["llvm"]
        rejected["llvm"] = "it needs llvmlite: pip install llvmlite"
    return Modes(default="llvm" if "llvm" in runs else "eager", runs=runs, rejected=rejected, otherwise="eager")


_QUANTIZED = {
    "w8a8": QuantizedKernel("the contract computed in float64, with exact sums of 128 products", itemsize=8),
    **DEQUANTIZED,
}
_COMPILED = dict.fromkeys(
    ("w8a16", "w4a16"), QuantizedKernel("codes in memory, numbers in registers; a group's sum is scaled")
)
"""Kernels of quantized layers in compiled functions."""

_FUNCTIONS = ("front", "back"), ("embed", "take", "norm"), ("alone", "draw")

FACTS = Facts(
    name="cpu",
    modes=modes(),
    machine=Machine(flops=1e11, bandwidth=1e10, step_overhead=2e-3, call_overhead=5e-4),
    split=256,
    min_tokens=2,
    on_host=True,
    host_sampler=True,
    block_size=256,
    max_num_seqs=64,
    max_num_batched_tokens=1024,
    quantized=_QUANTIZED,
    in_modes={"llvm": {"quantized": _QUANTIZED | _COMPILED, "float16": True, "functions": _FUNCTIONS}},
    ignored=NO_BRIDGE,
    rejected=NO_PEERS
    | {
        "use_fake_hpu": "the fake device is a Gaudi: give --device hpu, or leave VLLM_USE_FAKE_HPU unset",
        "batch_invariant": "torch's own kernels are used, at sizes proven to keep their bits; no kernel is faster "
        "without batch invariance",
        "async_scheduling": "a step is scheduled with all earlier tokens known, so no step is prepared ahead",
        "defrag_with_graphs": "there are no graphs on a CPU",
    },
)
"""``split`` is part of attention's contract here.

``min_tokens``: one row never has the bits of many. Steps are small, because an arriving request waits for the end of a
step.
"""
