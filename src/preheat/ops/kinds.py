"""The operations' variants, by name. No torch here: a model's spec names them long before anything is computed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Activation = Literal["silu_and_mul", "gelu_tanh_and_mul", "gelu", "gelu_tanh", "quick_gelu"]
"""What a linear layer ends with, see :mod:`preheat.ops.activation`. With "_and_mul" the first half of its outputs is
the gate of the second, and half as many are left."""

NormKind = Literal["rms", "rms_plus_one", "layer"]
"""The kinds of norm, see :mod:`preheat.ops.norm`."""

Code = Literal["fp8", "int4", "int8"]
"""What a quantized weight is stored as: float8 e4m3fn, or whole numbers of 4 or 8 bits."""

Scales = Literal["tensor", "channel", "group", "block"]
"""How a checkpoint shares the scales of a weight [outputs, inputs]: one, one for each output, one for each output and
``group`` inputs, or one for each ``group`` outputs and ``group`` inputs."""

ActivationScales = Literal["token", "block", "static"]
"""Where the scale of activations in float8 comes from: from a token's row, from each 128 numbers of it, or from the
checkpoint."""


@dataclass(frozen=True, kw_only=True)
class Scheme:
    """How a linear layer is quantized, see :mod:`preheat.ops.quantization`.

    ``group`` is that of :data:`Scales`, 0 for tensor and channel. ``zeros``: weights have zero points. ``indexed``: the
    checkpoint says of each input which group it belongs to. ``activations``: None if they are not quantized.
    """

    code: Code
    scales: Scales
    group: int = 0
    zeros: bool = False
    indexed: bool = False
    activations: ActivationScales | None = None

    @property
    def kind(self) -> str:
        """What a backend needs kernels for: the bits of weights and of activations."""
        return f"w{4 if self.code == 'int4' else 8}a{8 if self.activations else 16}"

    @property
    def name(self) -> str:
        """All of it, in a few words."""
        scales = f"{self.scales} {self.group}" if self.group else self.scales
        more = f"{', zero points' if self.zeros else ''}{', g_idx' if self.indexed else ''}"
        return f"{self.code} per {scales}{more}" + (f", activations per {self.activations}" if self.activations else "")

    def groups(self, inputs: int) -> int:
        """Scales of one output."""
        return -(-inputs // self.group) if self.group else 1

    def bytes(self, outputs: int, inputs: int) -> int:
        """Of a weight's codes, scales and zero points, as a device holds them: scales for each output, in float32."""
        codes = outputs * inputs // 2 if self.code == "int4" else outputs * inputs
        return codes + outputs * self.groups(inputs) * (4 + 4 * self.zeros) + 4 * inputs * self.indexed
