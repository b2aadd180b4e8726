"""Adapters of experts on CUDA: what is added, whose rows are left alone, and that a row's bits are its own."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from preheat.backends.base import ExpertsSize
from preheat.backends.cuda import lora_experts
from preheat.backends.cuda.lora import CudaAdapters
from preheat.backends.cuda.moe import CudaExperts, ExpertsConfig, ExpertsConfigs
from preheat.backends.cuda.tuning import Tile
from preheat.ops.lora import LowRank, add_delta, delta
from preheat.ops.moe import Routing, route, routed
from preheat.ops.proof import noise

HIDDEN, INNER, EXPERTS, PLACES, TOKENS = 600, 40, 5, 3, 13
ROUTING = Routing(2, True, False)
CONFIGS = {
    block: ExpertsConfig(block, *[Tile(128, max(block, 16), 256, 1, 2)] * 2) for block in (1, 16, 32)
}  # fmt: skip
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
WHOSE = [[0, -1, 1, 2, 0, 1][token % 6] for token in range(TOKENS)]


def weights(dtype: torch.dtype):
    """gate_up and down."""
    gate_up, down = noise(EXPERTS * 2 * INNER, HIDDEN, seed=3) / 25, noise(EXPERTS * HIDDEN, INNER, seed=4) / 6
    return gate_up.view(EXPERTS, -1, HIDDEN).to(dtype), down.view(EXPERTS, HIDDEN, INNER).to(dtype)


def tokens(dtype: torch.dtype):
    return noise(TOKENS, HIDDEN, seed=1).to(dtype), noise(TOKENS, EXPERTS, seed=2).to(dtype)


def adapter(place: int, dtype: torch.dtype) -> dict[int, LowRank]:
    """By part. Of expert 1 the first leaves up alone, of expert 2 all."""
    found = {}
    for part in range(3 * EXPERTS):
        if place == 0 and part in (4, 6, 7, 8):
            continue
        inputs, outputs = (INNER, HIDDEN) if part % 3 == 2 else (HIDDEN, INNER)
        rank = (3, 16, 21)[(place + part // 3) % 3]
        a = noise(rank, inputs, seed=100 * place + part) / inputs**0.5
        found[part] = LowRank(a.to(dtype), noise(outputs, rank, seed=100 * place + part + 50).to(dtype), 0.3 + place)
    return found


def made(dtype: torch.dtype, places: int = PLACES, max_rank: int = 21, order=(0, 1, 2)):
    """Experts with the adapters in places, in this order."""
    ops = CudaAdapters(torch.device("cpu"))
    rows = ops.rows(64, places)
    size = ExpertsSize(EXPERTS, HIDDEN, INNER, ROUTING.top_k, None)
    inner = CudaExperts(*weights(dtype), ROUTING, ExpertsConfigs())
    experts = ops.experts(inner, size, rows, places=places, max_rank=max_rank, dtype=dtype)
    assert experts is not None
    for number, place in enumerate(order):
        experts.write(place, experts.pack(adapter(number, dtype)))
    return experts, rows


def run(given, block: int, x, logits, whose: list[int]) -> torch.Tensor:
    experts, rows = given
    rows.describe(0, "tokens", np.array(whose, np.int32))
    rows.use("tokens")
    found = experts.local(CONFIGS[block], x.contiguous(), logits.contiguous())
    assert not experts.inner._counts.any()
    return found


def reference(x, logits, whose: list[int], dtype: torch.dtype) -> torch.Tensor:
    """By :func:`preheat.ops.lora.delta`, layer by layer, each sum rounded once."""
    gate_up, down = weights(dtype)
    adapters = [adapter(place, dtype) for place in range(PLACES)]
    chosen, shares = route(logits, ROUTING)

    def adapted(y, rows, part, place):
        return add_delta(y, delta(rows, *adapters[place][part])) if part in adapters[place] else y

    def one(number: int, row: torch.Tensor, place: int) -> torch.Tensor:
        halves = [(row.float() @ each.float().T).to(dtype) for each in gate_up[number].chunk(2)]
        if place >= 0:
            halves = [adapted(half, row, 3 * number + part, place) for part, half in enumerate(halves)]
        gate, up = halves
        inner = (torch.nn.functional.silu(gate.float()).to(dtype).float() * up.float()).to(dtype)
        y = (inner.float() @ down[number].float().T).to(dtype)
        return adapted(y, inner, 3 * number + 2, place) if place >= 0 else y

    out = []
    for token, place in enumerate(whose):
        own = slice(token, token + 1)
        out.append(routed(x[own], chosen[own], shares[own], EXPERTS, lambda n, rows, p=place: one(n, rows, p)))
    return torch.cat(out)


@DTYPES
@pytest.mark.parametrize("block", CONFIGS)
def test_what_is_added_is_the_references(block, dtype):
    x, logits = tokens(dtype)
    found, right = run(made(dtype), block, x, logits, WHOSE), reference(x, logits, WHOSE, dtype)
    error = (found.double() - right.double()).abs().amax(1) / right.double().abs().amax(1)
    assert (error < (1e-5 if dtype == torch.float32 else 1e-2)).all(), error
    plain = reference(x, logits, [-1] * TOKENS, dtype)
    assert ((right - plain).abs().amax(1) > 0.5).tolist() == [place >= 0 for place in WHOSE]


@DTYPES
@pytest.mark.parametrize("block", CONFIGS)
def test_rows_without_an_adapter_have_the_bits_of_experts_without(block, dtype):
    x, logits = tokens(dtype)
    given = made(dtype)
    found, plain = run(given, block, x, logits, WHOSE), given[0].inner.by(CONFIGS[block], x, logits)
    assert [torch.equal(*each) for each in zip(found, plain, strict=True)] == [place < 0 for place in WHOSE]
    given[1].use(None)
    assert torch.equal(given[0](x, logits), given[0].inner(x, logits))


COMPANIES = [[[row] for row in range(8)], [list(range(TOKENS))[::-1]], [list(range(5)), list(range(5, TOKENS))]]


@DTYPES
@pytest.mark.parametrize("block", CONFIGS)
@pytest.mark.parametrize("company", COMPANIES, ids=["alone", "backwards", "in two"])
def test_a_row_has_the_same_bits_in_any_company_place_room_and_block(company, block, dtype):
    x, logits = tokens(dtype)
    expected = run(made(dtype), 16, x, logits, WHOSE)
    order = (3, 0, 4)
    other = made(dtype, places=5, max_rank=50, order=order)
    for group in company:
        whose = [order[WHOSE[row]] if WHOSE[row] >= 0 else -1 for row in group]
        assert torch.equal(run(other, block, x[group], logits[group], whose), expected[group])


def test_an_adapter_of_another_row_of_the_block_is_seen(monkeypatch):
    """What the tests above would see: rows take the adapter of the first row of their block that has one."""
    x, logits = tokens(torch.float32)
    expected, given = run(made(torch.float32), 16, x, logits, WHOSE), made(torch.float32)
    right = lora_experts.add_experts

    def wrong(y, x, factors, blocks, arrangement):
        blocks.places.masked_fill_(blocks.places >= 0, 0)
        return right(y, x, factors, blocks, arrangement)

    monkeypatch.setattr(lora_experts, "add_experts", wrong)
    found = run(given, 16, x, logits, WHOSE)
    same = [torch.equal(*each) for each in zip(found, expected, strict=True)]
    assert same == [place <= 0 for place in WHOSE]


def test_a_place_that_is_cleared_adds_nothing():
    x, logits = tokens(torch.float32)
    given = made(torch.float32)
    given[0].clear(0)
    given[0].write(1, given[0].pack({part: each for part, each in adapter(1, torch.float32).items() if part % 3 == 2}))
    found, plain = run(given, 16, x, logits, WHOSE), given[0].inner.by(CONFIGS[16], x, logits)
    assert [torch.equal(*each) for each in zip(found, plain, strict=True)] == [place < 1 for place in WHOSE]
