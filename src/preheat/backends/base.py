"""The backend protocol: the only interface to a platform.

A backend is its facts (known without torch: modes, cost figures, rejected options), its memory, and its operations:
linear layers, norms, attention over the paged cache, the sampler, and the driver that runs programs. Everything above
uses this protocol; no platform's name occurs outside of :mod:`preheat.backends`. Nothing here imports torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol, TypeVar, runtime_checkable

import numpy as np

from preheat.combinations import Lacks
from preheat.limits import Limits
from preheat.ops.kinds import NormKind
from preheat.ops.values import Experts, Matmul, Recurrence, Support, Value
from preheat.settings import Settings

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from preheat.backends.cold import Watched
    from preheat.backends.rendezvous import Rendezvous
    from preheat.core import Level, StepStates
    from preheat.ops.delta import DeltaStates, DeltaWeights, Recur
    from preheat.ops.matmul import LowRankPair
    from preheat.ops.quantization import QuantizedRows, QuantizedWeight
    from preheat.ops.sampling import SamplingInput

HOST_COPIES = 2
"""Host copies of data for the device: the host writes one while the device may still read the other."""

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
    ``max_num_seqs``, ``max_num_batched_tokens`` and ``defaults``, by option, serve where none are set. ``rejected``:
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


class Linear(Protocol):
    """A linear layer [rows, inputs] -> [rows, outputs], its activation included.

    The result is returned; it may lie in ``out``.
    """

    def __call__(self, x: Tensor, out: Tensor | None = None) -> Tensor: ...


class Collective(Protocol):
    """Exchanges between the ranks that share a model's layers; all ranks call them in the same order."""

    rank: int
    world: int

    def gather(self, x: Tensor) -> Tensor:
        """Return ``x`` of every rank: [world, *shape], the same on all ranks.

        All ``x`` have one shape and dtype. Bits are moved and nothing else: no conversion and no sum.
        """

    def abort(self) -> None:
        """End all waiting on the device after a rank has died.

        Results are then undefined. Any thread may call it; threads that wait on the host are told by ``check``.
        """

    def fault(self) -> str | None:
        """Return why an exchange on the device ended without another rank's numbers; None if none did.

        Results of all exchanges since are undefined. The device tells the host before a step's results arrive.
        """


AdapterStep = Literal["tokens", "sampled"]
"""The rows of a linear layer: all tokens of a step, or the sampled ones."""


class AdapterRows(Protocol):
    """The adapter of each row of a step: its adapter slot, or a negative number for none."""

    def describe(self, turn: int, step: AdapterStep, slots: np.ndarray) -> None:
        """Send the ``slots``, int32 [rows], of a step's rows to the device; rows beyond are padding.

        ``turn`` is the host copy of the step.
        """

    def use(self, step: AdapterStep | None) -> None:
        """Set the kind of rows for the next calls of linear layers; None: no row has an adapter."""


class AdapterOps(Protocol):
    """Operations for adapters, besides layers with terms."""

    def rows(self, tokens: int, slots: int) -> AdapterRows:
        """Return the rows of steps of at most ``tokens`` tokens, with ``slots`` adapter slots."""


class AdapterSlots(Protocol):
    """The adapter matrices of a layer in all adapter slots, see :class:`preheat.ops.values.LowRank`.

    Matrices are given by the adapted part of the layer: gate, up and down of expert e are parts 3 * e and the next two.
    A rank gives the columns of its inputs, or the rows of its outputs.
    """

    @property
    def bytes(self) -> int:
        """Return the bytes of all adapter slots."""

    def pack(self, parts: Mapping[int, LowRankPair]) -> Any:
        """Return the content of an adapter slot for these matrices, by part.

        An adapter leaves parts without matrices alone. The result is on the host, in the layout and the dtype of a
        slot. Any thread may ask for it.
        """

    def write(self, slot: int, packed: Any) -> None:
        """Copy the result of :meth:`pack` into ``slot``.

        The copies are only launched, and steps launched before do not see them. This neither allocates on the device
        nor compiles.
        """

    def clear(self, slot: int) -> None:
        """Remove the adapter in ``slot`` from this layer."""


class ReadableSlots(AdapterSlots, Protocol):
    """Adapter slots in the host's memory, which an audit reads."""

    def tensors(self) -> Iterable[Tensor]:
        """Return the matrices of all adapter slots."""


class LayerWeights(NamedTuple):
    """The numbers of a layer.

    ``weight`` [outputs, inputs] and ``bias`` [outputs] may be kept or packed anew. A layer that rounds its inputs has
    their scale ``rounding``, fp32 [1], and the greatest number ``most`` after rounding.
    """

    weight: Tensor | QuantizedWeight
    bias: Tensor | None = None
    rounding: Tensor | None = None
    most: float = 0.0


class ExpertsWeights(NamedTuple):
    """The numbers of routed experts.

    ``gate_up`` [experts, 2 * inner, hidden], gates first, and ``down`` [experts, hidden, inner]; both may be kept or
    packed anew. The biases are [experts, 2 * inner] and [experts, hidden], if there are any. ``correction`` fp32
    [experts] is added to the router's scores for the choice, if there is one. ``factors`` fp32 [experts] multiply the
    experts' weights, if there are any.
    """

    gate_up: Tensor | QuantizedWeight
    down: Tensor | QuantizedWeight
    gate_up_bias: Tensor | None = None
    down_bias: Tensor | None = None
    correction: Tensor | None = None
    factors: Tensor | None = None


class LayerContext(NamedTuple):
    """Objects that a layer shares with others.

    ``ranks`` hold the other parts of the layer. ``rows`` come from :meth:`AdapterOps.rows` and tell the adapter of each
    row.
    """

    ranks: Collective | None = None
    rows: Any = None


ALONE = LayerContext()


class HasWeights(Protocol):
    """A layer with tensors for updates, sleep and transfers."""

    def weights(self) -> Iterable[Tensor]:
        """Return the tensors replaced by an update and dropped by sleep, in an order set by the value."""

    def state(self) -> Iterable[Tensor]:
        """Return the tensors that are no weights: counters, flags, adapter slots.

        They are zeros in a new layer.
        """


class Layer(Linear, HasWeights, Protocol):
    """The layer of a :class:`preheat.ops.values.Matmul`.

    ``slots`` hold its adapters; None: its value has no terms. If ranks share the layer's inputs, or divide an adapter's
    first matrices, all ranks call the layer at the same time, and the result is the same on all ranks. ``fused_input``
    is the layer's own way to read its inputs, if any.
    """

    @property
    def slots(self) -> AdapterSlots | None: ...

    def stored(self) -> tuple[Tensor, Tensor | None]:
        """Return the weight [outputs, inputs] and the bias [outputs] of a layer of plain numbers, not sharded."""


@runtime_checkable
class TableLayer(Protocol):
    """A layer with a weight that may serve as the table of embeddings, where the two are tied."""

    def table(self) -> Tensor | None:
        """Return the weight as a table (:mod:`preheat.ops.embedding`), a view; None if a copy serves better."""


class ExpertsLayer(HasWeights, Protocol):
    """The layer of :class:`preheat.ops.values.Experts`; ``slots`` and ``fused_input`` are as in :class:`Layer`."""

    @property
    def slots(self) -> AdapterSlots | None: ...

    def __call__(self, x: Tensor, logits: Tensor) -> Tensor:
        """Return [tokens, hidden] for ``x`` [tokens, hidden] and the router's ``logits`` [tokens, experts]."""


class Embedding(HasWeights, Protocol):
    """The layer of a value with a term looked up by token ids: adapters of a table of embeddings."""

    @property
    def slots(self) -> AdapterSlots | None: ...

    def add(self, tokens: Tensor, slots: Tensor, last_token: Tensor, out: Tensor) -> None:
        """Add to ``out`` [tokens, hidden] the adapters' embeddings of ``tokens`` int32 [tokens].

        -1 stands for ``last_token[slot]``; smaller numbers are no tokens and get nothing.
        """


@dataclass(frozen=True, kw_only=True)
class TuneRequest:
    """Layers of a model to measure, with bounds on rows and time.

    ``layers`` and ``experts`` are measured at up to ``max_rows`` rows, the ``head`` at up to ``max_head_rows``. The
    measurement takes about ``seconds``. The result goes to the file ``output``, or to ``folder``, where boots look for
    it.
    """

    layers: Sequence[Matmul]
    experts: Sequence[Experts]
    head: Matmul
    max_rows: int
    max_head_rows: int
    seconds: float
    output: str | None
    folder: Path | None


class Norm(Protocol):
    """A norm of rows, see :mod:`preheat.ops.norm`."""

    weight: Tensor
    eps: float
    kind: NormKind

    def __call__(self, x: Tensor) -> Tensor:
        """Return the norm of ``x``, a new tensor."""

    def add(self, x: Tensor, residual: Tensor) -> Tensor:
        """Add ``x`` to ``residual`` in place; return the norm of the sum, a new tensor."""


class FusedInput(Protocol):
    """A linear layer's own way to read its inputs, if the norm before it can write them so.

    Layers and experts have it as ``fused_input``.
    """

    def norm(self, norm: Norm, x: Tensor, residual: Tensor | None) -> QuantizedRows:
        """Return the ``norm`` of ``x``, in the form read by the layer.

        With ``residual``, x is added to it in place, and the norm of the sum is returned. All layers with this
        ``fused_input`` take the result in place of a tensor.
        """

    def same(self, other: FusedInput) -> bool:
        """Return whether one result serves both layers."""

    def beside_plain(self) -> FusedInput:
        """Return the fused input for a norm with a result that other layers read unquantized."""


Join = Callable[["Tensor", Norm, "Tensor", FusedInput | None], "Tensor | None"]
"""A layer's own way to add its output to the residual stream and to take the norm of the sum, if it has one.

``join(x, norm, residual, how)`` gives the bits of the layer, the addition in place, and the norm in the form ``how``,
one after the other. It returns None if it does not serve so many rows.
"""

Region = Callable[..., "Tensor"]
"""A part of a layer without state: a function of hidden states [tokens, ...], weights and more."""

K = TypeVar("K")
R = TypeVar("R")
K_contra = TypeVar("K_contra", contravariant=True)
R_co = TypeVar("R_co", covariant=True)


class GraphDriver(Protocol[K_contra, R_co]):
    """Runs ``body(key)``: directly, or as its captured graph."""

    def __contains__(self, key: K_contra) -> bool:
        """Return whether a graph runs ``key``."""

    def run(self, key: K_contra, *, eager: bool = False) -> R_co:
        """Launch the program of ``key``; return the result of its body, overwritten in place by a graph."""

    def capture(self, key: K_contra) -> None:
        """Make a graph of ``key``; all its kernels have run before."""

    def forget(self, key: K_contra) -> None:
        """Give up the graph of ``key``, if there is one."""


class BlockTables(Protocol):
    """The running sequences' block tables, see :class:`preheat.schedule.slots.Slots`.

    A device with one table reads ``block_table``, the first group's of ``tables``.
    """

    block_size: int
    block_table: np.ndarray
    tables: np.ndarray
    table_version: np.ndarray
    table_writes: int


@dataclass(slots=True)
class StepRows:
    """A step's rows for attention.

    Row i computes ``extend[i]`` tokens, from position ``first[i]`` on, of the sequence in slot ``slots[i]``. ``ends``
    int64 counts the step's tokens up to each row's last. The first ``num_decode`` rows decode, one token each. The step
    is padded to ``tokens``, and belongs to a program of ``width``, see :class:`StepInputs`. ``states`` are the state
    slots that the rows use, None if each row uses its own.
    """

    slots: np.ndarray
    first: np.ndarray
    extend: np.ndarray
    ends: np.ndarray
    num_decode: int
    tokens: int
    width: int = 0
    states: StepStates | None = None


@dataclass(slots=True)
class AttentionWork:
    """The pieces of work of a step.

    ``lists[i]`` int32 [n, 2] are written behind the step's tokens, see :class:`preheat.execution.buffers.StepBuffers`.
    ``steady``: the work stays valid for so many more steps of the same rows, all decoding; negative: it is for this
    step alone. ``table_writes``: it is valid only while the block tables have been written so often; negative: writes
    do not matter.
    """

    lists: list[np.ndarray]
    steady: int
    table_writes: int


@dataclass(frozen=True)
class StepInputs:
    """A program's input on the device, all int32.

    ``tokens`` [T] are ids, or -1 for the slot's latest token drawn by the device, or below -1 embeddings of images, see
    :meth:`Operations.embed`. ``slots`` [T] name each token's sequence, ``positions`` [T] its place in the sequence;
    padding has the slot beyond all others. ``lists`` are attention's lists of work, and ``counts`` their numbers of
    entries in use. ``rows`` is the program's largest number of rows. ``width`` is the largest number of tokens of a row
    where all rows decode: 1, or more with drafts; 0 where rows may read prompts. ``longest`` and ``blocks`` belong to
    the bucket, and are 0 where the bucket has none. ``places`` [axes, T] are the places by which tokens turn, None if
    they turn by their position.
    """

    tokens: Tensor
    slots: Tensor
    positions: Tensor
    lists: tuple[Tensor, ...]
    counts: Tensor
    rows: int
    width: int
    longest: int = 0
    blocks: int = 0
    places: Tensor | None = None

    @property
    def decode(self) -> bool:
        """Return whether all rows have one token."""
        return self.width == 1


@dataclass(frozen=True)
class AttentionLayer:
    """Tensors and constants of one layer's attention.

    ``cache`` [blocks, 2, kv heads, block size, dim]; ``rope`` [positions, 2, 1, dim], see
    :func:`preheat.model.rope.rope_table`; ``qk_norm`` norms each query and key head before rotary embedding. ``alibi``
    fp32 [heads]: slope * (key's position - query's) is added to a head's scaled scores, in fp32, before their maximum
    is taken. ``growth`` [positions] are factors of rotated queries; a product is rounded to ``dtype``. Where attention
    is not ``causal``, a token sees all tokens of its row of the step, also the tokens behind it, within ``window`` - 1
    tokens on each side; a step has all tokens of such a row. ``sinks`` fp32 [heads]: a head's sink is a score without a
    key. It joins the softmax as the last KV split: its sum of weights is one, its output zero.
    ``distances`` fp32 [heads, columns] are added to scaled scores, see :mod:`preheat.ops.distances`. A ``cache`` with
    one index in place of two has keys that are values too. The first ``still`` numbers of a head do not turn, and
    ``rope`` has the others. ``group`` is the number of the layer's cache group, with its block table. With ``by_token``
    row i of ``rope`` belongs to token i of the step, in place of position i: each step writes it. A layer that is not
    ``own`` reads the keys and values in its ``cache``, and stores none.

    Queries and outputs are of ``dtype``. In a cache of eight bits, keys and values are divided by ``kv_scales`` and
    rounded to the cache's dtype, see :mod:`preheat.ops.float8`. Attention reads only stored keys and values, also for a
    prompt's own chunk: ``scale`` times the keys' scale multiplies the scores, the values' scale the output.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    window: int | None
    cache: Tensor
    dtype: torch.dtype
    rope: Tensor | None
    qk_norm: Norm | None
    alibi: Tensor | None = None
    kv_scales: tuple[float, float] = (1.0, 1.0)
    growth: Tensor | None = None
    causal: bool = True
    sinks: Tensor | None = None
    distances: Tensor | None = None
    still: int = 0
    group: int = 0
    by_token: bool = False
    own: bool = True


Attend = Callable[[int, "Tensor"], "Tensor"]
"""``attend(layer, qkv)``: the attention of one layer, [tokens, heads * dim].

It norms and rotates the queries and keys of ``qkv`` [tokens, heads + 2 * kv heads, dim], stores keys and values, and
attends with the queries. A layer without its own keys and values is given queries alone.
"""


class Attention(Protocol):
    """Attention of all layers over the paged cache."""

    def list_sizes(self, tokens: int, rows: int, *, width: int) -> tuple[int, ...]:
        """Return the capacity of each list of work.

        Steps have ``tokens`` tokens in at most ``rows`` rows, and belong to programs of ``width``, see
        :class:`StepInputs`.
        """

    def plan(self, step: StepRows, tables: BlockTables) -> AttentionWork:
        """Cut ``step`` into work, on the host."""

    def write(self, turn: int, tables: BlockTables) -> None:
        """Bring host copy ``turn`` of the device's tables up to date."""

    def send(self, turn: int, work: AttentionWork, inputs: StepInputs) -> None:
        """Send work and tables to the device, before the step's programs run; returns before they arrive."""

    def attend(self, inputs: StepInputs, out: Tensor) -> Attend:
        """Return the function that the decoder calls in each layer of a program with these inputs.

        ``out`` [tokens, heads * dim] may be used for the results.
        """

    def clear(self) -> None:
        """Set every block table on the device to the pad block."""


class Recurrences(Protocol):
    """Recurrences of all layers with states, by kernels of the device. See :mod:`preheat.ops.delta`."""

    def states(self, value: Recurrence, slots: int, dtype: torch.dtype) -> DeltaStates:
        """Return the zero states of a layer, in the device's own layout."""

    def plan(self, step: StepRows, states: StepStates) -> Any:
        """Return the rows of ``step`` in the form of the device, on the host."""

    def send(self, turn: int, rows: Any) -> None:
        """Send the ``rows`` of a step in host copy ``turn``; returns before they arrive."""

    def run(self, inputs: StepInputs, x: Tensor, weights: DeltaWeights, states: DeltaStates, out: Tensor) -> Tensor:
        """Fill ``out`` [tokens, value heads * value dim] for ``x`` [tokens, inputs], and move the states on.

        The rows that were sent last are computed. A padding token's output is zero.
        """

    def clear(self) -> None:
        """Let no program compute a row until rows are sent."""


class SharedParts(NamedTuple):
    """An expert that all tokens visit; ``gate`` is [1, hidden], if there is one."""

    gate_up: Linear
    down: Linear
    gate: Tensor | None


class RoutedParts(NamedTuple):
    """The parts of a feed-forward block of experts."""

    router: Linear
    experts: ExpertsLayer
    shared: SharedParts | None


@dataclass(frozen=True, slots=True)
class LayerParts:
    """The parts of one decoder layer.

    ``gate_up`` and ``down`` are the feed-forward block, None if it is ``routed``. ``o_norm`` norms the output of
    attention before its addition to the residual stream, ``down_norm`` the output of the block. ``whole_qk_norm`` norms
    all query heads together, and all key heads together. ``parallel``: the second norm reads the residual stream as
    attention found it.
    """

    attention: AttentionLayer
    input_norm: Norm
    post_norm: Norm
    qkv: Linear
    o: Linear
    gate_up: Linear | None
    down: Linear | None
    routed: RoutedParts | None
    o_norm: Norm | None
    down_norm: Norm | None
    whole_qk_norm: tuple[Norm, Norm] | None = None
    parallel: bool = False


class LayerFunctions(Protocol):
    """Decoder layers as two functions each."""

    @property
    def attention(self) -> Attention:
        """The attention that tells the functions of a step."""

    def layers(self, part: Sequence[int], residual: Tensor, given: Tensor | None = None) -> Tensor:
        """Run consecutive layers on the residual stream [tokens, hidden] in place; return the stream.

        ``given`` [tokens, inputs] are the inputs of a layer that reads others than the norm of the stream.
        Of the last layer only the front runs: the output of its attention [tokens, heads * dim] is returned, valid
        until the next call. Rows that pad a step are not computed.
        """

    def build(self, function: str, layer: int | None = None) -> str:
        """Compile a ``function``, or the function of a layer, unless it is there. Return its name in the code.

        ``function`` is one of :attr:`Facts.functions`. Equal functions of several layers have one name.
        """

    def tables(self) -> Iterable[Tensor]:
        """Return the tables that functions read and no step writes."""

    def finish(self, attended: Tensor, residual: Tensor) -> Tensor:
        """Return hidden states [rows, hidden] after the last layer and the final norm; ``residual`` is overwritten."""

    def start(self, residual: Tensor, index: Tensor, head: Linear, logits: Tensor) -> Tensor | None:
        """Start all layers and ``head`` on the residual stream [tokens, hidden]; return before they are done.

        The output of the last attention is returned, as :meth:`layers` returns it. ``logits`` [size, vocab] become the
        logits of the tokens ``index``, int32 [size]. Both are there after :meth:`wait`, and no tensor of the step may
        change before. Return None, and start nothing, if the step has adapters or there is no function of ``head``.
        """

    def wait(self) -> None:
        """Wait for the step that was started last; return at once if there is none."""

    def take(self, attended: Tensor, residual: Tensor, index: Tensor) -> Tensor:
        """Return hidden states [size, hidden] of the tokens ``index``, int32 [size], valid until the next call.

        The states have the bits of :meth:`finish` on these tokens alone. ``residual`` is left as it is.
        """


class Sampler(Protocol):
    """Draws tokens and reports log-probabilities.

    Its state is the penalties' token counts and ``last_token``, int32 [slots + 1], the latest token of each slot.
    """

    last_token: Tensor

    def describe(self, turn: int, step: SamplingInput, slots: np.ndarray) -> None:
        """Describe the rows to sample to the device; they belong to the sequences in ``slots`` [step.size]."""

    def masks(self, turn: int) -> np.ndarray:
        """Return host copy ``turn`` of the masks, int32 [rows, words].

        Bit i % 32 of word i // 32 says whether token i is allowed. :meth:`describe` sends the masks of ``step.masked``,
        so write them before.
        """

    def sample(self, level: Level, logits: Tensor) -> None:
        """Draw a token for each row of ``logits`` [rows, vocab] as described.

        Rows beyond ``step.size`` are padding.
        """

    def report(self, logits: Tensor) -> None:
        """Compute log-probabilities of the drawn and the most likely tokens, of raw ``logits`` [rows, vocab]."""

    def fetch(self, turn: int, *, tokens: bool, reports: bool) -> None:
        """Send the wanted answers to the host; returns before they arrive."""

    def read(self, turn: int, rows: int, reporting: np.ndarray, alternatives: np.ndarray) -> SampledRows:
        """Wait for fetched answers; return tokens and reports.

        Tokens are of the first ``rows`` rows. Reports are of the rows at the places ``reporting``, with
        ``alternatives`` most likely tokens each.
        """

    def logprobs(self, logits: Tensor, tokens: np.ndarray, alternatives: int) -> list[Any]:
        """Return reports of ``tokens`` int32 [n] under the first n rows of raw ``logits``.

        Waits for the device.
        """

    def compile(self, logits: Tensor) -> None:
        """Build the kernels that no program launches."""

    def clear(self) -> None:
        """Tell the device that the current step has no rows."""

    def forget(self) -> None:
        """Reset all state, as after creation."""


StepCounter = Callable[[], tuple[int, float | None]]
"""Returns a number that only grows, and the seconds spent on its events; None where nobody counts seconds."""

SampledRows = tuple[np.ndarray, "list[Any]"]
"""Sampled tokens and the requested reports.

Tokens are integers [rows], marked as by :func:`preheat.core.marked`. Reports are TokenLogprobs or, where an engine
pools the hidden states of tokens, fp32 [hidden].
"""


class Operations(Protocol):
    """The operations of one model on one device."""

    def layer(self, value: Matmul, weights: LayerWeights, context: LayerContext = ALONE) -> Layer:
        """Return the layer of ``value`` with these ``weights``.

        For a value with a term looked up by token ids it is an :class:`Embedding`.
        """

    def experts(self, value: Experts, weights: ExpertsWeights, context: LayerContext = ALONE) -> ExpertsLayer:
        """Return the routed experts of ``value`` with these ``weights``."""

    def norm(self, weight: Tensor, eps: float, kind: NormKind = "rms", bias: Tensor | None = None) -> Norm: ...

    def embed(
        self,
        inputs: StepInputs,
        last_token: Tensor,
        table: Tensor,
        out: Tensor,
        *,
        scale: float | None = None,
        positions: Tensor | None = None,
        images: Tensor | None = None,
        types: Tensor | None = None,
    ) -> None:
        """Fill ``out`` [tokens, hidden] with the embeddings of the step's tokens.

        Tokens name rows of ``table``, [vocab, hidden] or a :class:`TableLayer`'s. The rows are multiplied by ``scale``.
        The rows of ``positions`` [positions, hidden] at the tokens' positions are added; see
        :mod:`preheat.ops.embedding`. With ``images`` [rows, hidden], the token -2 - row is that row of ``images``. With
        ``types`` [types, hidden], tokens have types.
        """

    def add_shared(self, routed: Tensor, x: Tensor, gate: Tensor, shared: Tensor) -> Tensor:
        """Return ``routed`` plus the ``shared`` expert's output for ``x``, times its ``gate``.

        All are [tokens, hidden], but ``gate`` is [1, hidden]; see :func:`preheat.ops.moe.add_shared`.
        """

    def recur(self, value: Recurrence) -> Recur:
        """Return the function of a layer's recurrence, see :func:`preheat.ops.delta.recur`."""

    def recurrences(self, limits: Limits) -> Recurrences | None:
        """Return kernels of whole recurrences for steps within ``limits``.

        None: the reference runs around :meth:`recur`.
        """

    def gated(self, out: Tensor, gates: Tensor) -> Tensor:
        """Return ``out`` times the sigmoids of ``gates``, see :mod:`preheat.ops.gate`; it may lie in ``out``."""

    def take_rows(self, x: Tensor, index: Tensor) -> Tensor:
        """Return the rows ``index`` int32 of ``x``, a new tensor."""

    def row_digests(self, logits: Tensor) -> Tensor:
        """Return the digest of each row, int64 [rows], see :mod:`preheat.ops.digest`."""


class Link(Collective, Protocol):
    """A collective between the stages of a pipeline; a CPU's collective is one."""

    def broadcast(self, x: Tensor, source: int) -> Tensor:
        """Fill ``x``, contiguous, with ``x`` of rank ``source``, and return it.

        All ``x`` have one shape and dtype.
        """


class Sharing(Protocol):
    """Rendezvous of the ranks that share a model's layers."""

    def join(self, rendezvous: Rendezvous, check: Callable[[], None]) -> Collective:
        """Meet the other ranks; one rank alone needs nobody.

        ``check`` is called during the wait for the others, and raises if a rank has died.
        """


class DeviceEvent(Protocol):
    """A point in the device's work that the host can wait for."""

    def record(self) -> None:
        """Move the event behind all work launched so far."""

    def wait(self) -> None:
        """Return once the device has done the work before the event; at once if it was never recorded."""


class HostEvent:
    """The event of a device whose calls return when their work is done."""

    def record(self) -> None:
        """Do nothing: the work is done."""

    def wait(self) -> None:
        """Return at once."""


class SleepMemory(Protocol):
    """Memory of the device that can be given back and taken again at the same addresses, by tag."""

    def taking(self, tag: str) -> AbstractContextManager[None]:
        """Let this thread's allocations inside sleep under ``tag``."""

    def pin(self, tag: str) -> int:
        """Take memory on the host for the contents of ``tag``, ahead of sleep; return its bytes."""

    def sleep(self, tag: str, *, keep: bool) -> None:
        """Give the memory back; ``keep``: its contents go to the host, else they are lost."""

    def wake(self, tag: str) -> None:
        """Take memory again; contents that were not kept are undefined."""


class Backend(Operations, Protocol):
    """One kind of device.

    ``sharing`` is None where no ranks can share layers, ``adapters`` where there are no kernels for adapters.
    """

    facts: Facts
    device: torch.device
    sharing: Sharing | None
    adapters: AdapterOps | None

    @property
    def fingerprint(self) -> str:
        """Return a text that differs between devices if their compiled code or bits may differ."""

    def free_memory(self) -> int:
        """Return the bytes that may still be allocated on the device."""

    def used_memory(self) -> int:
        """Return the bytes held by this process on the device."""

    def peak_memory(self, run: Callable[[], None]) -> int:
        """Call ``run``; return the most bytes it held on the device at once.

        ``run`` leaves nothing on the device. Memory for loading and compiling counts.
        """

    def kv_cache_memory(self) -> int | None:
        """Return the bytes of KV cache if no size is set; None means a share of the free memory."""

    def supports(self, value: Value) -> Support:
        """Return whether the device runs the layer of ``value``, and with its terms.

        See :mod:`preheat.backends.support`.
        """

    def supports_bfloat16(self) -> bool:
        """Return whether the device multiplies bfloat16 natively."""

    def prepare(self, settings: Settings, mode: Mode, cache: Path | None) -> None:
        """Set process-wide state before any computation; ``cache`` is the folder of stores and tables.

        It is called once for each ``mode`` that the boot tries.
        """

    def synchronize(self) -> None:
        """Wait until the device has finished all its work."""

    def host_copy(self, tensor: Tensor) -> Tensor:
        """Return zeros like ``tensor`` on the host, in memory for copies without waiting."""

    def event(self) -> DeviceEvent:
        """Return a new event on the device."""

    def sleep_memory(self) -> SleepMemory | None:
        """Return memory that can sleep at fixed addresses; None where addresses may change."""

    def uploading(self) -> AbstractContextManager[Callable[[Tensor, Tensor], None]]:
        """Yield ``copy(source, out)`` for loading weights, from a tensor of the host into its place."""

    def regions(self, mode: Mode, cache: Path | None) -> Callable[[Region], Region]:
        """Return a builder for the regions of a layer in ``mode``; compiled code is kept in ``cache``."""

    def activation_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Return the dtype of the residual stream of a model that was loaded in ``dtype``."""

    def functions(
        self, layers: Sequence[LayerParts], final_norm: Norm, others: Sequence[object], limits: Limits
    ) -> LayerFunctions | None:
        """Return whole layers as functions; None: a layer is regions and operations.

        ``others`` are the linear layers outside of ``layers``: the head's, and a vision tower's.
        Raises ModelError, with the reason, for a layer that has no function.
        """

    def programs(self, body: Callable[[K], R], attention: Attention | None = None) -> GraphDriver[K, R]:
        """Return a driver that runs ``body(key)`` for each key.

        ``body`` reads the input sent by ``attention``, if given. Programs run one after the other: graphs share their
        working memory.
        """

    def compiling(self, threads: int) -> AbstractContextManager[None] | None:
        """Build kernels launched inside by so many ``threads``, without running them.

        None: there is nothing to build ahead.
        """

    def select_kernels(self, layers: Iterable[tuple[Linear | ExpertsLayer, Sequence[int]]]) -> None:
        """Choose and prove the kernels of linear layers and experts at so many rows, before there is a cache."""

    def tune(self, request: TuneRequest) -> str:
        """Measure the fastest kernel of each linear layer, for later boots; return a sentence about it.

        Raises SettingsError if there is no choice of kernels, or no place for the result.
        """

    def attention(self, layers: Sequence[AttentionLayer], limits: Limits, *, contiguous: bool) -> Attention:
        """Return the attention of all ``layers``.

        ``contiguous``: decode reads the cache in place where the backend can (``--contiguous-pa``).
        """

    def sampler(
        self, limits: Limits, vocab_size: int, *, max_logprobs: int, handle_topk_duplicates: bool, masked: bool = False
    ) -> Sampler:
        """Return a sampler; ``masked``: rows may have masks."""

    def cold_sources(self) -> Mapping[str, Watched]:
        """Return how each of :data:`preheat.warmup.cold_sources.ORIGINS` is watched."""

    def step_counters(self) -> Mapping[str, StepCounter]:
        """Return the counters in the log of every step: ``compilations``, and ``fallbacks`` to the host."""
