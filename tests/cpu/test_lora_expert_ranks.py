"""Adapters of experts split over ranks: one, two and four ranks give the same bits, and PEFT's numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from preheat.backends.base.collective import Collective
from preheat.backends.base.layers import ExpertsWeights, LayerContext
from preheat.backends.cpu import lowrank
from preheat.backends.cpu.backend import CpuBackend
from preheat.backends.cpu.lowrank import CpuAdapters, LinearFactors
from preheat.ops.activation import silu_and_mul
from preheat.ops.matmul import LowRankPair, add_delta, delta
from preheat.ops.moe import route
from preheat.ops.proof import noise
from preheat.ops.values import Routing
from tests import layers
from tests.cpu import test_tensor_parallel
from tests.cpu.checkpoints import MODELS, save_checkpoint
from tests.cpu.quantized import quantize_checkpoint
from tests.cpu.test_lora import STACKED, reference, save_adapter
from tests.cpu.test_lora_ranks import MIXED, TOKENS, logits_on, on_sizes
from tests.cpu.test_model_families import random_tokens
from tests.cpu.test_quantized_ranks import KINDS, MOE
from tests.cpu.test_tensor_parallel import on_ranks, same

pytestmark = [
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:The following .* keys did not match:RuntimeWarning"),  # but parameters
]
NONE = np.full(TOKENS, -1, np.int32)
TARGETS: dict[str, dict[str, Any]] = {
    "qwen3 moe": {"target_modules": ["q_proj"], "target_parameters": STACKED},
    "qwen2 moe": {"target_modules": ["o_proj"], "target_parameters": ["mlp.experts.down_proj"]},
}


def saved(folder: Path, model: Any, **config: Any) -> Path:
    """Write a checkpoint and two adapters, "0" and "1"."""
    save_checkpoint(model, folder / "base")
    for number, rank in enumerate((5, 18)):
        save_adapter(folder / "base", folder / str(number), {"r": rank, "lora_alpha": 9, **config}, seed=number)
    return folder


@pytest.mark.parametrize("family", TARGETS)
def test_bits_do_not_depend_on_the_number_of_ranks(family, tmp_path):
    saved(tmp_path, MODELS[family], **TARGETS[family])
    base, adapters = tmp_path / "base", [tmp_path / "0", tmp_path / "1"]
    mixed = on_sizes(base, adapters, tmp_path / "mixed", MIXED)
    none = on_sizes(base, adapters, tmp_path / "none", NONE)
    assert same(mixed) and same([*none, *test_tensor_parallel.on_sizes(base, tmp_path / "plain")])
    assert not torch.equal(none[0], mixed[0])
    (own,) = on_ranks(1, tmp_path / "own", lambda c: logits_on(c, base, adapters[1:], np.zeros(TOKENS, np.int32)))
    with torch.inference_mode():
        expected = reference(base, adapters[1])(random_tokens(TOKENS)[None]).logits[0]
    torch.testing.assert_close(own, expected, atol=5e-4, rtol=1e-4)


def test_experts_with_float8_activations(tmp_path):
    """With float8 activations, ranks also exchange the scales of their inputs, and bits stay the same."""
    saved(tmp_path, MOE, target_modules=["q_proj"], target_parameters=STACKED)
    quantize_checkpoint(tmp_path / "base", KINDS["experts, fp8"][1], tmp_path / "quantized")
    adapters = [tmp_path / "0", tmp_path / "1"]
    assert same(on_sizes(tmp_path / "quantized", adapters, tmp_path / "ranks", MIXED))


HIDDEN, INNER, EXPERTS, ROWS = 40, 4 * 600, 5, 19
ROUTING = Routing(2, True, False)
WHOSE = [[0, -1, 1][row % 3] for row in range(ROWS)]


def weights() -> tuple[Tensor, Tensor]:
    gate_up, down = noise(EXPERTS * 2 * INNER, HIDDEN, seed=3) / 6, noise(EXPERTS * HIDDEN, INNER, seed=4) / 50
    return gate_up.view(EXPERTS, 2 * INNER, HIDDEN), down.view(EXPERTS, HIDDEN, INNER)


def adapter(place: int) -> dict[int, LowRankPair]:
    """Return an adapter by part.

    The first adapter skips up of expert 1, down of expert 2, and all of expert 3.
    """
    found = {}
    for part in range(3 * EXPERTS):
        if place == 0 and part in (4, 8, 9, 10, 11):
            continue
        inputs, outputs = (INNER, HIDDEN) if part % 3 == 2 else (HIDDEN, INNER)
        rank = (3, 16, 21)[(place + part // 3) % 3]
        a = noise(rank, inputs, seed=100 * place + part) / inputs**0.5
        found[part] = LowRankPair(a, noise(outputs, rank, seed=100 * place + part + 50) / 4, 0.3 + place)
    return found


def mine(given: dict[int, LowRankPair], kept: slice) -> dict[int, LowRankPair]:
    """Return a rank's share of an adapter."""
    return {
        part: each._replace(a=each.a[:, kept]) if part % 3 == 2 else each._replace(b=each.b[kept])
        for part, each in given.items()
    }


def added(collective: Collective, whose: list[int] = WHOSE, plain: bool = False) -> Tensor:
    """Return the output of experts with K splits of several parts.

    ``plain`` experts have no adapter slots.
    """
    part = INNER // collective.world
    kept = slice(collective.rank * part, (collective.rank + 1) * part)
    gate_up, down = weights()
    halves = gate_up.view(EXPERTS, 2, INNER, HIDDEN)[:, :, kept].reshape(EXPERTS, -1, HIDDEN)
    x, logits = noise(ROWS, HIDDEN, seed=1), noise(ROWS, EXPERTS, seed=2)
    given = ExpertsWeights(halves, down[:, :, kept].contiguous())
    value = layers.experts_value(*given[:2], ROUTING, layers.splits(4 // collective.world, collective.rank))
    if plain:
        return CpuBackend().experts(value, given, LayerContext(collective))(x, logits)
    rows, room = CpuAdapters().rows(32, 2), layers.with_room(value, 2, 40, torch.float32)
    experts = CpuBackend().experts(room, given, LayerContext(collective, rows))
    assert experts.slots is not None
    for place in (0, 1):
        experts.slots.write(place, experts.slots.pack(mine(adapter(place), kept)))
    rows.describe(0, "tokens", np.array(whose, np.int32))
    rows.use("tokens")
    return experts(x, logits)


def on_worlds(folder: Path) -> list[Tensor]:
    return [on_ranks(world, folder / str(world), added)[0] for world in (1, 2, 4)]


def right() -> Tensor:
    """Return the reference, token by token, by :func:`preheat.ops.matmul.delta`."""
    x, logits = noise(ROWS, HIDDEN, seed=1), noise(ROWS, EXPERTS, seed=2)
    (gate_up, down), (chosen, shares) = weights(), route(logits, ROUTING)
    out = torch.zeros(ROWS, HIDDEN)
    for token, place in enumerate(WHOSE):
        row, given, more = x[token, None], adapter(place) if place >= 0 else {}, torch.zeros(HIDDEN)
        for expert, share in zip(chosen[token].tolist(), shares[token], strict=True):
            halves = [row @ half.T for half in gate_up[expert].chunk(2)]
            for part, half in enumerate(halves):
                if (own := given.get(3 * expert + part)) is not None:
                    halves[part] = add_delta(half, delta(row, own))
            inner = silu_and_mul(torch.cat(halves, 1))
            out[token] += share * (inner @ down[expert].T)[0]
            if (own := given.get(3 * expert + 2)) is not None:
                more += share * delta(inner, own, 4)[0]
        out[token] = add_delta(out[token], more)
    return out


def test_expert_terms_equal_the_reference_and_spare_rows_without_an_adapter(tmp_path):
    found = on_worlds(tmp_path)
    assert same(found)
    torch.testing.assert_close(found[0], right(), atol=1e-5, rtol=1e-5)
    plain, nobody = (
        on_ranks(2, tmp_path / name, lambda c, given=given: added(c, **given))[0]
        for name, given in {"plain": {"plain": True}, "nobody": {"whose": [-1] * ROWS}}.items()
    )
    assert torch.equal(plain, nobody)
    alike = [torch.equal(*each) for each in zip(found[0], plain, strict=True)]
    assert alike == [place < 0 for place in WHOSE]


def in_a_row(patch):
    """Plant a rank that adds its K splits from the first to the last."""
    patch.setattr(lowrank, "tree_sum", lambda sums: sum(sums[1:], sums[0]))


def parts_of_the_rank(patch):
    """Plant parts cut from a rank's first input on, instead of each K split's first input."""
    made = LinearFactors.__init__

    def wrong(self: LinearFactors, *sizes: int, **more: Any) -> None:
        made(self, *sizes, **{**more, "k_splits": 1})

    patch.setattr(LinearFactors, "__init__", wrong)


@pytest.mark.parametrize("plant", [in_a_row, parts_of_the_rank])
def test_controls(plant, tmp_path, monkeypatch):
    plant(monkeypatch)
    assert not same(on_worlds(tmp_path))
