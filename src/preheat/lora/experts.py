"""Adapters of all experts of a layer at once (``target_parameters`` of PEFT).

transformers has the experts of a layer in two parameters: gates above ups [experts, 2 * inner, hidden] and downs
[experts, hidden, inner]. PEFT saves one pair of matrices for each parameter. lora_A [experts * rank, inputs] has one
expert's ranks after the other's. lora_B [outputs, rank * experts] has the experts of each rank together. PEFT names the
pairs by the module, and adds ``.base_layer`` for the parameter that it wrapped first, so their shapes tell them apart.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

from torch import Tensor

from preheat.model.mlp_specs import MoeSpec
from preheat.model.specs import ModelSpec
from preheat.ops.matmul import LowRankPair


class Stack(NamedTuple):
    """A stacked ``parameter``, by its name in the model's code.

    It has a matrix [outputs, inputs] for each of the ``experts``. The rows of a matrix belong to ``modules`` of the
    checkpoint, in equal parts; {} in their names is the expert's number. ``raw`` is the module's name in an adapter.
    """

    raw: str
    parameter: str
    modules: tuple[str, ...]
    experts: int
    outputs: int
    inputs: int

    @property
    def key(self) -> str:
        """The key of the parameter in the adapter's digest."""
        return self.parameter

    @property
    def names(self) -> list[str]:
        """The names of the modules in the checkpoint, of all experts."""
        return [name.format(expert) for expert in range(self.experts) for name in self.modules]

    def shapes(self, rank: int) -> tuple[list[int], list[int]]:
        """Return the shapes of lora_A and lora_B."""
        return [self.experts * rank, self.inputs], [self.outputs, rank * self.experts]

    def split(self, a: Tensor, b: Tensor, scale: float) -> Iterator[tuple[str, LowRankPair]]:
        """Yield the name and the matrices of each module of each expert."""
        rank, rows = len(a) // self.experts, self.outputs // len(self.modules)
        downs, ups = a.view(self.experts, rank, self.inputs), b.view(self.outputs, rank, self.experts)
        for expert in range(self.experts):
            for part, name in enumerate(self.modules):
                own = ups[part * rows : (part + 1) * rows, :, expert].contiguous()
                yield name.format(expert), LowRankPair(downs[expert], own, scale)


def stacks_of(raw: str, spec: ModelSpec) -> list[Stack]:
    """Return the stacked parameters of an adapter's module ``raw``; none unless it has experts."""
    module, found = raw.removesuffix(".base_layer"), list[Stack]()
    for layer in spec.layers:
        if isinstance(layer.mlp, MoeSpec):
            own = layer.mlp.experts
            gate_up, down = replace(own, inner=own.whole_inner).matrices
            for parts, size in (((own.gate, own.up), gate_up), ((own.down,), down)):
                name = _parameter(module, parts, spec)
                found += [Stack(raw, name, parts, own.whole_experts, *size)] if name else []
    return found


def alike(stack: Stack, spec: ModelSpec) -> Iterator[str]:
    """Yield the names of the same parameter in every layer with experts."""
    for layer in spec.layers:
        if isinstance(layer.mlp, MoeSpec):
            number, own = _number(layer.mlp.experts.gate), _number(stack.modules[0])
            yield stack.parameter.replace(f".{own}.", f".{number}.", 1)


def _number(module: str) -> str:
    match = re.search(r"\.(\d+)\.", module)
    assert match is not None, "experts are in layers"
    return match[1]


def _parameter(module: str, parts: tuple[str, ...], spec: ModelSpec) -> str | None:
    """Return the parameter of ``module`` that the family's checkpoints store as ``parts``, if there is one."""
    for name in ("gate_up_proj", "down_proj"):
        for rename in spec.renames:
            match = re.fullmatch(rename.stored, f"{module}.{name}")
            if match and tuple(match.expand(each) for each in rename.names) == tuple(f"{p}.weight" for p in parts):
                return f"{module}.{name}"
    return None
