"""Tensors that give their memory back and take it again.

Programs and views keep them meanwhile. A tensor in torch's memory loses its storage, and later gets one of the same
size: views of it see the new one. A tensor laid out by a library is replaced by an empty one, and filled when it is
replaced again. Addresses change, so no captured graph may contain them.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from preheat.model.update import is_packed
from preheat.utils.memory import trim


class Dropped:
    """The memory of ``tensors``, given back to the system.

    Their numbers are lost.
    """

    @torch.no_grad()
    def __init__(self, tensors: Iterable[Tensor]) -> None:
        self._storages: list[tuple[torch.UntypedStorage, int]] = []
        for tensor in tensors:
            if is_packed(tensor):
                tensor.data = torch.zeros(1, 1, dtype=tensor.dtype).to_mkldnn()
                continue
            storage = tensor.untyped_storage()
            if size := storage.nbytes():  # 0 if another tensor of the same storage came before
                self._storages.append((storage, size))
                storage.resize_(0)
        trim()

    def restore(self) -> None:
        """Take memory again. Its contents are undefined, and packed tensors stay empty."""
        for storage, size in self._storages:
            storage.resize_(size)
