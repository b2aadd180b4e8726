"""Facts of the Gaudi backend, without torch: its execution modes and defaults."""

from __future__ import annotations

from dataclasses import replace

from preheat.backends.base.facts import DEQUANTIZED, NO_LLVM, NO_PEERS, Facts, Machine, Modes

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
        rejected={"llvm": NO_LLVM},
        enforced="lazy",
    ),
    machine=Machine(flops=2e14, bandwidth=2e12, step_overhead=2e-2, call_overhead=1e-3),
    split=128,
    captures=True,
    own_graph_memory=True,
    logs_buckets=True,
    pads_context=True,
    host_sampler=True,
    block_size=128,
    quantized=DEQUANTIZED,
    plain_routers="its router's kernel has no sigmoids, groups or corrections yet",
    no_latents="its attention kernels read keys and values, not one entry for both",
    no_layer_ends="nobody has written the last steps of such layers, and entries of several sizes, there",
    plain_experts="nobody has written the biases of experts and the sinks of attention there",
    defaults={"bucketing_policy": "split", "config_hidden_layers": 1},
    lacks={
        ("expert_parallel",): "nobody has written the exchange of experts' rows there",
        ("groups",): "its attention kernels read one block table",
        ("states",): "it has no kernel for layers with states yet",
        ("encoder",): "its attention kernels read no key behind a token",
        ("adapters",): "it has no kernels for adapters yet",
        ("sleep",): "graphs hold the addresses of weights and cache, so these cannot move",
        ("offload",): "copies of blocks have not been tried on Gaudi",
        ("pooling",): "nobody has tried to read the hidden states of a step there",
        ("replicas",): "replicas on Gaudi have not been tried",
        ("several_models",): "a card belongs to one process",
        ("updates",): "the bridge may have folded the weights into its recipes",
        ("pipeline",): "nobody has tried stages there",
        ("audit",): "the digests of the audit are computed on the host",
        ("receipts",): "its sample program has no digest of the logits yet",
        **{
            ("tensor_parallel", kind): "nobody has tried it there"
            for kind in ("text_drafts", "draft_model", "images", "any_size", "prompt_embeds")
        },
        ("eagle3",): "its programs have never run with an EAGLE-3 head",
        ("mtp",): "its programs have never run with a layer that predicts ahead",
        **{("tensor_parallel", kind): "ranks have no kernels for quantized layers there" for kind in DEQUANTIZED},
    },
    rejected=NO_PEERS
    | {
        "async_scheduling": "a step ends when its tokens are on the host, so no step can be prepared ahead",
        "defrag_with_graphs": "prompts and decoding have separate steps, and their cache is not compacted",
    },
)
"""Facts of Gaudi; ``split`` equals the block.

Attention merges block by block. The defaults are from vLLM on Gaudi.
"""

SIMULATED = replace(FACTS, name="hpu (simulated)", simulated=True)
"""The facts of a fake device."""
