"""Routed experts: each token's weighted sum of a few small blocks.

Contract. The router's logits are in the model's dtype. Their softmax over all experts is taken in fp32; the ``top_k``
most likely experts are chosen, of equals the lowest number, and take the slots 0, 1, ... in this order. Their
probabilities are the weights, divided by their sum in slot order if the model says so, and rounded to the dtype if it
says so. An expert gives the result of a dense block with its weights, rounded to the dtype. Each such row is multiplied
by its weight in fp32, rounded, and the products are added in slot order in fp32; the sum is rounded once.

A router that scores by sigmoid takes each logit's sigmoid in fp32, 1 / (1 + exp(-x)). A correction (fp32, one number
for each expert) is added to the scores for the choice; the weights are the scores without it. With groups of experts, a
group's score is the sum of its ``best`` largest corrected scores, from the largest on. The ``top_groups`` groups of the
largest scores, of equals the lowest number, keep their experts, and no others are chosen. The divisor of weights by
sigmoid is their sum plus 1e-20. A factor multiplies the weights after that. Experts may have factors of their own
(fp32, one number for each expert): an expert's weight is multiplied by its factor last, before it is rounded.

Where there is a shared expert with a gate, its row is multiplied by the sigmoid of the token's product with the gate's
weights (one sum in fp32, rounded to the dtype; the sigmoid is fp32, rounded; so is the product), then added and
rounded. A shared expert without a gate is added as it is.

So a token's bits depend on its own row and its own experts. The experts of other tokens do not change them, nor does
the order of rows in a backend.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from preheat.ops.opaque import opaque
from preheat.ops.values import Routing


def route(
    logits: Tensor, routing: Routing, correction: Tensor | None = None, factors: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Choose experts by ``logits`` [tokens, experts]: numbers int64 and weights fp32, both [tokens, top_k].

    ``correction`` and ``factors`` are fp32 [experts].
    """
    scores = scores_of(logits, routing)
    wanted = scores if correction is None else scores + correction
    if routing.groups > 1:
        wanted = within_groups(wanted, routing)
    experts = torch.sort(wanted, dim=-1, descending=True, stable=True)[1][:, : routing.top_k].contiguous()
    weights = scores.gather(1, experts)
    if routing.renormalize:
        total = weights[:, 0].clone()
        for slot in range(1, routing.top_k):
            total += weights[:, slot]
        weights /= (total if routing.scoring == "softmax" else total + 1e-20)[:, None]
    if routing.factor != 1.0:
        weights *= routing.factor
    if factors is not None:
        weights *= factors[experts]
    if routing.round_weights:
        weights = weights.to(logits.dtype).float()
    return experts, weights


def scores_of(logits: Tensor, routing: Routing) -> Tensor:
    """Return the scores of all experts, fp32 [tokens, experts]."""
    if routing.scoring == "softmax":
        return torch.softmax(logits.float(), -1)
    return logits.float().neg().exp_().add_(1.0).reciprocal_()


def within_groups(wanted: Tensor, routing: Routing) -> Tensor:
    """Return ``wanted`` [tokens, experts] with minus infinity outside of each token's best groups."""
    grouped = wanted.view(len(wanted), routing.groups, -1)
    largest = grouped.sort(dim=-1, descending=True)[0]
    score = largest[..., 0].clone()
    for place in range(1, routing.best):
        score += largest[..., place]
    kept = torch.sort(score, dim=-1, descending=True, stable=True)[1][:, : routing.top_groups]
    hidden = torch.ones_like(score, dtype=torch.bool).scatter_(1, kept, False)
    return grouped.masked_fill(hidden[..., None], -torch.inf).view_as(wanted)


def combine(rows: Tensor, weights: Tensor) -> Tensor:
    """Return the sum of ``rows`` times ``weights``, in slot order: [tokens, hidden].

    ``rows`` are [tokens, top_k, hidden], ``weights`` fp32 [tokens, top_k].
    """
    total = rows[:, 0].float() * weights[:, :1]
    for slot in range(1, rows.shape[1]):
        total += rows[:, slot].float() * weights[:, slot, None]
    return total.to(rows.dtype)


def routed(
    x: Tensor, chosen: Tensor, weights: Tensor, num_experts: int, expert: Callable[[int, Tensor], Tensor]
) -> Tensor:
    """Run the ``chosen`` [tokens, top_k] experts one by one and return their weighted sum.

    ``expert(number, rows)`` returns one expert's rows [n, hidden]. The host waits for the choice.
    """
    rows = x.new_empty(chosen.numel(), x.shape[1])
    for number, mine in visits(chosen, num_experts):
        rows[mine] = expert(number, x[mine // chosen.shape[1]])
    return combine(rows.view(len(x), chosen.shape[1], -1), weights)


def routed_splits(
    x: Tensor, chosen: Tensor, weights: Tensor, num_experts: int, expert: Callable[[int, Tensor], Sequence[Tensor]]
) -> list[Tensor]:
    """Return each result's weighted sum over a token's experts, [tokens, hidden].

    Like :func:`routed`, for experts with several results. ``expert(number, slots)`` returns the results of one expert,
    [n, hidden] each, fp32 for splits. ``slots``, int64 [n] below tokens * top_k, are the (token, slot) pairs that chose
    the expert. See :mod:`preheat.ops.matmul`.
    """
    splits: list[Tensor] = []
    for number, mine in visits(chosen, num_experts):
        parts = expert(number, mine)
        if not splits:
            splits = [x.new_empty(chosen.numel(), x.shape[1], dtype=part.dtype) for part in parts]
        for rows, part in zip(splits, parts, strict=True):
            rows[mine] = part
    return [combine(rows.view(len(x), chosen.shape[1], -1), weights) for rows in splits]


def visits(chosen: Tensor, num_experts: int) -> Iterator[tuple[int, Tensor]]:
    """Yield each expert in ``chosen`` [tokens, top_k], and its indices into the flat ``chosen``."""
    slots = chosen.view(-1)
    counts = torch.bincount(slots, minlength=num_experts).tolist()
    order = torch.argsort(slots, stable=True)
    start = 0
    for number, count in enumerate(counts):
        if count:
            yield number, order[start : start + count]
            start += count


@opaque("(Tensor routed, Tensor x, Tensor gate, Tensor shared) -> Tensor", lambda x, *_: torch.empty_like(x))
def add_shared(routed: Tensor, x: Tensor, gate: Tensor, shared: Tensor) -> Tensor:
    """Return ``routed`` + sigmoid(``x`` . ``gate``) * ``shared``; all [tokens, hidden], but ``gate`` [1, hidden]."""
    score = (x.float() * gate.float()).sum(-1, True).to(x.dtype).float()
    share = score.neg_().exp_().add_(1.0).reciprocal_().to(x.dtype)
    return routed + shared * share
