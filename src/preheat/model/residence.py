"""Tensors whose memory is given back and taken again, while programs and views keep them.

A tensor in memory of torch's loses its storage, and gets one of the same size: views of it see the new one. One that a
library has laid out is replaced by an empty one, and filled when it is replaced again. Addresses change: nothing that
was captured may know them.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from preheat.model.update import is_packed
from preheat.utils.memory import trim


class Dropped:
    """The memory of ``tensors``, given back to the system; their numbers are lost."""

    @torch.no_grad()
    def __init__(self, tensors: Iterable[Tensor]) -> None:
        self._storages: list[tuple[torch.UntypedStorage, int]] = []
        for tensor in tensors:
            if is_packed(tensor):
                tensor.data = torch.zeros(1, 1, dtype=tensor.dtype).to_mkldnn()
                continue
            storage = tensor.untyped_storage()
            if size := storage.nbytes():  # else another tensor in it was before
                self._storages.append((storage, size))
                storage.resize_(0)
        trim()

    def restore(self) -> None:
        """Take memory again. What is in it is undefined, and what is packed is still empty."""
        for storage, size in self._storages:
            storage.resize_(size)
