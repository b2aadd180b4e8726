"""Routed experts on CUDA: the choice, the arrangement, and the bits of plain torch, whatever the blocks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from preheat.backends.base.layers import ExpertsWeights, LayerContext
from preheat.backends.cuda.matmul.config import ExpertsConfig, Tile
from preheat.backends.cuda.matmul.linear import apply
from preheat.backends.cuda.matmul.moe.experts import experts_forward
from preheat.backends.cuda.matmul.moe.route import Arrangement, Scales, arrange, most_blocks
from preheat.backends.cuda.matmul.weights import PlainWeight
from preheat.backends.cuda.ranks.collective import RankSums
from preheat.model.update import reset_state
from preheat.ops.kinds import Scheme
from preheat.ops.moe import route, routed
from preheat.ops.proof import noise
from preheat.ops.quantization import QuantizedWeight, empty_weight, quantize_weight
from preheat.ops.values import Routing
from tests import layers
from tests.cpu.test_quantized_layers import random_weight
from tests.kernels.backend import InterpretedCuda
from tests.kernels.ranks import on_ranks

PLAIN = Tile(16, 16, 16, 1, 2)
HIDDEN, INNER = 40, 24
ROUTINGS = [Routing(2, True, False), Routing(3, False, True), Routing(1, True, True)]


def operands(tokens: int, experts: int, dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return x, logits, gate_up and down."""
    x, logits = noise(tokens, HIDDEN, seed=1), noise(tokens, experts, seed=2)
    gate_up, down = noise(experts * 2 * INNER, HIDDEN, seed=3), noise(experts * HIDDEN, INNER, seed=4)
    made = x, logits, gate_up.view(experts, -1, HIDDEN), down.view(experts, HIDDEN, INNER)
    return tuple(each.to(dtype) for each in made)  # type: ignore[return-value]


def forward(config: ExpertsConfig, operands: tuple[Tensor, ...], routing: Routing) -> Tensor:
    x, logits, gate_up, down = operands
    counts = torch.zeros(logits.shape[1], dtype=torch.int32)
    found = experts_forward(config, x, logits, PlainWeight(gate_up), PlainWeight(down), routing, counts)
    assert not counts.any()  # the next layer's use begins with zeros
    return found


def expected(operands: tuple[Tensor, ...], routing: Routing) -> Tensor:
    """Return the result of dense kernels for each expert, and plain torch around them.

    The weights of a token's experts are the device's own: its exp differs.
    """
    x, logits, gate_up, down = operands
    chosen, close = route(logits, routing)
    weights = arranged(logits, routing, 1).weights
    torch.testing.assert_close(
        weights, close, rtol=1e-2 if routing.round_weights and x.dtype == torch.bfloat16 else 2e-6, atol=0
    )

    def expert(number: int, rows: Tensor) -> Tensor:
        inner = apply(PLAIN, rows.contiguous(), PlainWeight(gate_up[number].contiguous()), None, True)
        return apply(PLAIN, inner, PlainWeight(down[number].contiguous()), None, False)

    return routed(x, chosen, weights, len(gate_up), expert)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("routing", ROUTINGS, ids=str)
@pytest.mark.parametrize("block", [1, 16, 32])
def test_every_block_gives_the_bits_of_plain_torch(block, routing, dtype):
    made = operands(13, 5, dtype)
    tile = Tile(16, max(block, 16), 16, 1, 2)
    assert torch.equal(forward(ExpertsConfig(block, tile, tile), made, routing), expected(made, routing))


def test_a_token_alone_and_among_others():
    made, routing = operands(40, 6), ROUTINGS[0]
    tile = Tile(32, 16, 32, 2, 2, bulk=True)
    among = forward(ExpertsConfig(16, tile, tile), made, routing)
    for token in (0, 17, 39):
        alone = forward(
            ExpertsConfig(1, PLAIN, PLAIN), (*(each[token : token + 1] for each in made[:2]), *made[2:]), routing
        )
        assert torch.equal(alone[0], among[token])


def test_a_combine_in_the_order_of_arrival_is_seen():
    """The same rows and weights, added from the last slot to the first, have other bits somewhere."""
    made, routing = operands(6, 6, torch.float32), Routing(4, False, False)
    x, logits, gate_up, down = made
    chosen, weights = route(logits, routing)

    def row(token: int, number: int) -> Tensor:
        own = x[token : token + 1], torch.zeros(1, 1), gate_up[number : number + 1], down[number : number + 1]
        return expected(own, Routing(1, True, False))[0]

    rows = torch.stack([row(token, int(number)) for token in range(len(x)) for number in chosen[token]])
    rows = rows.view(len(x), routing.top_k, -1)
    backwards = torch.zeros(len(x), HIDDEN)
    for slot in reversed(range(routing.top_k)):
        backwards += rows[:, slot].float() * weights[:, slot, None]
    right = forward(ExpertsConfig(16, PLAIN, PLAIN), made, routing)
    assert not torch.equal(backwards, right)
    torch.testing.assert_close(backwards, right, rtol=1e-3, atol=1e-3)


def arranged(logits: Tensor, routing: Routing, block: int, *, largest_first: bool = False) -> Arrangement:
    return arrange(logits, routing, block, torch.zeros(logits.shape[1], dtype=torch.int32), largest_first=largest_first)


@pytest.mark.parametrize("largest_first", [False, True])
@pytest.mark.parametrize("experts", [3, 8, 130])
@pytest.mark.parametrize("tokens", [1, 9, 300])
def test_an_arrangement_puts_every_slot_into_a_block_of_its_expert(tokens, experts, largest_first):
    """With the largest first, an expert begins behind all experts with more rows."""
    routing, block = Routing(2, True, False), 16
    logits = noise(tokens, experts)
    made = arranged(logits, routing, block, largest_first=largest_first)
    chosen, weights = route(logits, routing)
    torch.testing.assert_close(made.weights, weights, rtol=2e-6, atol=0)
    places = made.places.long()
    assert len(places.unique()) == len(places)
    assert torch.equal(made.experts[places // block].long(), chosen.view(-1))
    assert torch.equal(made.tokens[places].long(), torch.arange(len(places)) // routing.top_k)
    rows = torch.bincount(chosen.view(-1), minlength=experts)
    blocks = (rows + block - 1) // block
    places = (-rows).argsort(stable=True) if largest_first else torch.arange(experts)
    ends = blocks[places].cumsum(0)
    assert made.starts[places].tolist() == [0, *ends[:-1].tolist()]
    assert made.starts[experts] == ends[-1]
    assert blocks.sum() <= len(made.experts) == most_blocks(chosen.numel(), experts, block)


def test_the_bound_of_blocks_is_reached():
    """Each expert but one has one row; the last has the rest."""
    assert most_blocks(3, 8, 16) == 3
    assert most_blocks(8 + 16, 8, 16) == 9
    counts = [17, *[1] * 7]
    assert sum(-(-count // 16) for count in counts) == most_blocks(sum(counts), 8, 16)


def test_ties_go_to_the_lowest_number_and_nan_stays_inside():
    logits = torch.tensor([[1.0, 3.0, 3.0, 3.0, 0.0], [0.0, 0.0, 0.0, 0.0, 0.0]])
    made = arranged(logits, Routing(2, True, False), 1)
    assert made.experts.tolist() == [1, 2, 0, 1]
    nan = arranged(torch.full((1, 5), torch.nan), Routing(2, True, False), 1)
    assert (nan.experts < 5).all()


HOW = [
    Routing(3, True, False, "sigmoid", groups=4, top_groups=2, best=2, factor=1.8),
    Routing(4, False, True, "softmax", groups=4, top_groups=3, best=1, factor=0.5),
    Routing(2, True, True, "sigmoid"),
    Routing(2, True, False),
]


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_experts_are_chosen_by_scores_groups_and_corrections(how, dtype):
    """Some scores are equal, also those of groups; rows beside a token change nothing."""
    logits = (noise(9, 12) * 4).round().to(dtype)
    scales = Scales((noise(12, 1)[:, 0] * 4).round() / 8, noise(12, 1)[:, 0].abs())
    chosen, weights = route(logits, how, *scales)
    made = arrange(logits, how, 1, torch.zeros(12, dtype=torch.int32), scales)
    assert torch.equal(made.experts.long(), chosen.view(-1))
    torch.testing.assert_close(made.weights, weights, rtol=1e-2 if how.round_weights else 2e-6, atol=0)
    alone = arrange(logits[4:5], how, 1, torch.zeros(12, dtype=torch.int32), scales)
    assert torch.equal(alone.weights, made.weights[4:5])
    lost = arrange(logits, how, 1, torch.zeros(12, dtype=torch.int32), scales._replace(correction=None))
    assert not torch.equal(lost.experts, made.experts)
    nan = arrange(torch.full((1, 12), torch.nan), how, 1, torch.zeros(12, dtype=torch.int32), scales)
    assert (nan.experts < 12).all()


def test_counters_are_reset_after_their_memory_was_lost():
    """A sleep may lose the memory of counters.

    Without the reset other rows are taken.
    """
    x, logits, *weights = operands(40, 4)
    experts = layers.experts(InterpretedCuda(), *weights, Routing(2, True, False))
    right = experts(x, logits)
    (counts,) = experts.state()
    assert not {each.data_ptr() for each in experts.weights()} & {counts.data_ptr()}
    counts.fill_(3)
    reset_state([experts])
    assert torch.equal(experts(x, logits), right) and not counts.any()


INT4 = Scheme(code="int4", scales="group", group=16)


def packed(numbers: Tensor) -> QuantizedWeight:
    """Return the matrices of experts in 4 bits."""
    out = empty_weight(INT4, *numbers.shape, dtype=numbers.dtype, device=numbers.device)
    for expert, each in enumerate(numbers):
        quantize_weight(each, out.part(expert))
    return out


FP8 = Scheme(code="fp8", scales="channel", activations="token")
FEATURES: list[dict[str, Any]] = [
    {},
    {"activation": "gelu_tanh_and_mul"},
    {"activation": "gelu_and_mul", "weighted": True},
    {"activation": "clamped_silu_and_mul", "biased": True},
    {"corrected": True, "weighted": True},
]


@pytest.mark.parametrize("features", FEATURES, ids=str)
@pytest.mark.parametrize("scheme", [None, INT4, FP8], ids=["plain", "int4", "float8"])
def test_experts_of_any_value_are_the_reference(scheme, features):
    """Any activation, biases, corrections and factors, whatever the weights are stored as."""
    shapes = (4, 2 * 48, 64), (4, 64, 48)
    numbers = [(noise(4 * shape[1], shape[2], seed=seed) / 8).view(shape) for seed, shape in enumerate(shapes)]
    stored = [
        number.bfloat16() if scheme is None else
        packed(number.bfloat16()) if scheme is INT4 else random_weight(scheme, *shape, dtype=torch.bfloat16, seed=seed)
        for seed, (shape, number) in enumerate(zip(shapes, numbers, strict=True))
    ]  # fmt: skip
    routing = layers.ROUTERS[2 if features.get("corrected") else 0]
    made = layers.any_experts(stored[0], stored[1], routing, 5, **features)
    found = InterpretedCuda().experts(made.value, made.weights, LayerContext())(made.x, made.logits)
    error = (found.float() - made.right.float()).abs().max() / made.right.float().abs().max()
    assert error < 2e-2  # half of it is one bf16 number that is rounded to the number beside it


def dealt(world: int, tokens: int, *, int4: bool = False, turned: int = 0) -> list[Tensor]:
    """Return the outputs of 8 experts on each of ``world`` ranks; ``turned``: ranks have experts of later ranks."""
    inner, hidden, experts, routing = 32, 64, 8, Routing(3, True, False)
    x, logits = noise(tokens, hidden, seed=1).bfloat16(), noise(tokens, experts, seed=2).bfloat16()
    gate_up = noise(experts, 2 * inner * hidden, seed=3).view(experts, 2 * inner, hidden).bfloat16()
    down = noise(experts, hidden * inner, seed=4).view(experts, hidden, inner).bfloat16()
    each = experts // world

    def layer(ranks: RankSums) -> Tensor:
        first = (ranks.rank + turned) % world * each
        matrices = [matrix[first : first + each].contiguous() for matrix in (gate_up, down)]
        stored = [packed(matrix) if int4 else matrix for matrix in matrices]
        value = layers.experts_value(*stored, routing)
        own = (ranks.rank * each, (ranks.rank + 1) * each)
        made = InterpretedCuda().experts(replace(value, own=own), ExpertsWeights(*stored), LayerContext(ranks))
        found = made(x, logits)
        assert not any(each.any() for each in made.state())  # the next step begins with zeros
        return found

    return on_ranks(world, layer)


@pytest.mark.parametrize("tokens", [1, 37])
@pytest.mark.parametrize("int4", [False, True])
def test_experts_dealt_to_ranks_have_the_bits_of_one_rank(tokens, int4):
    (right,) = dealt(1, tokens, int4=int4)
    for world in (2, 4):
        assert all(torch.equal(found, right) for found in dealt(world, tokens, int4=int4))


def test_a_rank_with_the_experts_of_another_is_seen():
    assert not torch.equal(dealt(2, 37, turned=1)[0], dealt(1, 37)[0])
