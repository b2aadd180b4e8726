"""What a linear layer and routed experts are, as values: features meet here, in fields. No torch.

A value says everything about a layer but its numbers and its names in a checkpoint. It is built from a spec before
weights are read (:mod:`preheat.model.values`). A backend says of a value whether it can run it, and makes the layer of
it. :mod:`preheat.ops.matmul` says what a layer of a value computes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

from preheat.ops.kinds import Activation, Scheme

Dtype = Literal["float32", "bfloat16", "float16"]

K_SPLITS = 4
"""Splits of the inputs of layers that up to so many ranks share."""

PART = 512
"""Inputs of an adapter's first matrix whose products are one sum."""

TILE = 16
"""Ranks of an adapter whose products with the second matrix are one sum."""


def k_splits_of(world: int) -> int:
    """Splits of the inputs for ``world`` ranks: above four ranks one each, and so another order of the sum."""
    return max(K_SPLITS, world)


class Groups(NamedTuple):
    """Which rows meet which matrix.

    Without any, all rows meet one matrix. With ``experts`` a row meets the matrices of the ``top_k`` experts that its
    router chose. With ``slots`` it meets the matrix of the adapter in its slot, if it has one. With both there is a
    matrix for each slot and expert.
    """

    experts: int = 0
    top_k: int = 0
    slots: int = 0


ALL = Groups()


class WeightFormat(NamedTuple):
    """How a matrix is stored: numbers of the model's ``dtype``, or codes with scales as ``scheme`` says."""

    dtype: Dtype
    scheme: Scheme | None = None


Input = Literal["plain", "rounded", "token", "block", "static"]
"""How a layer reads its inputs: as they are; rounded to float8 with one scale and widened again; or as float8 codes,
whose scale is that of a token's row, of each 128 numbers of it, or the checkpoint's."""


class SumOrder(NamedTuple):
    """In which order the products of an output are added.

    The inputs are cut into ``k_splits`` equal splits, which are added in a tree; this rank has the splits ``mine``
    [from, to). A split is cut into parts of ``part`` inputs, which are added from the first to the last; None: a split
    is one sum. ``tiles`` are the outputs that are one product each; none: all are one.
    """

    k_splits: int = 1
    mine: tuple[int, int] = (0, 1)
    part: int | None = None
    tiles: tuple[int, ...] = ()

    @property
    def own(self) -> int:
        """How many splits this rank has."""
        return self.mine[1] - self.mine[0]

    @property
    def is_split(self) -> bool:
        """Whether the inputs are cut, so that ranks may share them."""
        return self.k_splits > 1


ONE_SUM = SumOrder()


class Finish(NamedTuple):
    """What follows the sum of products: a ``bias``; then an ``activation``, or the outputs kept between -``clip`` and
    ``clip``.
    """

    bias: bool = False
    activation: Activation | None = None
    clip: float | None = None


NOTHING_MORE = Finish()


Shared = Literal["whole", "inputs", "ranks"]


@dataclass(frozen=True)
class LowRank:
    """What the adapters in ``slots`` add to a layer: for each slot and part a pair of matrices of ``rank`` at most.

    ``parts`` are the outputs of each stacked module. ``source``: whether the first matrix is multiplied by rows, or
    looked up by token ids. ``shared``: whether a rank has the first matrices whole, the columns of its inputs, or every
    world-th tile of their ranks. ``joins``: whether the term is added to the layer's own product, before the
    activation, or to a token's sum over its experts.
    """

    parts: tuple[int, ...]
    slots: int
    rank: int
    dtype: Dtype
    source: Literal["rows", "tokens"] = "rows"
    shared: Shared = "whole"
    joins: Literal["product", "combined"] = "product"


@dataclass(frozen=True, kw_only=True)
class Matmul:
    """A linear layer of ``inputs`` and ``outputs``, of which a rank may have a part.

    ``weight`` says how its matrices are stored, ``input`` how rows are read, ``groups`` which rows meet which matrix,
    ``order`` in which order products are added, ``terms`` what adapters add, ``finish`` what follows.
    """

    outputs: int
    inputs: int
    weight: WeightFormat
    input: Input = "plain"
    groups: Groups = ALL
    order: SumOrder = ONE_SUM
    terms: tuple[LowRank, ...] = ()
    finish: Finish = NOTHING_MORE

    def pair(self, term: LowRank, part: int) -> tuple[Matmul, Matmul]:
        """The two matrices of a ``term`` for one of its parts, which are layers with a matrix for each slot.

        The first sums its inputs in the splits of this layer, the second sums tiles of ranks.
        """
        stored = WeightFormat(pair_dtype(self.weight.dtype, term.dtype))
        groups = self.groups._replace(slots=term.slots)
        order = self.order._replace(part=PART, tiles=())
        rank = -(-term.rank // TILE) * TILE
        first = Matmul(outputs=rank, inputs=self.inputs, weight=stored, groups=groups, order=order)
        tiles = SumOrder(part=TILE)
        return first, Matmul(outputs=term.parts[part], inputs=rank, weight=stored, groups=groups, order=tiles)


def pair_dtype(model: Dtype, adapters: Dtype) -> Dtype:
    """In which dtype the matrices of adapters are multiplied: bfloat16, if that is what all of them are, else fp32."""
    return "bfloat16" if model == adapters == "bfloat16" else "float32"


class Routing(NamedTuple):
    """How a token's experts are chosen and weighted. ``renormalize``: the chosen experts' weights sum to one.
    ``round_weights``: they are rounded to the model's dtype.
    """

    top_k: int
    renormalize: bool
    round_weights: bool


@dataclass(frozen=True, kw_only=True)
class Experts:
    """Routed experts: ``gate_up``, whose activation is SwiGLU, and ``down``, with a matrix for each expert; ``routing``
    says how a token's experts are chosen and weighted.
    """

    gate_up: Matmul
    down: Matmul
    routing: Routing


Value = Matmul | Experts


class Ok(NamedTuple):
    """A backend runs the value as it is."""


class WithoutTerms(NamedTuple):
    """A backend runs the value, but without its terms: adapters of such layers are not served, for ``reason``."""

    reason: str


class Refused(NamedTuple):
    """A backend cannot run the value, for ``reason``."""

    reason: str


Support = Ok | WithoutTerms | Refused
