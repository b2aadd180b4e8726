"""The backend protocol: the one place that knows a platform.

A backend is its facts (known without torch: modes, cost figures, what it rejects), its memory, and its operations:
linear layers, norms, attention over the paged cache, the sampler, and the driver that runs programs. Everything above
asks these; no platform's name occurs outside of :mod:`preheat.backends`. Nothing here imports torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol, TypeVar

import numpy as np

from preheat.combinations import Lacks
from preheat.limits import Limits
from preheat.ops.kinds import NormKind
from preheat.ops.values import Experts, Matmul, Support, Value
from preheat.settings import Settings

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from preheat.backends.cold import Watched
    from preheat.backends.meeting import Meeting
    from preheat.core import Level
    from preheat.ops.matmul import LowRankPair
    from preheat.ops.quantization import QuantizedRows, QuantizedWeight
    from preheat.ops.sampling import SamplingInput

HOST_COPIES = 2
"""Copies on the host of what travels to the device: one is written while the device may still read the other."""

Mode = Literal["graphs", "compile", "eager", "lazy"]

NO_LAZY_BRIDGE = "it is the lazy backend of Gaudi's PyTorch bridge, which this platform has not"


@dataclass(frozen=True, kw_only=True)
class Modes:
    """The execution mode a backend takes by default, what each mode that it ``runs`` does there, and why the others are
    ``rejected``. ``enforced`` is what ``enforce_eager`` alone asks for.
    """

    default: Mode
    runs: Mapping[Mode, str]
    rejected: Mapping[Mode, str]
    enforced: Mode = "eager"


@dataclass(frozen=True)
class Machine:
    """Sustained speed: floating-point operations and bytes a second. Overheads are the seconds of a forward step, and
    of a call of anything smaller, in which nothing is computed.
    """

    flops: float
    bandwidth: float
    step_overhead: float
    call_overhead: float


@dataclass(frozen=True)
class QuantizedKernel:
    """What computes linear layers that are quantized in one way. ``itemsize``: bytes of a weight in memory, where it is
    not held as codes and scales; 0 stands for those of the model's dtype.
    """

    kernel: str
    itemsize: int | None = None

    @property
    def keeps_codes(self) -> bool:
        return self.itemsize is None


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What is known of a backend before anything is imported or allocated.

    ``split``: keys of a KV split. ``min_tokens``: a step is padded to at least so many. ``asynchronous``: the device
    goes on after a call returns, so that the host can prepare the next step. ``captures``: programs become graphs.
    ``on_host``: its memory is the host's. ``logs_buckets``: the log tells of each bucket, as the platform's users know
    it. ``pads_context``: the length of contexts is part of a decode program, whose attention is padded to it.
    ``host_sampler``: sampling is a plain function on the host, which runs the same code for any number of rows.
    ``quantized``: what computes quantized layers, by :attr:`preheat.ops.kinds.Scheme.kind`; others are refused.
    ``own_graph_memory``: a graph shares its working memory with no other. ``simulated``: it is a fake, which every
    result says. ``lacks``: the traits that it cannot have, alone or together, with the reason. ``block_size``,
    ``max_num_seqs``, ``max_num_batched_tokens`` and ``defaults``, by option, serve where none are set. ``rejected``:
    options that must stay at their default, with the reason. ``ignored``: options of another platform's software, which
    have no effect here, as a warning says.
    """

    name: str
    modes: Modes
    machine: Machine
    split: int
    min_tokens: int = 1
    asynchronous: bool = False
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
    defaults: Mapping[str, Any] = field(default_factory=dict)
    lacks: Lacks = field(default_factory=dict)
    rejected: Mapping[str, str] = field(default_factory=dict)
    ignored: Mapping[str, str] = field(default_factory=dict)


DEQUANTIZED = {
    kind: QuantizedKernel("dequantized while loading, then as any layer", itemsize=0) for kind in ("w8a16", "w4a16")
}
"""Where no kernel multiplies codes."""

NO_BRIDGE = dict.fromkeys(
    ("lazy_collectives", "disable_tensor_cache", "metrics_gc_details", "pa_softmax_impl"),
    "it is for Gaudi, which this platform is not",
)
"""Options of Gaudi's software, and what other platforms say of them."""


class Linear(Protocol):
    """A linear layer [rows, inputs] -> [rows, outputs], its activation included. ``out`` may be used for the result,
    which is what is returned.
    """

    def __call__(self, x: Tensor, out: Tensor | None = None) -> Tensor: ...


class Collective(Protocol):
    """What the ranks that share a model's layers do together: all of them, in the same order."""

    rank: int
    world: int

    def gather(self, x: Tensor) -> Tensor:
        """``x`` of every rank, all of one shape and dtype: [world, *shape], the same on all ranks. Bits are moved and
        nothing else: no conversion and no sum.
        """

    def abort(self) -> None:
        """A rank has died: what waits for it on the device ends, with results that nobody may use. May be called by any
        thread; those who wait on the host are told by ``check``.
        """


AdapterStep = Literal["tokens", "sampled"]
"""What the rows of a linear layer are: all tokens of a step, or those that are sampled."""


class AdapterRows(Protocol):
    """Which adapter each row of a step has: its place on the device, or a negative number for none."""

    def describe(self, turn: int, step: AdapterStep, slots: np.ndarray) -> None:
        """Let the device know the ``slots``, int32 [rows], of a step's rows; those beyond pad. ``turn`` is the host
        copy of the step.
        """

    def use(self, step: AdapterStep | None) -> None:
        """The linear layers that are called next have rows of this kind; None: no row has an adapter."""


class AdapterOps(Protocol):
    """What adapters need of a device besides layers with terms."""

    def rows(self, tokens: int, slots: int) -> AdapterRows:
        """For steps of at most so many tokens, and adapters in so many slots."""


class AdapterSlots(Protocol):
    """The matrices of the adapters in all slots of a layer, see :class:`preheat.ops.values.LowRank`.

    Matrices are given by the part of the layer that they adapt: those of experts are gate, up and down of expert e,
    parts 3 * e and the next two. A rank gives the columns of its inputs, or the rows of its outputs.
    """

    @property
    def bytes(self) -> int:
        """Bytes of all slots."""

    def pack(self, parts: Mapping[int, LowRankPair]) -> Any:
        """What a slot holds of an adapter with these matrices, by part; others it leaves alone. On the host, in the
        layout and the dtype of a slot. Any thread may ask for it.
        """

    def write(self, slot: int, packed: Any) -> None:
        """Put what :meth:`pack` gave into ``slot``. Only copies are asked for, not waited for, and steps that were
        launched before do not see them. It neither allocates on the device nor compiles.
        """

    def clear(self, slot: int) -> None:
        """The adapter in ``slot`` leaves this layer alone."""


class LayerWeights(NamedTuple):
    """The numbers of a layer: ``weight`` [outputs, inputs] and ``bias`` [outputs], which may be kept or packed anew. A
    layer that rounds its inputs has their scale ``rounding``, fp32 [1], and the greatest number ``most`` after it.
    """

    weight: Tensor | QuantizedWeight
    bias: Tensor | None = None
    rounding: Tensor | None = None
    most: float = 0.0


class ExpertsWeights(NamedTuple):
    """The numbers of routed experts: ``gate_up`` [experts, 2 * inner, hidden], gates first, and ``down`` [experts,
    hidden, inner]; both may be kept or packed anew.
    """

    gate_up: Tensor | QuantizedWeight
    down: Tensor | QuantizedWeight


class LayerContext(NamedTuple):
    """What a layer shares with others: the ``ranks`` that have the rest of it, and the ``rows`` that
    :meth:`AdapterOps.rows` gave, by which it knows the adapter of each row.
    """

    ranks: Collective | None = None
    rows: Any = None


ALONE = LayerContext()


class HasWeights(Protocol):
    """A layer that an update, a sleep and a transfer may ask for its tensors."""

    def weights(self) -> Iterable[Tensor]:
        """The tensors whose numbers an update replaces and a sleep drops, in an order that the value decides."""

    def state(self) -> Iterable[Tensor]:
        """The tensors that are no weights: counters, flags, adapter slots. They are zeros in a new layer."""


class Layer(Linear, HasWeights, Protocol):
    """The layer of a :class:`preheat.ops.values.Matmul`. ``slots`` hold its adapters; None: its value has no terms.

    On ranks that share its inputs, or divide an adapter's first matrices, all call it at the same time, and the result
    is the same on all ranks. A layer that reads its inputs in a way of its own has it as ``fused_input``.
    """

    @property
    def slots(self) -> AdapterSlots | None: ...


class ExpertsLayer(HasWeights, Protocol):
    """The layer of :class:`preheat.ops.values.Experts`. ``slots`` and ``fused_input`` are as those of a layer."""

    @property
    def slots(self) -> AdapterSlots | None: ...

    def __call__(self, x: Tensor, logits: Tensor) -> Tensor:
        """``x`` [tokens, hidden] and the router's ``logits`` [tokens, experts] -> [tokens, hidden]."""


class Embedding(HasWeights, Protocol):
    """The layer of a value whose term is looked up by token ids: what adapters add to a table of embeddings."""

    @property
    def slots(self) -> AdapterSlots | None: ...

    def add(self, tokens: Tensor, slots: Tensor, last_token: Tensor, out: Tensor) -> None:
        """Add to ``out`` [tokens, hidden] what the adapters of its rows have for their ``tokens`` int32 [tokens]; -1
        stands for ``last_token[slot]``, less for what is no token.
        """


@dataclass(frozen=True, kw_only=True)
class TuneRequest:
    """Linear ``layers`` to measure at up to ``max_rows`` rows, ``experts``, and the ``head`` at up to
    ``max_head_rows``, for about ``seconds``.

    The result goes to the file ``output``, or to ``folder``, where boots look for it.
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
        """The norm of ``x``, a new tensor."""

    def add(self, x: Tensor, residual: Tensor) -> Tensor:
        """Add ``x`` to ``residual`` in place, then the norm of the sum, a new tensor."""


class FusedInput(Protocol):
    """How a linear layer reads its inputs, where the norm before it can give them so. A layer or experts that have it
    have it as ``fused_input``.
    """

    def norm(self, norm: Norm, x: Tensor, residual: Tensor | None) -> QuantizedRows:
        """The ``norm`` of ``x``, or of what it is added to: ``residual``, in place. All that read so take it in place
        of a tensor.
        """

    def same(self, other: FusedInput) -> bool:
        """Whether one result does for both."""

    def beside_plain(self) -> FusedInput:
        """The same for layers, some of which read the norm's result as it is."""


Region = Callable[..., "Tensor"]
"""A part of a layer: a function of its hidden states [tokens, ...], the layer's weights and more, without a state."""

K = TypeVar("K")
R = TypeVar("R")
K_contra = TypeVar("K_contra", contravariant=True)
R_co = TypeVar("R_co", covariant=True)


class GraphDriver(Protocol[K_contra, R_co]):
    """Runs ``body(key)``: directly, or as a graph that was captured of it."""

    def __contains__(self, key: K_contra) -> bool:
        """Whether a graph runs ``key``."""

    def run(self, key: K_contra, *, eager: bool = False) -> R_co:
        """Launch the program of ``key``; what its body returned, which a graph overwrites in place."""

    def capture(self, key: K_contra) -> None:
        """Make a graph of ``key``, all of whose kernels have run before."""

    def forget(self, key: K_contra) -> None:
        """Give up the graph of ``key``, if there is one."""


class BlockTables(Protocol):
    """The running sequences' block tables, see :class:`preheat.schedule.slots.Slots`."""

    block_size: int
    block_table: np.ndarray
    table_version: np.ndarray
    table_writes: int


@dataclass(slots=True)
class StepRows:
    """A step's rows as attention sees them: row i computes ``extend[i]`` tokens from position ``first[i]`` on of the
    sequence in slot ``slots[i]``; ``ends`` int64 count the step's tokens up to each row's last. The first
    ``num_decode`` rows decode, one token each. The step is padded to ``tokens``, and is of a program of ``width``, see
    :class:`StepInputs`.
    """

    slots: np.ndarray
    first: np.ndarray
    extend: np.ndarray
    ends: np.ndarray
    num_decode: int
    tokens: int
    width: int = 0


@dataclass(slots=True)
class AttentionWork:
    """How a step is cut into work: ``lists[i]`` int32 [n, 2] are written behind the step's tokens, see
    :class:`preheat.execution.buffers.StepBuffers`. ``steady``: for so many more steps of the same rows, all decoding,
    it stays what it is; negative: it is for this step alone. ``table_writes``: only while the block tables have been
    written so often; negative: whatever becomes of them.
    """

    lists: list[np.ndarray]
    steady: int
    table_writes: int


@dataclass(frozen=True)
class StepInputs:
    """A program's input on the device, all int32.

    ``tokens`` [T] are ids, or -1 for the token that the device drew last for the slot, or below that embeddings of
    images, see :meth:`Operations.embed`. ``slots`` [T] name each token's
    sequence, ``positions`` [T] its place in it; padding has the slot beyond all others. ``lists`` are attention's,
    ``counts`` say how many entries of each are in use. ``rows`` are the most that the program has. ``width`` is the
    most tokens of a row where all rows decode: 1, or more with drafts; 0 where rows may read prompts. ``longest`` and
    ``blocks`` are those of the bucket, 0 where they are no part of it.
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

    @property
    def decode(self) -> bool:
        """Whether all rows have one token."""
        return self.width == 1


@dataclass(frozen=True)
class AttentionLayer:
    """What one layer's attention works with. ``cache`` [blocks, 2, kv heads, block size, dim]; ``rope`` [positions, 2,
    1, dim], see :func:`preheat.model.rope.rope_table`; ``qk_norm`` norms each query and key head before they turn.
    ``alibi`` fp32 [heads]: slope * (key's position - query's) is added to a head's scaled scores, in fp32, before
    their maximum is taken.

    Queries and outputs are of ``dtype``. Where the cache is of eight bits, keys and values are divided by ``kv_scales``
    and rounded to it, see :mod:`preheat.ops.float8`, and all attention is to what is stored, that of a prompt's own
    chunk too: ``scale`` times the keys' scale multiplies the scores, the values' scale the output.
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


Attend = Callable[[int, "Tensor"], "Tensor"]
"""``attend(layer, qkv)``: norm and turn the queries and keys of ``qkv`` [tokens, heads + 2 * kv heads, dim], store its
keys and values, attend with its queries; returns [tokens, heads * dim]."""


class Attention(Protocol):
    """Attention of all layers over the paged cache."""

    def list_sizes(self, tokens: int, rows: int, *, width: int) -> tuple[int, ...]:
        """The most entries of each list of work, for steps of ``tokens`` in at most ``rows``, of programs of ``width``,
        see :class:`StepInputs`.
        """

    def plan(self, step: StepRows, tables: BlockTables) -> AttentionWork:
        """On the host: how ``step`` is cut into work."""

    def write(self, turn: int, tables: BlockTables) -> None:
        """On the host: bring host copy ``turn`` of what the device knows of ``tables`` up to date."""

    def send(self, turn: int, work: AttentionWork, inputs: StepInputs) -> None:
        """Let the device have it, before the step's programs run; returns before it is there."""

    def attend(self, inputs: StepInputs, out: Tensor) -> Attend:
        """What the decoder calls in each layer of a program with these inputs. ``out`` [tokens, heads * dim] may be
        used for the results.
        """

    def clear(self) -> None:
        """On the device every block table is all pad block."""


class Sampler(Protocol):
    """Draws tokens and reports log-probabilities; its state is the penalties' token counts and ``last_token``, int32
    [slots + 1], the latest token of each slot.
    """

    last_token: Tensor

    def describe(self, turn: int, step: SamplingInput, slots: np.ndarray) -> None:
        """Let the device know of the rows to sample, which belong to the sequences in ``slots`` [step.size]."""

    def masks(self, turn: int) -> np.ndarray:
        """Host copy ``turn`` of the masks, int32 [rows, words]: bit i % 32 of word i // 32 says whether token i is
        allowed. :meth:`describe` sends those of ``step.masked``, so they are written before.
        """

    def sample(self, level: Level, logits: Tensor) -> None:
        """Draw a token for each row of ``logits`` [rows, vocab] as described; rows beyond ``step.size`` pad."""

    def report(self, logits: Tensor) -> None:
        """Log-probabilities of the drawn tokens and of the most likely ones, of raw ``logits`` [rows, vocab]."""

    def fetch(self, turn: int, *, tokens: bool, reports: bool) -> None:
        """Send what is wanted of the answers to the host; returns before it is there."""

    def read(self, turn: int, rows: int, reporting: np.ndarray, alternatives: np.ndarray) -> SampledRows:
        """Wait for what was fetched: the tokens of the first ``rows`` rows, and of the rows at the places ``reporting``
        the log-probabilities, with so many ``alternatives`` each.
        """

    def logprobs(self, logits: Tensor, tokens: np.ndarray, alternatives: int) -> list[Any]:
        """Reports of ``tokens`` int32 [n] under the first n rows of raw ``logits``. Waits for the device."""

    def compile(self, logits: Tensor) -> None:
        """Build the kernels that no program launches."""

    def clear(self) -> None:
        """What the device was told last describes no rows."""

    def forget(self) -> None:
        """Be as new."""


StepCounter = Callable[[], tuple[int, float | None]]
"""A number that only grows, and the seconds that went into it, None where nobody counts them."""

SampledRows = tuple[np.ndarray, "list[Any]"]
"""Tokens, integers [rows], as :func:`preheat.core.marked` marks them, and the reports that were asked for:
TokenLogprobs, but where an engine pools the hidden states of tokens, fp32 [hidden]."""


class Operations(Protocol):
    """The operations of one model on one device."""

    def layer(self, value: Matmul, weights: LayerWeights, context: LayerContext = ALONE) -> Layer:
        """The layer of ``value`` with these ``weights``. For a value whose term is looked up by token ids it is an
        :class:`Embedding`.
        """

    def experts(self, value: Experts, weights: ExpertsWeights, context: LayerContext = ALONE) -> ExpertsLayer:
        """The routed experts of ``value`` with these ``weights``."""

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
    ) -> None:
        """Fill ``out`` [tokens, hidden] with the rows of ``table`` that the step's tokens name, times ``scale``, plus
        the rows of ``positions`` [positions, hidden] at their positions; see :mod:`preheat.ops.embedding`. With
        ``images`` [rows, hidden], the token -2 - row is that row of them.
        """

    def add_shared(self, routed: Tensor, x: Tensor, gate: Tensor, shared: Tensor) -> Tensor:
        """``routed`` plus what the ``shared`` expert gave for ``x``, times its ``gate``: all [tokens, hidden], but
        ``gate`` [1, hidden]; see :func:`preheat.ops.moe.add_shared`.
        """

    def take_rows(self, x: Tensor, index: Tensor) -> Tensor:
        """The rows of ``x`` that ``index`` int32 names, a new tensor."""

    def row_digests(self, logits: Tensor) -> Tensor:
        """int64 [rows], see :mod:`preheat.ops.digest`."""


class Link(Collective, Protocol):
    """A collective by which stages of a pipeline hand on; that of a CPU is one."""

    def broadcast(self, x: Tensor, source: int) -> Tensor:
        """Fill ``x``, contiguous, with what it is on rank ``source``; all have one shape and dtype. Returns it."""


class Sharing(Protocol):
    """How ranks meet that share a model's layers."""

    def join(self, meeting: Meeting, check: Callable[[], None]) -> Collective:
        """Meet the other ranks. ``check``, which raises where a rank has died, is called while one waits for them. One
        rank alone needs nobody.
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
        """What this thread allocates inside can sleep under ``tag``."""

    def pin(self, tag: str) -> int:
        """Memory on the host for the contents of ``tag``, taken ahead; bytes."""

    def sleep(self, tag: str, *, keep: bool) -> None:
        """Give the memory back; ``keep``: its contents go to the host, else they are lost."""

    def wake(self, tag: str) -> None:
        """Take memory again. What was not kept is undefined."""


class Backend(Operations, Protocol):
    """One kind of device. ``sharing`` is None where no ranks can share layers, ``adapters`` where there are no kernels
    for them.
    """

    facts: Facts
    device: torch.device
    sharing: Sharing | None
    adapters: AdapterOps | None

    @property
    def fingerprint(self) -> str:
        """All that tells this device from another one whose compiled code or bits may differ."""

    def free_memory(self) -> int:
        """Bytes that may still be allocated on the device."""

    def used_memory(self) -> int:
        """Bytes that this process holds on the device."""

    def peak_memory(self, run: Callable[[], None]) -> int:
        """Run ``run``, which leaves nothing on the device; the most bytes that it held there at once, those of what it
        had to load or compile included.
        """

    def kv_cache_memory(self) -> int | None:
        """Bytes of KV cache if no size is set; None means a share of the free memory."""

    def supports(self, value: Value) -> Support:
        """Whether the device runs the layer of ``value``, and with its terms; see :mod:`preheat.backends.support`."""

    def supports_bfloat16(self) -> bool:
        """Whether the device multiplies bfloat16 natively."""

    def prepare(self, settings: Settings, cache: Path | None) -> None:
        """Set process-wide state once, before anything is computed. ``cache``: the folder of stores and tables."""

    def synchronize(self) -> None:
        """Wait until the device has done all that it was told."""

    def host_copy(self, tensor: Tensor) -> Tensor:
        """Zeros like ``tensor`` on the host, in memory that the device copies from and to without waiting."""

    def event(self) -> DeviceEvent:
        """Return a new event on the device."""

    def sleep_memory(self) -> SleepMemory | None:
        """What gives the device's memory back at addresses that stay; None where addresses may change."""

    def uploading(self) -> AbstractContextManager[Callable[[Tensor, Tensor], None]]:
        """While weights are loaded: ``copy(source, out)`` brings a tensor of the host into its place."""

    def regions(self, mode: Mode, cache: Path | None) -> Callable[[Region], Region]:
        """What builds the regions of a layer in ``mode``, keeping compiled code in ``cache``."""

    def programs(self, body: Callable[[K], R], attention: Attention | None = None) -> GraphDriver[K, R]:
        """What runs ``body(key)`` for each key, which reads what ``attention`` was sent, if that is given. Programs run
        one after the other: graphs share their working memory.
        """

    def compiling(self, threads: int) -> AbstractContextManager[None] | None:
        """Kernels that are launched inside are built by so many threads and not run; None: there is nothing to build
        ahead.
        """

    def settle(self, layers: Iterable[tuple[Linear | ExpertsLayer, Sequence[int]]]) -> None:
        """Choose and prove what serves linear layers and experts at so many rows, before there is a cache."""

    def tune(self, request: TuneRequest) -> str:
        """Measure which kernel is fastest for each linear layer, for later boots; what was done, in a sentence.

        Raises SettingsError where there is nothing to choose from, or no place for the result.
        """

    def attention(self, layers: Sequence[AttentionLayer], limits: Limits, *, contiguous: bool) -> Attention:
        """``contiguous``: where it can, decode reads the cache in place (``--contiguous-pa``)."""

    def sampler(
        self, limits: Limits, vocab_size: int, *, max_logprobs: int, handle_topk_duplicates: bool, masked: bool = False
    ) -> Sampler:
        """``masked``: rows may have masks."""

    def cold_sources(self) -> Mapping[str, Watched]:
        """How each of :data:`preheat.warmup.cold_sources.ORIGINS` is watched."""

    def step_counters(self) -> Mapping[str, StepCounter]:
        """What the log of every step reads: ``compilations``, and ``fallbacks`` of operations to the host."""
