"""Sequences of random latent vectors in a paged cache, for tests of attention on CUDA or in the interpreter."""

from __future__ import annotations

import dataclasses

import numpy as np
import torch
from torch import Tensor

from preheat.backends.cuda.attention.latent import (
    DECODE,
    PROMPT,
    VERIFY,
    latent_attention,
    least_work,
)
from preheat.backends.cuda.attention.latent_few import FewConfig, few_rows_attention
from preheat.backends.cuda.attention.latent_rotary import turn_and_write
from preheat.backends.cuda.attention.paged import AttentionConfig
from preheat.backends.cuda.attention.shape import TOKENS, query_tokens
from preheat.backends.cuda.attention.values import Latents, Pieces, Places, Rows, Workspace
from preheat.backends.cuda.attention.work import decode_work, prefill_tiles, query_tiles
from preheat.model.attention_specs import RopeSpec
from preheat.model.rope import rope_table
from preheat.ops.rotary import apply_rope_

FEW = 3
"""A mode beside those of :func:`latent_attention`: rows of one token, scores first."""

Work = list[tuple[int, int, int]]
"""Sequence, first position and number of tokens of each row of a step."""


@dataclasses.dataclass
class Sizes:
    heads: int = 5
    rank: int = 32
    rope: int = 16
    dtype: torch.dtype = torch.bfloat16

    @property
    def entry(self) -> int:
        return self.rank + self.rope


class LatentPages:
    """Sequences in a paged cache; sequence i has ``lengths[i]`` tokens, and its slot is i.

    ``made`` are queries and entries before they turn. Slots without a token are NaN.
    """

    def __init__(self, sizes: Sizes, lengths: list[int], block_size: int = 64, device: str = "cpu") -> None:
        self.sizes, self.lengths, self.device = sizes, lengths, device
        generator = torch.Generator().manual_seed(0)
        counts = [-(-n // block_size) for n in lengths]
        order = torch.randperm(sum(counts), generator=torch.Generator().manual_seed(block_size)) + 1
        table = torch.zeros(len(lengths) + 1, max(counts), dtype=torch.int32)
        for row, blocks in zip(table, order.split(counts), strict=False):
            row[: len(blocks)] = blocks
        shape = sum(counts) + 1, 2, 1, 1, block_size, sizes.entry
        self.cache = torch.full(shape, torch.nan, dtype=sizes.dtype, device=device)[:, 1]  # a layer of two
        rope = RopeSpec(kind="default", theta=1e4)
        self.table, self.rope = table.to(device), rope_table(rope, sizes.rope, max(lengths), sizes.dtype).to(device)
        size = sizes.heads + 1, sizes.entry
        made = [torch.randn(n, *size, generator=generator).to(sizes.dtype) for n in lengths]
        self.made = [each.to(device) for each in made]
        self.turned = [made.clone() for made in self.made]
        for i, n in enumerate(lengths):
            self.store(i, 0, n)

    def store(self, i: int, first: int, count: int) -> None:
        """Turn and store tokens of sequence ``i``."""
        made = self.made[i][first : first + count].clone()
        slots, positions = self._places([(i, first, count)])
        turn_and_write(made, self.rope, slots, positions, self.table, self.cache, self.sizes.rank)
        self.turned[i][first : first + count] = made

    def _places(self, work: Work) -> tuple[Tensor, Tensor]:
        slots = torch.cat([torch.full((n,), i, dtype=torch.int32) for i, _, n in work])
        positions = torch.cat([torch.arange(p, p + n, dtype=torch.int32) for _, p, n in work])
        return slots.to(self.device), positions.to(self.device)

    def exact(self, i: int) -> Tensor:
        """Return the attention of sequence ``i`` in float64, [tokens, heads, rank]."""
        sizes, made = self.sizes, self.made[i].clone()
        cos, sin = self.rope[: len(made)].unbind(1)
        apply_rope_(made[..., sizes.rank :], cos, sin)
        query, entry = made[:, :-1].double().transpose(0, 1), made[:, -1].double()
        scores = query @ entry.T * sizes.entry**-0.5
        hidden = torch.ones(len(made), len(made), device=made.device).triu(1).bool()
        weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
        return (weights @ entry[:, : sizes.rank]).transpose(0, 1)

    def run(
        self,
        work: Work,
        mode: int,
        split: int,
        *,
        config: AttentionConfig | FewConfig | None = None,
        room: int | None = None,
    ) -> Tensor:
        """Return the attention of a step's rows, [tokens, heads, rank]."""
        sizes, extends = self.sizes, np.array([n for _, _, n in work])
        first, starts = np.array([p for _, p, _ in work]), np.cumsum(extends) - extends
        width = int(extends.max()) if mode == VERIFY else 1
        if mode == PROMPT:
            pieces = prefill_tiles(starts, extends, first, TOKENS)
        else:
            starts, first, lengths = query_tiles(extends.cumsum(), extends, first, query_tokens(width))
            drafts = {"queries": lengths, "room": room} if mode == VERIFY else {}
            pieces = decode_work(starts, first, split, None, **drafts)
        spare = np.full((3, 2), 1 << 20, np.int32)
        given = torch.from_numpy(np.concatenate([pieces, spare])).to(self.device)
        count = torch.tensor([len(pieces)], dtype=torch.int32).to(self.device)
        query = torch.cat([self.turned[i][p : p + n] for i, p, n in work])[:, : sizes.heads]
        out = torch.full((len(query), sizes.heads * sizes.entry), torch.nan, dtype=sizes.dtype, device=self.device)
        room = max(len(given) * query_tokens(width), least_work(sizes.heads, query.device))
        scores = len(given) * sizes.heads * split
        space = Workspace(room, len(query), sizes.heads, sizes.rank, query.device, scores=scores)
        latents, places = Latents(sizes.entry**-0.5, sizes.rank, split), Places(*self._places(work), self.table)
        given = query, self.cache, out, places, Pieces(given, count), space, latents
        if mode == FEW:
            few_rows_attention(*given, config=config)
        else:
            latent_attention(*given, Rows(len(work), width), mode=mode, config=config)
        assert not space.arrived.any()
        return out.view(len(query), sizes.heads, -1)[..., : sizes.rank]


__all__ = ["DECODE", "FEW", "PROMPT", "VERIFY", "LatentPages", "Sizes"]
