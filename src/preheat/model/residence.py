"""Tensors that give their memory back and take it again.

Programs and views keep them meanwhile. A tensor in torch's memory loses its pages, and keeps its address. A tensor laid
out by a library is replaced by an empty one, and filled when it is replaced again.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from preheat.model.update import is_packed
from preheat.utils.memory import release, trim


class Dropped:
    """The memory of ``tensors``, given back to the system.

    Their numbers are lost.
    """

    @torch.no_grad()
    def __init__(self, tensors: Iterable[Tensor]) -> None:
        for tensor in tensors:
            if is_packed(tensor):
                tensor.data = torch.zeros(1, 1, dtype=tensor.dtype).to_mkldnn()
                continue
            storage = tensor.untyped_storage()
            release(storage.data_ptr(), storage.nbytes())
        trim()

    def restore(self) -> None:
        """Do nothing: the first write takes memory again. Packed tensors stay empty until then."""
