"""Routed experts on a real device: every serving path has the bits of dense kernels."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from preheat.backends.base.layers import ExpertsWeights
from preheat.backends.cuda.backend import CudaBackend
from preheat.backends.cuda.device.graph import capture
from preheat.backends.cuda.matmul.config import PLAIN, REFERENCE, ExpertsConfig, ExpertsShape, Tile, Wide
from preheat.backends.cuda.matmul.kernels import KernelConfigs
from preheat.backends.cuda.matmul.linear import apply
from preheat.backends.cuda.matmul.moe.experts import ExpertsLayer
from preheat.backends.cuda.matmul.moe.route import arrange
from preheat.backends.cuda.matmul.moe.tuner import TOKENS as TUNED
from preheat.backends.cuda.matmul.moe.tuner import tune_experts
from preheat.backends.cuda.matmul.prove import settle_experts
from preheat.backends.cuda.matmul.tables import Table
from preheat.backends.cuda.matmul.weights import PlainWeight
from preheat.ops.kinds import Scheme
from preheat.ops.moe import route, routed
from preheat.ops.values import Routing
from preheat.settings import Settings
from tests import layers

SHAPES = [(128, 512, 192, 8), (8, 1024, 1792, 2), (5, 136, 72, 2)]
CONFIGS = [
    ExpertsConfig(1, Tile(128, 16, 64, 4, 6, True), Tile(32, 16, 64, 2, 4)),
    ExpertsConfig(16, Tile(64, 16, 128, 4, 3, True), Tile(128, 16, 128, 4, 3, True)),
    ExpertsConfig(32, Tile(128, 32, 128, 4, 3, True), Tile(64, 32, 64, 4, 3)),
    ExpertsConfig(64, Tile(128, 64, 64, 4, 4, True), Tile(64, 64, 64, 4, 3)),
    ExpertsConfig(128, Wide(256, 128, 4), Wide(128, 128, 6)),
    ExpertsConfig(256, Wide(128, 256, 4), Wide(128, 256, 4)),
]
TOKENS = 700


@pytest.fixture(autouse=True, scope="module")
def _process():
    CudaBackend().prepare(Settings(), "eager", None)


def made(shape: tuple[int, ...], dtype: torch.dtype = torch.bfloat16) -> tuple[ExpertsLayer, Tensor, Tensor, Routing]:
    """Return experts, x, logits and routing."""
    num_experts, hidden, inner, top_k = shape
    random = torch.Generator("cuda").manual_seed(1)

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, device="cuda", generator=random).to(dtype)

    routing = Routing(top_k, True, False)
    weights = normal(num_experts, 2 * inner, hidden) / hidden**0.5, normal(num_experts, hidden, inner) / inner**0.5
    value = layers.experts_value(*weights, routing)
    experts = ExpertsLayer(value, ExpertsWeights(*weights), KernelConfigs(), weights[0].device)
    return experts, normal(TOKENS, hidden), normal(TOKENS, num_experts), routing


def bits(y: Tensor) -> Tensor:
    return y.view(torch.int16 if y.dtype == torch.bfloat16 else torch.int32)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_way_gives_the_bits_of_dense_kernels(shape):
    experts, x, logits, routing = made(shape)
    plain = REFERENCE[x.dtype]
    gate_up, down = (weight.plain() for weight in (experts._gate_up[0], experts._down[0]))

    def expert(number: int, rows: Tensor) -> Tensor:
        inner = apply(plain, rows.contiguous(), PlainWeight(gate_up[number]), None, True)
        return apply(plain, inner, PlainWeight(down[number]), None, False)

    chosen, close = route(logits, routing)
    weights = arrange(logits, routing, 1, experts._counts).weights
    torch.testing.assert_close(weights, close, rtol=2e-6, atol=0)
    expected = routed(x, chosen, weights, shape[0], expert)
    for config in CONFIGS:
        assert torch.equal(bits(experts.by(config, x, logits)), bits(expected)), config
        assert not experts._counts.any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_token_alone_among_others_and_in_a_graph(shape, dtype):
    experts, x, logits, _ = made(shape, dtype)
    sizes = [1, 2, 3, 4, 8, 17, 33, 64, 130, 300, TOKENS]
    settle_experts([(experts, sizes)], invariant=True)
    whole = experts(x, logits)
    for size in sizes:
        kept: list[Tensor] = []
        first = experts(x[-size:], logits[-size:])
        assert torch.equal(bits(first), bits(whole[-size:])), size
        graph = capture(lambda size=size, kept=kept: kept.append(experts(x[-size:], logits[-size:])))
        for _ in range(3):
            graph.replay()
            assert torch.equal(bits(kept[0]), bits(whole[-size:])), size


def test_all_tokens_to_the_same_experts():
    """The most uneven load: one expert has every row, and most have none."""
    experts, x, logits, _ = made(SHAPES[0])
    logits = logits[:1].expand(TOKENS, -1).contiguous()
    expected = experts.by(PLAIN[x.dtype], x, logits)
    for config in CONFIGS:
        assert torch.equal(bits(experts.by(config, x, logits)), bits(expected)), config


def test_a_kernel_with_other_bits_is_replaced():
    """A kernel with results off by a hundredth takes the place of a right one."""
    experts, x, logits, _ = made(SHAPES[1])

    class Short(ExpertsLayer):
        def by(self, config: ExpertsConfig, x: Any, logits: Tensor, *, apart: bool = False) -> Tensor:
            y = super().by(config, x, logits, apart=apart)
            return y if config == PLAIN[x.dtype] else y * 1.01

    weights = ExpertsWeights(*experts.weights())
    short = Short(experts.value, weights, KernelConfigs(), x.device)
    settle_experts([(short, [16, 64])], invariant=True)
    assert short.configs.experts(short.shape, 16) == short.configs.experts(short.shape, 64) == PLAIN[x.dtype]
    assert torch.equal(bits(short(x[:16], logits[:16])), bits(experts(x[:16], logits[:16])))


@pytest.mark.parametrize("scheme", [None, Scheme(code="fp8", scales="channel", activations="token")], ids=str)
def test_the_tuner_finds_kernels_that_have_the_bits(scheme):
    """The tuner's kernels have the right bits, and a boot serves by them."""
    shape = ExpertsShape(8, 512, 384, 2, torch.bfloat16, scheme)
    found = tune_experts(shape, 256)
    assert [entry.tokens for entry in found] == [tokens for tokens in TUNED if tokens <= 256]
    configs = KernelConfigs([Table("this", (9, 0), [], found)])
    if scheme is None:
        experts, *_ = made((8, 512, 384, 2))
        experts.configs = configs
        settle_experts([(experts, [entry.tokens for entry in found])], invariant=True)
    assert all(configs.experts(shape, entry.tokens) == entry.choice for entry in found)
