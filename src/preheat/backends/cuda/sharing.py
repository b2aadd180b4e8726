"""Meeting of ranks that share a model's layers on GPUs, one process each."""

from __future__ import annotations

from collections.abc import Callable

import torch

from preheat.backends.cuda.collective import Nccl, RankSums
from preheat.backends.cuda.peer import meet
from preheat.backends.rendezvous import OneNode, Rendezvous


class CudaSharing:
    """See :class:`preheat.backends.base.collective.Sharing`; for a rank on the GPU ``device``."""

    def __init__(self, device: torch.device) -> None:
        self._device, self.by_nccl = device, False

    def join(self, rendezvous: Rendezvous, check: Callable[[], None]) -> RankSums:
        """Meet the other ranks; they exchange over peer memory on one node, else or ``by_nccl`` through NCCL."""
        if rendezvous.world == 1:
            return RankSums()
        nccl = Nccl(self._device, rendezvous, check)
        return meet(nccl, self._device) if isinstance(rendezvous, OneNode) and not self.by_nccl else nccl
