"""The CUDA backend: one NVIDIA GPU of the Hopper generation or later, the first that the process sees.

Importing this imports Triton, which takes a second: :mod:`preheat.backends.cuda.device` tells first whether it can run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

from preheat.backends.base import AttentionLayer, K, Linear, Mode, R, Region, StepInputs, TuneRequest
from preheat.backends.cold import Watched
from preheat.backends.cuda.attention import CudaAttention
from preheat.backends.cuda.cold import COLD_SOURCES
from preheat.backends.cuda.device import driver_version, fix_arithmetic, obstacle
from preheat.backends.cuda.digest import digest_rows
from preheat.backends.cuda.embedding import embed, take_rows
from preheat.backends.cuda.facts import FACTS
from preheat.backends.cuda.graph import CudaGraphs, Pool
from preheat.backends.cuda.launch import compiling
from preheat.backends.cuda.linear import CudaLinear
from preheat.backends.cuda.norm import CudaNorm
from preheat.backends.cuda.prove import settle
from preheat.backends.cuda.sampler import CudaSampler
from preheat.backends.cuda.tune import tune_layers
from preheat.backends.cuda.tuning import KernelConfigs, kernel_configs
from preheat.backends.cuda.upload import Upload
from preheat.errors import SettingsError
from preheat.limits import Limits
from preheat.settings import Settings


class CudaBackend:
    """torch and Triton on a GPU. SettingsError, saying what to change, where there is none that can be used."""

    facts = FACTS

    def __init__(self) -> None:
        if reason := obstacle():
            raise SettingsError(reason, param="device")
        self.device = torch.device("cuda", 0)
        self._held_before = 0
        self._configs = KernelConfigs()

    @cached_property
    def fingerprint(self) -> str:
        """Name, capability, multiprocessors and memory of the GPU, and its driver."""
        gpu = torch.cuda.get_device_properties(self.device)
        return (
            f"{gpu.name}, compute capability {gpu.major}.{gpu.minor}, {gpu.multi_processor_count} multiprocessors, "
            f"{gpu.total_memory / 2**30:.1f} GiB, driver {driver_version()}, CUDA {torch.version.cuda}"
        )

    def free_memory(self) -> int:
        """What the driver can still give; what torch's allocator holds and does not use is not in it."""
        return int(torch.cuda.mem_get_info(self.device)[0])

    def used_memory(self) -> int:
        """What the GPU holds above what it held when this process came: graphs and libraries count, unlike in torch's
        own figures, and so does what others take meanwhile.
        """
        return self._held() - self._held_before

    def kv_cache_memory(self) -> int | None:
        """A share of the free memory."""
        return None

    def supports_bfloat16(self) -> bool:
        """True for every GPU that is accepted."""
        return True

    def prepare(self, settings: Settings, cache: Path | None) -> None:
        """Fix what decides bits, and leave the legacy stream, which every other stream would wait for.

        The host's threads are kept to one unless a number is asked for: they would only spin beside the one that
        feeds the GPU.
        """
        torch.set_num_threads(settings.num_threads or 1)
        torch.cuda.set_device(self.device)
        torch.cuda.set_stream(torch.cuda.Stream(self.device))
        self._held_before = self._held()
        fix_arithmetic()
        if torch.backends.cuda.preferred_blas_library() != torch._C._BlasBackend.Cublaslt:  # see early.py
            torch.backends.cuda.preferred_blas_library("cublaslt")
        name, capability = torch.cuda.get_device_name(self.device), torch.cuda.get_device_capability(self.device)
        self._configs = kernel_configs(name, capability, cache, invariant=settings.batch_invariant)

    def synchronize(self) -> None:
        """Wait for all streams."""
        torch.cuda.synchronize(self.device)

    def host_copy(self, tensor: Tensor) -> Tensor:
        """Pinned."""
        return torch.zeros(tensor.shape, dtype=tensor.dtype, pin_memory=True)

    @contextmanager
    def uploading(self) -> Iterator[Callable[[Tensor, Tensor], None]]:
        with Upload(self.device) as upload:
            yield upload.copy

    def regions(self, mode: Mode, cache: Path | None) -> Callable[[Region], Region]:
        """As they are written: their parts are kernels already."""
        return lambda region: region

    @cached_property
    def _pool(self) -> Pool:
        return torch.cuda.graph_pool_handle()

    def programs(self, body: Callable[[K], R]) -> CudaGraphs[K, R]:
        return CudaGraphs(body, self._pool)

    def compiling(self, threads: int) -> AbstractContextManager[None]:
        return compiling(threads)

    def settle(self, layers: Iterable[tuple[Linear, Sequence[int]]]) -> None:
        """Kernels are compiled side by side; what has not the contract's bits at one of its sizes is done without."""
        settle(self._configs, [(each.shape, rows) for each, rows in layers if isinstance(each, CudaLinear)])

    def tune(self, request: TuneRequest) -> str:
        return tune_layers(request, self.device)

    def attention(self, layers: Sequence[AttentionLayer], limits: Limits, *, contiguous: bool) -> CudaAttention:
        return CudaAttention(layers, limits, self)

    def sampler(
        self, limits: Limits, vocab_size: int, *, max_logprobs: int, handle_topk_duplicates: bool
    ) -> CudaSampler:
        rows = limits.max_num_seqs
        return CudaSampler(rows, vocab_size, self, rows, handle_topk_duplicates, max_logprobs=max_logprobs)

    def cold_sources(self) -> Mapping[str, Watched]:
        return COLD_SOURCES

    def linear(self, weight: Tensor, bias: Tensor | None = None, *, gated: bool = False) -> CudaLinear:
        return CudaLinear(weight, bias, gated=gated, configs=self._configs)

    def norm(self, weight: Tensor, eps: float) -> CudaNorm:
        return CudaNorm(weight, eps)

    def embed(self, inputs: StepInputs, last_token: Tensor, table: Tensor, out: Tensor) -> None:
        embed(inputs.tokens, inputs.slots, last_token, table, out)

    def take_rows(self, x: Tensor, index: Tensor) -> Tensor:
        return take_rows(x, index)

    def row_digests(self, logits: Tensor) -> Tensor:
        return digest_rows(logits)

    def _held(self) -> int:
        free, total = torch.cuda.mem_get_info(self.device)
        return int(total - free)
