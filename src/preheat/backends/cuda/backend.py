"""The CUDA backend: one NVIDIA GPU of a kind in the table of cards (:mod:`preheat.backends.cuda.device.card`).

A rank takes the visible GPU with its own number. To import this module is to import Triton, and takes a second:
:mod:`preheat.backends.cuda.device.detect` tells first whether the backend can run. Triton reads the source of every
kernel at import. So methods that boots call import the kernels of experts and of recurrences, and methods that steps
call import nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar, cast

import torch
from torch import Tensor

from preheat.backends.base import layers as base
from preheat.backends.base.adapters import AdapterOps
from preheat.backends.base.attention import Attention, AttentionLayer, StepInputs
from preheat.backends.base.backend import K, R, TuneRequest
from preheat.backends.base.collective import Sharing
from preheat.backends.base.device import DeviceEvent, StepCounter
from preheat.backends.base.facts import Mode
from preheat.backends.base.layers import ALONE, ExpertsWeights, LayerContext, LayerWeights, Region
from preheat.backends.cold import DYNAMO_COUNTERS, Watched
from preheat.backends.cuda.attention.layers import CudaAttention
from preheat.backends.cuda.cold import COLD_SOURCES
from preheat.backends.cuda.device.card import experience, text
from preheat.backends.cuda.device.compiling import compiling
from preheat.backends.cuda.device.detect import card_at, driver_version, fix_arithmetic, obstacle
from preheat.backends.cuda.device.graph import CudaGraphs, Pool
from preheat.backends.cuda.device.memory import VirtualMemory
from preheat.backends.cuda.device.streams import CudaEvent, own_stream
from preheat.backends.cuda.device.upload import Upload
from preheat.backends.cuda.facts import FACTS
from preheat.backends.cuda.lacking import lacking, lacking_terms
from preheat.backends.cuda.matmul.config import LinearShape
from preheat.backends.cuda.matmul.heads import HeadsLayer
from preheat.backends.cuda.matmul.kernels import KernelConfigs
from preheat.backends.cuda.matmul.layer import Embedding, Layer
from preheat.backends.cuda.matmul.lora.slots import CudaAdapters
from preheat.backends.cuda.matmul.moe.shared import add_shared
from preheat.backends.cuda.matmul.prove import launch, launch_experts, settle, settle_experts, settle_heads
from preheat.backends.cuda.matmul.tables import tables_for
from preheat.backends.cuda.pointwise.closing import KINDS, BlockNorm
from preheat.backends.cuda.pointwise.digest import digest_rows
from preheat.backends.cuda.pointwise.embedding import embed, sum_rows, take_rows
from preheat.backends.cuda.pointwise.gate import gated
from preheat.backends.cuda.pointwise.norm import CudaNorm
from preheat.backends.cuda.ranks.sharing import CudaSharing
from preheat.backends.cuda.sampling.sampler import CudaSampler
from preheat.backends.support import supports
from preheat.errors import SettingsError
from preheat.limits import Limits
from preheat.ops.delta import Recur, recur_of
from preheat.ops.kinds import NormKind
from preheat.ops.values import Experts, Matmul, Ok, Recurrence, Refused, Support, Value, WithoutTerms
from preheat.settings import Settings

if TYPE_CHECKING:
    from preheat.backends.cuda.matmul.moe.experts import ExpertsLayer
    from preheat.backends.cuda.recurrence.delta import CudaRecurrences

logger = logging.getLogger(__name__)

L = TypeVar("L")


class CudaBackend:
    """The backend of torch and Triton on a GPU.

    Raises SettingsError, saying how to go on, if there is no usable GPU.
    """

    facts = FACTS

    def __init__(self, rank: int = 0) -> None:
        if reason := obstacle(rank):
            raise SettingsError(reason, param="device")
        if rank >= (seen := torch.cuda.device_count()):
            raise SettingsError(
                f"rank {rank} has no GPU, torch sees {seen}: lower --tensor-parallel-size, or check "
                "CUDA_VISIBLE_DEVICES",
                param="tensor_parallel_size",
            )
        self.device = torch.device("cuda", rank)
        self.adapters: AdapterOps | None = CudaAdapters(self.device)
        self._used_before = 0
        self._configs = KernelConfigs()
        self._sharing = CudaSharing(self.device)
        self.sharing: Sharing | None = self._sharing

    @cached_property
    def fingerprint(self) -> str:
        """Name, capability, multiprocessors and memory of the GPU, and its driver."""
        gpu = torch.cuda.get_device_properties(self.device)
        return (
            f"{gpu.name}, compute capability {gpu.major}.{gpu.minor}, {gpu.multi_processor_count} multiprocessors, "
            f"{gpu.total_memory / 2**30:.1f} GiB, driver {driver_version()}, CUDA {torch.version.cuda}"
        )

    def free_memory(self) -> int:
        """Return the bytes that the driver can still give.

        Memory that torch's allocator holds without using it does not count as free.
        """
        return int(torch.cuda.mem_get_info(self.device)[0])

    def used_memory(self) -> int:
        """Return the growth of the GPU's used memory since this process started, in bytes.

        Unlike in torch's own figures, graphs and libraries count, and so does memory that other processes take
        meanwhile.
        """
        return self._used() - self._used_before

    def peak_memory(self, run: Callable[[], None]) -> int:
        """Return the peak memory of ``run`` in bytes.

        It is the peak of torch's allocator, plus the memory that kernels and libraries took beside it, and keep.
        Afterwards the allocator gives its unused memory back.
        """
        used, held = self._used(), torch.cuda.memory_reserved(self.device)
        allocated = torch.cuda.memory_allocated(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        run()
        self.synchronize()
        peak = torch.cuda.max_memory_allocated(self.device) - allocated
        beside = self._used() - used - (torch.cuda.memory_reserved(self.device) - held)
        torch.cuda.empty_cache()
        return peak + max(beside, 0)

    def kv_cache_memory(self) -> int | None:
        """Return None: the cache gets a share of the free memory."""
        return None

    def supports(self, value: Value) -> Support:
        """Return the support for ``value``."""
        if reason := lacking(card_at(self.device), value):
            return Refused(reason)
        found = supports(self.facts, value)
        reason = lacking_terms(value) if isinstance(found, Ok) else None
        return found if reason is None else WithoutTerms(reason)

    def supports_bfloat16(self) -> bool:
        """Return True: every accepted GPU supports it."""
        return True

    def prepare(self, settings: Settings, mode: Mode, cache: Path | None) -> None:
        """Fix every setting that decides bits, and leave the legacy stream.

        Every other stream would wait for the legacy stream.

        The host has one thread unless a number is asked for: more would only spin beside the thread that feeds the GPU.
        """
        torch.set_num_threads(settings.num_threads or 1)
        self._sharing.by_nccl = settings.disable_custom_all_reduce
        torch.cuda.set_device(self.device)
        torch.cuda.set_stream(own_stream(self, self.device))
        self._used_before = self._used()
        fix_arithmetic()
        if torch.backends.cuda.preferred_blas_library() != torch._C._BlasBackend.Cublaslt:  # see early.py
            torch.backends.cuda.preferred_blas_library("cublaslt")
        name, capability = torch.cuda.get_device_name(self.device), torch.cuda.get_device_capability(self.device)
        tables = tables_for(name, capability, cache)
        self._configs = KernelConfigs(tables, invariant=settings.batch_invariant, card=card_at(self.device))
        free, total = torch.cuda.mem_get_info(self.device)
        logger.info(
            "%s, compute capability %s: %s; %.1f of %.1f GiB are free, and the engine takes its share of these alone",
            name, text(capability), experience(capability), free / 2**30, total / 2**30,
        )  # fmt: skip

    def synchronize(self) -> None:
        """Wait for all streams."""
        torch.cuda.synchronize(self.device)

    def host_copy(self, tensor: Tensor) -> Tensor:
        """Return pinned zeros of the shape and dtype of ``tensor``."""
        return torch.zeros(tensor.shape, dtype=tensor.dtype, pin_memory=True)

    def event(self) -> DeviceEvent:
        return CudaEvent()

    @cached_property
    def _sleep_memory(self) -> VirtualMemory:
        return VirtualMemory(self.device)

    def sleep_memory(self) -> VirtualMemory:
        """Return virtual memory of the driver."""
        return self._sleep_memory

    @contextmanager
    def uploading(self) -> Iterator[Callable[[Tensor, Tensor], None]]:
        """Give unused memory of torch back to the driver, then yield the function that copies.

        Weights that an update has replaced are an example of such memory.
        """
        torch.cuda.empty_cache()
        with Upload(self.device) as upload:
            yield upload.copy

    def regions(self, mode: Mode, cache: Path | None) -> Callable[[Region], Region]:
        """Return regions as they are written: their parts are kernels already."""
        return lambda region: region

    def activation_dtype(self, dtype: torch.dtype) -> torch.dtype:
        return dtype

    def functions(self, *_: object) -> None:
        """Return none: a layer is regions and operations."""

    @cached_property
    def _pool(self) -> Pool:
        return torch.cuda.graph_pool_handle()

    def programs(self, body: Callable[[K], R], attention: Attention | None = None) -> CudaGraphs[K, R]:
        return CudaGraphs(body, self._pool)

    @contextmanager
    def compiling(self, threads: int, layers: Iterable[base.LayerRows] = ()) -> Iterator[None]:
        given = list(layers)
        with compiling(threads, ignore_errors=bool(given)):
            launch(self._configs, *_shapes(given))
            launch_experts(_experts(given))
            yield

    def select_kernels(self, layers: Iterable[base.LayerRows]) -> None:
        """Compile kernels side by side; replace kernels with other bits than the contract's."""
        given = list(layers)
        settle(self._configs, *_shapes(given))
        settle_experts(_experts(given), invariant=self._configs.invariant)
        settle_heads(_of(HeadsLayer, given), invariant=self._configs.invariant)

    def tune(self, request: TuneRequest) -> str:
        from preheat.backends.cuda.matmul.tune import tune_layers

        return tune_layers(request, self.device)

    def attention(self, layers: Sequence[AttentionLayer], limits: Limits, *, contiguous: bool) -> CudaAttention:
        return CudaAttention(layers, limits, self)

    def sampler(
        self, limits: Limits, vocab_size: int, *, max_logprobs: int, handle_topk_duplicates: bool, masked: bool = False
    ) -> CudaSampler:
        seqs, rows = limits.max_num_seqs, limits.max_sampled
        return CudaSampler(
            seqs, vocab_size, self, rows, handle_topk_duplicates, max_logprobs=max_logprobs, masked=masked
        )

    def cold_sources(self) -> Mapping[str, Watched]:
        return COLD_SOURCES

    def step_counters(self) -> Mapping[str, StepCounter]:
        return DYNAMO_COUNTERS

    def layer(self, value: Matmul, weights: LayerWeights, context: LayerContext = ALONE) -> base.Layer:
        if value.terms and value.terms[0].source == "tokens":
            return cast(base.Layer, Embedding(value, self.device, context))
        return Layer(value, weights, self._configs, self.device, context)

    def experts(self, value: Experts, weights: ExpertsWeights, context: LayerContext = ALONE) -> base.ExpertsLayer:
        from preheat.backends.cuda.matmul.moe.experts import ExpertsLayer

        return ExpertsLayer(value, weights, self._configs, self.device, context)

    def heads(self, value: Matmul, weight: Tensor) -> HeadsLayer:
        return HeadsLayer(value, weight, self._configs)

    def norm(self, weight: Tensor, eps: float, kind: NormKind = "rms", bias: Tensor | None = None) -> CudaNorm:
        made = BlockNorm if kind in KINDS else CudaNorm
        return made(weight, eps, kind, bias)

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
        embed(
            inputs.tokens, inputs.slots, last_token, table, out,
            scale=scale, positions=positions, at=inputs.positions, images=images, types=types,
        )  # fmt: skip

    def add_shared(self, routed: Tensor, x: Tensor, gate: Tensor, shared: Tensor) -> Tensor:
        return add_shared(routed, x, gate, shared)

    def recur(self, value: Recurrence) -> Recur:
        """Return the reference, for comparisons: :meth:`recurrences` run the layers."""
        return recur_of(value)

    def recurrences(self, limits: Limits) -> CudaRecurrences:
        from preheat.backends.cuda.recurrence.delta import CudaRecurrences

        return CudaRecurrences(limits, self)

    def tape_bytes(self, value: Recurrence) -> int:
        from preheat.backends.cuda.recurrence.delta import tape_bytes

        return tape_bytes(value)

    def gated(self, out: Tensor, gates: Tensor) -> Tensor:
        return gated(out, gates)

    def take_rows(self, x: Tensor, index: Tensor) -> Tensor:
        return take_rows(x, index)

    def sum_rows(self, x: Tensor, bounds: Tensor, out: Tensor) -> None:
        sum_rows(x, bounds, out)

    def row_digests(self, logits: Tensor) -> Tensor:
        return digest_rows(logits)

    def _used(self) -> int:
        free, total = torch.cuda.mem_get_info(self.device)
        return int(total - free)


def _shapes(layers: Iterable[base.LayerRows]) -> tuple[list[tuple[LinearShape, Sequence[int]]], set[LinearShape]]:
    """Return the shapes of the linear layers with their numbers of rows, and the shapes with adapters."""
    linears = _of(Layer, layers)
    adapted = {shape for each, _ in linears if each.adapted for shape in each.shapes}
    return [(shape, rows) for each, rows in linears for shape in each.shapes], adapted


def _of(kind: type[L], layers: Iterable[base.LayerRows]) -> list[tuple[L, Sequence[int]]]:
    """Return the ``layers`` of a ``kind``, with their numbers of rows."""
    return [(each, rows) for each, rows in layers if isinstance(each, kind)]


def _experts(layers: Iterable[base.LayerRows]) -> list[tuple[ExpertsLayer, Sequence[int]]]:
    """Return the experts among the ``layers``, known by their values, with their numbers of tokens."""
    found = [(each, rows) for each, rows in layers if isinstance(getattr(each, "value", None), Experts)]
    return [(cast("ExpertsLayer", each), rows) for each, rows in found]
