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
from typing import TYPE_CHECKING, Literal, Protocol, TypeVar

import numpy as np

from preheat.limits import Limits
from preheat.settings import Settings

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from preheat.backends.cold import Watched
    from preheat.core import Level, TokenLogprobs
    from preheat.ops.sampling import SamplingInput

HOST_COPIES = 2
"""Copies on the host of what travels to the device: one is written while the device may still read the other."""

Mode = Literal["graphs", "compile", "eager", "lazy"]

NO_LAZY_BRIDGE = "it is the lazy backend of Gaudi's PyTorch bridge, which this platform has not"


@dataclass(frozen=True, kw_only=True)
class Modes:
    """The execution mode a backend takes by default, what each mode that it ``runs`` does there, and why the others are
    ``rejected``.
    """

    default: Mode
    runs: Mapping[Mode, str]
    rejected: Mapping[Mode, str]


@dataclass(frozen=True)
class Machine:
    """Sustained speed: floating-point operations and bytes a second. Overheads are the seconds of a forward step, and
    of a call of anything smaller, in which nothing is computed.
    """

    flops: float
    bandwidth: float
    step_overhead: float
    call_overhead: float


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What is known of a backend before anything is imported or allocated.

    ``split``: keys of a KV split. ``min_tokens``: a step is padded to at least so many. ``asynchronous``: the device
    goes on after a call returns, so that the host can prepare the next step. ``captures``: programs become graphs.
    ``rejected``: options that must stay at their default, with the reason.
    """

    name: str
    modes: Modes
    machine: Machine
    split: int
    min_tokens: int = 1
    asynchronous: bool = False
    captures: bool = False
    rejected: Mapping[str, str] = field(default_factory=dict)


class Linear(Protocol):
    """A linear layer [rows, inputs] -> [rows, outputs], its activation included. ``out`` may be used for the result,
    which is what is returned.
    """

    def __call__(self, x: Tensor, out: Tensor | None = None) -> Tensor: ...


class LinearSize(Protocol):
    """What is known of a linear layer without its weights, see :class:`preheat.model.specs.LinearSpec`."""

    @property
    def outputs(self) -> int: ...
    @property
    def inputs(self) -> int: ...
    @property
    def gated(self) -> bool: ...
    @property
    def bias(self) -> bool: ...


@dataclass(frozen=True, kw_only=True)
class TuneRequest:
    """Linear layers of ``dtype`` to measure at up to ``max_rows`` rows, the head at up to ``max_head_rows``, for about
    ``seconds``. The result goes to the file ``output``, or to ``folder``, where boots look for it.
    """

    layers: Sequence[LinearSize]
    head: LinearSize
    dtype: str
    max_rows: int
    max_head_rows: int
    seconds: float
    output: str | None
    folder: Path | None


class Norm(Protocol):
    """A root-mean-square norm of rows, see :mod:`preheat.ops.norm`."""

    weight: Tensor
    eps: float

    def __call__(self, x: Tensor) -> Tensor:
        """The norm of ``x``, a new tensor."""

    def add(self, x: Tensor, residual: Tensor) -> Tensor:
        """Add ``x`` to ``residual`` in place, then the norm of the sum, a new tensor."""


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
    ``num_decode`` rows decode, one token each. The step is padded to ``tokens``.
    """

    slots: np.ndarray
    first: np.ndarray
    extend: np.ndarray
    ends: np.ndarray
    num_decode: int
    tokens: int


@dataclass(slots=True)
class AttentionWork:
    """How a step is cut into work: ``lists[i]`` int32 [n, 2] are written behind the step's tokens, see
    :class:`preheat.execution.buffers.StepBuffers`. ``steady``: for so many more steps of the same rows, all decoding,
    it stays what it is; negative: it is for this step alone.
    """

    lists: list[np.ndarray]
    steady: int


@dataclass(frozen=True)
class StepInputs:
    """A program's input on the device, all int32.

    ``tokens`` [T] are ids, or -1 for the token that the device drew last for the slot. ``slots`` [T] name each token's
    sequence, ``positions`` [T] its place in it; padding has the slot beyond all others. ``lists`` are attention's,
    ``counts`` say how many entries of each are in use. ``rows`` are the most that the program has; ``decode``: all of
    its rows have one token.
    """

    tokens: Tensor
    slots: Tensor
    positions: Tensor
    lists: tuple[Tensor, ...]
    counts: Tensor
    rows: int
    decode: bool


@dataclass(frozen=True)
class AttentionLayer:
    """What one layer's attention works with. ``cache`` [blocks, 2, kv heads, block size, dim]; ``rope`` [positions, 2,
    1, dim], see :func:`preheat.model.rope.rope_table`; ``qk_norm`` norms each query and key head before they turn.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    window: int | None
    cache: Tensor
    rope: Tensor
    qk_norm: Norm | None


Attend = Callable[[int, "Tensor"], "Tensor"]
"""``attend(layer, qkv)``: norm and turn the queries and keys of ``qkv`` [tokens, heads + 2 * kv heads, dim], store its
keys and values, attend with its queries; returns [tokens, heads * dim]."""


class Attention(Protocol):
    """Attention of all layers over the paged cache."""

    def list_sizes(self, tokens: int, rows: int, *, decode: bool) -> tuple[int, ...]:
        """The most entries of each list of work, for steps of ``tokens`` in at most ``rows``."""

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

    def logprobs(self, logits: Tensor, tokens: np.ndarray, alternatives: int) -> list[TokenLogprobs]:
        """Of ``tokens`` int32 [n] under the first n rows of raw ``logits``. Waits for the device."""

    def compile(self, logits: Tensor) -> None:
        """Build the kernels that no program launches."""

    def clear(self) -> None:
        """What the device was told last describes no rows."""

    def forget(self) -> None:
        """Be as new."""


SampledRows = tuple[np.ndarray, "list[TokenLogprobs]"]
"""Tokens, integers [rows], and the reports that were asked for."""


class Operations(Protocol):
    """The operations of one model on one device."""

    def linear(self, weight: Tensor, bias: Tensor | None = None, *, gated: bool = False) -> Linear:
        """The linear layer of ``weight`` [outputs, inputs] and ``bias`` [outputs], which may be kept or packed anew.
        ``gated``: the first half of its outputs is the gate of the second, and SwiGLU of both is what it gives.
        """

    def norm(self, weight: Tensor, eps: float) -> Norm: ...

    def embed(self, inputs: StepInputs, last_token: Tensor, table: Tensor, out: Tensor) -> None:
        """Fill ``out`` [tokens, hidden] with the rows of ``table`` that the step's tokens name."""

    def take_rows(self, x: Tensor, index: Tensor) -> Tensor:
        """The rows of ``x`` that ``index`` int32 names, a new tensor."""

    def row_digests(self, logits: Tensor) -> Tensor:
        """int64 [rows], see :mod:`preheat.ops.digest`."""


class Backend(Operations, Protocol):
    """One kind of device."""

    facts: Facts
    device: torch.device

    @property
    def fingerprint(self) -> str:
        """All that tells this device from another one whose compiled code or bits may differ."""

    def free_memory(self) -> int:
        """Bytes that may still be allocated on the device."""

    def used_memory(self) -> int:
        """Bytes that this process holds on the device."""

    def kv_cache_memory(self) -> int | None:
        """Bytes of KV cache when nobody asked for a size; None means a share of the free memory."""

    def supports_bfloat16(self) -> bool:
        """Whether the device multiplies bfloat16 natively."""

    def prepare(self, settings: Settings, cache: Path | None) -> None:
        """Set process-wide state once, before anything is computed. ``cache``: the folder of stores and tables."""

    def synchronize(self) -> None:
        """Wait until the device has done all that it was told."""

    def host_copy(self, tensor: Tensor) -> Tensor:
        """Zeros like ``tensor`` on the host, in memory that the device copies from and to without waiting."""

    def uploading(self) -> AbstractContextManager[Callable[[Tensor, Tensor], None]]:
        """While weights are loaded: ``copy(source, out)`` brings a tensor of the host into its place."""

    def regions(self, mode: Mode, cache: Path | None) -> Callable[[Region], Region]:
        """What builds the regions of a layer in ``mode``, keeping compiled code in ``cache``."""

    def programs(self, body: Callable[[K], R]) -> GraphDriver[K, R]:
        """What runs ``body(key)`` for each key. Programs run one after the other: graphs share their working memory."""

    def compiling(self, threads: int) -> AbstractContextManager[None] | None:
        """Kernels that are launched inside are built by so many threads and not run; None: there is nothing to build
        ahead.
        """

    def settle(self, layers: Iterable[tuple[Linear, Sequence[int]]]) -> None:
        """Choose and prove what serves linear layers at so many rows, before there is a cache."""

    def tune(self, request: TuneRequest) -> str:
        """Measure which kernel is fastest for each linear layer, for later boots; what was done, in a sentence.

        Raises SettingsError where there is nothing to choose from, or no place for the result.
        """

    def attention(self, layers: Sequence[AttentionLayer], limits: Limits, *, contiguous: bool) -> Attention:
        """``contiguous``: decode reads the cache in place (``--contiguous-pa``)."""

    def sampler(
        self, limits: Limits, vocab_size: int, *, max_logprobs: int, handle_topk_duplicates: bool
    ) -> Sampler: ...

    def cold_sources(self) -> Mapping[str, Watched]:
        """How each of :data:`preheat.warmup.cold_sources.ORIGINS` is watched."""
