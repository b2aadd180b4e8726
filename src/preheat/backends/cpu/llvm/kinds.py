"""What the compiled functions of a model are made for: kinds of layers and products, as values. No llvmlite."""

from __future__ import annotations

from typing import Literal, NamedTuple

PANEL = 32
"""Outputs of a weight that lie side by side for each input."""

LANES = 16

Stored = Literal["float32", "bfloat16"]


class Product(NamedTuple):
    """A weight [outputs, inputs] in panels; ``gated``: outputs are gates and ups, and SwiGLU follows."""

    inputs: int
    outputs: int
    stored: Stored
    bias: bool = False
    gated: bool = False

    @property
    def results(self) -> int:
        """Numbers that a row has after SwiGLU."""
        return self.outputs // 2 if self.gated else self.outputs


class LayerKind(NamedTuple):
    """A decoder layer. ``window`` and rope tables are data; ``qk_norm``: each head of queries and keys is normed."""

    hidden: int
    heads: int
    kv_heads: int
    dim: int
    scale: float
    eps: float
    qk_norm: float | None
    cached: Stored
    block_size: int
    qkv: Product
    o: Product
    gate_up: Product
    down: Product


FRAME = {
    name: at
    for at, name in enumerate(
        "x attended qkv inner normed scores positions tables rows threads counters".split()
    )
}  # fmt: skip
"""Fields of the frame of a step, words of 64 bits."""

JOB, FUNCTION, LAYER = 32, 40, 41
"""Fields that threads watch: the number of the latest job, its function and the layer's frame."""

COUNTERS = 8
"""Counters of a job: one for each phase of a function."""

LINE = 8
"""Words of a cache line."""

LAYER_FRAME = {
    name: at
    for at, name in enumerate(
        "norm qkv qkv_bias q_norm k_norm cos sin cache window o o_bias post_norm gate_up gate_up_bias down "
        "down_bias".split()
    )
}  # fmt: skip
"""Fields of a layer's frame: addresses, and the window in tokens, 0 for none."""

SPLIT = 256
"""Keys of a KV split: a split has a softmax of its own, and splits are merged in rising order."""
