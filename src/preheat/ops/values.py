"""Linear layers and routed experts as values; no torch here.

A value says everything about a layer except its numbers and its names in a checkpoint. Each feature of a layer is a
field of the value. The value is built from a spec before weights are read (:mod:`preheat.model.values`). A backend says
whether it can run the value, and makes the layer of it. :mod:`preheat.ops.matmul` defines the result of the layer.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple

from preheat.ops.kinds import Activation, Scheme, Scoring

Dtype = Literal["float32", "bfloat16", "float16"]

K_SPLITS = 4
"""K splits of a layer that up to this many ranks share."""

PART = 512
"""Inputs of an adapter's first matrix in one sum of products."""

TILE = 16
"""Ranks of an adapter (columns of its second matrix) in one sum of products."""


def k_splits_of(world: int) -> int:
    """Return the number of K splits for ``world`` ranks.

    Above ``K_SPLITS`` ranks each rank has one split, so the order of the sum differs there.
    """
    return max(K_SPLITS, world)


class Groups(NamedTuple):
    """Assignment of rows to matrices.

    Without experts and slots, all rows meet one matrix. With ``experts`` a row meets the matrices of the ``top_k``
    experts that its router chose. With ``slots`` a row meets the matrix of the adapter in its adapter slot, if there is
    one. With both there is a matrix for each adapter slot and expert.
    """

    experts: int = 0
    top_k: int = 0
    slots: int = 0


ALL = Groups()


class WeightFormat(NamedTuple):
    """Storage of a matrix.

    It has numbers of the model's ``dtype``, or codes with scales as ``scheme`` says.
    """

    dtype: Dtype
    scheme: Scheme | None = None


Input = Literal["plain", "rounded", "token", "block", "static"]
"""How a layer reads its inputs.

plain: as they are. rounded: rounded to float8 with one scale, then widened again. token, block, static: as float8 codes
with one scale for each row, one for each 128 numbers of a row, or one static scale from the checkpoint.
"""


class SumOrder(NamedTuple):
    """Order of the sum of an output's products.

    The inputs are cut into ``k_splits`` equal K splits. The splits' sums are added in a tree; this rank has the splits
    ``mine`` [from, to). A split is cut into parts of ``part`` inputs, added from the first to the last; with None a
    split is one sum. ``tiles`` are the numbers of outputs computed by one product each; empty: one product computes all
    outputs.
    """

    k_splits: int = 1
    mine: tuple[int, int] = (0, 1)
    part: int | None = None
    tiles: tuple[int, ...] = ()

    @property
    def own_k_splits(self) -> int:
        """Number of K splits that this rank has."""
        return self.mine[1] - self.mine[0]

    @property
    def is_split(self) -> bool:
        """Whether the inputs are cut, so that ranks may share them."""
        return self.k_splits > 1


ONE_SUM = SumOrder()


class Finish(NamedTuple):
    """Steps after the sum of products.

    First comes a ``bias``. An ``activation`` follows, or the outputs are kept between -``clip`` and ``clip``, or they
    are multiplied by ``factor``, or x becomes ``cap`` * tanh(x / ``cap``).
    """

    bias: bool = False
    activation: Activation | None = None
    clip: float | None = None
    factor: float | None = None
    cap: float | None = None


NOTHING_MORE = Finish()


Shared = Literal["whole", "inputs", "ranks"]


@dataclass(frozen=True)
class LowRank:
    """Terms that the adapters in ``slots`` add to a layer.

    Each adapter slot and part has a pair of matrices of ``rank`` at most. ``parts`` are the outputs of each stacked
    module. ``source``: whether rows are multiplied by the first matrix, or token ids look up its columns. ``shared``:
    whether a rank has the first matrices whole, the columns of its own inputs, or every world-th tile of their ranks.
    ``joins``: whether the term is added to the layer's own product, before the activation, or to a token's sum over its
    experts.
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
    """A linear layer, or the part of it that one rank has.

    ``weight``: the storage of its matrices. ``input``: how rows are read. ``groups``: the matrix that a row meets.
    ``order``: the order of the sum of products. ``terms``: the terms of adapters. ``finish``: the steps after the sum.
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
        """Return the two matrices of ``term`` for one part.

        They are layers with a matrix for each adapter slot. The first layer sums its inputs in the K splits of this
        layer. The second layer sums tiles of ranks.
        """
        stored = WeightFormat(pair_dtype(self.weight.dtype, term.dtype))
        groups = self.groups._replace(slots=term.slots)
        order = self.order._replace(part=PART, tiles=())
        rank = -(-term.rank // TILE) * TILE
        first = Matmul(outputs=rank, inputs=self.inputs, weight=stored, groups=groups, order=order)
        tiles = SumOrder(part=TILE)
        return first, Matmul(outputs=term.parts[part], inputs=rank, weight=stored, groups=groups, order=tiles)


def pair_dtype(model: Dtype, adapters: Dtype) -> Dtype:
    """Return the dtype for products with adapter matrices.

    It is bfloat16 if model and adapters have it, else fp32.
    """
    return "bfloat16" if model == adapters == "bfloat16" else "float32"


class Routing(NamedTuple):
    """How a token's experts are chosen and weighted.

    ``renormalize``: the weights of the chosen experts sum to one. ``round_weights``: the weights are rounded to the
    model's dtype. ``scoring``: how logits become scores. Experts are cut into ``groups`` of neighbors; those of the
    ``top_groups`` with the largest sums of their ``best`` scores may be chosen. Weights are multiplied by ``factor``.
    """

    top_k: int
    renormalize: bool
    round_weights: bool
    scoring: Scoring = "softmax"
    groups: int = 1
    top_groups: int = 1
    best: int = 1
    factor: float = 1.0

    @property
    def is_plain(self) -> bool:
        """Whether experts are chosen among all, by softmax, without a factor."""
        return self.scoring == "softmax" and self.groups == 1 and self.factor == 1.0


@dataclass(frozen=True, kw_only=True)
class Experts:
    """Routed experts: ``gate_up`` and ``down`` have a matrix per expert.

    ``gate_up`` ends with a gated activation. Each expert may have biases. ``routing`` says how a token's experts are
    chosen and weighted. ``corrected``: a vector is added to the scores for the choice. ``weighted``: each expert has a
    factor of its weight. ``own``: ranks have whole experts, and this rank the numbers [from, to); its matrices are of
    these experts alone. None: the rank has a part of every expert.
    """

    gate_up: Matmul
    down: Matmul
    routing: Routing
    corrected: bool = False
    weighted: bool = False
    own: tuple[int, int] | None = None


@dataclass(frozen=True, kw_only=True)
class Cache:
    """The KV cache of a layer: heads of ``head_dim`` numbers of ``dtype``, of a model of dtype ``model``.

    ``distances``: scores have biases by distance. ``latent``: a token has one entry for all heads.
    """

    head_dim: int
    dtype: str
    model: Dtype
    distances: bool = False
    latent: bool = False


@dataclass(frozen=True, kw_only=True)
class Latents:
    """Attention over latent vectors: one map to keys and one to values for each of ``heads`` heads.

    See :mod:`preheat.model.latent`.
    """

    heads: int
    keys: Matmul
    values: Matmul


class StateRule(NamedTuple):
    """What a recurrence does, see :mod:`preheat.ops.delta`; by default the gated delta rule.

    ``unit``: queries and keys are divided by their lengths. ``delta``: what a state holds is subtracted from the value.
    ``betas``: a token brings betas; else beta is its step. ``limits``: the least and the greatest step. ``skip``: a
    multiple of the value is added to the output. ``bias``: the convolution has one. ``gate_first``: the gate comes
    before the norm. ``normed``: the number of neighboring value heads in one norm.
    """

    unit: bool = True
    delta: bool = True
    betas: bool = True
    limits: tuple[float, float] = (0.0, math.inf)
    skip: bool = False
    bias: bool = False
    gate_first: bool = False
    normed: int = 1


DELTA = StateRule()


@dataclass(frozen=True, kw_only=True)
class Recurrence:
    """A recurrence with its convolution, see :mod:`preheat.ops.delta`.

    A sequence has a state in place of keys and values: the last ``taps`` - 1 inputs of the convolution, and a matrix of
    ``key_dim`` rows and ``value_dim`` columns for each value head. Neighboring value heads share a key head. ``rule``
    says what happens to the matrix.
    """

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    taps: int
    rule: StateRule = DELTA

    @property
    def key_size(self) -> int:
        """Numbers in all key heads."""
        return self.key_heads * self.key_dim

    @property
    def value_size(self) -> int:
        """Numbers in all value heads."""
        return self.value_heads * self.value_dim

    @property
    def channels(self) -> int:
        """Channels of the convolution: queries, keys and values."""
        return 2 * self.key_size + self.value_size

    @property
    def parts(self) -> tuple[int, ...]:
        """Numbers that a token brings: queries, keys, values, gates, betas if the rule has them, and decays."""
        each = self.key_size, self.key_size, self.value_size, self.value_size
        return *each, *[self.value_heads] * (1 + self.rule.betas)

    @property
    def inputs(self) -> int:
        """Numbers that a token brings, all :attr:`parts`."""
        return sum(self.parts)

    def state_bytes(self, itemsize: int) -> int:
        """Return the bytes of a sequence's state, in a model whose dtype has ``itemsize`` bytes."""
        return (self.taps - 1) * self.channels * itemsize + 4 * self.value_size * self.key_dim


@dataclass(frozen=True, kw_only=True)
class LayerEnd:
    """Last steps of a layer: a block that reads the layer's own ``inputs``, and a scalar; 0: only the scalar.

    See :mod:`preheat.model.layer_inputs`.
    """

    inputs: int


Value = Matmul | Experts | Cache | Latents | Recurrence | LayerEnd


class Ok(NamedTuple):
    """The backend runs the value as it is."""


class WithoutTerms(NamedTuple):
    """The backend runs the value without its terms.

    Adapters on this layer are not served, for ``reason``.
    """

    reason: str


class Refused(NamedTuple):
    """The backend cannot run the value, for ``reason``."""

    reason: str


Support = Ok | WithoutTerms | Refused
