"""Biases of attention by the distance of two positions.

A bias is added to a scaled score, in float32, before the maximum is taken. ALiBi's bias is a slope times the distance,
key less query, rounded once. Other biases are in a table [heads, columns]: column :func:`middle` + key - query.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

AFTER = 16
"""Columns behind the greatest distance: kernels read so many keys at once."""


def middle(columns: int) -> int:
    """Return the column of the distance 0."""
    return (columns - AFTER) // 2


def by_distance(bias: Tensor, distance: Tensor) -> Tensor:
    """Return fp32 [heads, *distance.shape] for slopes [heads], or for a table [heads, columns]."""
    if bias.dim() == 1:
        return bias.view(-1, *[1] * distance.dim()) * distance.float()
    columns = bias.shape[1]
    return bias[:, (distance + middle(columns)).clamp(0, columns - 1).long()]


def distance_table(buckets: Tensor, most: int, length: int) -> Tensor:
    """Return the table fp32 [heads, columns] of positions before ``length``.

    ``buckets`` [buckets, heads] are biases: half of the buckets are for keys behind the query. In each half the first
    half are single distances, the others grow to the distance ``most`` by their logarithm (source: T5, MPNet).
    """
    half = len(buckets) // 2
    distance = torch.arange(-length, length + AFTER)
    far, exact = distance.abs(), half // 2
    large = exact + (torch.log(far.clamp(min=1) / exact) / math.log(most / exact) * (half - exact)).long()
    number = torch.where(far < exact, far, large.clamp(max=half - 1)) + half * (distance > 0)
    return buckets.float()[number].T.contiguous()
