"""Adapters (LoRA): what a row with an adapter adds to what a linear layer gives.

Contract. A row without an adapter, or whose adapter leaves the layer alone, is skipped: nothing is added to it, not
even zero, which would turn -0.0 into 0.0. To any other row ``(x A^T * scale) B^T`` is added, in float32:

1. shrink: the inputs are cut into parts of ``PART`` from the first one on; a part's dot products are accumulated in
   float32, and the parts' partial sums are added from the first to the last. The sum is multiplied by ``scale``.
2. expand: the ranks are cut into tiles of ``TILE`` from the first one on; the tiles' dot products, each over the ranks
   of the tile, are added from the first to the last. Ranks that fill up a tile are zeros. Where the model and its
   adapters are of bfloat16, what a row shrank to, scaled, is rounded to it first, as PEFT and vLLM do it.
3. The layer's own output is rounded to the dtype first, as without adapters; the sum of that and of what is expanded is
   rounded once. Then comes the layer's activation.

Where layers are summed in leaves (:mod:`preheat.ops.leaves`), those that take their inputs by columns shrink in the
same leaves: the parts are those of a leaf, from its first input on, and what the leaves have is added in the tree. So a
rank has the columns of ``A`` that belong to its inputs, and sends what its rows shrink to beside the layer's own sums;
the scale is applied to the root. ``B`` is whole there. Layers that are divided by rows have ``A`` whole, and those rows
of ``B`` that are theirs.

The table of embeddings gives a token its row; an adapter's first matrix gives it a row, too, which is multiplied by the
scale and expanded in the same way. So ``x A^T`` is no product there. Rows that are no tokens are left alone.

An expert's three matrices are adapted like layers of their own, for the rows that visit it: what is added to gate and
up reads the expert's input and comes before the activation; what is added to down reads what the activation gave,
rounded to the dtype, and comes before the row is weighted. Each of the three sums is rounded once.

Beside quantized layers and experts nothing changes: adapters read what activations were before they were quantized,
also those of an expert's down, and the sum is with the layer's own output. What a layer quantizes of adapted rows is
computed of the sums.
Where experts are summed in leaves, these are sums over a token's experts, so there is no row of one expert to add to.
What a token's row shrinks to for down of each expert is added in the tree by itself, as in other layers, scaled and
expanded. That is multiplied by the expert's weight in fp32, rounded, and the products are added in slot order in fp32.
The token's own sum is rounded first, as without adapters, and the sum of that and of what all slots have is rounded
once. Gate and up are divided by rows.

So a row's bits depend on the row and on its adapter alone: not on what shares the step, on how many rows share the
adapter, on the place that it has on the device, on the largest rank that there is room for, or on the number of ranks
that share the layers.
"""

from __future__ import annotations

from functools import reduce
from operator import add
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from preheat.ops.leaves import tree_sum

PART = 512
"""Inputs whose products are one sum."""

TILE = 16
"""Ranks that are expanded at once."""


NOTHING = -0.0
"""What leaves every number that it is added to as it is, also -0.0; and so does its product with a probability."""


class LowRank(NamedTuple):
    """What an adapter has for one module: ``a`` [rank, inputs] and ``b`` [outputs, rank], on the host and in the
    adapters' dtype, and the ``scale`` of the product with ``a``, which is applied in float32. The inputs of a table of
    embeddings are its rows.
    """

    a: Tensor
    b: Tensor
    scale: float


def matrix_dtype(model: torch.dtype, adapters: torch.dtype) -> torch.dtype:
    """In which matrices of adapters are multiplied: bfloat16, if that is what all of them are, else fp32."""
    return torch.bfloat16 if model == adapters == torch.bfloat16 else torch.float32


def delta(x: Tensor, a: Tensor, b: Tensor, scale: float, leaves: int = 1) -> Tensor:
    """What is added to rows ``x`` [rows, inputs] of one adapter, ``a`` [rank, inputs] and ``b`` [outputs, rank]: fp32
    [rows, outputs], a new tensor. The inputs are cut into so many ``leaves``.
    """
    more = -len(a) % TILE
    downs, ups = F.pad(a.float(), (0, 0, 0, more)), F.pad(b.float(), (0, more))
    inputs, expanded, dtype = x.float().chunk(leaves, 1), list[Tensor](), matrix_dtype(x.dtype, a.dtype)
    for down, up in zip(torch.split(downs, TILE), torch.split(ups, TILE, 1), strict=True):
        shrunk = tree_sum([_in_parts(*each) for each in zip(inputs, down.chunk(leaves, 1), strict=True)])
        expanded.append((shrunk * scale).to(dtype).float() @ up.T)
    return reduce(add, expanded)


def _in_parts(x: Tensor, a: Tensor) -> Tensor:
    parts = zip(torch.split(x, PART, 1), torch.split(a, PART, 1), strict=True)
    return reduce(add, (one @ other.T for one, other in parts))


def add_delta(y: Tensor, more: Tensor) -> Tensor:
    """``y`` [rows, outputs], rounded to its dtype already, plus fp32 ``more``, rounded once."""
    return (y.float() + more).to(y.dtype)
