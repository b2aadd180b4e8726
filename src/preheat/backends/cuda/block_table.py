"""The block table on a device that replays programs.

Few rows of it change from one step to the next. So every copy knows the version of each of its rows, and only rows that
differ go on to the next copy.
"""

from __future__ import annotations

import numpy as np
import torch

from preheat.backends.base import Backend, BlockTables


class DeviceTable:
    """``rows`` int32 [num_slots + 1, max_blocks] on the device, the last of them all pad block, and ``copies`` of the
    table on the host, of which one may be written while the device still reads another.
    """

    def __init__(self, num_slots: int, max_blocks: int, copies: int, backend: Backend) -> None:
        self.rows = torch.zeros(num_slots + 1, max_blocks, dtype=torch.int32, device=backend.device)
        self._version, self._writes = np.zeros(num_slots, np.int64), 0
        self._host = [backend.host_copy(self.rows) for _ in range(copies)]
        self._arrays = [host.numpy() for host in self._host]
        self._host_versions = [np.zeros(num_slots, np.int64) for _ in range(copies)]
        self._host_writes = [0] * copies

    def write(self, copy: int, tables: BlockTables) -> None:
        """Bring a host copy up to date."""
        if self._host_writes[copy] == tables.table_writes:
            return
        version, self._host_writes[copy] = self._host_versions[copy], tables.table_writes
        changed = (version != tables.table_version).nonzero()[0]
        self._arrays[copy][changed] = tables.block_table[changed]
        version[changed] = tables.table_version[changed]

    def send(self, copy: int) -> None:
        """Let the device have what a host copy holds; returns before it is there."""
        if self._writes == self._host_writes[copy]:
            return
        version, self._writes = self._host_versions[copy], self._host_writes[copy]
        changed = (self._version != version).nonzero()[0]
        if len(changed):
            span = slice(int(changed[0]), int(changed[-1]) + 1)
            self.rows[span].copy_(self._host[copy][span], non_blocking=True)
            self._version[:] = version

    def clear(self) -> None:
        """On the device every entry is the pad block."""
        self.rows.zero_()
        self._version[:], self._writes = 0, 0
