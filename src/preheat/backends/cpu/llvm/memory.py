"""Arrays at addresses that suit vectors, and weights in panels."""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from preheat.backends.cpu.llvm.kinds import IN_WORD, LANES, PANEL, Product, Stored
from preheat.ops.fp4 import nibbles_of
from preheat.ops.quantization import QuantizedWeight

ALIGNMENT = 64


def zeros(count: int, dtype: type) -> np.ndarray:
    """Return ``count`` zeros at a multiple of :data:`ALIGNMENT` bytes."""
    size = np.dtype(dtype).itemsize
    raw = np.zeros(count * size + ALIGNMENT, np.uint8)
    first = -raw.ctypes.data % ALIGNMENT
    return raw[first : first + count * size].view(dtype)


def panels(how: Product, weight: Tensor | QuantizedWeight) -> Tensor:
    """Return ``weight`` [outputs, inputs] in panels of 32 outputs: for each input the panel's numbers side by side.

    Rows of zeros fill the last panel. Bfloat16 numbers j and j + 16 of a panel are the halves of a word. Of a gated
    weight, a panel of gates is followed by the panel of their ups. :mod:`preheat.backends.cpu.llvm.codes` has the
    layout of codes, in bytes.
    """
    if isinstance(weight, QuantizedWeight):
        return _coded(how, weight)
    rows = _in_panels(how, weight)
    if how.stored == "bfloat16":
        return rows.view(-1, 2, LANES, how.inputs).permute(0, 3, 2, 1).contiguous()
    return (rows.float() if how.stored == "float32" else rows).transpose(1, 2).contiguous()


def rows_in(how: Product, found: Tensor) -> Tensor:
    """Return the rows of a weight in panels, numbers and no codes: a view [.., inputs], in the order of the panels."""
    return found.permute(0, 3, 2, 1) if how.stored == "bfloat16" else found.transpose(1, 2)


def stored(how: Product, found: Tensor) -> Tensor:
    """Return the weight [outputs, inputs] that lies in the panels ``found``: numbers, no codes."""
    return _out_of_panels(how, rows_in(how, found).reshape(-1, how.inputs))


def stored_vector(how: Product, bias: Tensor) -> Tensor:
    """Return the bias [outputs] that lies in the order of the panels."""
    return _out_of_panels(how, bias.unsqueeze(1)).squeeze(1)


def _out_of_panels(how: Product, rows: Tensor) -> Tensor:
    """Return [outputs, n] from rows in the order of the panels, as :func:`_in_panels` arranged them."""
    if not how.gated:
        return rows[: how.outputs]
    pairs = rows.view(-1, 2, PANEL, rows.shape[1])
    return torch.cat([pairs[:, half].reshape(-1, rows.shape[1])[: how.results] for half in (0, 1)])


def _coded(how: Product, weight: QuantizedWeight) -> Tensor:
    """Return the panels of codes, with scales and zero points, as bytes."""
    scales = how.scales
    assert scales is not None
    codes = _in_panels(how, weight.codes).transpose(1, 2)
    parts = [codes.contiguous() if how.stored == "int8" else _words(how, codes)]
    rows = [weight.scales.to(getattr(torch, scales.stored))]
    if weight.zeros is not None:
        rows.append(weight.zeros.to(torch.bfloat16))
    parts += [_in_panels(how, each).transpose(1, 2).contiguous() for each in rows]
    count, split = len(codes), 1 if scales.indexed else weight.scales.shape[1]
    found = torch.cat([part.reshape(count, split, -1).view(torch.uint8) for part in parts], 2).reshape(-1)
    return found if weight.index is None else torch.cat((weight.index.view(torch.uint8), found))


def _words(how: Product, codes: Tensor) -> Tensor:
    """Return codes of 4 bits [panels, inputs, 32] as words [panels, inputs / 8, 32]."""
    nibbles = nibbles_of(codes) if how.stored == "fp4" else codes + 8
    eights = nibbles.reshape(len(codes), -1, IN_WORD, PANEL).to(torch.int32)
    words = torch.zeros_like(eights[:, :, 0])
    for place in range(IN_WORD):
        words |= eights[:, :, place] << (4 * place)
    return words


def exact(scales: Tensor) -> Stored:
    """Return float16 if its numbers have the values of ``scales``, else float32.

    Another choice of 16 bits would have the same size, and an update could not tell the two apart.
    """
    return "float16" if torch.equal(scales.to(torch.float16).float(), scales) else "float32"


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
