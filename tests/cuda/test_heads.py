"""Layers of heads on a GPU: the tiles of the rule have the bits of each head's own layer, and no proof rejects them."""

import pytest
import torch

from preheat.backends.cuda.device.card import HOPPER
from preheat.backends.cuda.matmul.config import REFERENCE
from preheat.backends.cuda.matmul.heads import HeadsLayer
from preheat.backends.cuda.matmul.kernels import KernelConfigs
from preheat.backends.cuda.matmul.prove import settle_heads
from preheat.ops.values import Matmul, WeightFormat

ROWS = [1, 2, 16, 40, 256, 2048]
SIZES = [(20, 512, 192), (20, 256, 512), (16, 512, 128), (128, 128, 512)]
"""Heads, outputs and inputs of GLM-4.7-Flash and of DeepSeek-V3."""


def made(heads: int, outputs: int, inputs: int) -> HeadsLayer:
    weight = torch.randn(heads, outputs, inputs, device="cuda", dtype=torch.bfloat16) * inputs**-0.5
    value = Matmul(outputs=outputs, inputs=inputs, weight=WeightFormat("bfloat16"))
    return HeadsLayer(value, weight, KernelConfigs(card=HOPPER))


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_no_tile_of_the_rule_is_rejected(size):
    layer = made(*size)
    before = [layer.configs.heads(layer.shape, rows, size[0]) for rows in ROWS]
    settle_heads([(layer, ROWS)], invariant=True)
    assert [layer.configs.heads(layer.shape, rows, size[0]) for rows in ROWS] == before


def test_a_tile_with_other_bits_is_rejected(monkeypatch):
    """Control."""
    layer, right = made(*SIZES[0]), HeadsLayer.by

    def by(self, tile, x, out):
        right(self, tile, x, out)
        out[len(out) // 2, 3, 5] += 1

    monkeypatch.setattr(HeadsLayer, "by", by)
    settle_heads([(layer, ROWS[:2])], invariant=True)
    assert layer.configs.heads(layer.shape, 2, 20) == REFERENCE[torch.bfloat16]
