"""Linear layers rounded to FP8 by Intel Neural Compressor's scales.

Contract. Weights and inputs are rounded to e4m3 with one scale each (:mod:`preheat.ops.float8`). Where the backend
multiplies codes, the layer is one of W8A8 with a static scale (:mod:`preheat.ops.quantization`). Elsewhere the layer is
simulated: codes are widened, multiplied by their scale in fp32, and rounded to the model's dtype. Scales that are
powers of two make this last rounding exact. The layer is then the backend's own. Scales are constants of the model, so
a row's bits depend on no other row.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from preheat.backends.base.layers import LayerWeights, Linear
from preheat.model.formats import Plain
from preheat.model.inc import module_name
from preheat.model.inc_files import IncConfig
from preheat.model.reading import WeightReader
from preheat.model.tensor_specs import LinearSpec
from preheat.ops.float8 import round_to, simulate
from preheat.ops.quantization import E4M3

ROWS = 1024
"""Rows rounded at a time.

Intermediate numbers take four bytes each.
"""


class Inc(Plain):
    """A plain checkpoint with layers rounded while they are loaded.

    ``scales`` are the scales of inputs, by module.
    """

    def __init__(self, config: IncConfig, scales: Mapping[str, float]) -> None:
        self._config, self._scales = config, scales

    def load(self, spec: LinearSpec, loader: WeightReader) -> Linear:
        weight, bias = self.read(spec, loader)
        most = self._config.traits.full_scale
        scale = torch.tensor([self._weight_scale(weight)], device=weight.device)
        inputs = torch.tensor([self._scales[module_name(spec)]], device=loader.backend.device)
        if spec.scheme is not None:
            coded = loader.empty_weight(spec.scheme, spec.outputs, spec.inputs)
            for codes, rows in zip(torch.split(coded.codes, ROWS), torch.split(weight, ROWS), strict=True):
                codes.copy_(round_to(rows, scale, E4M3, most))
            assert coded.static is not None
            coded.scales.copy_(scale.expand_as(coded.scales))
            coded.static.copy_(inputs[0])
            return loader.layer_of(spec, LayerWeights(coded, bias))
        for rows in torch.split(weight, ROWS):
            rows.copy_(simulate(rows, scale, most))
        return loader.layer_of(spec, LayerWeights(weight, bias, inputs, most))

    def _weight_scale(self, weight: Tensor) -> float:
        """Return the scale of a weight by INC's rule.

        It comes from the greatest magnitude, or is the candidate of least error.
        """
        config = self._config
        if not config.candidates:
            return config.weight_scale(max(rows.abs().max().item() for rows in torch.split(weight, ROWS)))
        errors = [self._error(weight, scale) for scale in config.candidates]
        return min(zip(errors, config.candidates, strict=True), key=lambda found: found[0])[1]

    def _error(self, weight: Tensor, scale: float) -> float:
        given = torch.tensor([scale], device=weight.device)
        most = self._config.traits.full_scale
        return sum(
            (rows - simulate(rows, given, most)).double().square().sum().item() for rows in torch.split(weight, ROWS)
        )
