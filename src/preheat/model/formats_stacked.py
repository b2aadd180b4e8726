"""Experts that a checkpoint stores as stacks: gates and ups of an expert alternate, and each layer has a bias.

The renames of a family cut the stacks into experts. ``gate`` and ``up`` of the spec are one module.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from preheat.backends.base.layers import ExpertsWeights
from preheat.model.formats_fp4 import exponents
from preheat.model.mlp_specs import ExpertsSpec
from preheat.model.reading import Shape, WeightReader
from preheat.model.tensor_specs import LinearSpec

if TYPE_CHECKING:
    from torch import Tensor

    from preheat.backends.base.layers import Linear
    from preheat.ops.quantization import QuantizedWeight

BLOCK = 32
"""Inputs of a block of MXFP4; a block has 16 bytes."""


class Stacked:
    """``<module>`` [inputs, outputs] and ``<module>_bias`` [outputs] of each expert, in a floating-point dtype."""

    def tensors(self, spec: LinearSpec | ExpertsSpec) -> Mapping[str, Shape]:
        assert isinstance(spec, ExpertsSpec), "only experts are stacked"
        found: dict[str, Shape] = {}
        for expert in spec.numbers:
            for name, (outputs, inputs) in zip((spec.gate, spec.down), spec.matrices, strict=True):
                found |= self.module_tensors(name.format(expert), outputs, inputs)
                found[f"{name.format(expert)}_bias"] = (outputs,)
        return found

    def module_tensors(self, name: str, outputs: int, inputs: int) -> Mapping[str, Shape]:
        """Return the shapes of the tensors of an expert's module, without its bias."""
        return {name: (inputs, outputs)}

    def load(self, spec: LinearSpec, loader: WeightReader) -> Linear:
        """Never called: quantization and families give the format to experts alone."""
        raise AssertionError("only experts are stacked")

    def experts(self, spec: ExpertsSpec, loader: WeightReader) -> ExpertsWeights:
        """Return the weights and the biases of ``spec``, each expert read to its destination."""
        found: list[Tensor] = []
        biases: list[Tensor] = []
        for name, (outputs, inputs) in zip((spec.gate, spec.down), spec.matrices, strict=True):
            weight, bias = loader.empty(spec.num_experts, outputs, inputs), loader.empty(spec.num_experts, outputs)
            for at, expert in enumerate(spec.numbers):
                stored = loader.tensor(name.format(expert), inputs, outputs)
                weight[at].copy_(_apart(stored.t(), name == spec.gate))
                bias[at].copy_(_apart(loader.tensor(f"{name.format(expert)}_bias", outputs), name == spec.gate))
            found.append(weight)
            biases.append(bias)
        return ExpertsWeights(*found, *biases)


class StackedMxFp4(Stacked):
    """``<module>_blocks`` [outputs, blocks, 16] and ``<module>_scales`` [outputs, blocks] in place of the numbers."""

    def module_tensors(self, name: str, outputs: int, inputs: int) -> Mapping[str, Shape]:
        blocks = inputs // BLOCK
        return {f"{name}_blocks": (outputs, blocks, BLOCK // 2), f"{name}_scales": (outputs, blocks)}

    def experts(self, spec: ExpertsSpec, loader: WeightReader) -> ExpertsWeights:
        """Return the codes and the biases of ``spec``, each expert read to its destination."""
        from preheat.ops import fp4

        assert spec.scheme is not None
        found: list[QuantizedWeight] = []
        biases: list[Tensor] = []
        for name, (outputs, inputs) in zip((spec.gate, spec.down), spec.matrices, strict=True):
            weight, blocks = loader.empty_weight(spec.scheme, spec.num_experts, outputs, inputs), inputs // BLOCK
            bias, pairs = loader.empty(spec.num_experts, outputs), name == spec.gate
            for at, expert in enumerate(spec.numbers):
                own, part = name.format(expert), weight.part(at)
                packed = loader.read_bytes(f"{own}_blocks", outputs, blocks, BLOCK // 2)
                part.codes.copy_(_apart(fp4.unpacked(packed.flatten(1)), pairs))
                part.scales.copy_(_apart(exponents(f"{own}_scales", (outputs, blocks), loader), pairs))
                bias[at].copy_(_apart(loader.tensor(f"{own}_bias", outputs), pairs))
            found.append(weight)
            biases.append(bias)
        gate_up, down = found
        return ExpertsWeights(gate_up, down, *biases)


def _apart(rows: Tensor, pairs: bool) -> Tensor:
    """Return ``rows`` with all gates above all ups, where they alternate in ``pairs``."""
    import torch

    return torch.cat((rows[::2], rows[1::2])) if pairs else rows
