"""The block tables on a device that replays programs: one for each cache group.

Few rows of the table change from one step to the next. So every copy knows the version of each row, and only rows with
another version go on to the next copy.
"""

from __future__ import annotations

import numpy as np
import torch

from preheat.backends.base.attention import BlockTables
from preheat.backends.base.backend import Backend

ALIGNED = 4
"""Columns are a multiple of this: the table of each group then begins at 16 bytes, and kernels compile once."""


class DeviceTable:
    """The block tables on the device and their copies on the host.

    ``rows`` int32 [num_slots + 1, groups, max_blocks] lies on the device; its last row is all pad block. The rows of a
    slot lie together, so that one copy sends the tables of all groups. The host may write one of the ``copies`` while
    the device still reads another.
    """

    def __init__(self, num_slots: int, max_blocks: int, copies: int, backend: Backend, *, groups: int = 1) -> None:
        columns = max_blocks if groups == 1 else -(-max_blocks // ALIGNED) * ALIGNED
        self.rows = torch.zeros(num_slots + 1, groups, columns, dtype=torch.int32, device=backend.device)
        self.of_group = self.rows.unbind(1)
        self._columns = max_blocks
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
        self._arrays[copy][changed, :, : self._columns] = tables.tables[changed]
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
        """Set every entry of all groups on the device to the pad block."""
        self.rows.zero_()
        self._version[:], self._writes = 0, 0
