"""Linear layers and routed experts: contract, and reference in plain torch.

Contract of a :class:`~preheat.ops.values.Matmul`. Every output is one dot product over the inputs, accumulated in fp32
in an order that depends on the value alone, plus the bias, rounded once to the dtype. Then come the terms, then the
activation or the limit. A row's bits do not depend on the number of rows, on its index among them, or on the other
rows. Quantized weights and inputs: :mod:`preheat.ops.quantization`.

Splits. Where ranks share the inputs, the inputs are cut into equal K splits, four on 1, 2 and 4 ranks. A split is one
product over its inputs, accumulated in fp32 in the order of a linear layer of its size, and is not rounded. Splits are
added in fp32 in a fixed binary tree of neighbors, ((0 + 1) + (2 + 3)); the bias is added to the root in fp32, and the
sum is rounded once to the dtype. A rank has one, two or all four splits, always a subtree. It adds its own splits and
sends the fp32 sum, and every rank adds the sums of all ranks in the order of the tree. So the number of ranks decides
only where an addition takes place, never its operands. The order comes from "Deterministic Inference across Tensor
Parallel Sizes" (arXiv 2511.17826).

Terms: adapters (LoRA). A row without an adapter is skipped, and so is a row of an adapter without matrices for the
layer. Nothing is added to such a row, not even zero: zero would turn -0.0 into 0.0. To any other row ``(x A^T * scale)
B^T`` is added, in fp32:

1. The inputs are cut into parts of ``PART`` from the first one on; the products of a part are accumulated in fp32, and
   the sums of the parts are added from the first to the last. The sum is multiplied by ``scale``.
2. The ranks are cut into tiles of ``TILE`` from the first one on; the products of each tile are one sum, and the tiles'
   sums are added from the first to the last. Ranks that fill up a tile are zeros. Where the model and its adapters are
   of bfloat16, the scaled row is rounded to it before step 2, as PEFT and vLLM do it.
3. The layer's own output is rounded to the dtype first, as without adapters; its sum with the term is rounded once.
   Then comes the layer's activation.

A layer with K splits has its first matrices split alike. Each split is cut into parts from its first input on, and the
splits are added in the tree. So a rank has the columns of ``A`` that belong to its inputs, and sends its sums beside
the layer's own; the scale is applied to the root. ``B`` is whole there. Layers that are divided by outputs have ``A``
whole and the rows of ``B`` of their outputs.

The table of embeddings gives a token its row. An adapter's first matrix gives it a row, too; the row is multiplied by
the scale and expanded in the same way. So ``x A^T`` is no product there. Rows that are no tokens are left alone.

Contract of :class:`~preheat.ops.values.Experts`. A token's experts and their weights: :mod:`preheat.ops.moe`. An expert
gives the result of a dense block with its weights, rounded to the dtype. Each such row is multiplied by its weight in
fp32, rounded, and the products are added in slot order in fp32; the sum is rounded once.

Where ranks share the inner numbers, a split is the sum over a token's experts, in slot order in fp32, of the weight
times the expert's split; splits are then added in the tree and rounded once. Slots first, then splits, then ranks.

Where ranks have whole experts, each rank has all tokens, and computes the rows of its own experts. A row has the bits
that it has on one rank, rounded to the dtype; the terms of adapters are added to it before. Ranks gather these rows.
Nothing is converted or added on the way, and each slot's row comes from one rank. Then every rank multiplies the rows
by their weights and adds them in slot order, as above. So the sum has the bits of experts that no ranks share, on any
number of ranks.

An expert's three matrices are adapted like layers of their own, for the rows that visit it. The terms of gate and up
read the expert's input and come before the activation. The term of down reads the activation's result, rounded to the
dtype, and comes before the row is weighted. Where down is split there is no row of one expert to add to. There a
token's term of each expert is added in the tree by itself, scaled and expanded. It is multiplied by the expert's weight
in fp32 and rounded. The products are added in slot order in fp32. The token's own sum is rounded first, as without
adapters, and its sum with the sum of the terms is rounded once.

Beside quantized layers and experts nothing changes: adapters read activations before they are quantized, and the sum is
with the layer's own output. A layer quantizes adapted rows from the sums.

So a row's bits depend on the row and on its adapter alone. They depend neither on the other rows of the step, nor on
the adapter's slot or number of rows. They depend neither on the greatest rank that fits, nor on the number of ranks
that share the layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from operator import add
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from preheat.ops.activation import ACTIVATIONS, capped, clip, scaled
from preheat.ops.moe import combine, route
from preheat.ops.quantization import PROMOTED, QuantizedWeight, plain, quantize_rows, scaled_product
from preheat.ops.values import PART, TILE, Experts, Finish, Matmul, SumOrder

Weight = Tensor | QuantizedWeight

NOTHING = -0.0
"""A number that changes no number when added, not even -0.0.

Its product with a weight has this property too.
"""


class LowRankPair(NamedTuple):
    """An adapter's matrices of one module.

    They are on the host and in the adapters' dtype. ``a`` is [rank, inputs] and ``b`` [outputs, rank]. ``scale``
    multiplies the product with ``a``, in fp32. The inputs of a table of embeddings are its rows.
    """

    a: Tensor
    b: Tensor
    scale: float


class Adapted(NamedTuple):
    """Rows of one adapter, int64 [n], and its matrices by part (:class:`preheat.ops.values.LowRank`)."""

    rows: Tensor
    pairs: dict[int, LowRankPair]


def pair_dtype(model: torch.dtype, adapters: torch.dtype) -> torch.dtype:
    """Return the torch dtype of :func:`preheat.ops.values.pair_dtype`."""
    return torch.bfloat16 if model == adapters == torch.bfloat16 else torch.float32


def tree_sum(parts: Sequence[Tensor]) -> Tensor:
    """Return the sum of fp32 ``parts`` in a binary tree of neighbors.

    Raises ValueError unless the number of parts is a power of two.
    """
    if len(parts) & (len(parts) - 1) or not parts:
        raise ValueError(f"a sum takes 1, 2, 4, ... K splits, not {len(parts)}")
    level = list(parts)
    while len(level) > 1:
        level = [level[at] + level[at + 1] for at in range(0, len(level), 2)]
    return level[0]


def product(x: Tensor, weight: Tensor, order: SumOrder) -> Tensor:
    """Return ``x`` times ``weight`` in this ``order``: fp32 [rows, outputs].

    ``x`` is [rows, inputs of this rank], ``weight`` [outputs, inputs of this rank].
    """
    inputs, found = x.float().chunk(order.own_k_splits, 1), list[Tensor]()
    for tile in torch.split(weight.float(), list(order.tiles or (len(weight),))):
        splits = zip(inputs, tile.chunk(order.own_k_splits, 1), strict=True)
        found.append(tree_sum([_in_parts(*each, order.part or max(tile.shape[1], 1)) for each in splits]))
    return torch.cat(found, 1)


def _in_parts(x: Tensor, weight: Tensor, size: int) -> Tensor:
    parts = zip(torch.split(x, size, 1), torch.split(weight, size, 1), strict=True)
    return reduce(add, (one @ other.T for one, other in parts))


def delta(x: Tensor, pair: LowRankPair, k_splits: int = 1) -> Tensor:
    """Return the term of rows of one adapter: fp32 [rows, outputs].

    ``x`` is [rows, inputs]; the term is a new tensor.
    """
    return expand(shrink(x, pair, k_splits), pair, x.dtype)


def shrink(x: Tensor, pair: LowRankPair, k_splits: int = 1) -> Tensor:
    """Return ``x`` times the first matrix: fp32 [rows, ranks], not scaled.

    The matrix is padded to whole tiles of ranks.
    """
    a = F.pad(pair.a.float(), (0, 0, 0, -len(pair.a) % TILE))
    return product(x, a, SumOrder(k_splits, (0, k_splits), PART, (TILE,) * (len(a) // TILE)))


def expand(shrunk: Tensor, pair: LowRankPair, dtype: torch.dtype) -> Tensor:
    """Return the term of rows with the result ``shrunk`` of :func:`shrink`: fp32 [rows, outputs].

    ``dtype`` is the model's.
    """
    b = F.pad(pair.b.float(), (0, -pair.b.shape[1] % TILE))
    scaled = (shrunk * pair.scale).to(pair_dtype(dtype, pair.a.dtype)).float()
    return product(scaled, b, SumOrder(part=TILE))


def add_delta(y: Tensor, more: Tensor) -> Tensor:
    """Return ``y`` [rows, outputs], already rounded to its dtype, plus fp32 ``more``, rounded once."""
    return (y.float() + more).to(y.dtype)


def finished(y: Tensor, finish: Finish) -> Tensor:
    """Return ``y`` [rows, outputs] after the activation, limit, factor or cap of ``finish``."""
    if finish.activation is not None:
        return ACTIVATIONS[finish.activation](y)
    if finish.clip is not None:
        return clip(y, finish.clip)
    if finish.cap is not None:
        return capped(y, finish.cap)
    return y if finish.factor is None else scaled(y, finish.factor)


def sums(value: Matmul, x: Tensor, weight: Weight) -> list[Tensor]:
    """Return the products of each K split of this rank: fp32 [rows, outputs].

    All scales are applied, the bias is not. ``x`` [rows, inputs of this rank] is in the model's dtype; ``weight`` is
    [outputs, inputs of this rank].
    """
    own, one = value.order.own_k_splits, value.order._replace(k_splits=1, mine=(0, 1))
    if not isinstance(weight, QuantizedWeight) or weight.scheme.activations is None:
        halves = zip(x.chunk(own, 1), plain(weight).chunk(own, 1), strict=True)
        return [product(*each, one) for each in halves]
    codes, scales = quantize_rows(x, weight.scheme.activations, weight.static)
    size, grouped = weight.shape[1] // own, scales.shape[1] > 1
    found = list[Tensor]()
    of_splits = scales.chunk(own, 1) if grouped else [scales] * own
    for at, (mine, of_x) in enumerate(zip(codes.chunk(own, 1), of_splits, strict=True)):
        cut = weight.cut(((0, len(weight.codes)),), (at * size, (at + 1) * size))
        parts = [part.double().t() for part in torch.split(cut.codes.float(), PROMOTED, 1)]
        found.append(scaled_product(mine, of_x, parts, cut.scales, None, torch.float32))
    return found


def matmul(
    value: Matmul,
    x: Tensor,
    weight: Weight,
    bias: Tensor | None = None,
    adapters: Sequence[Adapted] = (),
) -> Tensor:
    """Return the layer of ``value`` for ``x`` [rows, inputs]: [rows, outputs] in the dtype of ``x``.

    The rank must have all K splits.
    """
    total = tree_sum(sums(value, x, weight))
    y = (total if bias is None else total + bias.float()).to(x.dtype)
    for rows, pairs in adapters:
        add_terms(y, x, value, rows, pairs)
    return finished(y, value.finish)


def add_terms(y: Tensor, x: Tensor, value: Matmul, rows: Tensor, pairs: dict[int, LowRankPair]) -> None:
    """Add the terms of one adapter's ``rows`` to ``y`` [all rows, outputs], in place."""
    first = 0
    for part, outputs in enumerate(value.terms[0].parts if value.terms else ()):
        if part in pairs:
            more = delta(x[rows], pairs[part], value.order.k_splits)
            y[rows, first : first + outputs] = add_delta(y[rows, first : first + outputs], more)
        first += outputs


def experts(
    value: Experts, x: Tensor, logits: Tensor, weights: tuple[Weight, Weight], adapters: Sequence[Adapted] = (),
    *, biases: tuple[Tensor, Tensor] | None = None, correction: Tensor | None = None, factors: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Return the output of the experts of ``value``, [tokens, hidden].

    The rank must have all K splits. ``x`` [tokens, hidden] are the tokens and ``logits`` [tokens, experts] the
    router's. ``weights`` are gates above ups [experts, 2 * inner, hidden], and downs [experts, hidden, inner]. An
    adapter's parts 3e, 3e + 1 and 3e + 2 are gate, up and down of expert e. ``biases`` are [experts, 2 * inner] and
    [experts, hidden]; ranks do not share experts that have them. ``correction`` and ``factors`` are as for
    :func:`preheat.ops.moe.route`.
    """
    chosen, shares = route(logits, value.routing, correction, factors)
    owner = {token: each for each in adapters for token in each.rows.tolist()}
    own = [torch.empty(*chosen.shape, x.shape[1]) for _ in range(value.down.order.own_k_splits)]
    more = torch.full((*chosen.shape, x.shape[1]), NOTHING)
    for token, slots in enumerate(chosen.tolist()):
        for slot, number in enumerate(slots):
            pairs = owner[token].pairs if token in owner else {}
            row, mine = x[token, None], [_one(each, number) for each in weights]
            gated = {part: pairs[3 * number + part] for part in (0, 1) if 3 * number + part in pairs}
            first, last = (None, None) if biases is None else (each[number] for each in biases)
            inner = matmul(value.gate_up, row, mine[0], first, [Adapted(torch.tensor([0]), gated)])
            parts, pair = sums(value.down, inner, mine[1]), pairs.get(3 * number + 2)
            if value.down.order.is_split and pair is not None:
                more[token, slot] = delta(inner, pair, value.down.order.k_splits)[0]
            elif not value.down.order.is_split:
                y = (parts[0] if last is None else parts[0] + last.float()).to(x.dtype)
                parts = [(y if pair is None else add_delta(y, delta(inner, pair))).float()]
            for split, part in zip(own, parts, strict=True):
                split[token, slot] = part[0]
    y = tree_sum([combine(split, shares) for split in own]).to(x.dtype)
    return add_delta(y, combine(more, shares)) if value.down.order.is_split else y


def _one(weight: Weight, number: int) -> Weight:
    return weight[number] if isinstance(weight, Tensor) else weight.part(number)
