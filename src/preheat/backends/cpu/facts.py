"""What is known of the CPU backend without torch."""

from __future__ import annotations

from preheat.backends.base import NO_LAZY_BRIDGE, Facts, Machine, Modes

FACTS = Facts(
    name="cpu",
    modes=Modes(
        default="eager",
        runs={
            "eager": "torch runs one operation after the other",
            "compile": "torch.compile, each kind of layer once for each number of tokens",
            "graphs": "as eager; there are no graphs on a CPU, so the bytes that they would take are counted",
        },
        rejected={"lazy": NO_LAZY_BRIDGE},
    ),
    machine=Machine(flops=1e11, bandwidth=1e10, step_overhead=2e-3, call_overhead=5e-4),
    split=256,
    min_tokens=2,
    rejected={
        "batch_invariant": "torch's own kernels serve, at sizes that were proven to keep their bits; none is faster "
        "without that",
        "async_scheduling": "a step has ended when its call returns, so there is nothing to work ahead of",
        "defrag_with_graphs": "there are no graphs on a CPU",
    },
)
"""``split`` is part of attention's contract here; ``min_tokens``: one row never has the bits of many."""
