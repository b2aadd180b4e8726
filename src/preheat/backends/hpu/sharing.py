"""Rendezvous of the ranks that share a model on Gaudi.

Each rank has one card and one process. Ranks exchange by torch.distributed's process group of HCCL's name. Its
gathering is an operation like any other: in lazy mode it accumulates, and graphs hold it, if
``PT_HPU_ENABLE_LAZY_COLLECTIVES`` is on.
"""

from __future__ import annotations

from collections.abc import Callable

import torch.distributed as dist
from torch import Tensor

from preheat.backends.base.collective import Collective
from preheat.backends.hpu.bridge import Bridge
from preheat.backends.process_group import join_group
from preheat.backends.rendezvous import Rendezvous
from preheat.errors import SettingsError


class HpuSharing:
    """See :class:`preheat.backends.base.collective.Sharing`.

    ``bridge`` returns the bridge once the backend is prepared.
    """

    def __init__(self, bridge: Callable[[], Bridge]) -> None:
        self._bridge = bridge

    def join(self, rendezvous: Rendezvous, check: Callable[[], None]) -> Collective:
        return Group(self._bridge(), rendezvous, check)


class Group:
    """A rank, see :func:`preheat.backends.process_group.join_group`.

    Raises SettingsError also if collectives are kept out of lazy graphs.
    """

    def __init__(self, bridge: Bridge, rendezvous: Rendezvous, check: Callable[[], None]) -> None:
        self.rank, self.world = rendezvous.rank, rendezvous.world
        if self.world == 1:
            return
        if not bridge.collects:
            raise SettingsError(
                "lazy_collectives (PT_HPU_ENABLE_LAZY_COLLECTIVES) is false, and lazy graphs of several ranks hold "
                "their collectives: leave it out, set it to true, or set PT_HPU_LAZY_MODE=0",
                param="lazy_collectives",
            )
        join_group(bridge.process_group, rendezvous, check)

    def gather(self, x: Tensor) -> Tensor:
        if self.world == 1:
            return x.unsqueeze(0)
        found = x.new_empty(self.world, *x.shape)
        dist.all_gather(list(found.unbind()), x.contiguous())
        return found

    def abort(self) -> None:
        """Do nothing: operations that wait on a card end with the process."""

    def fault(self) -> None:
        """Return None: the host notices a silent rank, by its heartbeats."""
