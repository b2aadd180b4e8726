"""Names of the variants of operations.

No torch here: a model's spec names the variants long before anything is computed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Activation = Literal[
    "silu_and_mul", "clamped_silu_and_mul", "gelu_tanh_and_mul", "gelu_and_mul", "gelu", "gelu_tanh", "quick_gelu",
    "relu2",
]  # fmt: skip
"""Activation at the end of a linear layer, see :mod:`preheat.ops.activation`.

With "_and_mul" the first half of the outputs is the gate of the second half, and half as many outputs remain.
"""

Scoring = Literal["softmax", "sigmoid"]
"""Scores of experts by a router's logits, see :mod:`preheat.ops.moe`."""

NormKind = Literal["rms", "rms_once", "rms_plus_one", "layer", "identity"]
"""Kinds of norm, see :mod:`preheat.ops.norm`."""

Code = Literal["fp8", "fp4", "int4", "int8"]
"""Storage of a quantized weight: float8 e4m3fn, float4 e2m1, int4 or int8."""

Scales = Literal["tensor", "channel", "group", "block"]
"""Sharing of the scales of a weight [outputs, inputs] in a checkpoint.

tensor: one scale. channel: one for each output. group: one for each output and ``group`` inputs. block: one for each
``group`` outputs and ``group`` inputs.
"""

ActivationScales = Literal["token", "block", "static"]
"""Source of the scale of float8 activations.

token: a token's row. block: each 128 numbers of a row. static: the checkpoint.
"""


@dataclass(frozen=True, kw_only=True)
class Scheme:
    """Quantization of a linear layer, see :mod:`preheat.ops.quantization`.

    ``group`` is the group size of :data:`Scales`, 0 for tensor and channel. ``zeros``: weights have zero points.
    ``indexed``: the checkpoint names the group of each input. ``activations``: None if they are not quantized.
    """

    code: Code
    scales: Scales
    group: int = 0
    zeros: bool = False
    indexed: bool = False
    activations: ActivationScales | None = None

    @property
    def bits(self) -> int:
        """Bits of a weight's code."""
        return 4 if self.code in ("fp4", "int4") else 8

    @property
    def powers(self) -> bool:
        """Whether scales are powers of two: blocks of 32 numbers of e2m1 (MXFP4)."""
        return self.code == "fp4" and self.group == 32

    @property
    def kind(self) -> str:
        """Bits of weights and activations; each kind needs its own kernels."""
        return f"w{self.bits}a{8 if self.activations else 16}"

    @property
    def name(self) -> str:
        """The whole scheme in a few words."""
        scales = f"{self.scales} {self.group}" if self.group else self.scales
        more = f"{', zero points' if self.zeros else ''}{', g_idx' if self.indexed else ''}"
        return f"{self.code} per {scales}{more}" + (f", activations per {self.activations}" if self.activations else "")

    def groups(self, inputs: int) -> int:
        """Return the number of scales of one output."""
        return -(-inputs // self.group) if self.group else 1

    def bytes(self, outputs: int, inputs: int) -> int:
        """Return the bytes of a weight on a device.

        These are its codes, scales and zero points. A device holds scales for each output, in float32.
        """
        codes = outputs * inputs * self.bits // 8
        return codes + outputs * self.groups(inputs) * (4 + 4 * self.zeros) + 4 * inputs * self.indexed


QUERIES = 256
"""Queries of a tile of an image's attention, see :mod:`preheat.ops.image_attention`."""
