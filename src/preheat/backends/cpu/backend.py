"""The CPU backend: torch's own kernels, run one by one or compiled.

Its graph driver calls the function. Thread count and instruction set are among the inputs that fix the bits.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

from preheat.backends.base.adapters import AdapterOps
from preheat.backends.base.attention import Attention, AttentionLayer, StepInputs
from preheat.backends.base.backend import K, R, TuneRequest
from preheat.backends.base.collective import Sharing
from preheat.backends.base.device import HostEvent, StepCounter
from preheat.backends.base.facts import Mode
from preheat.backends.base.functions import LayerFunctions, LayerParts
from preheat.backends.base.layers import (
    ALONE,
    ExpertsLayer,
    ExpertsWeights,
    Layer,
    LayerContext,
    LayerRows,
    LayerWeights,
    Norm,
    Region,
)
from preheat.backends.calls import Calls
from preheat.backends.cold import DYNAMO_COUNTERS, Watched
from preheat.backends.cpu.attention import CpuAttention
from preheat.backends.cpu.cold import COLD_SOURCES
from preheat.backends.cpu.compile import region_builder
from preheat.backends.cpu.experts import ExpertsLayer as CpuExperts
from preheat.backends.cpu.facts import FACTS
from preheat.backends.cpu.linear import obstacle
from preheat.backends.cpu.llvm import layer
from preheat.backends.cpu.llvm.adapters import PanelAdapters
from preheat.backends.cpu.llvm.layer import PanelExperts, PanelLayer
from preheat.backends.cpu.llvm.packed import PackedNorm
from preheat.backends.cpu.lowrank import CpuAdapters, Embedding, expert_slots, slots_of
from preheat.backends.cpu.products import products_of
from preheat.backends.cpu.sampler import CpuSampler
from preheat.backends.cpu.sharing import CpuSharing
from preheat.backends.cpu.threads import give_back_threads, leave_one_thread
from preheat.backends.heads import EachHead
from preheat.backends.layer import Layer as ProductLayer
from preheat.backends.support import matmuls, supports
from preheat.errors import SettingsError
from preheat.limits import Limits
from preheat.ops.delta import Recur
from preheat.ops.digest import row_digests
from preheat.ops.embedding import embed
from preheat.ops.gate import gated
from preheat.ops.kinds import NormKind
from preheat.ops.moe import add_shared
from preheat.ops.norm import make_norm
from preheat.ops.pooling import sum_rows
from preheat.ops.values import Experts, Matmul, Recurrence, Refused, Support, Value
from preheat.settings import Settings
from preheat.utils import memory
from preheat.utils.processors import physical_cores

if TYPE_CHECKING:
    from preheat.backends.cpu.llvm.model import Functions  # needs llvmlite

KV_CACHE_BYTES = 1 << 30


class CpuBackend:
    """torch on the host's processors."""

    facts = FACTS
    device = torch.device("cpu")
    _compiled = False
    _cache: Path | None = None
    _threads = 1  # of compiled functions
    _functions: Functions | None = None
    sharing: Sharing | None = CpuSharing()
    adapters: AdapterOps | None = CpuAdapters()
    _row_digests: Callable[[Tensor], Tensor] = staticmethod(row_digests)

    @property
    def fingerprint(self) -> str:
        """Instruction set of torch's kernels here, and the processor that functions are compiled for."""
        found = f"{platform.machine()}, {torch.backends.cpu.get_cpu_capability()}"
        if not self._compiled:
            return found
        from preheat.backends.cpu.llvm import targets

        return f"{found}, {targets.here().title}"

    def free_memory(self) -> int:
        return memory.free_memory()

    def used_memory(self) -> int:
        return memory.used_memory()

    def peak_memory(self, run: Callable[[], None]) -> int:
        """Return the peak of the resident set."""
        return memory.peak_memory(run)

    def kv_cache_memory(self) -> int | None:
        """Return 1 GiB.

        A host's memory is shared with other programs, so the default takes no share of it.
        """
        return KV_CACHE_BYTES

    def supports(self, value: Value) -> Support:
        """Return the support that the facts give, or that compiled functions give.

        Plain matrices are refused too if this torch multiplies none.
        """
        if self._compiled:
            return layer.supports(value)
        found = supports(self.facts, value)
        if isinstance(found, Refused) or all(part.input in {"token", "block", "static"} for part in matmuls(value)):
            return found
        return obstacle() or found

    def supports_bfloat16(self) -> bool:
        """Return whether the processor multiplies bfloat16.

        That takes AVX512-BF16 or AMX. Otherwise torch emulates bfloat16, slower than float32. Compiled functions widen
        it on every processor.
        """
        return self._compiled or bool(torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())

    def prepare(self, settings: Settings, mode: Mode, cache: Path | None) -> None:
        """Fix the thread count; compiled functions have a thread for each physical core.

        torch has as many while weights are loaded, and one from :meth:`functions` on.
        """
        self._compiled = mode == "llvm"
        self.facts = type(self).facts.in_mode(mode)
        self.adapters = PanelAdapters() if self._compiled else type(self).adapters
        self._functions = None
        self._threads = settings.num_threads or physical_cores()
        if settings.num_threads or self._compiled:
            torch.set_num_threads(self._threads)
        else:
            give_back_threads()
        self._cache = None if cache is None else cache / "llvm"

    def synchronize(self) -> None:
        """Do nothing: no operation runs on after its call returns."""

    def host_copy(self, tensor: Tensor) -> Tensor:
        return torch.zeros_like(tensor)

    def event(self) -> HostEvent:
        return HostEvent()

    def sleep_memory(self) -> None:
        """Return nothing: no graph knows an address."""

    @contextmanager
    def uploading(self) -> Iterator[Callable[[Tensor, Tensor], None]]:
        yield _copy

    def regions(self, mode: Mode, cache: Path | None) -> Callable[[Region], Region]:
        return region_builder(mode, cache)

    def activation_dtype(self, dtype: torch.dtype) -> torch.dtype:
        return torch.float32 if self._compiled else dtype

    def functions(
        self, layers: Sequence[LayerParts], final_norm: Norm, others: Sequence[object], limits: Limits
    ) -> LayerFunctions | None:
        if not self._compiled:
            return None
        from preheat.backends.cpu.llvm.model import Functions

        rows = max(limits.max_num_batched_tokens, limits.max_num_seqs, self.facts.min_tokens)
        found = Functions(layers, final_norm, others, limits, threads=self._threads, folder=self._cache, rows=rows)
        leave_one_thread()
        self._functions = found
        return found

    def programs(self, body: Callable[[K], R], attention: Attention | None = None) -> Calls[K, R]:
        return Calls(body)

    def compiling(self, threads: int, layers: Iterable[LayerRows] = ()) -> None:
        """Do nothing: torch's kernels are compiled already."""

    def select_kernels(self, layers: Iterable[LayerRows]) -> None:
        """Do nothing: a linear layer proves a size at its first use.

        The first use is before ready.
        """

    def tune(self, request: TuneRequest) -> str:
        raise SettingsError(
            "there is nothing to tune on a CPU: it uses torch's own kernels; run preheat tune on a machine with a GPU",
            param="device",
        )

    def attention(self, layers: Sequence[AttentionLayer], limits: Limits, *, contiguous: bool) -> CpuAttention:
        return CpuAttention(layers, contiguous)

    def sampler(
        self, limits: Limits, vocab_size: int, *, max_logprobs: int, handle_topk_duplicates: bool, masked: bool = False
    ) -> CpuSampler:
        rows, masked_rows = limits.max_num_seqs, limits.max_sampled if masked else 0
        if not self._compiled:
            return CpuSampler(rows, vocab_size, handle_topk_duplicates, masked_rows=masked_rows)
        from preheat.backends.cpu.llvm.sampler import Draws

        draw = Draws(limits.max_sampled, self._cache, duplicates=handle_topk_duplicates)
        self._row_digests = draw.row_digests
        return CpuSampler(
            rows,
            vocab_size,
            handle_topk_duplicates,
            masked_rows=masked_rows,
            draw=draw,
            best=draw.best_ids,
            build=draw.build,
            digests=draw.digests,
        )

    def cold_sources(self) -> Mapping[str, Watched]:
        return COLD_SOURCES

    def step_counters(self) -> Mapping[str, StepCounter]:
        return DYNAMO_COUNTERS

    def layer(self, value: Matmul, weights: LayerWeights, context: LayerContext = ALONE) -> Layer:
        if any(term.source == "tokens" for term in value.terms):
            return cast(Layer, Embedding(value, context.rows))
        if self._compiled:
            return PanelLayer(value, weights, context)
        products = products_of(value, weights.weight, weights.bias, context.ranks)
        return ProductLayer(value, weights, products, context=context, slots=slots_of(value, context))

    def experts(self, value: Experts, weights: ExpertsWeights, context: LayerContext = ALONE) -> ExpertsLayer:
        if self._compiled:
            return PanelExperts(value, weights, context)
        return CpuExperts(value, weights, context, expert_slots(value, context))

    def heads(self, value: Matmul, weight: Tensor) -> EachHead:
        return EachHead(self, value, weight)

    def norm(self, weight: Tensor, eps: float, kind: NormKind = "rms", bias: Tensor | None = None) -> Norm:
        norm = make_norm(weight, eps, kind, bias)
        return PackedNorm(norm) if self._compiled else norm

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
        """Embed known tokens: a step has ended when the next one begins.

        Raises IndexError for an id outside the table.
        """
        if scale is None and images is None and self._functions is not None:
            added = [] if types is None else [(types, inputs.tokens, table.shape[0])]
            added += [] if positions is None else [(positions, inputs.positions, 1)]
            rows_of = self._functions.embed
            if rows_of.takes(table, out, added):
                rows_of(inputs.tokens, table, out, types=1 if types is None else types.shape[0], added=added)
                return
        rows = partial(
            embed, inputs.tokens, table, scale=scale, positions=positions, at=inputs.positions, images=images,
            types=types,
        )  # fmt: skip
        if out.dtype == table.dtype:
            rows(out=out)
        else:
            out.copy_(rows())

    def add_shared(self, routed: Tensor, x: Tensor, gate: Tensor, shared: Tensor) -> Tensor:
        return add_shared(routed, x, gate, shared)

    def recur(self, value: Recurrence) -> Recur:
        """Return a compiled function, in every mode: torch would run an operation for each step of each token."""
        from preheat.backends.cpu.llvm.delta import CompiledRecur

        return CompiledRecur(value, self._cache, self._threads)

    def recurrences(self, limits: Limits) -> None:
        """Return nothing: the host runs each operation around :meth:`recur`."""

    def tape_bytes(self, value: Recurrence) -> int:
        return 0

    def gated(self, out: Tensor, gates: Tensor) -> Tensor:
        return gated(out, gates)

    def take_rows(self, x: Tensor, index: Tensor) -> Tensor:
        return x.index_select(0, index)

    def sum_rows(self, x: Tensor, bounds: Tensor, out: Tensor) -> None:
        if self._functions is None or not self._functions.embed.sum_rows(x, bounds, out):
            sum_rows(x, bounds, out)

    def row_digests(self, logits: Tensor) -> Tensor:
        return self._row_digests(logits)


def _copy(source: Tensor, out: Tensor) -> None:
    out.copy_(source)
