"""The protocol of a backend: its memory, its operations, and the makers of its parts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TypeVar

from preheat.backends.base.adapters import AdapterOps
from preheat.backends.base.attention import Attention, AttentionLayer, Recurrences, StepInputs
from preheat.backends.base.collective import Sharing
from preheat.backends.base.device import DeviceEvent, GraphDriver, SleepMemory, StepCounter
from preheat.backends.base.facts import Facts, Mode
from preheat.backends.base.functions import LayerFunctions, LayerParts
from preheat.backends.base.layers import (
    ALONE,
    ExpertsLayer,
    ExpertsWeights,
    HeadLayers,
    Layer,
    LayerContext,
    LayerRows,
    LayerWeights,
    Norm,
    Region,
)
from preheat.backends.base.sampling import Sampler
from preheat.limits import Limits
from preheat.ops.kinds import NormKind
from preheat.ops.values import Experts, Matmul, Recurrence, Support, Value
from preheat.settings import Settings

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from preheat.backends.cold import Watched
    from preheat.ops.delta import Recur


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


K = TypeVar("K")

R = TypeVar("R")


class Operations(Protocol):
    """The operations of one model on one device."""

    def layer(self, value: Matmul, weights: LayerWeights, context: LayerContext = ALONE) -> Layer:
        """Return the layer of ``value`` with these ``weights``.

        For a value with a term looked up by token ids it is an :class:`Embedding`.
        """

    def experts(self, value: Experts, weights: ExpertsWeights, context: LayerContext = ALONE) -> ExpertsLayer:
        """Return the routed experts of ``value`` with these ``weights``."""

    def heads(self, value: Matmul, weight: Tensor) -> HeadLayers:
        """Return the layer of each head; ``weight`` [heads, outputs, inputs] may be kept."""

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

    def tape_bytes(self, value: Recurrence) -> int:
        """Return the bytes beside its states that each sequence takes in a layer of ``value``."""

    def gated(self, out: Tensor, gates: Tensor) -> Tensor:
        """Return ``out`` times the sigmoids of ``gates``, see :mod:`preheat.ops.gate`; it may lie in ``out``."""

    def take_rows(self, x: Tensor, index: Tensor) -> Tensor:
        """Return the rows ``index`` int32 of ``x``, a new tensor."""

    def sum_rows(self, x: Tensor, bounds: Tensor, out: Tensor) -> None:
        """Fill ``out`` with the sums of the rows of texts, see :func:`preheat.ops.pooling.sum_rows`."""

    def row_digests(self, logits: Tensor) -> Tensor:
        """Return the digest of each row, int64 [rows], see :mod:`preheat.ops.digest`; valid until the next call."""


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

    def compiling(self, threads: int, layers: Iterable[LayerRows] = ()) -> AbstractContextManager[None] | None:
        """Build kernels launched inside by so many ``threads``, without running them.

        Kernels that may run or prove ``layers`` are among them; :meth:`select_kernels` replaces a kernel that does not
        compile, so it is no error here. None: there is nothing to build ahead.
        """

    def select_kernels(self, layers: Iterable[LayerRows]) -> None:
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
