"""Routing of tokens to experts, places of the experts' rows, and the sum over experts, on CUDA.

Contract. As :mod:`preheat.ops.moe` says. A row's place among the rows of its expert is the order of arrival. The place
decides where a row is computed and never how, so no bit depends on it. Sums over experts go by slots.

The rows of an expert lie next to each other, padded to whole blocks of ``block`` rows. The host does not know the
number of rows: grids have the largest possible size, and programs past the end return. With ``block`` one there is
nothing to arrange: every slot is a block of its own.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from preheat.backends.cuda.device.launch import begin, options
from preheat.backends.cuda.device.sizes import cdiv, next_power_of_2
from preheat.backends.cuda.matmul.moe.scores import keep, route_by_scores
from preheat.ops.values import Routing

SLOTS = 128
"""Most slots, and blocks, arranged by one program."""


class Arrangement(NamedTuple):
    """Places of the rows of [tokens * top_k] slots.

    ``places`` int32 [slots]: the row of each; ``tokens`` int32 [rows]: the token of each row, undefined for padding;
    ``experts`` int32 [blocks]: the expert of each block. ``starts`` int32 [experts + 1]: each expert's first block,
    then the number of blocks; ``counts`` int32 [experts]: its rows. ``weights`` fp32 [slots]. With ``block`` one,
    ``places`` and ``tokens`` are not needed, and ``starts`` and ``counts`` undefined.

    ``own``: the rank has the experts [from, to) of all. Slots of other experts have no place. ``experts`` and
    ``starts`` are then of the own experts alone, numbered from 0; with ``block`` one ``experts`` are of all. ``chosen``
    int32 [slots] are the numbers of all experts, and ``counts`` are of all.
    """

    block: int
    places: Tensor
    tokens: Tensor
    experts: Tensor
    starts: Tensor
    counts: Tensor
    weights: Tensor
    chosen: Tensor
    own: tuple[int, int] | None = None

    @property
    def rows_of_experts(self) -> Tensor:
        """Return the numbers of rows of the experts in ``starts``: int32 [experts]."""
        return self.counts if self.own is None else self.counts[slice(*self.own)]

    @property
    def rows(self) -> int:
        return len(self.tokens)

    @property
    def top_k(self) -> int:
        return self.weights.shape[1]


@triton.jit
def _route(
    logits, chosen, weights, ranks, counts, EXPERTS: tl.constexpr, WIDTH: tl.constexpr, K: tl.constexpr,
    SLOTS_WIDTH: tl.constexpr, renormalize: tl.constexpr, round_weights: tl.constexpr, count: tl.constexpr,
    overlap: tl.constexpr,
):  # fmt: skip
    """Choose the experts and weights of one token a program; with ``count``, count each expert's rows."""
    begin(overlap)
    token = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, WIDTH)
    row = tl.load(logits + token * EXPERTS + at, mask=at < EXPERTS, other=float("-inf"))
    wide = row.to(tl.float32)
    share = tl.exp(wide - tl.max(wide, 0))
    likely = tl.where(at < EXPERTS, tl.div_rn(share, tl.sum(share, 0)), -1.0)
    slots = tl.arange(0, SLOTS_WIDTH)
    experts = tl.zeros([SLOTS_WIDTH], tl.int32)
    found = tl.zeros([SLOTS_WIDTH], tl.float32)
    total = 0.0
    for slot in tl.static_range(K):
        best = tl.max(likely, 0)
        expert = tl.minimum(tl.min(tl.where(likely == best, at, WIDTH), 0), EXPERTS - 1)  # NaN equals nothing
        experts = tl.where(slots == slot, expert, experts)
        found = tl.where(slots == slot, best, found)
        likely = tl.where(at == expert, -1.0, likely)
        total += best
    if renormalize:
        found = tl.div_rn(found, total)
    if round_weights:
        found = found.to(row.dtype).to(tl.float32)
    keep(chosen, weights, ranks, counts, token, slots, experts, found, K, count)


@triton.jit
def _arrange(
    chosen, ranks, counts, places, tokens, experts, starts, slots, blocks, K: tl.constexpr, BLOCK: tl.constexpr,
    EXPERTS: tl.constexpr, WIDTH: tl.constexpr, SLOTS: tl.constexpr, dealt: tl.constexpr, FIRST: tl.constexpr,
    largest_first: tl.constexpr, overlap: tl.constexpr,
):  # fmt: skip
    """Place ``SLOTS`` slots and as many blocks a program; every program adds up the counts for itself.

    ``dealt``: slots of experts outside of [FIRST, FIRST + EXPERTS) get no place. ``largest_first``:
    blocks of experts with more rows come first.
    """
    begin(overlap)
    at = tl.arange(0, WIDTH)
    rows = tl.load(counts + at, mask=at < EXPERTS, other=0)
    sizes = (rows + (BLOCK - 1)) // BLOCK
    if largest_first:
        more, equal = rows[None, :] > rows[:, None], rows[None, :] == rows[:, None]
        before = more | (equal & (at[None, :] < at[:, None]))
        starting = tl.sum(tl.where(before, sizes[None, :], 0), 1)
    else:
        starting = tl.cumsum(sizes, 0) - sizes
    here = tl.program_id(0) * SLOTS + tl.arange(0, SLOTS)

    inside = here < slots
    expert = tl.load(chosen + here, mask=inside, other=0)
    if dealt:
        expert -= FIRST
        inside &= (expert >= 0) & (expert < EXPERTS)
        expert = tl.where(inside, expert, 0)
    first = tl.gather(starting, expert, 0)
    place = first * BLOCK + tl.load(ranks + here, mask=inside, other=0)
    tl.store(places + here, place, mask=inside)
    tl.store(tokens + place, here // K, mask=inside)

    if tl.program_id(0) * SLOTS < blocks:
        ends = starting + sizes
        its = (starting[None, :] <= here[:, None]) & (here[:, None] < ends[None, :])
        tl.store(experts + here, tl.sum(tl.where(its, at[None, :], 0), 1), mask=here < blocks)
    if tl.program_id(0) == 0:
        tl.store(starts + at, starting, mask=at < EXPERTS)
        tl.store(starts + EXPERTS, tl.sum(sizes, 0))


def most_blocks(slots: int, num_experts: int, block: int) -> int:
    """Return the most blocks for so many slots, with any routing."""
    return min(slots, num_experts) + max(slots - num_experts, 0) // block


class Scales(NamedTuple):
    """Numbers of each expert, fp32 [experts]: a correction of its scores, and a factor of its weights."""

    correction: Tensor | None = None
    factors: Tensor | None = None


NO_SCALES = Scales()


def arrange(
    logits: Tensor, routing: Routing, block: int, counts: Tensor, scales: Scales = NO_SCALES,
    own: tuple[int, int] | None = None, *, largest_first: bool = False,
) -> Arrangement:  # fmt: skip
    """Return the arrangement of the experts chosen by ``logits`` [tokens, experts].

    Blocks have ``block`` rows. ``counts`` int32 [experts] are zeros; :func:`combine` makes them zeros again. ``own``:
    only the experts [from, to) get rows. ``largest_first``: experts with more rows come first, for programs that take
    blocks in turn. The kernel for many rows finds an expert's last block at the start of the next expert, so it needs
    the experts in order.
    """
    tokens, num_experts = logits.shape
    slots = tokens * routing.top_k
    first, last = own or (0, num_experts)
    blocks = most_blocks(slots, last - first, block)

    def ints(count: int) -> Tensor:
        return torch.empty(count, dtype=torch.int32, device=logits.device)

    chosen = ints(slots)
    weights = torch.empty(tokens, routing.top_k, dtype=torch.float32, device=logits.device)
    ranks = ints(slots) if block > 1 else chosen
    if routing.is_plain and scales == NO_SCALES:
        _route[(tokens,)](
            logits, chosen, weights, ranks, counts, EXPERTS=num_experts, WIDTH=next_power_of_2(num_experts),
            K=routing.top_k, SLOTS_WIDTH=next_power_of_2(routing.top_k), renormalize=routing.renormalize,
            round_weights=routing.round_weights, count=block > 1, enable_fp_fusion=False,
            **options(num_warps=1, num_stages=1),
        )  # fmt: skip
    else:
        route_by_scores(logits, routing, *scales, (chosen, weights, ranks, counts), count=block > 1)
    if block == 1:
        return Arrangement(1, chosen, chosen, chosen, chosen, counts, weights, chosen, own)
    made = Arrangement(
        block, ints(slots), ints(blocks * block), ints(blocks),
        ints(last - first + 1), counts, weights, chosen, own,
    )  # fmt: skip
    at_once = min(SLOTS, max(next_power_of_2(slots), 16))
    _arrange[(cdiv(max(slots, blocks), at_once),)](
        chosen, ranks, made.rows_of_experts, made.places, made.tokens, made.experts, made.starts, slots, blocks,
        K=routing.top_k, BLOCK=block, EXPERTS=last - first, WIDTH=next_power_of_2(last - first), SLOTS=at_once,
        dealt=own is not None, FIRST=first, largest_first=largest_first, **options(num_warps=4, num_stages=1),
    )  # fmt: skip
    return made


@triton.jit
def _spread(
    x, places, chosen, out, size, K: tl.constexpr, WIDTH: tl.constexpr, dealt: tl.constexpr, FIRST: tl.constexpr,
    EXPERTS: tl.constexpr, overlap: tl.constexpr,
):  # fmt: skip
    """Copy one token's row a program to the places of all its slots; ``dealt`` as for :func:`_arrange`."""
    begin(overlap)
    token = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, WIDTH)
    inside = at < size
    row = tl.load(x + token * size + at, mask=inside)
    for slot in tl.static_range(K):
        place = tl.load(places + token * K + slot).to(tl.int64)
        mask = inside
        if dealt:
            expert = tl.load(chosen + token * K + slot) - FIRST
            mask &= (expert >= 0) & (expert < EXPERTS)
        tl.store(out + place * size + at, row, mask=mask)


def spread(x: Tensor, arrangement: Arrangement) -> Tensor:
    """Return rows of ``x`` [tokens, size] at their arranged places; padding is undefined."""
    if arrangement.block == 1:
        return x[:, None].expand(-1, arrangement.top_k, -1).contiguous().view(arrangement.rows, -1)
    size, width = x.shape[1], next_power_of_2(x.shape[1])
    out = x.new_empty(arrangement.rows, size)
    keywords: dict[str, Any] = options(num_warps=min(max(width // 512, 1), 16), num_stages=1)
    first, last = arrangement.own or (0, 0)
    _spread[(len(x),)](
        x, arrangement.places, arrangement.chosen, out, size, K=arrangement.top_k, WIDTH=width,
        dealt=arrangement.own is not None, FIRST=first, EXPERTS=last - first, **keywords,
    )  # fmt: skip
    return out


@triton.jit
def _take(
    rows, places, chosen, out, size, FIRST: tl.constexpr, EXPERTS: tl.constexpr, WIDTH: tl.constexpr,
    overlap: tl.constexpr,
):  # fmt: skip
    """Copy the row of one slot a program; nothing for slots of other ranks' experts."""
    begin(overlap)
    slot = tl.program_id(0).to(tl.int64)
    expert = tl.load(chosen + slot) - FIRST
    if (expert < 0) | (expert >= EXPERTS):
        return
    at = tl.arange(0, WIDTH)
    row = tl.load(rows + tl.load(places + slot).to(tl.int64) * size + at, mask=at < size)
    tl.store(out + slot * size + at, row, mask=at < size)


def by_slots(rows: Tensor, arrangement: Arrangement) -> Tensor:
    """Return the own experts' ``rows`` [arranged rows, size] as [slots, size]; other slots are undefined."""
    if arrangement.block == 1:
        return rows
    assert arrangement.own is not None
    slots, (first, last), size = len(arrangement.chosen), arrangement.own, rows.shape[1]
    out, width = rows.new_empty(slots, size), next_power_of_2(size)
    _take[(slots,)](
        rows, arrangement.places, arrangement.chosen, out, size, FIRST=first, EXPERTS=last - first, WIDTH=width,
        **options(num_warps=min(max(width // 512, 1), 16), num_stages=1),
    )  # fmt: skip
    return out


@triton.jit
def _weighted(
    rows, places, weights, token, at, size, K: tl.constexpr, COLUMNS: tl.constexpr, arranged: tl.constexpr,
    dealt: tl.constexpr, EACH: tl.constexpr,
):  # fmt: skip
    """Return the sum of a token's rows in slot order, see :func:`_combine`."""
    inside = at < size
    total = tl.zeros([COLUMNS], tl.float32)
    for slot in tl.static_range(K):
        place = token * K + slot
        weight = tl.load(weights + place)
        if dealt:
            place += tl.load(places + place) // EACH * (tl.num_programs(0).to(tl.int64) * K)
        elif arranged:
            place = tl.load(places + place).to(tl.int64)
        product = tl.load(rows + place * size + at, mask=inside, other=0.0).to(tl.float32) * weight
        total = product if slot == 0 else total + product
    return total


@triton.jit
def _combine(
    rows, places, weights, counts, out, size, apart, K: tl.constexpr, COLUMNS: tl.constexpr, EXPERTS: tl.constexpr,
    WIDTH: tl.constexpr, SPLITS: tl.constexpr, arranged: tl.constexpr, dealt: tl.constexpr, EACH: tl.constexpr,
    overlap: tl.constexpr,
):  # fmt: skip
    """Add up one token and ``COLUMNS`` columns a program.

    ``dealt``: ``places`` are the chosen experts, and rows of all slots come from each rank, of ``EACH`` experts. The
    rows of ``SPLITS`` lie ``apart`` numbers behind each other; their sums are added in a tree.
    """
    begin(overlap)
    token = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    apart = tl.cast(apart, tl.int64)
    total = _weighted(rows, places, weights, token, at, size, K, COLUMNS, arranged, dealt, EACH)
    if SPLITS >= 2:
        total += _weighted(rows + apart, places, weights, token, at, size, K, COLUMNS, arranged, dealt, EACH)
    if SPLITS == 4:
        right = _weighted(rows + 2 * apart, places, weights, token, at, size, K, COLUMNS, arranged, dealt, EACH)
        right += _weighted(rows + 3 * apart, places, weights, token, at, size, K, COLUMNS, arranged, dealt, EACH)
        total += right
    tl.store(out + token * size + at, total.to(out.dtype.element_ty), mask=at < size)
    if arranged and tl.program_id(0) + tl.program_id(1) == 0:
        experts = tl.arange(0, WIDTH)
        tl.store(counts + experts, tl.zeros([WIDTH], tl.int32), mask=experts < EXPERTS)


def combine(rows: Tensor, arrangement: Arrangement) -> Tensor:
    """Return the weighted sum [tokens, size] of the experts' ``rows``, in slot order.

    ``rows`` are [arranged rows, size]. Of experts that are dealt to ranks they are [ranks, slots, size], as
    :func:`by_slots` gives them: each slot counts from the rank that has its expert. Of 1, 2 or 4 splits they are fp32
    [splits, arranged rows, size], and the sums of the splits are added in their tree (:mod:`preheat.ops.matmul`).
    """
    tokens, size, dealt = len(arrangement.weights), rows.shape[-1], arrangement.own is not None
    splits = len(rows) if rows.ndim == 3 and not dealt else 1
    out = rows.new_empty(tokens, size)
    columns, experts = min(1024, next_power_of_2(size)), len(arrangement.counts)
    _combine[(tokens, cdiv(size, columns))](
        rows, arrangement.chosen if dealt else arrangement.places, arrangement.weights, arrangement.counts, out, size,
        rows.stride(0) if splits > 1 else 0, K=arrangement.top_k, COLUMNS=columns, EXPERTS=experts,
        WIDTH=next_power_of_2(experts), SPLITS=splits, arranged=arrangement.block > 1, dealt=dealt,
        EACH=experts // len(rows) if dealt else 0,
        enable_fp_fusion=False, **options(num_warps=4, num_stages=1),
    )  # fmt: skip
    return out
