"""The paged key/value cache: one allocation, a block's keys and values side by side."""

from __future__ import annotations

import torch
from torch import Tensor

from preheat.model.specs import ModelSpec
from preheat.ops.float8 import DTYPES


class KVCache:
    """``data`` [layers, blocks, 2, kv heads, slots, dim]: keys at index 0 of the third axis, values at 1. They are of
    ``dtype``, the model's, or of the eight bits that the spec asks for.

    Block 0 is the pad block. Within a block each head's keys are contiguous, so that a read gathers whole heads of
    whole blocks straight into the layout of the matrix product.
    """

    def __init__(
        self, spec: ModelSpec, num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        shape = (spec.num_layers, num_blocks, 2, spec.num_kv_heads, block_size, spec.head_dim)
        self.data = torch.zeros(shape, dtype=DTYPES.get(spec.kv_dtype, dtype), device=device)
        self.layers = list(self.data.unbind(0))
        self._blocks = [layer.view(num_blocks, -1).view(torch.int64) for layer in self.layers]  # moved in whole words

    def swap(self, pairs: Tensor) -> None:
        """The contents of each of the ``pairs`` of blocks, int64 [n, 2], change places, in one layer after the other.

        A pair may be given more than once, and a block with itself; else no block may occur twice. Takes the memory of
        2n blocks of one layer meanwhile.
        """
        here, there = pairs.flatten(), pairs.flip(1).flatten()
        contents = self._blocks[0].new_empty(len(here), self._blocks[0].shape[1])
        for blocks in self._blocks:
            torch.index_select(blocks, 0, there, out=contents)
            blocks.index_copy_(0, here, contents)
