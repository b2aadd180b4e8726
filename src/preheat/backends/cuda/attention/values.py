"""The arguments that attention's kernels share: a step's tokens and work, and a layer's constants."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from preheat.backends.cuda.attention.work import SPLIT

LOG2_E = 1.4426950408889634
"""Kernels take the scale of scores times this number, and powers of two in place of powers of e."""


class Places(NamedTuple):
    """Where the tokens of a step are: ``slots`` and ``positions`` int32 [tokens], and the blocks of each slot.

    ``table`` int32 [slots, max blocks] holds the blocks. The host copies all three for each step. They are read before
    earlier kernels end, so no kernel may write them.
    """

    slots: Tensor
    positions: Tensor
    table: Tensor


class Pieces(NamedTuple):
    """Pieces of work, ``work`` int32 [most pieces, 2]; the first ``used`` int32 [1] ones count.

    The host copies both for each step, as it copies :class:`Places`.
    """

    work: Tensor
    used: Tensor


class Rows(NamedTuple):
    """The rows of a program that decodes: the ``most`` rows, and the ``width``, the most tokens of a row."""

    most: int = 0
    width: int = 1


ANY_ROWS = Rows()
"""Any number of rows of one token: a grid has as many programs as there is work."""


class Scores(NamedTuple):
    """How a layer scores keys and weights values.

    ``scale`` multiplies a score; for a cache of eight bits it includes the scale of the keys, and ``value_scale``
    multiplies the output. ``window`` is the sliding window in tokens, None for all keys. ``alibi`` fp32 [heads] holds
    slopes, ``sinks`` fp32 [heads] scores without keys. Contexts are cut into splits of ``split`` keys.
    """

    scale: float
    window: int | None = None
    split: int = SPLIT
    alibi: Tensor | None = None
    value_scale: float | None = None
    sinks: Tensor | None = None


class Latents(NamedTuple):
    """How a layer scores latent vectors of ``rank`` numbers: scores are multiplied by ``scale``."""

    scale: float
    rank: int
    split: int = SPLIT


COUNTERS = 64
"""The least counters of a token."""


class Workspace:
    """Partial results of queries with several splits.

    There is room for ``max_work`` splits of ``heads`` heads of ``dim`` numbers; a piece takes as many splits as its
    tile may have queries. ``arrived`` counts the finished pieces of each of ``max_tokens`` tokens and kv heads, and
    ``claims`` counts the claimed units. All counts are zero between calls. ``scores`` holds single scores.
    """

    def __init__(
        self, max_work: int, max_tokens: int, heads: int, dim: int, device: torch.device, *, scores: int = 0
    ) -> None:
        self.parts = torch.empty(max_work, heads, dim, dtype=torch.float32, device=device)
        self.tops = torch.empty(max_work, heads, dtype=torch.float32, device=device)
        self.totals = torch.empty(max_work, heads, dtype=torch.float32, device=device)
        self.arrived = torch.zeros(max_tokens, max(heads, COUNTERS), dtype=torch.int32, device=device)
        self.claims = torch.zeros(1, dtype=torch.int32, device=device)
        self.scores = torch.empty(scores, dtype=torch.float32, device=device)
