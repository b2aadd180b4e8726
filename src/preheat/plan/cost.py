"""What an item costs, in seconds of warm-up and bytes of working memory: estimated from the model's sizes and the
machine's rough speed, or measured, where an earlier boot's record has it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from preheat.plan.buckets import Bucket


class Cost(NamedTuple):
    """Seconds to run an item once, and the bytes that it needs beside weights and cache."""

    seconds: float
    bytes: int


class SpecLike(Protocol):
    """What is read of a model's spec."""

    @property
    def hidden_size(self) -> int: ...
    @property
    def intermediate_size(self) -> int: ...
    @property
    def num_layers(self) -> int: ...
    @property
    def num_heads(self) -> int: ...
    @property
    def num_kv_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def vocab_size(self) -> int: ...


@dataclass(frozen=True, kw_only=True)
class ModelSizes:
    """The sizes of a decoder that decide what a step costs. ``dtype_bytes`` is for weights, activations and cache."""

    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    dtype_bytes: int = 2

    @classmethod
    def of(cls, spec: SpecLike, dtype_bytes: int = 2) -> ModelSizes:
        """The sizes of a model with this spec."""
        return cls(
            hidden=spec.hidden_size,
            intermediate=spec.intermediate_size,
            layers=spec.num_layers,
            heads=spec.num_heads,
            kv_heads=spec.num_kv_heads,
            head_dim=spec.head_dim,
            vocab=spec.vocab_size,
            dtype_bytes=dtype_bytes,
        )

    @property
    def layer_params(self) -> int:
        """Weights of all layers, without embeddings."""
        attention = self.hidden * self.head_dim * (2 * self.heads + 2 * self.kv_heads)
        return self.layers * (attention + 3 * self.hidden * self.intermediate + 2 * self.hidden)

    @property
    def kv_bytes_per_token(self) -> int:
        return 2 * self.layers * self.kv_heads * self.head_dim * self.dtype_bytes

    @property
    def activation_bytes_per_token(self) -> int:
        """The widest moment of a layer: residual and normed input beside either q, k, v and output, or the MLP."""
        attention = self.head_dim * (2 * self.heads + 2 * self.kv_heads)
        return (2 * self.hidden + max(attention, 3 * self.intermediate)) * self.dtype_bytes


@dataclass(frozen=True)
class Machine:
    """Sustained speed: floating-point operations and bytes a second. Overheads are the seconds of a forward step, and
    of a call of anything smaller, in which nothing is computed.
    """

    flops: float
    bandwidth: float
    step_overhead: float
    call_overhead: float


MACHINES: Mapping[str, Machine] = {
    "cpu": Machine(flops=1e11, bandwidth=1e10, step_overhead=2e-3, call_overhead=5e-4),
    "cuda": Machine(flops=4e14, bandwidth=3e12, step_overhead=2e-2, call_overhead=1e-3),
}
"""Orders of magnitude, for a plan that was never measured; the record of a boot replaces them item by item."""


@dataclass(frozen=True)
class Costs:
    """Answers what an item costs. ``measured`` gives the seconds of items that ran before, by name; what they held on
    to then says nothing of the memory that they need, which stays estimated.
    """

    sizes: ModelSizes
    machine: Machine
    block_size: int
    measured: Mapping[str, float] = field(default_factory=dict)

    def forward(self, name: str, bucket: Bucket) -> Cost:
        """One forward step: the slower of its arithmetic and of reading weights and context, logits not included."""
        sizes = self.sizes
        context = bucket.blocks * self.block_size or (bucket.rows * bucket.longest if bucket.phase == "decode" else 0)
        flops = 2.0 * sizes.layer_params * bucket.tokens
        moved = sizes.layer_params * sizes.dtype_bytes + context * sizes.kv_bytes_per_token
        work = bucket.tokens * sizes.activation_bytes_per_token
        return self._known(name, flops, moved + work, work, self.machine.step_overhead)

    def sampling(self, name: str, rows: int) -> Cost:
        """Logits of ``rows`` positions, in float32, and one token from each."""
        sizes = self.sizes
        head = sizes.vocab * sizes.hidden
        logits = rows * sizes.vocab * 4
        moved = (head * sizes.dtype_bytes if rows else 0) + 4 * logits
        return self._known(name, 2.0 * head * rows, moved, 2 * logits, self.machine.call_overhead)

    def swap(self, name: str, pairs: int) -> Cost:
        """``pairs`` pairs of blocks exchanged in every layer, by way of copies of one layer's."""
        moved = pairs * 2 * self.block_size * self.sizes.kv_bytes_per_token
        return self._known(name, 0.0, 2 * moved, moved // self.sizes.layers, self.machine.call_overhead)

    def _known(self, name: str, flops: float, moved: float, memory: int, overhead: float) -> Cost:
        estimate = overhead + max(flops / self.machine.flops, moved / self.machine.bandwidth)
        return Cost(self.measured.get(name, estimate), memory)
