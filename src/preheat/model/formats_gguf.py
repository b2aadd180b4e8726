"""Linear layers of GGUF files that keep their codes: Q8_0 and Q4_0."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from preheat.model.formats_quantized import QuantizedFormat
from preheat.model.reading import Shape, WeightReader
from preheat.ops.kinds import Scheme

if TYPE_CHECKING:
    from preheat.ops.quantization import QuantizedWeight


class GgufCodes(QuantizedFormat):
    """Codes around zero, and a scale for each 32 inputs of an output.

    :mod:`preheat.model.gguf.tensors` splits the file's blocks into the two.
    """

    def module_tensors(self, scheme: Scheme, outputs: int, inputs: int) -> Mapping[str, Shape]:
        return {"codes": (outputs, inputs), "scales": (outputs, scheme.groups(inputs))}

    def read(self, name: str, out: QuantizedWeight, loader: WeightReader) -> None:
        loader.source.fill(f"{name}.codes", out.codes)
        loader.source.fill(f"{name}.scales", out.scales)
