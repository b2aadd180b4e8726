"""What an item costs, in seconds of warm-up and bytes of working memory: estimated from the model's sizes and the
machine's rough speed, or measured, where an earlier boot's record has it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from preheat.backends.base import Machine
from preheat.plan.buckets import Bucket


class Cost(NamedTuple):
    """Seconds to run an item once, and the bytes that it needs beside weights and cache."""

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
    """What is read of a model's spec."""

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
    """The sizes of a decoder that decide what a step costs. ``dtype_bytes`` is for weights, activations and cache.

    ``layer_params`` are the weights of all layers and ``head_params`` those of the output head, without embeddings.
    ``kv_heads`` are the most that a layer has.
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
        """The sizes of a model with this spec.

        Activations are those of the widest moment of a layer: residual and normed input beside what the layer has.
        """
        return cls(
            hidden=spec.hidden_size,
            vocab=spec.vocab_size,
            layers=len(spec.layers),
            kv_heads=max(layer.kv.num_kv_heads for layer in spec.layers),
            layer_params=sum(layer.step_params for layer in spec.layers),
            head_params=spec.head.weights,
            kv_bytes_per_token=spec.kv_bytes_per_token(dtype_bytes),
            activation_bytes_per_token=dtype_bytes
            * (2 * spec.hidden_size + max(layer.activations for layer in spec.layers)),
            dtype_bytes=dtype_bytes,
        )


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
        logits = rows * sizes.vocab * 4
        moved = (sizes.head_params * sizes.dtype_bytes if rows else 0) + 4 * logits
        return self._known(name, 2.0 * sizes.head_params * rows, moved, 2 * logits, self.machine.call_overhead)

    def swap(self, name: str, pairs: int) -> Cost:
        """``pairs`` pairs of blocks exchanged in every layer, by way of copies of one layer's."""
        moved = pairs * 2 * self.block_size * self.sizes.kv_bytes_per_token
        return self._known(name, 0.0, 2 * moved, moved // self.sizes.layers, self.machine.call_overhead)

    def _known(self, name: str, flops: float, moved: float, memory: int, overhead: float) -> Cost:
        estimate = overhead + max(flops / self.machine.flops, moved / self.machine.bandwidth)
        return Cost(self.measured.get(name, estimate), memory)
