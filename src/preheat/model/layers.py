"""The parts of a loaded model, a tree of the same form as its :class:`~preheat.model.specs.ModelSpec`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from preheat.backends.base import Linear, Norm

Linears = Iterator[tuple[str, Linear]]
"""Linear layers, each with its path in the spec."""


@dataclass(frozen=True, slots=True)
class AttentionWeights:
    """The weights of attention. ``qk_norm`` is the norm of each query and key head, if there is one."""

    qkv: Linear
    o: Linear
    qk_norm: Norm | None

    def linears(self) -> Linears:
        yield "qkv", self.qkv
        yield "o", self.o


@dataclass(frozen=True, slots=True)
class DenseMlp:
    """The feed-forward block, [tokens, hidden] -> [tokens, hidden]. ``gate_up`` includes the activation."""

    gate_up: Linear
    down: Linear

    def __call__(self, x: Tensor) -> Tensor:
        return self.down(self.gate_up(x))

    def linears(self) -> Linears:
        yield "gate_up", self.gate_up
        yield "down", self.down


@dataclass(frozen=True, slots=True)
class Layer:
    """One decoder layer."""

    attention: AttentionWeights
    mlp: DenseMlp
    input_norm: Norm
    post_norm: Norm

    def linears(self) -> Linears:
        yield from _below("attention", self.attention.linears())
        yield from _below("mlp", self.mlp.linears())


@dataclass(frozen=True, slots=True)
class Weights:
    """A whole model: ``embedding`` [vocab, hidden], its layers, the final norm and the output head."""

    embedding: Tensor
    layers: list[Layer]
    final_norm: Norm
    head: Linear

    def linears(self) -> Linears:
        """All linear layers, the head last, with the paths of :meth:`ModelSpec.linears`."""
        for index, layer in enumerate(self.layers):
            yield from _below(f"layers.{index}", layer.linears())
        yield "head", self.head


def _below(path: str, linears: Linears) -> Linears:
    return ((f"{path}.{name}", linear) for name, linear in linears)
