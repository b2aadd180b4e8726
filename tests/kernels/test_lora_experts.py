"""Adapters of experts on CUDA, plain and quantized.

Kernels add the right terms, leave other rows alone, and keep a row's bits its own.
"""

from __future__ import annotations

import functools
from itertools import product

import numpy as np
import pytest
import torch

from preheat.backends.base.layers import ExpertsWeights, LayerContext
from preheat.backends.cpu.backend import CpuBackend
from preheat.backends.cpu.quantized import parts_of
from preheat.backends.cuda.matmul import weights as stored
from preheat.backends.cuda.matmul.config import ExpertsConfig, Tile
from preheat.backends.cuda.matmul.lora import routed as lora_routed
from preheat.backends.cuda.matmul.moe import experts as moe
from preheat.model.layers import MoeMlp, normed
from preheat.ops import matmul, quantization
from preheat.ops.kinds import Scheme
from preheat.ops.matmul import LowRankPair, add_delta, delta
from preheat.ops.moe import route, routed
from preheat.ops.proof import noise
from preheat.ops.quantization import QuantizedRows, QuantizedWeight
from preheat.ops.values import Routing
from tests import layers
from tests.cpu.test_quantized_layers import FP8, W8A8, random_weight
from tests.kernels.backend import InterpretedCuda

Kind = torch.dtype | Scheme
"""Kind of experts: the dtype of their numbers, or the scheme of quantized experts, in a model of bfloat16."""

EXPERTS, SLOTS, TOKENS = 5, 3, 13
ROUTING = Routing(2, True, False)
BLOCKS, DTYPES = (1, 16, 32), (torch.float32, torch.bfloat16)
SCHEMES = [FP8, W8A8[4], Scheme(code="int4", scales="group", group=32, zeros=True)]
WHOSE = [[0, -1, 1, 2, 0, 1][token % 6] for token in range(TOKENS)]


@pytest.fixture(autouse=True)
def parts(monkeypatch):
    """Give few inputs several parts of several steps; the last ones are uneven."""
    monkeypatch.setattr(lora_routed, "PART", 128)
    monkeypatch.setattr(lora_routed, "CHUNK", 64)
    monkeypatch.setattr(matmul, "PART", 128)


def named(value: object) -> str:
    return value.name if isinstance(value, Scheme) else str(value)


CASES = pytest.mark.parametrize(
    ("block", "kind"), [*product(BLOCKS, DTYPES), *((16, scheme) for scheme in SCHEMES)], ids=named
)


def size(kind: Kind) -> tuple[int, int]:
    """Hidden and inner."""
    return (300, 144) if isinstance(kind, Scheme) else (150, 40)


def config(kind: Kind, block: int) -> ExpertsConfig:
    tile = Tile(64, max(block, 16), 128, 4, 3) if isinstance(kind, Scheme) else Tile(64, max(block, 16), 64, 1, 2)
    return ExpertsConfig(block, tile, tile)


def dtype_of(kind: Kind) -> torch.dtype:
    return torch.bfloat16 if isinstance(kind, Scheme) else kind


@functools.cache
def weights(kind: Kind):
    """Return gate_up and down."""
    hidden, inner = size(kind)
    shapes = (EXPERTS, 2 * inner, hidden), (EXPERTS, hidden, inner)
    if isinstance(kind, Scheme):
        found = [random_weight(kind, *shape, dtype=torch.bfloat16, seed=seed) for seed, shape in enumerate(shapes)]
        for weight in found:
            weight.scales.mul_(20 if kind.code == "int4" else 1)  # to numbers as large as in other kinds
        return found
    return [(noise(EXPERTS, m * k, seed=m).view(-1, m, k) / k**0.5).to(kind) for _, m, k in shapes]


def tokens(kind: Kind):
    dtype = dtype_of(kind)
    return noise(TOKENS, size(kind)[0], seed=1).to(dtype), noise(TOKENS, EXPERTS, seed=2).to(dtype)


def adapter(slot: int, kind: Kind) -> dict[int, LowRankPair]:
    """Return the matrices of an adapter by part.

    Adapter 0 leaves up of expert 1 alone, and all of expert 2.
    """
    found, (hidden, inner), dtype = {}, size(kind), dtype_of(kind)
    for part in range(3 * EXPERTS):
        if slot == 0 and part in (4, 6, 7, 8):
            continue
        inputs, outputs = (inner, hidden) if part % 3 == 2 else (hidden, inner)
        rank = (3, 16, 21)[(slot + part // 3) % 3]
        a = noise(rank, inputs, seed=100 * slot + part) / inputs**0.5
        found[part] = LowRankPair(a.to(dtype), noise(outputs, rank, seed=100 * slot + part + 50).to(dtype), 0.3 + slot)
    return found


def made(kind: Kind, slots: int = SLOTS, max_rank: int = 21, order=(0, 1, 2), backend=None):
    """Return experts with adapters in the adapter slots of ``order``, and their rows."""
    backend = backend or InterpretedCuda()
    rows = backend.adapters.rows(64, slots)
    given = ExpertsWeights(*weights(kind))
    value = layers.with_room(layers.experts_value(*given[:2], ROUTING), slots, max_rank, dtype_of(kind))
    experts = backend.experts(value, given, LayerContext(rows=rows))
    for number, slot in enumerate(order):
        experts.slots.write(slot, experts.slots.pack(adapter(number, kind)))
    return experts, rows


def run(given, how: ExpertsConfig, x, logits, whose: list[int]) -> torch.Tensor:
    experts, rows = given
    rows.describe(0, "tokens", np.array(whose, np.int32))
    rows.use("tokens")
    found = experts.local(how, x, logits.contiguous(), apart=True)
    assert not experts._counts.any()
    return found


@functools.cache
def mixed(kind: Kind, block: int) -> torch.Tensor:
    """Return the outputs of all tokens with their adapters."""
    return run(made(kind), config(kind, block), *tokens(kind), WHOSE)


def times(x: torch.Tensor, weight: torch.Tensor | QuantizedWeight) -> torch.Tensor:
    """Return a layer's outputs, rounded."""
    if isinstance(weight, torch.Tensor):
        return (x.float() @ weight.float().T).to(x.dtype)
    if weight.scheme.activations is None:
        return times(x, quantization.dequantize(weight))
    codes = quantization.quantize_rows(x, weight.scheme.activations, weight.static)
    return quantization.scaled_product(*codes, parts_of(weight.codes), weight.scales, None, x.dtype)


@functools.cache
def reference(kind: Kind, adapted: bool = True) -> torch.Tensor:
    """Return the reference: :func:`preheat.ops.matmul.delta`, layer by layer, each sum rounded once."""
    (x, logits), (gate_up, down) = tokens(kind), weights(kind)
    adapters = [adapter(slot, kind) for slot in range(SLOTS)]
    chosen, shares = route(logits, ROUTING)

    def own(weight, number):
        return weight.part(number) if isinstance(weight, QuantizedWeight) else weight[number]

    def added(y, rows, part, slot):
        return add_delta(y, delta(rows, adapters[slot][part])) if part in adapters[slot] else y

    def one(number: int, row: torch.Tensor, slot: int) -> torch.Tensor:
        gate, up = times(row, own(gate_up, number)).chunk(2, 1)
        if slot >= 0:
            gate, up = (added(y, row, 3 * number + part, slot) for part, y in enumerate((gate, up)))
        inner = (torch.nn.functional.silu(gate.float()).to(x.dtype).float() * up.float()).to(x.dtype)
        y = times(inner, own(down, number))
        return added(y, inner, 3 * number + 2, slot) if slot >= 0 else y

    out = []
    for token, slot in enumerate(WHOSE if adapted else [-1] * TOKENS):
        at = slice(token, token + 1)
        out.append(routed(x[at], chosen[at], shares[at], EXPERTS, lambda n, rows, p=slot: one(n, rows, p)))
    return torch.cat(out)


def errors(found: torch.Tensor, kind: Kind) -> torch.Tensor:
    """Return the error of each row, as a share of its greatest number."""
    right = reference(kind).double()
    return (found.double() - right).abs().amax(1) / right.abs().amax(1)


def equal_rows(found, right) -> list[bool]:
    return [torch.equal(*each) for each in zip(found, right, strict=True)]


@CASES
def test_the_added_term_equals_the_reference(block, kind):
    error = errors(mixed(kind, block), kind)
    assert (error < (1e-5 if kind == torch.float32 else 1e-2)).all(), error
    more = (reference(kind) - reference(kind, adapted=False)).abs().amax(1)
    assert (more > 0.5).tolist() == [slot >= 0 for slot in WHOSE]


@pytest.mark.parametrize("kind", SCHEMES, ids=named)
def test_a_cpu_adds_the_same(kind):
    experts, rows = made(kind, backend=CpuBackend())
    rows.describe(0, "tokens", np.array(WHOSE, np.int32))
    rows.use("tokens")
    assert (errors(experts(*tokens(kind)), kind) < 1e-2).all()


@CASES
def test_rows_without_an_adapter_have_the_bits_of_experts_without(block, kind):
    (x, logits), (experts, rows) = tokens(kind), made(kind)
    plain = experts.by(config(kind, block), x, logits)
    assert equal_rows(mixed(kind, block), plain) == [slot < 0 for slot in WHOSE]
    if kind == torch.float32 and block == 16:  # the block is the kernels' own here
        rows.use(None)
        assert torch.equal(experts(x, logits), experts.by(experts.configs.experts(experts.shape, len(x)), x, logits))


BATCHES = {
    "alone": [[row] for row in range(4)], "backwards": [list(range(TOKENS))[::-1]],
    "in two": [list(range(5)), list(range(5, TOKENS))], "few": [[0], [3, 1]],
}  # fmt: skip


ALONG = [
    (batches, block, DTYPES[(one + other) % 2])
    for one, batches in enumerate(["alone", "backwards", "in two"])
    for other, block in enumerate(BLOCKS)
]
"""The batches in every block; each entry and each block has both dtypes, in turns."""


@pytest.mark.parametrize(("batches", "block", "kind"), [*ALONG, *(("few", 1, scheme) for scheme in SCHEMES)], ids=named)
def test_a_row_has_the_same_bits_in_any_batch_adapter_slot_and_block(batches, block, kind):
    (x, logits), expected = tokens(kind), mixed(kind, 16)
    order = (3, 0, 4)
    other = made(kind, slots=5, max_rank=50, order=order)
    for group in BATCHES[batches]:
        whose = [order[WHOSE[row]] if WHOSE[row] >= 0 else -1 for row in group]
        rows = as_a_norm_gives(x[group], kind)
        assert torch.equal(run(other, config(kind, block), rows, logits[group], whose), expected[group])


def as_a_norm_gives(x: torch.Tensor, kind: Kind) -> torch.Tensor | QuantizedRows:
    """Return ``x``, with codes beside it if experts read codes."""
    if not isinstance(kind, Scheme) or kind.activations is None:
        return x
    return QuantizedRows(*quantization.quantize_rows(x, kind.activations), x)


def test_a_model_gives_them_plain_rows_beside_codes():
    assert made(SCHEMES[2])[0].fused_input is None
    (experts, rows), cuda, (x, _) = made(FP8), InterpretedCuda(), tokens(FP8)
    block = MoeMlp(layers.linear(cuda, noise(EXPERTS, x.shape[1], seed=7).bfloat16()), experts)
    norm = cuda.norm(noise(x.shape[1], seed=8).bfloat16(), 1e-5)
    rows.describe(0, "tokens", np.array(WHOSE[:2], np.int32))
    rows.use("tokens")
    given = normed(norm, x[:2], None, block.fused_input)
    assert isinstance(given, QuantizedRows)
    assert torch.equal(block(given), block(norm(x[:2])))


def test_an_adapter_of_another_row_of_the_block_is_seen(monkeypatch):
    """Negative control of the tests above.

    Rows take the adapter of the first adapted row of their block.
    """
    expected, right = mixed(torch.float32, 16), moe.add_experts

    def wrong(y, x, factors, blocks, arrangement, *, gathered):
        blocks.adapter_slots.masked_fill_(blocks.adapter_slots >= 0, 0)
        return right(y, x, factors, blocks, arrangement, gathered=gathered)

    monkeypatch.setattr(moe, "add_experts", wrong)
    found = run(made(torch.float32), config(torch.float32, 16), *tokens(torch.float32), WHOSE)
    assert equal_rows(found, expected) == [slot <= 0 for slot in WHOSE]


def test_adapters_that_read_quantized_numbers_are_noticed(monkeypatch):
    """The comparison with the reference shows it."""
    (x, logits), few, found = tokens(FP8), slice(0, 2), mixed(FP8, 16).clone()
    monkeypatch.setattr(moe, "plain_rows", lambda rows: (rows.codes.float() * rows.scales).bfloat16())
    found[few] = run(made(FP8), config(FP8, 1), as_a_norm_gives(x[few], FP8), logits[few], WHOSE[few])
    assert (errors(found, FP8) >= 1e-2).tolist() == [True] + [False] * (TOKENS - 1)


def test_a_scale_of_adapted_and_other_rows_together_is_seen(monkeypatch):
    """Rows without an adapter then have other bits beside adapted rows.

    If no row is adapted, nothing is amiss.
    """
    few, how = slice(0, 3), config(FP8, 1)
    x, logits = (each[few] for each in tokens(FP8))

    def together(right):
        def quantized(rows, kind, static):
            own = right(rows, kind, static)
            return right(rows, "static", own.scales.amax())

        return quantized

    monkeypatch.setattr(moe, "silu_and_quantize", together(moe.silu_and_quantize))
    monkeypatch.setattr(stored, "quantize_rows", together(stored.quantize_rows))
    given = made(FP8)
    plain = given[0].by(how, x, logits)
    assert torch.equal(run(given, how, x, logits, [-1] * 3), plain)
    assert equal_rows(run(given, how, x, logits, WHOSE[few]), plain) == [False] * 3


def test_a_cleared_slot_adds_nothing():
    kind = torch.float32
    (x, logits), given = tokens(kind), made(kind)
    given[0].slots.clear(0)
    given[0].slots.write(
        1, given[0].slots.pack({part: each for part, each in adapter(1, kind).items() if part % 3 == 2})
    )
    found, plain = run(given, config(kind, 16), x, logits, WHOSE), given[0].by(config(kind, 16), x, logits)
    assert equal_rows(found, plain) == [slot < 1 for slot in WHOSE]
