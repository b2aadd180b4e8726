"""The specs of feed-forward blocks, dense and of experts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from preheat.model.tensor_specs import GateSpec, LinearSpec, NormSpec, VectorSpec
from preheat.ops.kinds import Activation, Scheme, Scoring


@dataclass(frozen=True, kw_only=True)
class DenseSpec:
    """A feed-forward block: ``gate_up``, including the activation, then ``down``.

    Without a gate, ``gate_up`` is only up.
    """

    gate_up: LinearSpec
    down: LinearSpec

    @property
    def activations(self) -> int:
        """Intermediate numbers per token: gate, up, and the output of the activation."""
        return self.gate_up.outputs + self.down.inputs


STACKED, STACKED_MXFP4 = "stacked", "stacked-mxfp4"
"""Formats of experts whose checkpoint has a stack of all experts, :mod:`preheat.model.formats_stacked`."""


@dataclass(frozen=True, kw_only=True)
class ExpertsSpec:
    """The experts of a layer: feed-forward blocks of ``inner`` numbers with a gated ``activation``.

    In the checkpoint each expert has the modules ``gate``, ``up`` and ``down``; {} in their names is the expert's
    number. Formats of stacked experts have gate and up in one module. ``bias``: both layers have one. A shard has
    ``kept`` [from, to) of the checkpoint's ``stored_inner`` numbers, summed in ``k_splits`` splits.

    ``dealt``: ranks have whole experts instead. A shard then has ``num_experts`` experts of the checkpoint's
    ``stored_experts``, from number ``first`` on.
    """

    gate: str
    up: str
    down: str
    num_experts: int
    hidden: int
    inner: int
    bias: bool = False
    activation: Activation = "silu_and_mul"
    format: str = "plain"
    scheme: Scheme | None = None
    kept: tuple[int, int] | None = None
    stored_inner: int = 0
    k_splits: int = 0
    dealt: bool = False
    first: int = 0
    stored_experts: int = 0

    @property
    def params(self) -> int:
        return self.num_experts * (3 * self.hidden * self.inner + self.bias * (2 * self.inner + self.hidden))

    @property
    def matrices(self) -> tuple[tuple[int, int], ...]:
        """Outputs and inputs of one expert's weights: gates above ups, and downs."""
        return (2 * self.inner, self.hidden), (self.hidden, self.inner)

    @property
    def whole_inner(self) -> int:
        """Inner numbers of the checkpoint's experts."""
        return self.stored_inner or self.inner

    @property
    def numbers(self) -> range:
        """Numbers of the experts, as the router has them."""
        return range(self.first, self.first + self.num_experts)

    @property
    def whole_experts(self) -> int:
        """Number of the checkpoint's experts."""
        return self.stored_experts or self.num_experts

    @property
    def modules(self) -> Iterator[str]:
        """The modules of all experts of the checkpoint."""
        return (name.format(each) for each in range(self.whole_experts) for name in (self.gate, self.up, self.down))

    def weight_bytes(self, itemsize: int) -> int:
        """Return the bytes of all experts on a device."""
        if self.scheme is None:
            return self.params * itemsize
        return self.num_experts * sum(self.scheme.bytes(*matrix) for matrix in self.matrices)


@dataclass(frozen=True, kw_only=True)
class SharedSpec:
    """An expert that all tokens visit, and its ``gate``.

    The gate sets its share in each token; without one (None) the share is one.
    """

    block: DenseSpec
    gate: GateSpec | None = None


@dataclass(frozen=True, kw_only=True)
class BesideSpec:
    """Norms of a block of experts that reads the residual stream itself, beside its shared expert.

    ``router``, ``experts`` and ``shared`` are the norms of what each reads, ``experts_out`` and ``shared_out`` of what
    they return.
    """

    router: NormSpec
    experts: NormSpec
    experts_out: NormSpec
    shared: NormSpec
    shared_out: NormSpec


@dataclass(frozen=True, kw_only=True)
class MoeSpec:
    """A feed-forward block of experts; ``router`` chooses ``top_k`` for each token (:mod:`preheat.ops.moe`).

    ``renormalize``: the weights of the chosen experts sum to one. ``round_weights``: the weights are rounded to the
    model's dtype. ``scoring``, the groups and ``factor`` are as in :class:`preheat.ops.values.Routing`. ``correction``
    is added to the scores for the choice alone. ``weighted`` has a factor of each expert's weight, after all others.
    With ``beside`` the block reads the residual stream, and has a shared expert.
    """

    router: LinearSpec
    experts: ExpertsSpec
    top_k: int
    renormalize: bool
    round_weights: bool
    shared: SharedSpec | None = None
    scoring: Scoring = "softmax"
    groups: int = 1
    top_groups: int = 1
    best: int = 1
    factor: float = 1.0
    correction: VectorSpec | None = None
    weighted: VectorSpec | None = None
    beside: BesideSpec | None = None

    @property
    def activations(self) -> int:
        """Intermediate numbers per token.

        These are inputs or outputs of the chosen experts, and their inner numbers.
        """
        chosen = self.top_k * (self.experts.hidden + self.experts.inner) + self.router.outputs
        return chosen + (self.shared.block.activations + self.experts.hidden if self.shared else 0)

    @property
    def share(self) -> float:
        """Share of the experts that a token visits."""
        return self.top_k / self.experts.whole_experts


MlpSpec = DenseSpec | MoeSpec
