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
    rows = _in_panels(how, weight)
    if how.stored == "float32":
        return rows.float().transpose(1, 2).contiguous()
    return rows.view(-1, 2, LANES, how.inputs).permute(0, 3, 2, 1).contiguous()


def vector(how: Product, bias: Tensor) -> Tensor:
    """Return ``bias`` [outputs] as floats, in the order of the panels."""
    return _in_panels(how, bias.float().unsqueeze(1)).reshape(-1).contiguous()


def _in_panels(how: Product, rows: Tensor) -> Tensor:
    """Return ``rows`` [outputs, size] as panels [panels, 32, size], filled up with zeros."""
    parts = rows.chunk(2) if how.gated else (rows,)
    missing = how.padded // len(parts) - how.results
    filled = [F.pad(part, (0, 0, 0, missing)) if missing else part for part in parts]
    pieces = [part.view(-1, PANEL, rows.shape[1]) for part in filled]
    return torch.stack(pieces, 1).view(-1, PANEL, rows.shape[1]) if how.gated else pieces[0]
