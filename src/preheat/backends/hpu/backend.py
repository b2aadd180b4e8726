"""The Gaudi backend: torch on Intel's Gaudi through its PyTorch bridge.

In tests it runs on a fake of the bridge. It has run only on the fake, never on a card: docs/gaudi.md says how much that
shows.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

from preheat.backends.base.adapters import AdapterOps
from preheat.backends.base.attention import Attention, AttentionLayer, StepInputs
from preheat.backends.base.backend import K, R, TuneRequest
from preheat.backends.base.collective import Sharing
from preheat.backends.base.device import GraphDriver, HostEvent, StepCounter
from preheat.backends.base.facts import Mode
from preheat.backends.base.layers import ALONE, ExpertsWeights, LayerContext, LayerRows, LayerWeights, Region
from preheat.backends.calls import Calls
from preheat.backends.cold import Watched
from preheat.backends.heads import EachHead
from preheat.backends.hpu.attention import HpuAttention
from preheat.backends.hpu.bridge import DEVICES, Bridge
from preheat.backends.hpu.cold import cold_sources
from preheat.backends.hpu.detect import is_simulated, obstacle
from preheat.backends.hpu.experts import ExpertsLayer
from preheat.backends.hpu.facts import FACTS, SIMULATED
from preheat.backends.hpu.graph import HpuGraphs
from preheat.backends.hpu.linear import SizedProduct, Sizes, products_of
from preheat.backends.hpu.norm import HpuNorm
from preheat.backends.hpu.sampler import HpuSampler
from preheat.backends.hpu.sharing import HpuSharing
from preheat.backends.layer import Layer
from preheat.backends.support import supports
from preheat.errors import SettingsError
from preheat.limits import Limits
from preheat.ops.delta import Recur, recur_of
from preheat.ops.digest import row_digests
from preheat.ops.embedding import embed
from preheat.ops.gate import gated
from preheat.ops.kinds import NormKind
from preheat.ops.moe import add_shared
from preheat.ops.norm import make_norm
from preheat.ops.pooling import sum_rows
from preheat.ops.values import Experts, Matmul, Recurrence, Support, Value
from preheat.options.environment import warn
from preheat.settings import Settings

logger = logging.getLogger(__name__)


class HpuBackend:
    """torch on one Gaudi.

    Raises SettingsError, with advice, if there is no Gaudi that can be used.
    """

    adapters: AdapterOps | None = None

    def __init__(self) -> None:
        if reason := obstacle():
            raise SettingsError(reason, param="device")
        simulated = is_simulated()
        self.facts, self.device = SIMULATED if simulated else FACTS, DEVICES[simulated]
        self.sharing: Sharing | None = HpuSharing(lambda: self._bridge)
        self._settings = Settings()
        self._used_before = 0
        self._captured = 0

    @cached_property
    def _bridge(self) -> Bridge:
        """The bridge, loaded at its first use, after :meth:`prepare`."""
        return Bridge(self._settings)

    @cached_property
    def _sizes(self) -> Sizes:
        return Sizes(self._bridge, invariant=self._settings.batch_invariant)

    @cached_property
    def fingerprint(self) -> str:
        """Name and memory of the card, and the bridge's mode."""
        hpu = self._bridge.hpu
        memory = hpu.mem_get_info()[1] / 2**30
        return f"{hpu.get_device_name()}, {memory:.1f} GiB, {'lazy' if self._bridge.lazy else 'eager'} bridge"

    def free_memory(self) -> int:
        return int(self._bridge.hpu.mem_get_info()[0])

    def used_memory(self) -> int:
        """Return the growth of the card's used memory.

        It counts from the start of this process, recipes and graphs included.
        """
        return self._used() - self._used_before

    def peak_memory(self, run: Callable[[], None]) -> int:
        hpu = self._bridge.hpu
        before = self._used()
        hpu.reset_peak_memory_stats()
        allocated = hpu.memory_allocated()
        run()
        self.synchronize()
        return max(int(hpu.max_memory_allocated() - allocated), self._used() - before)

    def kv_cache_memory(self) -> int | None:
        """Return None: the cache takes a share of the free memory."""
        return None

    def supports(self, value: Value) -> Support:
        """Return the support that the facts give."""
        return supports(self.facts, value)

    def supports_bfloat16(self) -> bool:
        """Return True: every Gaudi multiplies bfloat16."""
        return True

    def prepare(self, settings: Settings, mode: Mode, cache: Path | None) -> None:
        """Load the bridge in the requested mode.

        Raises SettingsError for a fake that the settings do not ask for, and for a real bridge if they ask for the
        fake.
        """
        self._settings = settings
        if self.facts.simulated is not settings.use_fake_hpu:
            raise SettingsError(
                "the installed habana_frameworks is a fake that computes on the host: set VLLM_USE_FAKE_HPU=1 to use "
                "it, or use --device cpu"
                if self.facts.simulated
                else "VLLM_USE_FAKE_HPU is set, but habana_frameworks is not the fake: unset it",
                param="use_fake_hpu",
            )
        if self.facts.simulated:
            warn("The device is simulated: its speed and bits say nothing about a real Gaudi")
        if settings.pa_softmax_impl:
            logger.info("Softmax of attention (%s): each row by its own maximum", settings.pa_softmax_impl)
        if settings.num_threads:
            torch.set_num_threads(settings.num_threads)
        self._used_before = self._used()

    def synchronize(self) -> None:
        self._bridge.synchronize()

    def host_copy(self, tensor: Tensor) -> Tensor:
        return torch.zeros(tensor.shape, dtype=tensor.dtype)

    def event(self) -> HostEvent:
        """Return an event that is always reached.

        A host copy is pageable, and copying it waits.
        """
        return HostEvent()

    def sleep_memory(self) -> None:
        """Return nothing: no graph knows an address."""

    @contextmanager
    def uploading(self) -> Iterator[Callable[[Tensor, Tensor], None]]:
        yield _copy

    def regions(self, mode: Mode, cache: Path | None) -> Callable[[Region], Region]:
        """Return a function that builds a region.

        In ``compile`` torch.compile builds the region. Otherwise the region is a lazy graph of its own, so that layers
        of one kind share a recipe.
        """
        if mode == "compile":
            from preheat.backends.cpu.compile import Regional

            name = self._bridge.compile_backend()
            return lambda region: Regional(region, backend=name)
        return self._bridge.as_unit

    def activation_dtype(self, dtype: torch.dtype) -> torch.dtype:
        return dtype

    def functions(self, *_: object) -> None:
        """Return none: a layer is regions and operations."""

    def programs(self, body: Callable[[K], R], attention: Attention | None = None) -> GraphDriver[K, R]:
        """Return a driver of the programs.

        Programs that read attention's tensors become graphs. The sampler's and the image encoder's programs stay lazy.
        """
        if not isinstance(attention, HpuAttention):
            return Calls(self._bridge.as_program(body))
        keeps = self._settings.disable_tensor_cache is False
        return HpuGraphs(body, self._bridge, attention, disable_tensor_cache=not keeps, count=self._count)

    def _count(self) -> None:
        self._captured += 1

    def compiling(self, threads: int, layers: Iterable[LayerRows] = ()) -> None:
        """Do nothing: a recipe is compiled when its graph first runs."""

    def select_kernels(self, layers: Iterable[LayerRows]) -> None:
        """Prove at how many rows the device computes linear layers alike.

        The last layer also has the head's sizes.
        """
        given = list(layers)
        rows = sorted({size for _, sizes in given for size in sizes})
        parts = [part for layer, _ in given if isinstance(layer, Layer | ExpertsLayer) for part in layer.parts]
        by_shape = {part.shape: part for part in parts if isinstance(part, SizedProduct)}
        for part in by_shape.values():
            part.select_kernels(rows)

    def tune(self, request: TuneRequest) -> str:
        raise SettingsError("there is nothing to tune on Gaudi: its graph compiler chooses the kernels", param="device")

    def attention(self, layers: Sequence[AttentionLayer], limits: Limits, *, contiguous: bool) -> HpuAttention:
        """Return attention, contiguous only if the settings ask for it.

        ``contiguous`` makes a second graph of each decoding program.
        """
        asked = contiguous and self._settings.contiguous_pa is True
        return HpuAttention(layers, limits, self._bridge, contiguous=asked)

    def sampler(
        self, limits: Limits, vocab_size: int, *, max_logprobs: int, handle_topk_duplicates: bool, masked: bool = False
    ) -> HpuSampler:
        return HpuSampler(
            limits.max_num_seqs,
            limits.max_sampled,
            vocab_size,
            self._bridge,
            handle_topk_duplicates=handle_topk_duplicates,
            masked=masked,
        )

    def cold_sources(self) -> Mapping[str, Watched]:
        return cold_sources(self._bridge, lambda: self._captured)

    def step_counters(self) -> Mapping[str, StepCounter]:
        return {
            name: self._metric(metric)
            for name, metric in (("compilations", "graph_compilation"), ("fallbacks", "cpu_fallback"))
        }

    def _metric(self, name: str) -> StepCounter:
        def read() -> tuple[int, float]:
            stats = self._bridge.metric(name)
            return int(stats["TotalNumber"]), float(stats["TotalTime"]) / 1e6

        return read

    def layer(self, value: Matmul, weights: LayerWeights, context: LayerContext = ALONE) -> Layer:
        products, finish = products_of(value, weights.weight, weights.bias, self._sizes)
        return Layer(value, weights, products, context=context, finish=finish)

    def experts(self, value: Experts, weights: ExpertsWeights, context: LayerContext = ALONE) -> ExpertsLayer:
        return ExpertsLayer(value, weights, context, self._sizes)

    def heads(self, value: Matmul, weight: Tensor) -> EachHead:
        return EachHead(self, value, weight)

    def norm(self, weight: Tensor, eps: float, kind: NormKind = "rms", bias: Tensor | None = None) -> HpuNorm:
        return HpuNorm(make_norm(weight, eps, kind, bias), self._bridge)

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
        """Embed known tokens: a step has ended when the next one begins."""
        with self._bridge.unit():
            embed(
                inputs.tokens, table, scale=scale, positions=positions, at=inputs.positions, images=images,
                types=types, out=out,
            )  # fmt: skip

    def add_shared(self, routed: Tensor, x: Tensor, gate: Tensor, shared: Tensor) -> Tensor:
        return add_shared(routed, x, gate, shared)

    def recur(self, value: Recurrence) -> Recur:
        """Return the reference: :meth:`supports` refuses layers with states, which have no kernel here."""
        return recur_of(value)

    def recurrences(self, limits: Limits) -> None:
        """Return nothing: the facts refuse layers with states."""

    def tape_bytes(self, value: Recurrence) -> int:
        return 0

    def gated(self, out: Tensor, gates: Tensor) -> Tensor:
        return gated(out, gates)

    def take_rows(self, x: Tensor, index: Tensor) -> Tensor:
        """Take rows of the whole static tensor that ``x`` begins.

        So the recipe depends on no step's tokens.
        """
        whole = _whole(x)
        with self._bridge.unit():
            return whole.index_select(0, index)

    def sum_rows(self, x: Tensor, bounds: Tensor, out: Tensor) -> None:
        """Add up a host copy, as the number of rows differs from step to step."""
        found = torch.empty(out.shape, dtype=out.dtype)
        sum_rows(x.cpu(), bounds.cpu(), found)
        out.copy_(found)

    def row_digests(self, logits: Tensor) -> Tensor:
        """Return digests of a host copy.

        Digests are integer arithmetic, and no step computes them.
        """
        return row_digests(logits.cpu())

    def _used(self) -> int:
        free, total = self._bridge.hpu.mem_get_info()
        return int(total - free)


def _copy(source: Tensor, out: Tensor) -> None:
    out.copy_(source)


def _whole(x: Tensor) -> Tensor:
    """Return all rows of the allocation that begins with the rows ``x`` [rows, width]."""
    storage, width = x.untyped_storage(), x.shape[1]
    if x.storage_offset() or not x.is_contiguous():
        return x
    rows = storage.nbytes() // (width * x.itemsize)
    return x.as_strided((rows, width), (width, 1))
