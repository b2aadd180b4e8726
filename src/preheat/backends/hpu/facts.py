"""What is known of Gaudi without its software: the table of execution modes of its PyTorch bridge."""

from __future__ import annotations

from preheat.backends.base import Facts, Machine, Modes

FACTS = Facts(
    name="hpu",
    modes=Modes(
        default="graphs",
        runs={
            "eager": "PyTorch eager mode of the bridge",
            "compile": "torch.compile over the bridge's eager backend",
            "graphs": "HPU Graphs over the bridge's lazy backend",
            "lazy": "the bridge's lazy backend, without graphs",
        },
        rejected={},
    ),
    machine=Machine(flops=2e14, bandwidth=2e12, step_overhead=2e-2, call_overhead=1e-3),
    split=256,
    asynchronous=True,
    captures=True,
)
