"""Facts about the CUDA backend that need no torch."""

from __future__ import annotations

from preheat.backends.base import NO_BRIDGE, NO_LAZY_BRIDGE, NO_LLVM, Facts, Machine, Modes, QuantizedKernel

FACTS = Facts(
    name="cuda",
    modes=Modes(
        default="graphs",
        runs={
            "eager": "the host launches one kernel after the other",
            "graphs": "every program is captured once and replayed",
        },
        rejected={
            "compile": "a layer is a few fused kernels, which a compiler must leave as they are to keep their bits; "
            "what it saves in launches, graphs save whole",
            "lazy": NO_LAZY_BRIDGE,
            "llvm": NO_LLVM,
        },
    ),
    machine=Machine(flops=4e14, bandwidth=3e12, step_overhead=2e-2, call_overhead=1e-3),
    split=512,
    asynchronous=True,
    captures=True,
    quantized={
        "w8a8": QuantizedKernel("float8 matrix unit, promoted to fp32 every 128 inputs"),
        "w8a16": QuantizedKernel("dequantized in the tile; layers, for many rows, in memory"),
        "w4a16": QuantizedKernel("dequantized in the tile; layers, for many rows, in memory"),
    },
    ignored=NO_BRIDGE,
    lacks={
        ("pipeline",): "nobody has tried stages there",
        ("tensor_parallel", "text_drafts"): "nobody has tried it there",
        ("tensor_parallel", "pooling"): "nobody has tried it there",
    },
    rejected={
        "use_fake_hpu": "the fake is a Gaudi's: give --device hpu, or leave VLLM_USE_FAKE_HPU unset",
        "contiguous_pa": "attention reads every block where it lies",
        "defrag_with_graphs": "blocks are swapped operation by operation",
    },
)
"""``split`` is part of attention's contract here: another value gives other bits."""
