"""Adapters on CUDA: kernels add the right terms, leave other rows alone, and keep a row's bits its own."""

from __future__ import annotations

from functools import cache, reduce
from itertools import pairwise
from operator import add
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from preheat.backends.base.layers import LayerContext, LayerWeights
from preheat.backends.cuda.matmul.layer import Layer
from preheat.backends.cuda.matmul.lora import blocks as lora_blocks
from preheat.backends.cuda.matmul.lora import expand as lora_expand
from preheat.backends.cuda.matmul.lora import shrink as lora_shrink
from preheat.backends.cuda.matmul.lora import slots as lora
from preheat.backends.cuda.matmul.lora.blocks import (
    BLOCK,
    LONG_BLOCK,
    STRETCH,
    most_blocks,
    write_blocks,
    write_stretches,
)
from preheat.backends.cuda.matmul.lora.expand import expand
from preheat.backends.cuda.matmul.lora.shrink import shrink
from preheat.backends.cuda.matmul.lora.slots import Factors
from preheat.backends.cuda.pointwise.activation import silu_and_mul
from preheat.backends.cuda.pointwise.quantize import quantize_rows
from preheat.ops import matmul
from preheat.ops.kinds import Scheme
from preheat.ops.matmul import LowRankPair, add_delta, delta
from preheat.ops.proof import noise, signed_pairs
from preheat.ops.quantization import QuantizedRows
from preheat.ops.values import LowRank
from tests import layers
from tests.kernels.backend import InterpretedCuda
from tests.kernels.test_quantized import random_weight as quantized_weight

INPUTS, OUTPUTS, SLOTS = 300, (48, 24), 3
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)


@pytest.fixture(autouse=True)
def parts(monkeypatch):
    """Give the inputs three parts of two steps each; the last part is uneven."""
    monkeypatch.setattr(lora_shrink, "PART", 128)
    monkeypatch.setattr(lora_shrink, "CHUNK", 64)
    monkeypatch.setattr(matmul, "PART", 128)


def layer(
    dtype: torch.dtype = torch.bfloat16,
    max_rank: int = 40,
    adapters: torch.dtype | None = None,
    weight: Any = None,
    **more: Any,
):
    weight = (noise(sum(OUTPUTS), INPUTS) / 30).to(dtype) if weight is None else weight
    return made_of(weight, OUTPUTS, max_rank, adapters or dtype, **more)


def made_of(weight: Any, parts: tuple[int, ...], rank: int, dtype: torch.dtype, **more: Any):
    """Return a layer with room for adapters, and its rows."""
    backend = InterpretedCuda()
    rows = backend.adapters.rows(64, SLOTS)
    term = LowRank(parts, SLOTS, rank, layers.name_of(dtype))
    made: Any = layers.linear(backend, weight, terms=(term,), context=LayerContext(rows=rows), **more)
    return made, rows


def factors(rank: int, part: int, seed: int = 0, dtype=torch.bfloat16) -> tuple[torch.Tensor, torch.Tensor, float]:
    return (noise(rank, INPUTS, seed=seed) / 30).to(dtype), noise(OUTPUTS[part], rank, seed=seed + 1).to(dtype), 0.37


def put(made, slot: int, *given: tuple[torch.Tensor, torch.Tensor, float] | None) -> None:
    """Put an adapter into adapter slot ``slot``: its matrices for each part, or None."""
    parts = {part: LowRankPair(*each) for part, each in enumerate(given) if each is not None}
    made.slots.write(slot, made.slots.pack(parts))


def added(factors: Factors, x: torch.Tensor, y: torch.Tensor, blocks: Any, **more: Any) -> torch.Tensor:
    """Return ``y`` plus the terms of its rows' adapters."""
    given, to = factors.room(x, blocks)
    factors.shrink(given, to, blocks, beside=False)
    return expand(y, to, factors.bounds, **more)


def run(made, rows, x: torch.Tensor, slots: list[int], turn: int = 0) -> torch.Tensor:
    rows.describe(turn, "tokens", np.array(slots, np.int32))
    rows.use("tokens")
    return made(x)


@DTYPES
@pytest.mark.parametrize("rank", [1, 16, 23])
def test_the_added_term_equals_the_reference(rank, dtype):
    made, rows = layer(dtype)
    x = noise(19, INPUTS, seed=5).to(dtype)
    given = [factors(rank, part, 10 * part, dtype) for part in range(2)]
    put(made, 1, *given)
    base, found = layers.product(made, x), run(made, rows, x, [1] * 19)
    more = torch.cat([delta(x, LowRankPair(*each)) for each in given], 1)
    shrunk = [((x.double() @ a.double().T) * scale).to(dtype) for a, _, scale in given]
    exact = torch.cat([each.double() @ b.double().T for each, (_, b, _) in zip(shrunk, given, strict=True)], 1)
    torch.testing.assert_close(more.double(), exact, atol=1e-5, rtol=1e-5)
    right = add_delta(base, more)
    if dtype == torch.float32:
        torch.testing.assert_close(found, right, atol=1e-5, rtol=1e-5)
    else:  # the sum before it is rounded is nearly the same, so hardly an element is rounded another way
        assert (found != right).float().mean() < 0.01
        torch.testing.assert_close(found, right, atol=0.0, rtol=2**-7)


def test_adapters_that_are_not_of_the_models_dtype_are_not_rounded_to_it():
    made, rows = layer(torch.bfloat16, adapters=torch.float32)
    x, (a, b, scale) = noise(5, INPUTS, seed=5).bfloat16(), factors(7, 0, dtype=torch.float32)
    put(made, 0, (a, b, scale))
    found = run(made, rows, x, [0] * 5)[:, : OUTPUTS[0]]
    right = add_delta(layers.product(made, x)[:, : OUTPUTS[0]], delta(x, LowRankPair(a, b, scale)))
    assert (found != right).float().mean() < 0.01
    rounded = add_delta(
        layers.product(made, x)[:, : OUTPUTS[0]], delta(x, LowRankPair(a.bfloat16(), b.bfloat16(), scale))
    )
    assert (found != rounded).float().mean() > 0.1


@pytest.mark.parametrize("activation", [None, "silu_and_mul"])
def test_a_layer_with_float8_activations_reads_the_output_of_a_norm(activation):
    """The layer reads codes, adapters read the numbers before quantization."""
    scheme = Scheme(code="fp8", scales="channel", activations="token")
    weight = quantized_weight(scheme, sum(OUTPUTS), INPUTS, dtype=torch.bfloat16)
    made, rows = layer(weight=weight, activation=activation)
    put(made, 0, factors(8, 0), factors(5, 1))
    x = noise(9, INPUTS, seed=5).bfloat16()
    how = made.fused_input
    assert how is not None and how.plain
    codes = quantize_rows(x, "token", None)
    given = QuantizedRows(codes.codes, codes.scales, x)
    slots = [0, -1, 0] * 3
    assert torch.equal(run(made, rows, given, slots), run(made, rows, x, slots))
    assert torch.equal(run(made, rows, given, slots)[1::3], layers.without_terms(made, x)[1::3])
    assert not torch.equal(run(made, rows, given, slots)[::3], layers.without_terms(made, x)[::3])


def test_rows_without_an_adapter_are_left_alone_with_the_sign_of_zero():
    made, rows = layer()
    put(made, 0, factors(8, 0))
    x = noise(9, INPUTS, seed=5).bfloat16()
    x[1] = x[2] = 0
    plain = layers.product(made, x)
    minus = torch.full_like(plain, -0.0)
    rows.describe(0, "tokens", np.array([0, -1, 1] * 3, np.int32))
    added(made.slots, x, minus, rows._kinds["tokens"][0])
    assert (minus[1::3].view(torch.int16) == -(2**15)).all() and (minus[2::3].view(torch.int16) == -(2**15)).all()
    assert (minus[::3, : OUTPUTS[0]] != 0).any()
    assert (minus[::3, OUTPUTS[0] :].view(torch.int16) == -(2**15)).all()  # this part has no matrices
    assert torch.equal(run(made, rows, x, [-1] * 9), plain)


def cancelling() -> tuple[torch.Tensor, list[tuple[torch.Tensor, torch.Tensor, float]]]:
    """Return rows and adapters with sums of zero, but for the order of the additions."""
    x = signed_pairs(noise(37, INPUTS, seed=1) * noise(37, INPUTS, seed=2).exp(), 1.0).bfloat16()
    given = [
        (signed_pairs(noise(20, INPUTS, seed=9 + slot), -1.0).bfloat16(), noise(OUTPUTS[0], 20, seed=slot).bfloat16(),
         2.0**20) for slot in range(SLOTS)
    ]  # fmt: skip
    return x, given


BATCHES = {
    "alone": [[row] for row in range(4)],  # one with each adapter, one without
    "together": [list(range(37))],
    "backwards": [list(range(37))[::-1]],
    "in two": [list(range(5)), list(range(5, 37))],
}


def behind(monkeypatch) -> None:
    """Let rows shrink behind the layer, as they do behind cuBLAS."""
    monkeypatch.setattr(Layer, "_choice", lambda self, rows: (self.configs(self._product, rows), False))


WHOSE = [[0, 1, 2, -1, 1][row % 5] for row in range(37)]


@cache
def all_together() -> torch.Tensor:
    """Return all rows with their adapters; they shrink beside the layer."""
    x, given = cancelling()
    made, rows = layer()
    for slot, each in enumerate(given):
        put(made, slot, each)
    found = run(made, rows, x, WHOSE)
    assert (found[0] != layers.product(made, x)[0]).any()
    return found


@pytest.mark.parametrize("how", ["beside the layer", "behind it", "in long blocks", "with a head's programs"])
@pytest.mark.parametrize("batches", BATCHES)
def test_a_row_has_the_same_bits_in_any_batch_row_and_adapter_slot(batches, how, monkeypatch):
    """Neither the program that adds up a shrunk row nor the outputs of a program matter."""
    x, given = cancelling()
    expected = all_together()
    if how == "behind it":
        behind(monkeypatch)
    elif how == "in long blocks":
        monkeypatch.setattr(lora_blocks, "MANY_ROWS", 1)
    elif how == "with a head's programs":
        monkeypatch.setattr(lora_expand, "HEAD_OUTPUTS", 1)
    other, theirs = layer(max_rank=70)
    for slot, each in enumerate(given):
        put(other, (slot + 1) % SLOTS, each)
    moved = [slot if slot < 0 else (slot + 1) % SLOTS for slot in WHOSE]
    for turn, group in enumerate(BATCHES[batches]):
        found = run(other, theirs, x[group].contiguous(), [moved[row] for row in group], turn % 2)
        assert torch.equal(found, expected[group])


@pytest.mark.parametrize("how", ["beside the layer", "behind it"])
def test_sums_in_another_order_have_other_bits(how, monkeypatch):
    """Negative control of the test above: parts of the inputs are added from the last to the first.

    Atomic additions can do so.
    """
    x, given = cancelling()
    if how == "behind it":
        behind(monkeypatch)
    made, rows = layer()
    put(made, 0, given[0])
    expected = run(made, rows, x, [0] * 37)

    def backwards(shrinking, shrunk, *rest, **more):
        shrink(shrinking, shrunk, *rest, **more)
        shrinking.sums.copy_(shrinking.sums.flip(2))
        shrunk[0].copy_(reduce(add, shrinking.sums.unbind(2)) * given[0][2])

    monkeypatch.setattr(lora, "shrink", backwards)
    assert not torch.equal(run(made, rows, x, [0] * 37), expected)


@DTYPES
@pytest.mark.parametrize("count", [1, 16, 37])
def test_the_activation_reads_the_sum_with_the_term(count, dtype, monkeypatch):
    """One launch gives the same bits as two, in long blocks as in short ones.

    There are ranks of one tile and of three, a part without matrices, rows without an adapter, and padding.
    """
    monkeypatch.setattr(lora_blocks, "MANY_ROWS", 24)
    weight = (noise(128, INPUTS) / 30).to(dtype)
    made, rows = made_of(weight, (64, 64), 40, dtype, activation="silu_and_mul")
    for slot, (rank, parts) in enumerate([(7, (0, 1)), (37, (0,)), (16, (0, 1))]):
        a = noise(rank, INPUTS, seed=slot) / 30
        put(made, slot, *((a.to(dtype), noise(64, rank, seed=part).to(dtype), 0.7) for part in parts))
    x = noise(count + 2, INPUTS, seed=5).to(dtype)
    whose = [[1, 0, -1, 2, 1][row % 5] for row in range(count)]
    found = run(made, rows, x, whose)
    assert torch.equal(found, silu_and_mul(added(made.slots, x, layers.product(made, x), rows.blocks)))
    rows.use(None)
    plain = made(x)
    alone = [each < 0 for each in [*whose, -1, -1]]
    assert [torch.equal(one, other) for one, other in zip(found, plain, strict=True)] == alone


@DTYPES
def test_writing_an_adapter_slot_only_copies_packed_matrices(dtype):
    """Packed matrices have the dtype and layout of the slot.

    So nothing else runs, and nothing is waited for.
    """
    made, _ = layer(dtype)
    factor, (a, b, scale) = made.slots, factors(23, 1, dtype=torch.float32)
    packed = made.slots.pack({1: LowRankPair(a, b, scale)})
    ran: list[str] = []

    class Noting(TorchDispatchMode):
        def __torch_dispatch__(self, op, types, args=(), kwargs=None):
            ran.append(op.overloadpacket.__name__)
            if op is torch.ops.aten.copy_.default:
                to, source, waits = args[0], args[1], not args[2]
                assert (to.dtype, to.shape) == (source.dtype, source.shape) and not waits
                assert to.is_contiguous() and source.is_contiguous()
            return op(*args, **(kwargs or {}))

    with Noting():
        made.slots.write(2, packed)
        made.slots.clear(1)
        made.slots.clear(2)
        made.slots.write(2, packed)
    assert ran.count("copy_") == 3 + 1 + 3 and {*ran} <= {"copy_", "select", "slice"}
    assert torch.equal(factor._a[2, :2, 1].reshape(32, INPUTS)[:23], a.to(dtype))
    assert torch.equal(factor._b[2, :2, OUTPUTS[0] :].transpose(0, 1).reshape(OUTPUTS[1], 32)[:, :23], b.to(dtype))
    assert factor._tiles[2, :2].tolist() == [0, 2] and factor._scales[2, 1] == torch.tensor(scale)


@DTYPES
def test_a_tokens_embedding_gets_the_term_of_its_adapter(dtype):
    """Tokens are ids of the step's own, one drawn last by the device, and rows that are no tokens.

    An image has such rows.
    """
    backend, vocab, hidden = InterpretedCuda(), 50, 40
    rows = backend.adapters.rows(64, SLOTS)
    table = noise(vocab, hidden, seed=3).to(dtype)
    term = LowRank((hidden,), SLOTS, 24, layers.name_of(dtype), source="tokens")
    value = layers.value_of(table.T, terms=(term,))
    made: Any = backend.layer(value, LayerWeights(table), LayerContext(rows=rows))
    a, b = noise(21, vocab, seed=1).to(dtype), noise(hidden, 21, seed=2).to(dtype)
    made.slots.write(1, made.slots.pack({0: LowRankPair(a, b, 0.37)}))
    tokens, last = torch.tensor([7, 7, -1, 49, -2, 0] * 4, dtype=torch.int32), torch.tensor([5, 11], dtype=torch.int32)
    slots, whose = torch.tensor([0, 0, 1] * 8, dtype=torch.int32), [1, -1, 1, 1, 1, 0] * 4
    rows.describe(0, "tokens", np.array(whose, np.int32))
    rows.use("tokens")
    ids = torch.tensor([7, 7, 11, 49, 0, 0] * 4)
    before, out = table[ids], table[ids].clone()
    made.add(tokens, slots, last, out)
    right = add_delta(before, delta(torch.eye(vocab)[ids].to(dtype), LowRankPair(a, b, 0.37)))
    adapted = [token != -2 and slot == 1 for token, slot in zip(tokens.tolist(), whose, strict=True)]
    if dtype == torch.bfloat16:
        assert (out[adapted] != right[adapted]).float().mean() < 0.01
    torch.testing.assert_close(out[adapted], right[adapted], atol=1e-5, rtol=2**-7 if dtype == torch.bfloat16 else 1e-5)
    others = [not each for each in adapted]
    assert torch.equal(out[others], before[others])
    zeros = torch.full_like(before, -0.0)
    made.add(tokens, slots, last, zeros)
    assert torch.signbit(zeros[others]).all()
    alone = table[ids[:1]].clone()
    rows.describe(0, "tokens", np.array([1], np.int32))
    made.add(tokens[:1], slots[:1], last, alone)
    assert torch.equal(alone[0], out[0])


def test_a_rewritten_or_cleared_slot_keeps_nothing():
    made, rows = layer()
    x = noise(5, INPUTS, seed=5).bfloat16()
    small, large = factors(5, 0, 1), factors(37, 0, 3)
    put(made, 0, small)
    expected = run(made, rows, x, [0] * 5)
    put(made, 0, large)
    assert not torch.equal(run(made, rows, x, [0] * 5), expected)
    made.slots.clear(0)
    assert torch.equal(run(made, rows, x, [0] * 5), layers.product(made, x))
    put(made, 0, small)
    assert torch.equal(run(made, rows, x, [0] * 5), expected)


def test_the_activation_comes_after_and_steps_without_adapters_are_the_plain_layer():
    made, rows = gated()
    x = noise(6, INPUTS, seed=5).bfloat16()
    rows.use(None)
    plain = made(x)
    assert torch.equal(plain, layers.without_terms(made, x)) and plain.shape == (6, 24)
    assert torch.equal(run(made, rows, x, [-1, 0, 1, -1, 2, 2]), plain)
    put(made, 1, None, (noise(4, INPUTS, seed=3).bfloat16(), noise(24, 4).bfloat16(), 1.0))
    found = run(made, rows, x, [-1, 0, 1, -1, 2, 2])
    assert [torch.equal(one, other) for one, other in zip(found, plain, strict=True)] == [True, True, False] + [
        True
    ] * 3


def gated():
    weight = (noise(48, INPUTS) / 30).bfloat16()
    return made_of(weight, (24, 24), 8, torch.bfloat16, activation="silu_and_mul")


@pytest.mark.parametrize("size", [BLOCK, LONG_BLOCK])
def test_blocks_hold_every_row_once_and_never_need_more_room(size):
    draw = np.random.default_rng(0)
    for count in (1, 2, 15, 16, 17, 40, 64):
        for most in (1, 2, 8):
            for _ in range(20):
                adapter_slots = draw.integers(-1, most, count).astype(np.int32)
                room = most_blocks(64, most, size)
                words = np.empty(room * (1 + size) + count, np.int32)
                write_blocks(words, room, adapter_slots, size)
                blocks, members, slots = np.split(words, [room, room * (1 + size)])
                there = adapter_slots >= 0
                assert (members[slots[there]] == np.flatnonzero(there)).all() and (slots[~there] == -1).all()
                members = members.reshape(room, size)
                used = blocks >= 0
                assert used.sum() <= most_blocks(count, most, size) and used[: used.sum()].all()
                assert (members[~used] == -1).all()
                found = [(int(row), int(adapter_slot)) for adapter_slot, rows in zip(blocks, members, strict=True)
                         for row in rows if row >= 0]  # fmt: skip
                assert sorted(found) == [
                    (row, adapter_slot) for row, adapter_slot in enumerate(adapter_slots.tolist()) if adapter_slot >= 0
                ]


@pytest.mark.parametrize("most", [1, 3, 200])
def test_each_stretch_lists_the_adapters_that_its_rows_have(most):
    draw = np.random.default_rng(0)
    for count in (1, STRETCH - 1, STRETCH, STRETCH + 1, 700):
        for chance in (0.0, 0.02, 1.0):
            adapter_slots = np.where(draw.random(count) < chance, draw.integers(0, most, count), -1).astype(np.int32)
            stretches = -(-700 // STRETCH)
            words = np.full(700 + stretches + 1 + stretches * min(STRETCH, most), 99, np.int32)
            write_stretches(words, 700, adapter_slots, most)
            whose, starts, present = np.split(words, [700, 700 + stretches + 1])
            assert (whose[:count] == adapter_slots).all() and (whose[count:] == -1).all()
            for number, (start, stop) in enumerate(pairwise(starts)):
                own = adapter_slots[number * STRETCH : (number + 1) * STRETCH]
                assert present[start:stop].tolist() == sorted({*own.tolist()} - {-1})
