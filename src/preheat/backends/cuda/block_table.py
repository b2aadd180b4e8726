"""The block table on a device that replays programs.

Few rows of the table change from one step to the next. So every copy knows the version of each row, and only rows with
another version go on to the next copy.
"""

from __future__ import annotations

import numpy as np
import torch

from preheat.backends.base import Backend, BlockTables


class DeviceTable:
    """The block table on the device and its copies on the host.

    ``rows`` int32 [num_slots + 1, max_blocks] lies on the device; its last row is all pad block. The host may write one
    of the ``copies`` while the device still reads another.
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
        """Send a host copy to the device; returns before the copy has arrived."""
        if self._writes == self._host_writes[copy]:
            return
        version, self._writes = self._host_versions[copy], self._host_writes[copy]
        changed = (self._version != version).nonzero()[0]
        if len(changed):
            span = slice(int(changed[0]), int(changed[-1]) + 1)
            self.rows[span].copy_(self._host[copy][span], non_blocking=True)
            self._version[:] = version

    def clear(self) -> None:
        """Set every entry on the device to the pad block."""
        self.rows.zero_()
        self._version[:], self._writes = 0, 0
