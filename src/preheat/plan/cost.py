"""What an item costs: estimated from the model's sizes and the machine's speed, or measured by an earlier boot."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from preheat.backends.base import Machine
from preheat.plan.buckets import Bucket


class Cost(NamedTuple):
    """Seconds to run an item once, and the bytes that it needs besides weights and cache."""

    seconds: float
    bytes: int


class _Cache(Protocol):
    @property
    def num_kv_heads(self) -> int: ...


class _Layer(Protocol):
    @property
    def step_params(self) -> int: ...
    @property
    def activations(self) -> int: ...
    @property
    def kv(self) -> _Cache: ...


class _Head(Protocol):
    @property
    def weights(self) -> int: ...


class SpecLike(Protocol):
    """The part of :class:`preheat.model.specs.ModelSpec` that costs depend on."""

    @property
    def hidden_size(self) -> int: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def layers(self) -> Sequence[_Layer]: ...
    @property
    def head(self) -> _Head: ...
    def kv_bytes_per_token(self, itemsize: int) -> int: ...


@dataclass(frozen=True, kw_only=True)
class ModelSizes:
    """The sizes of a decoder that determine what a step costs. ``layer_params`` are the weights of all layers and
    ``head_params`` those of the output head, without embeddings; ``kv_heads`` are the most that a layer has;
    ``dtype_bytes`` is for weights, activations and cache.
    """

    hidden: int
    vocab: int
    layers: int
    kv_heads: int
    layer_params: int
    head_params: int
    kv_bytes_per_token: int
    activation_bytes_per_token: int
    dtype_bytes: int

    @classmethod
    def of(cls, spec: SpecLike, dtype_bytes: int = 2) -> ModelSizes:
        """Activations are the most that a layer holds at once, residual and normed input included."""
        widest = 2 * spec.hidden_size + max(layer.activations for layer in spec.layers)
        return cls(
            hidden=spec.hidden_size,
            vocab=spec.vocab_size,
            layers=len(spec.layers),
            kv_heads=max(layer.kv.num_kv_heads for layer in spec.layers),
            layer_params=sum(layer.step_params for layer in spec.layers),
            head_params=spec.head.weights,
            kv_bytes_per_token=spec.kv_bytes_per_token(dtype_bytes),
            activation_bytes_per_token=dtype_bytes * widest,
            dtype_bytes=dtype_bytes,
        )


@dataclass(frozen=True)
class Costs:
    """``measured`` gives the seconds of items that ran in an earlier boot, by name. Memory is always estimated."""

    sizes: ModelSizes
    machine: Machine
    block_size: int
    measured: Mapping[str, float] = field(default_factory=dict)

    def forward(self, name: str, bucket: Bucket) -> Cost:
        """One forward step without logits: the slower of its arithmetic and of reading weights and context."""
        sizes = self.sizes
        context = bucket.blocks * self.block_size or (bucket.rows * bucket.longest if bucket.phase == "decode" else 0)
        flops = 2.0 * sizes.layer_params * bucket.tokens
        moved = sizes.layer_params * sizes.dtype_bytes + context * sizes.kv_bytes_per_token
        work = bucket.tokens * sizes.activation_bytes_per_token
        return self._known(name, flops, moved + work, work, self.machine.step_overhead)

    def sampling(self, name: str, rows: int) -> Cost:
        """Float32 logits of ``rows`` positions, and one token from each."""
        sizes = self.sizes
        logits = rows * sizes.vocab * 4
        moved = (sizes.head_params * sizes.dtype_bytes if rows else 0) + 4 * logits
        return self._known(name, 2.0 * sizes.head_params * rows, moved, 2 * logits, self.machine.call_overhead)

    def swap(self, name: str, pairs: int) -> Cost:
        """Swapping ``pairs`` pairs of blocks, layer by layer through copies."""
        moved = pairs * 2 * self.block_size * self.sizes.kv_bytes_per_token
        return self._known(name, 0.0, 2 * moved, moved // self.sizes.layers, self.machine.call_overhead)

    def _known(self, name: str, flops: float, moved: float, memory: int, overhead: float) -> Cost:
        estimate = overhead + max(flops / self.machine.flops, moved / self.machine.bandwidth)
        return Cost(self.measured.get(name, estimate), memory)
