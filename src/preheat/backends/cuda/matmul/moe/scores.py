"""The choice of experts by scores, in groups, with corrections and factors, on CUDA.

Contract. As :mod:`preheat.ops.moe` says; sums of scores go from the largest on. A token's numbers depend on its own
logits alone.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from preheat.backends.cuda.device.launch import begin, options
from preheat.backends.cuda.device.sizes import next_power_of_2
from preheat.ops.values import Routing


@triton.jit
def _largest(numbers, at, WIDTH: tl.constexpr, COUNT: tl.constexpr):
    """Return the largest of ``numbers``, and its place: of equals the lowest. NaN equals nothing."""
    best = tl.max(numbers, 0)
    return best, tl.minimum(tl.min(tl.where(numbers == best, at, WIDTH), 0), COUNT - 1)


@triton.jit
def _within_groups(
    wanted, at, EXPERTS: tl.constexpr, WIDTH: tl.constexpr, GROUPS: tl.constexpr, GROUPS_WIDTH: tl.constexpr,
    TOP_GROUPS: tl.constexpr, BEST: tl.constexpr,
):  # fmt: skip
    """Return ``wanted`` with minus infinity outside of the best groups."""
    PER: tl.constexpr = EXPERTS // GROUPS
    number = tl.arange(0, GROUPS_WIDTH)
    scores = tl.full([GROUPS_WIDTH], -float("inf"), tl.float32)
    for group in tl.static_range(GROUPS):
        own = tl.where((at // PER == group) & (at < EXPERTS), wanted, -float("inf"))
        total, place = _largest(own, at, WIDTH, EXPERTS)
        for _ in tl.static_range(BEST - 1):
            own = tl.where(at == place, -float("inf"), own)
            more, place = _largest(own, at, WIDTH, EXPERTS)
            total += more
        scores = tl.where(number == group, total, scores)
    kept = at < 0
    for _ in tl.static_range(TOP_GROUPS):
        _, group = _largest(scores, number, GROUPS_WIDTH, GROUPS)
        kept |= at // PER == group
        scores = tl.where(number == group, -float("inf"), scores)
    return tl.where(kept, wanted, -float("inf"))


@triton.jit
def keep(chosen, weights, ranks, counts, token, slots, experts, found, K: tl.constexpr, count: tl.constexpr):
    """Store the ``experts`` of a token and their weights ``found``; with ``count``, count each expert's rows."""
    real = slots < K
    tl.store(chosen + token * K + slots, experts, mask=real)
    tl.store(weights + token * K + slots, found, mask=real)
    if count:
        rank = tl.atomic_add(counts + experts, 1, mask=real, sem="relaxed")
        tl.store(ranks + token * K + slots, rank, mask=real)


@triton.jit
def _route_by_scores(
    logits, correction, factors, chosen, weights, ranks, counts, factor,
    EXPERTS: tl.constexpr, WIDTH: tl.constexpr, K: tl.constexpr, SLOTS_WIDTH: tl.constexpr, GROUPS: tl.constexpr,
    GROUPS_WIDTH: tl.constexpr, TOP_GROUPS: tl.constexpr, BEST: tl.constexpr, SIGMOID: tl.constexpr,
    renormalize: tl.constexpr, round_weights: tl.constexpr, count: tl.constexpr, overlap: tl.constexpr,
):  # fmt: skip
    """Choose the experts and weights of one token a program; with ``count``, count each expert's rows."""
    begin(overlap)
    token = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, WIDTH)
    inside = at < EXPERTS
    row = tl.load(logits + token * EXPERTS + at, mask=inside, other=float("-inf"))
    wide = row.to(tl.float32)
    if SIGMOID:
        scores = tl.div_rn(tl.full([WIDTH], 1.0, tl.float32), tl.exp(-wide) + 1.0)
    else:
        share = tl.exp(wide - tl.max(wide, 0))
        scores = tl.div_rn(share, tl.sum(share, 0))
    wanted = scores
    if correction is not None:
        wanted += tl.load(correction + at, mask=inside, other=0.0)
    wanted = tl.where(inside, wanted, -float("inf"))
    if GROUPS > 1:
        wanted = _within_groups(wanted, at, EXPERTS, WIDTH, GROUPS, GROUPS_WIDTH, TOP_GROUPS, BEST)
    slots = tl.arange(0, SLOTS_WIDTH)
    experts = tl.zeros([SLOTS_WIDTH], tl.int32)
    found = tl.zeros([SLOTS_WIDTH], tl.float32)
    total = 0.0
    for slot in tl.static_range(K):
        _, expert = _largest(wanted, at, WIDTH, EXPERTS)
        score = tl.sum(tl.where(at == expert, scores, 0.0), 0)  # one number and zeros
        experts = tl.where(slots == slot, expert, experts)
        found = tl.where(slots == slot, score, found)
        wanted = tl.where(at == expert, -float("inf"), wanted)
        total += score
    if renormalize:
        found = tl.div_rn(found, total + 1e-20 if SIGMOID else total)
    if factor is not None:
        found *= factor
    if factors is not None:
        found *= tl.load(factors + experts)
    if round_weights:
        found = found.to(row.dtype).to(tl.float32)
    keep(chosen, weights, ranks, counts, token, slots, experts, found, K, count)


def route_by_scores(
    logits: Tensor,
    routing: Routing,
    correction: Tensor | None,
    factors: Tensor | None,
    out: tuple[Tensor, Tensor, Tensor, Tensor],
    *,
    count: bool,
) -> None:
    """Choose the experts of ``logits`` [tokens, experts] for any ``routing``.

    ``correction`` and ``factors`` are fp32 [experts]. ``out``: experts and weights of each slot, the slot's rank among
    the rows of its expert, and the experts' rows, as :func:`preheat.backends.cuda.matmul.moe.route.arrange` has them.
    """
    tokens, experts = logits.shape
    factor = None if routing.factor == 1.0 else routing.factor
    _route_by_scores[(tokens,)](
        logits, correction, factors, *out, factor, EXPERTS=experts, WIDTH=next_power_of_2(experts),
        K=routing.top_k, SLOTS_WIDTH=next_power_of_2(routing.top_k), GROUPS=routing.groups,
        GROUPS_WIDTH=next_power_of_2(routing.groups), TOP_GROUPS=routing.top_groups, BEST=routing.best,
        SIGMOID=routing.scoring == "sigmoid", renormalize=routing.renormalize, round_weights=routing.round_weights,
        count=count, enable_fp_fusion=False, **options(num_warps=1, num_stages=1),
    )  # fmt: skip
