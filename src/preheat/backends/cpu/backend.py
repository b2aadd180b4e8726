"""The CPU backend: torch's own kernels, one operation after the other or compiled. Its graph driver calls the function.

Thread count and instruction set are part of what fixes the bits.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Generic

import torch
from torch import Tensor

from preheat.backends.base import AttentionLayer, K, Linear, Mode, R, Region, StepInputs, TuneRequest
from preheat.backends.cold import Watched
from preheat.backends.cpu.attention import CpuAttention
from preheat.backends.cpu.cold import COLD_SOURCES
from preheat.backends.cpu.compile import region_builder
from preheat.backends.cpu.facts import FACTS
from preheat.backends.cpu.linear import GatedLinear, OneDnnLinear
from preheat.backends.cpu.sampler import CpuSampler
from preheat.errors import SettingsError
from preheat.limits import Limits
from preheat.ops.digest import row_digests
from preheat.ops.norm import RMSNorm
from preheat.settings import Settings
from preheat.utils import memory

KV_CACHE_BYTES = 1 << 30


class CpuBackend:
    """torch on the host's processors."""

    facts = FACTS
    device = torch.device("cpu")

    @property
    def fingerprint(self) -> str:
        """The instruction set that torch's kernels use here."""
        return f"{platform.machine()}, {torch.backends.cpu.get_cpu_capability()}"

    def free_memory(self) -> int:
        return memory.free_memory()

    def used_memory(self) -> int:
        return memory.used_memory()

    def kv_cache_memory(self) -> int | None:
        """1 GiB: a host's memory is shared with everything else on it, so the default takes no share of it."""
        return KV_CACHE_BYTES

    def supports_bfloat16(self) -> bool:
        """True with AVX512-BF16 or AMX; without them bfloat16 is emulated and slower than float32."""
        return bool(torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())

    def prepare(self, settings: Settings, cache: Path | None) -> None:
        """Fix the thread count."""
        if settings.num_threads:
            torch.set_num_threads(settings.num_threads)

    def synchronize(self) -> None:
        """Nothing runs on when a call returns."""

    def host_copy(self, tensor: Tensor) -> Tensor:
        return torch.zeros_like(tensor)

    @contextmanager
    def uploading(self) -> Iterator[Callable[[Tensor, Tensor], None]]:
        yield _copy

    def regions(self, mode: Mode, cache: Path | None) -> Callable[[Region], Region]:
        return region_builder(mode, cache)

    def programs(self, body: Callable[[K], R]) -> Calls[K, R]:
        return Calls(body)

    def compiling(self, threads: int) -> None:
        """torch's kernels are there."""

    def settle(self, layers: Iterable[tuple[Linear, Sequence[int]]]) -> None:
        """A linear layer proves a number of rows when it first occurs, which is before ready."""

    def tune(self, request: TuneRequest) -> str:
        raise SettingsError(
            "on a CPU torch's own kernels serve: there is nothing to tune; run it where there is a GPU", param="device"
        )

    def attention(self, layers: Sequence[AttentionLayer], limits: Limits, *, contiguous: bool) -> CpuAttention:
        return CpuAttention(layers, contiguous)

    def sampler(
        self, limits: Limits, vocab_size: int, *, max_logprobs: int, handle_topk_duplicates: bool
    ) -> CpuSampler:
        return CpuSampler(limits.max_num_seqs, vocab_size, handle_topk_duplicates)

    def cold_sources(self) -> Mapping[str, Watched]:
        return COLD_SOURCES

    def linear(self, weight: Tensor, bias: Tensor | None = None, *, gated: bool = False) -> Linear:
        linear = OneDnnLinear(weight, bias)
        return GatedLinear(linear) if gated else linear

    def norm(self, weight: Tensor, eps: float) -> RMSNorm:
        return RMSNorm(weight, eps)

    def embed(self, inputs: StepInputs, last_token: Tensor, table: Tensor, out: Tensor) -> None:
        """IndexError for an id outside the table. Every token is known: a step has ended when the next one begins."""
        torch.index_select(table, 0, inputs.tokens, out=out)

    def take_rows(self, x: Tensor, index: Tensor) -> Tensor:
        return x.index_select(0, index)

    def row_digests(self, logits: Tensor) -> Tensor:
        return row_digests(logits)


def _copy(source: Tensor, out: Tensor) -> None:
    out.copy_(source)


class Calls(Generic[K, R]):
    """The graph driver of a device without graphs: it calls the function."""

    def __init__(self, body: Callable[[K], R]) -> None:
        self._body = body

    def __contains__(self, key: K) -> bool:
        return False

    def run(self, key: K, *, eager: bool = False) -> R:
        return self._body(key)

    def capture(self, key: K) -> None:
        """There is nothing to capture."""

    def forget(self, key: K) -> None:
        """Nor to give up."""
