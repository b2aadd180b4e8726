"""Arrays at addresses that suit vectors, and weights in panels."""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from preheat.backends.cpu.llvm.kinds import LANES, PANEL, Product

ALIGNMENT = 64


def zeros(count: int, dtype: type) -> np.ndarray:
    """Return ``count`` zeros at a multiple of :data:`ALIGNMENT` bytes."""
    size = np.dtype(dtype).itemsize
    raw = np.zeros(count * size + ALIGNMENT, np.uint8)
    first = -raw.ctypes.data % ALIGNMENT
    return raw[first : first + count * size].view(dtype)


def panels(how: Product, weight: Tensor) -> Tensor:
    """Return ``weight`` [outputs, inputs] in panels of 32 outputs: for each input the panel's numbers side by side.

    Rows of zeros fill the last panel. Bfloat16 numbers j and j + 16 of a panel are the halves of a word. Of a gated
    weight, a panel of gates is followed by the panel of their ups.
    """
    if how.gated:
        gates, ups = (half.reshape(-1, PANEL, how.inputs) for half in weight.chunk(2))
        weight = torch.stack((gates, ups), 1).reshape(how.outputs, how.inputs)
    weight = F.pad(weight, (0, 0, 0, how.outputs - len(weight)))
    if how.stored == "float32":
        return weight.float().view(-1, PANEL, how.inputs).transpose(1, 2).contiguous()
    halves = weight.view(-1, 2, LANES, how.inputs)
    return halves.permute(0, 3, 2, 1).contiguous()


def vector(how: Product, bias: Tensor) -> Tensor:
    """Return ``bias`` [outputs] as floats, in the order of the panels."""
    if how.gated:
        gates, ups = (half.reshape(-1, PANEL) for half in bias.chunk(2))
        bias = torch.stack((gates, ups), 1).reshape(-1)
    return F.pad(bias.float(), (0, how.outputs - len(bias))).contiguous()
