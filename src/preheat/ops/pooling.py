"""Sums of the states of texts.

Contract. The sum of a text begins at +0 in float32. Its rows are converted to float32 and added one after the other, in
the order of the text; each sum is rounded. So a sum does not depend on the texts beside it.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import torch
from torch import Tensor


def sum_rows(x: Tensor, bounds: Tensor, out: Tensor) -> None:
    """Fill ``out`` fp32 [texts, size] with the sums of rows of ``x`` [rows, size].

    The rows of a text lie between two of ``bounds``, int32 [texts + 1].

    numpy adds whole rows, the first row first: only sums along a row are cut into parts.
    """
    rows, sums = x.to(torch.float32).numpy(), out.numpy()
    for total, (begin, end) in zip(sums, pairwise(bounds.tolist()), strict=True):
        np.add.reduce(rows[begin:end], axis=0, initial=np.float32(0.0), out=total)
