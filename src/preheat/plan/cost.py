"""The cost of items.

It is estimated from the model's sizes and the machine's speed, or measured by an earlier boot.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from preheat.backends.base.facts import Machine
from preheat.plan.buckets import Bucket

GRAMMAR_SECONDS, FUNCTION_SECONDS = 0.05, 0.15
CHECK_TOKENS, CHECK_STEPS = 1024, 16
"""The approximate work of a cross-check: its contexts, each alone and in a full batch."""


class Cost(NamedTuple):
    """Seconds to run an item once, and its bytes besides weights and cache."""

    seconds: float
    bytes: int


class _Cache(Protocol):
    @property
    def num_kv_heads(self) -> int: ...


class _Layer(Protocol):
    @property
    def step_params(self) -> int: ...
    @property
    def expert_params(self) -> int: ...
    def step_bytes(self, itemsize: int) -> int: ...
    def expert_bytes(self, itemsize: int) -> int: ...
    @property
    def expert_share(self) -> float: ...
    @property
    def activations(self) -> int: ...
    @property
    def kv(self) -> _Cache: ...


class _Head(Protocol):
    @property
    def weights(self) -> int: ...
    def weight_bytes(self, itemsize: int) -> int: ...


class _Vision(Protocol):
    @property
    def step_params(self) -> int: ...
    @property
    def num_positions(self) -> int: ...
    @property
    def activations(self) -> int: ...


class SpecLike(Protocol):
    """The part of :class:`preheat.model.specs.ModelSpec` that costs depend on."""

    @property
    def hidden_size(self) -> int: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def layers(self) -> Sequence[_Layer]: ...
    @property
    def head(self) -> _Head | None: ...
    @property
    def vision(self) -> _Vision | None: ...
    @property
    def encodes(self) -> bool: ...
    @property
    def has_states(self) -> bool: ...
    @property
    def first_of_kinds(self) -> tuple[int, ...]: ...
    @property
    def image_tokens(self) -> int: ...
    @property
    def any_size(self) -> bool: ...
    @property
    def layer_windows(self) -> tuple[int | None, ...]: ...
    @property
    def entries(self) -> tuple[tuple[int, ...], ...]: ...
    @property
    def max_position_embeddings(self) -> int: ...
    def kv_bytes_per_token(self, itemsize: int) -> int: ...
    def state_bytes(self, itemsize: int) -> int: ...


@dataclass(frozen=True, kw_only=True)
class ModelSizes:
    """The sizes of a decoder that determine the cost of a step.

    ``layer_params`` are the weights of all layers and ``expert_params`` the weights of their experts; a token visits
    the part ``expert_share`` of the experts. ``head_params`` are the weights of the output head, without embeddings.
    ``..._bytes`` are the bytes of these weights as a device holds them. ``kv_heads`` are the most of any layer.
    ``dtype_bytes`` is for activations and cache. An image has ``vision_positions`` positions in its encoder of
    ``vision_params`` weights, and ``vision_tokens`` positions of a prompt; images of any size have at most as many.
    """

    hidden: int
    vocab: int
    layers: int
    kv_heads: int
    layer_params: int
    head_params: int
    layer_bytes: int
    head_bytes: int
    kv_bytes_per_token: int
    activation_bytes_per_token: int
    dtype_bytes: int
    expert_params: int = 0
    expert_bytes: int = 0
    expert_share: float = 0.0
    vision_params: int = 0
    vision_positions: int = 0
    vision_bytes_per_image: int = 0
    vision_tokens: int = 0

    @classmethod
    def of(cls, spec: SpecLike, dtype_bytes: int = 2) -> ModelSizes:
        """Return the sizes of ``spec``.

        Activations are the most of any layer, residual and normed input included.
        """
        widest = 2 * spec.hidden_size + max(layer.activations for layer in spec.layers)
        return cls(
            hidden=spec.hidden_size,
            vocab=spec.vocab_size,
            layers=len(spec.layers),
            kv_heads=max(layer.kv.num_kv_heads for layer in spec.layers),
            layer_params=sum(layer.step_params for layer in spec.layers),
            head_params=spec.head.weights if spec.head else 0,
            layer_bytes=sum(layer.step_bytes(dtype_bytes) for layer in spec.layers),
            head_bytes=spec.head.weight_bytes(dtype_bytes) if spec.head else 0,
            kv_bytes_per_token=spec.kv_bytes_per_token(dtype_bytes),
            activation_bytes_per_token=dtype_bytes * widest,
            dtype_bytes=dtype_bytes,
            expert_params=sum(layer.expert_params for layer in spec.layers),
            expert_bytes=sum(layer.expert_bytes(dtype_bytes) for layer in spec.layers),
            expert_share=max(layer.expert_share for layer in spec.layers),
            vision_params=spec.vision.step_params if spec.vision else 0,
            vision_positions=spec.vision.num_positions if spec.vision else 0,
            vision_bytes_per_image=dtype_bytes * spec.vision.activations if spec.vision else 0,
            vision_tokens=spec.image_tokens,
        )

    def read_by(self, tokens: int) -> float:
        """Return the bytes of the layers that ``tokens`` tokens read.

        Each token chooses its experts independently.
        """
        return self.layer_bytes + self.expert_bytes * (1 - (1 - self.expert_share) ** tokens)


@dataclass(frozen=True)
class Costs:
    """The costs of items.

    ``measured`` gives the seconds of items that ran in an earlier boot, by name. Memory is always estimated.
    """

    sizes: ModelSizes
    machine: Machine
    block_size: int
    measured: Mapping[str, float] = field(default_factory=dict)

    def forward(self, name: str, bucket: Bucket) -> Cost:
        """Return the cost of one forward step without logits.

        It is the slower of arithmetic and of reading memory.
        """
        sizes = self.sizes
        context = bucket.blocks * self.block_size or (bucket.rows * bucket.longest if bucket.phase == "decode" else 0)
        flops = 2.0 * (sizes.layer_params + sizes.expert_params * sizes.expert_share) * bucket.tokens
        moved = sizes.read_by(bucket.tokens) + context * sizes.kv_bytes_per_token
        work = bucket.tokens * sizes.activation_bytes_per_token
        return self._known(name, flops, moved + work, work, self.machine.step_overhead)

    def sampling(self, name: str, rows: int, times: int = 1) -> Cost:
        """Return the cost of sampling ``rows`` positions ``times`` times.

        A sampling computes float32 logits and one token from each.
        """
        sizes = self.sizes
        logits = rows * sizes.vocab * 4
        moved = (sizes.head_bytes if rows else 0) + 4 * logits
        flops, overhead = 2.0 * sizes.head_params * rows, self.machine.call_overhead
        return self._known(name, times * flops, times * moved, 2 * logits, times * overhead)

    def check(self, name: str) -> Cost:
        """Return the cost of a cross-check at boot: a few short steps.

        Its memory is not estimated.
        """
        flops = 2.0 * self.sizes.layer_params * CHECK_TOKENS
        return self._known(name, flops, 0, 0, CHECK_STEPS * self.machine.step_overhead)

    def encoder(self, name: str, images: int, cells: int = 0) -> Cost:
        """Return the cost of encoding ``images`` images at once, or an image of any size that pads to ``cells``."""
        sizes = self.sizes
        count = cells / sizes.vision_tokens if cells else images
        work, reads = int(count * sizes.vision_bytes_per_image), sizes.vision_params * sizes.dtype_bytes
        flops = 2.0 * sizes.vision_params * sizes.vision_positions * count
        return self._known(name, flops, reads + work, work, self.machine.step_overhead)

    def grammar(self, name: str) -> Cost:
        """Return the cost of compiling a small grammar, on the host.

        Some of its states are built, too.
        """
        return self._known(name, 0.0, 0, 0, GRAMMAR_SECONDS)

    def function(self, name: str) -> Cost:
        """Return the cost of compiling a function of layers."""
        return self._known(name, 0.0, 0, 0, FUNCTION_SECONDS)

    def swap(self, name: str, pairs: int) -> Cost:
        """Return the cost of swapping ``pairs`` pairs of blocks, layer by layer through copies."""
        moved = pairs * 2 * self.block_size * self.sizes.kv_bytes_per_token
        return self._known(name, 0.0, 2 * moved, moved // self.sizes.layers, self.machine.call_overhead)

    def _known(self, name: str, flops: float, moved: float, memory: int, overhead: float) -> Cost:
        estimate = overhead + max(flops / self.machine.flops, moved / self.machine.bandwidth)
        return Cost(self.measured.get(name, estimate), memory)
