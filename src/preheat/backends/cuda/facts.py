"""Facts about the CUDA backend that need no torch."""

from __future__ import annotations

from preheat.backends.base.facts import NO_BRIDGE, NO_LAZY_BRIDGE, NO_LLVM, Facts, Machine, Modes, QuantizedKernel

FACTS = Facts(
    name="cuda",
    modes=Modes(
        default="graphs",
        runs={
            "eager": "the host launches one kernel after another",
            "graphs": "every program is captured once and replayed",
        },
        rejected={
            "compile": "a layer is a few fused kernels, and a compiler must not change them or their bits change; "
            "graphs already save the launches",
            "lazy": NO_LAZY_BRIDGE,
            "llvm": NO_LLVM,
        },
    ),
    machine=Machine(flops=4e14, bandwidth=3e12, step_overhead=2e-2, call_overhead=1e-3),
    split=512,
    asynchronous=True,
    captures=True,
    max_num_expert_tokens=8192,
    quantized={
        "w8a8": QuantizedKernel("float8 matrix unit, promoted to fp32 every 128 inputs"),
        "w8a16": QuantizedKernel("dequantized in the tile; layers, for many rows, in memory"),
        "w4a16": QuantizedKernel("dequantized in the tile; layers, for many rows, in memory"),
    },
    ignored=NO_BRIDGE,
    lacks={
        ("expert_parallel", "adapters"): "nobody has written the terms of experts that are dealt to ranks there",
        **{
            ("expert_parallel", kind): "no two GPUs have run it"
            for kind in ("images", "any_size", "draft_model", "eagle3", "mtp")
        },
        ("tensor_parallel", "eagle3"): "no two GPUs have run it",
        ("pipeline", "draft_model"): "no two GPUs have run it",
        ("pipeline", "tensor_parallel"): "a GPU is in one group of ranks so far",
        ("states", "pooling"): "no GPU has run it",
        ("audit",): "the digests of the audit are computed on the host",
    },
    rejected={
        "use_fake_hpu": "the fake device is a Gaudi: give --device hpu, or leave VLLM_USE_FAKE_HPU unset",
        "contiguous_pa": "attention always reads blocks in place",
        "defrag_with_graphs": "blocks are swapped operation by operation",
    },
)
"""``split`` is part of attention's contract here: another value gives other bits."""
