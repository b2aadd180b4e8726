"""Weights in numbers of four bits, with a scale for each block: MXFP4 and NVFP4 of compressed-tensors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from preheat.errors import ModelError
from preheat.model.formats_quantized import QuantizedFormat
from preheat.model.reading import Shape, WeightReader
from preheat.ops.kinds import Scheme

if TYPE_CHECKING:
    from torch import Tensor

    from preheat.ops.quantization import QuantizedWeight

NOT_A_NUMBER = 255
"""The exponent of e8m0 that stands for no number."""


class MxFp4(QuantizedFormat):
    """``weight_packed``, two numbers a byte, and ``weight_scale``, the exponent of each 32 inputs."""

    def module_tensors(self, scheme: Scheme, outputs: int, inputs: int) -> Mapping[str, Shape]:
        return {"weight_packed": (outputs, inputs // 2), "weight_scale": (outputs, scheme.groups(inputs))}

    def read(self, name: str, out: QuantizedWeight, loader: WeightReader) -> None:
        from preheat.ops import fp4

        outputs, inputs = out.shape
        out.codes.copy_(fp4.unpacked(loader.read_bytes(f"{name}.weight_packed", outputs, inputs // 2)))
        out.scales.copy_(self.scales(name, out.scheme, (outputs, inputs), loader))

    def scales(self, name: str, scheme: Scheme, shape: tuple[int, int], loader: WeightReader) -> Tensor:
        """Return the scales of the module ``name`` of this ``shape``, for codes."""
        return exponents(f"{name}.weight_scale", (shape[0], scheme.groups(shape[1])), loader)


class NvFp4(MxFp4):
    """The same with e4m3 scales of 16 inputs, divided by the module's ``weight_global_scale``."""

    def module_tensors(self, scheme: Scheme, outputs: int, inputs: int) -> Mapping[str, Shape]:
        return {**super().module_tensors(scheme, outputs, inputs), "weight_global_scale": (1,)}

    def scales(self, name: str, scheme: Scheme, shape: tuple[int, int], loader: WeightReader) -> Tensor:
        from preheat.ops import fp4

        whole = loader.read(f"{name}.weight_global_scale", 1)
        if not float(whole) > 0:
            raise ModelError(
                f"{name}.weight_global_scale must be positive, got {float(whole)}; export the weights again"
            )
        return fp4.quotients(loader.read(f"{name}.weight_scale", shape[0], scheme.groups(shape[1])), whole)


def exponents(name: str, shape: Shape, loader: WeightReader) -> Tensor:
    """Return the scales of the tensor ``name`` of exponents, for codes."""
    from preheat.ops import fp4

    found = loader.read_bytes(name, *shape)
    if bool(found.eq(NOT_A_NUMBER).any()):
        raise ModelError(f"{name} holds {NOT_A_NUMBER}, which is no scale (e8m0's NaN); export the weights again")
    return fp4.powers(found)
