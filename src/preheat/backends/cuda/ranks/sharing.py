"""Meeting of ranks that share a model's layers on GPUs, one process each."""

from __future__ import annotations

from collections.abc import Callable

import torch

from preheat.backends.cuda.ranks.collective import Nccl, RankSums
from preheat.backends.rendezvous import OneNode, Rendezvous
from preheat.errors import SettingsError


class CudaSharing:
    """See :class:`preheat.backends.base.collective.Sharing`; for a rank on the GPU ``device``."""

    def __init__(self, device: torch.device) -> None:
        self._device, self.by_nccl = device, False
        self._joined: RankSums | None = None

    def join(self, rendezvous: Rendezvous, check: Callable[[], None]) -> RankSums:
        """Meet the other ranks; they exchange over peer memory on one node, else or ``by_nccl`` through NCCL.

        All groups of two stages are one. Raises SettingsError for more stages.
        """
        if rendezvous.world == 1:
            return RankSums()
        joined = self._joined
        if joined is None:
            meet = self._over_memory() if isinstance(rendezvous, OneNode) and not self.by_nccl else None
            nccl = Nccl(self._device, rendezvous, check)
            joined = self._joined = nccl if meet is None else meet(nccl, self._device)
        if (joined.rank, joined.world) != (rendezvous.rank, rendezvous.world):
            raise SettingsError(
                "a GPU is in one group of ranks so far: set --pipeline-parallel-size to 2 or 1",
                param="pipeline_parallel_size",
            )
        return joined

    @staticmethod
    def _over_memory() -> Callable[[Nccl, torch.device], RankSums]:
        """Import the kernels of peers while the other ranks are on their way; a GPU alone has none."""
        from preheat.backends.cuda.ranks.peer import meet

        return meet
