"""Facts about a backend, known before anything is imported or allocated."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from preheat.settings.combinations import Lacks

Mode = Literal["graphs", "compile", "eager", "lazy", "llvm"]

NO_LAZY_BRIDGE = "only Gaudi's PyTorch bridge has a lazy backend"

NO_LLVM = "its functions are for processors of a host"


@dataclass(frozen=True, kw_only=True)
class Modes:
    """Execution modes of a backend.

    ``default`` is taken unless an option asks for another mode, and ``otherwise`` for a model that the default mode
    does not run; None: the default mode runs every model. ``runs`` describes each mode that runs, and ``rejected``
    gives the reason for each mode that does not. ``enforced`` is the mode for ``enforce_eager`` alone.
    """

    default: Mode
    runs: Mapping[Mode, str]
    rejected: Mapping[Mode, str]
    enforced: Mode = "eager"
    otherwise: Mode | None = None


@dataclass(frozen=True)
class Machine:
    """Sustained speed: floating-point operations and bytes a second.

    Overheads are seconds in which nothing is computed: of a forward step, and of a call of anything smaller.
    """

    flops: float
    bandwidth: float
    step_overhead: float
    call_overhead: float


@dataclass(frozen=True)
class QuantizedKernel:
    """The kernel of linear layers that are quantized in one way.

    ``itemsize``: bytes of a weight in memory, if it is not held as codes and scales; 0 stands for the bytes of the
    model's dtype.
    """

    kernel: str
    itemsize: int | None = None

    @property
    def keeps_codes(self) -> bool:
        return self.itemsize is None


@dataclass(frozen=True, kw_only=True)
class Facts:
    """Facts about a backend before anything is imported or allocated.

    ``plain_experts``: why experts have no biases and only one activation here; "" where they may. ``plain_routers``:
    why routers score by softmax alone here, without groups, ``no_latents``: why attention reads no latent vectors, and
    ``no_layer_ends``: why no layer has a scalar or an input of its own; "" where they may. ``split``: keys of a KV
    split. ``min_tokens``: a step is padded to at least so many.
    ``asynchronous``: the device goes on after a call returns, so that the host can prepare the next step.
    ``functions`` run a step where layers are compiled functions: of each kind of layer, of all models, and of models
    with an output head. Such a step goes on after a call returns, while its results are not needed.
    ``captures``: programs become graphs.
    ``on_host``: its memory is the host's. ``logs_buckets``: the log tells of each bucket, as the platform's users know
    it. ``pads_context``: the length of contexts is part of a decode program, and attention is padded to it.
    ``host_sampler``: sampling is a plain function on the host, which runs the same code for any number of rows.
    ``quantized``: kernels of quantized layers, by :attr:`preheat.ops.kinds.Scheme.kind`; other kinds are refused.
    ``float16``: models in float16 run as they are, not as bfloat16. ``in_modes``: facts that are others in a mode.
    ``own_graph_memory``: a graph shares its working memory with no other. ``simulated``: it is a fake, and every result
    says so. ``lacks``: traits that the backend cannot have, alone or together, with the reason. ``block_size``,
    ``max_num_seqs``, ``max_num_batched_tokens`` and ``defaults``, by option, serve where none are set.
    ``max_num_expert_tokens``: the tokens of a step for a model with experts, None: as for others. ``rejected``:
    options that must stay at their default, with the reason. ``ignored``: options of another platform's software; they
    have no effect here, and a warning says so.
    """

    name: str
    modes: Modes
    machine: Machine
    split: int
    min_tokens: int = 1
    asynchronous: bool = False
    functions: tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]] = ((), (), ())
    captures: bool = False
    on_host: bool = False
    logs_buckets: bool = False
    pads_context: bool = False
    host_sampler: bool = False
    own_graph_memory: bool = False
    simulated: bool = False
    block_size: int = 64
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    max_num_expert_tokens: int | None = None
    quantized: Mapping[str, QuantizedKernel] = field(default_factory=dict)
    float16: bool = False
    plain_experts: str = ""
    plain_routers: str = ""
    no_latents: str = ""
    no_layer_ends: str = ""
    in_modes: Mapping[Mode, Mapping[str, Any]] = field(default_factory=dict)
    defaults: Mapping[str, Any] = field(default_factory=dict)
    lacks: Lacks = field(default_factory=dict)
    rejected: Mapping[str, str] = field(default_factory=dict)
    ignored: Mapping[str, str] = field(default_factory=dict)

    def in_mode(self, mode: Mode) -> Facts:
        """Return the facts in an execution mode."""
        return replace(self, **self.in_modes.get(mode, {}))


DEQUANTIZED = {
    kind: QuantizedKernel("dequantized while loading, then run like any layer", itemsize=0)
    for kind in ("w8a16", "w4a16")
}
"""Quantized kinds without a kernel that multiplies codes."""

NO_BRIDGE = dict.fromkeys(
    ("lazy_collectives", "disable_tensor_cache", "metrics_gc_details", "pa_softmax_impl"),
    "it is only for Gaudi",
)
"""Options of Gaudi's software, and the answer of other platforms to them."""

NO_PEERS = {"disable_custom_all_reduce": "it is only for GPUs"}
"""Options of exchanges between GPUs, and the answer of other platforms to them."""
