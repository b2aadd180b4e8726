"""Row-parallel layers: sums over the inputs whose order does not depend on how many ranks share them.

Contract. The inputs are cut into :func:`leaves_of` equal ranges, the leaves; four on 1, 2 and 4 ranks. A leaf is one
product over its inputs, accumulated in fp32 in the order of a linear layer of its size, and is not rounded. Leaves are
added in fp32 in a fixed binary tree of neighbours, ((0 + 1) + (2 + 3)); the bias is added to the root in fp32, and the
sum is rounded once to the dtype. A rank has one, two or all four leaves, which are a subtree: it adds those up and
sends the fp32 sum, and every rank adds what all have sent in the order of the tree. So the number of ranks moves where
an addition takes place, and never which numbers are added.

For routed experts, a leaf is the sum over a token's experts, in slot order in fp32, of the weight times the expert's
leaf; leaves are then added as above and rounded once.

The order is that of "Deterministic Inference across Tensor Parallel Sizes" (arXiv 2511.17826).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

LEAVES = 4
"""Leaves on up to so many ranks."""


def leaves_of(world: int) -> int:
    """Leaves of ``world`` ranks: above four ranks one each, and so another order of the sum."""
    return max(LEAVES, world)


def tree_sum(parts: Sequence[Tensor]) -> Tensor:
    """The sum of fp32 ``parts``, as many as a power of two, in a binary tree of neighbours."""
    if len(parts) & (len(parts) - 1) or not parts:
        raise ValueError(f"a tree has 1, 2, 4, ... leaves, not {len(parts)}")
    level = list(parts)
    while len(level) > 1:
        level = [level[at] + level[at + 1] for at in range(0, len(level), 2)]
    return level[0]
