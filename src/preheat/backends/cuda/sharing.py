"""Meeting of ranks that share a model's layers on GPUs, one process each."""

from __future__ import annotations

from collections.abc import Callable

import torch

from preheat.backends.cuda.collective import Nccl, RankSums
from preheat.backends.rendezvous import Rendezvous


class CudaSharing:
    """See :class:`preheat.backends.base.Sharing`; for a rank on the GPU ``device``."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def join(self, rendezvous: Rendezvous, check: Callable[[], None]) -> RankSums:
        return RankSums() if rendezvous.world == 1 else Nccl(self._device, rendezvous, check)
