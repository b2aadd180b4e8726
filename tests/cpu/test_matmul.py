"""Layers of any value on a CPU have the reference's numbers.

They run alone and on ranks, with and without adapters.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from threading import Barrier
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from preheat.backends.base.layers import ExpertsWeights, LayerContext, LayerWeights
from preheat.backends.cpu.backend import CpuBackend
from preheat.backends.cpu.lowrank import CpuAdapters
from preheat.ops import matmul
from preheat.ops.kinds import Scheme
from preheat.ops.matmul import Adapted, LowRankPair
from preheat.ops.proof import noise
from preheat.ops.quantization import QuantizedWeight
from preheat.ops.values import LowRank, Routing, SumOrder
from tests import layers
from tests.controls import fails
from tests.cpu.test_quantized_layers import random_weight

SCHEMES = (
    None,
    Scheme(code="fp8", scales="channel", activations="token"),
    Scheme(code="fp8", scales="tensor", activations="static"),
    Scheme(code="int4", scales="group", group=32),
)
SLOTS, MAX_RANK = 2, 40
QUICK = settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)


class Ranks:
    """Collective of threads."""

    def __init__(self, rank: int, world: int, barrier: Barrier, found: list[Any]) -> None:
        self.rank, self.world, self._barrier, self._found = rank, world, barrier, found

    def gather(self, x: Tensor) -> Tensor:
        self._found[self.rank] = x
        self._barrier.wait(20)
        gathered = torch.stack(self._found)
        self._barrier.wait(20)
        return gathered


def on_ranks(world: int, run: Any) -> list[Tensor]:
    barrier, found = Barrier(world), [None] * world
    with ThreadPoolExecutor(world) as pool:
        return list(pool.map(lambda rank: run(Ranks(rank, world, barrier, found)), range(world)))


def weight_of(scheme: Scheme | None, *shape: int, seed: int = 0) -> layers.Weight:
    if scheme is not None:
        return random_weight(scheme, *shape, seed=seed)
    return noise(shape[0] * (shape[1] if len(shape) == 3 else 1), shape[-1], seed=seed).view(*shape) / shape[-1] ** 0.5


def columns(weight: layers.Weight, kept: slice) -> layers.Weight:
    if isinstance(weight, QuantizedWeight):
        return weight.cut(((0, weight.shape[-2]),), (kept.start, kept.stop))
    return weight[..., kept].contiguous()


def pairs_of(parts: dict[int, tuple[int, int]], slot: int, rank: int) -> dict[int, LowRankPair]:
    """Return matrices for parts with these numbers of outputs and inputs."""
    return {
        part: LowRankPair(
            noise(rank, inputs, seed=9 * slot + part) / inputs**0.5, noise(outputs, rank, seed=part) / 4, 0.5 + slot
        )
        for part, (outputs, inputs) in parts.items()
    }


def described(whose: list[int]) -> Any:
    rows = CpuAdapters().rows(len(whose), SLOTS)
    rows.describe(0, "tokens", np.array(whose, np.int32))
    rows.use("tokens")
    return rows


def adapted(whose: list[int], given: list[dict[int, LowRankPair]]) -> list[Adapted]:
    found = ((torch.tensor([row for row, slot in enumerate(whose) if slot == own]), own) for own in range(SLOTS))
    return [Adapted(rows, given[own]) for rows, own in found if len(rows)]


def close(found: Tensor, right: Tensor, coded: bool) -> None:
    error = (found - right).abs().max() / right.abs().max().clamp(min=1e-3)
    assert error <= (3e-2 if coded else 2e-5)  # inputs may be rounded to the code beside


WHOSE = st.lists(st.integers(-1, SLOTS - 1), min_size=1, max_size=12)


@QUICK
@given(
    scheme=st.sampled_from(SCHEMES), world=st.sampled_from([0, 1, 2, 4]), whose=WHOSE, bias=st.booleans(),
    finish=st.sampled_from([(None, None), ("silu_and_mul", None), (None, 0.5)]), rank=st.integers(1, MAX_RANK),
)  # fmt: skip
def test_layers(scheme, world, whose, bias, finish, rank):
    compare_layers(scheme, world, whose, bias, finish, rank)


def compare_layers(scheme, world, whose, bias=True, finish=(None, None), rank=21):
    """Compare a layer with the reference.

    With world 0, no rank shares the inputs.
    """
    inputs, outputs = 512, 48
    weight, x = weight_of(scheme, outputs, inputs), noise(len(whose), inputs, seed=5)
    biases = noise(outputs, seed=6) if bias else None
    parts = (outputs,) if world else (32, 16)
    sizes = {part: (size, inputs) for part, size in enumerate(parts)}
    given_pairs = [pairs_of(sizes, slot, rank) for slot in range(SLOTS)]
    if not world:
        given_pairs[1].pop(1)
    term = LowRank(parts, SLOTS, MAX_RANK, "float32", shared="inputs" if world else "whole")
    whole = layers.value_of(weight, layers.splits(4) if world else SumOrder(), terms=(term,))
    whole = replace(whole, finish=whole.finish._replace(bias=bias, activation=finish[0], clip=finish[1]))
    right = matmul.matmul(whole, x, weight, biases, adapted(whose, given_pairs))

    def run(ranks: Ranks) -> Tensor:
        part = inputs // max(world, 1)
        kept = slice(ranks.rank * part, (ranks.rank + 1) * part)
        own = 4 // world if world else 1
        value = replace(whole, inputs=part, order=layers.splits(own, ranks.rank) if world else SumOrder())
        layer = CpuBackend().layer(
            value, LayerWeights(columns(weight, kept), biases), LayerContext(ranks, described(whose))
        )
        assert layer.slots is not None
        for slot, pairs in enumerate(given_pairs):
            mine = {at: each._replace(a=each.a[:, kept]) for at, each in pairs.items()}
            layer.slots.write(slot, layer.slots.pack(mine))
        return layer(x[:, kept].contiguous())

    for found in on_ranks(max(world, 1), run):
        close(found, right, scheme is not None and scheme.activations is not None)


@QUICK
@given(scheme=st.sampled_from(SCHEMES), world=st.sampled_from([0, 1, 2]), whose=WHOSE, rank=st.integers(1, MAX_RANK))
def test_experts(scheme, world, whose, rank):
    compare_experts(scheme, world, whose, rank)


def compare_experts(scheme, world, whose, rank=21):
    count, hidden, inner, routing = 4, 64, 512, Routing(2, True, False)
    gate_up = weight_of(scheme, count, 2 * inner, hidden)
    down = weight_of(scheme, count, hidden, inner, seed=1)
    x, logits = noise(len(whose), hidden, seed=5), noise(len(whose), count, seed=6)
    order = layers.splits(4) if world else SumOrder()
    whole = layers.with_room(layers.experts_value(gate_up, down, routing, order), SLOTS, MAX_RANK, torch.float32)
    kinds = (inner, hidden), (inner, hidden), (hidden, inner)
    sizes = {part: kinds[part % 3] for part in range(3 * count) if part not in (4, 8)}
    given_pairs = [pairs_of(sizes, slot, rank) for slot in range(SLOTS)]
    right = matmul.experts(whole, x, logits, (gate_up, down), adapted(whose, given_pairs))

    def run(ranks: Ranks) -> Tensor:
        part, own = inner // max(world, 1), 4 // world if world else 1
        kept = slice(ranks.rank * part, (ranks.rank + 1) * part)
        halves: layers.Weight
        if isinstance(gate_up, QuantizedWeight):
            first, last = (kept.start, kept.stop), (inner + kept.start, inner + kept.stop)
            halves = gate_up.cut((first, last), None)
        else:
            halves = gate_up.view(count, 2, inner, hidden)[:, :, kept].reshape(count, -1, hidden).contiguous()
        weights = ExpertsWeights(halves, columns(down, kept))
        mine = layers.experts_value(*weights[:2], routing, layers.splits(own, ranks.rank) if world else SumOrder())
        value = layers.with_room(mine, SLOTS, MAX_RANK, torch.float32)
        layer = CpuBackend().experts(value, weights, LayerContext(ranks, described(whose)))
        assert layer.slots is not None
        for slot, pairs in enumerate(given_pairs):
            cut = {
                at: each._replace(a=each.a[:, kept]) if at % 3 == 2 else each._replace(b=each.b[kept])
                for at, each in pairs.items()
            }
            layer.slots.write(slot, layer.slots.pack(cut))
        return layer(x, logits)

    for found in on_ranks(max(world, 1), run):
        close(found, right, scheme is not None and scheme.activations is not None)


@QUICK
@given(
    scheme=st.sampled_from(SCHEMES), activation=st.sampled_from(layers.GATED), routing=st.sampled_from(layers.ROUTERS),
    tokens=st.integers(1, 9), biased=st.booleans(), corrected=st.booleans(), weighted=st.booleans(),
)  # fmt: skip
def test_experts_of_any_value(scheme, routing, tokens, **features):
    compare_any_experts(scheme, routing, tokens, **features)


def compare_any_experts(scheme, routing=layers.ROUTERS[0], tokens=5, **features):
    """Compare experts without adapters, which may be a single operation, with the reference."""
    gate_up, down = weight_of(scheme, 4, 2 * 96, 64), weight_of(scheme, 4, 64, 96, seed=1)
    made = layers.any_experts(gate_up, down, routing, tokens, **features)
    found = CpuBackend().experts(made.value, made.weights, LayerContext())(made.x, made.logits)
    close(found, made.right, scheme is not None and scheme.activations is not None)


@pytest.mark.parametrize("scheme", [None, SCHEMES[1]], ids=["plain", "float8"])
def test_another_activation_is_seen(scheme, monkeypatch):
    compare_any_experts(scheme, activation="gelu_tanh_and_mul")
    monkeypatch.setattr(matmul, "ACTIVATIONS", {"gelu_tanh_and_mul": matmul.ACTIVATIONS["silu_and_mul"]})
    with fails():
        compare_any_experts(scheme, activation="gelu_tanh_and_mul")


def skipped_term(patch):
    patch.setattr(matmul, "add_terms", lambda *_: None)


def swapped_split(patch):
    """Plant a sum that counts the first K split twice and never the last."""
    patch.setattr(matmul, "tree_sum", lambda parts: sum(parts[:-1], parts[0]))


def wrong_group(patch):
    right = matmul._one
    patch.setattr(matmul, "_one", lambda weight, number: right(weight, number ^ 1))


def combined_without_weights(patch):
    patch.setattr(matmul, "combine", lambda rows, weights: rows.sum(1) * weights.mean())


@pytest.mark.parametrize(
    ("plant", "compare"),
    [
        (skipped_term, compare_layers),
        (swapped_split, compare_layers),
        (wrong_group, compare_experts),
        (combined_without_weights, compare_experts),
        (skipped_term, compare_experts),
    ],
)
def test_comparisons_see_planted_faults(plant, compare, monkeypatch):
    compare(None, 2, [0, -1, 1])
    plant(monkeypatch)
    with fails():
        compare(None, 2, [0, -1, 1])
