"""Experts dealt whole to ranks: any number of ranks gives the bits of one rank's plain experts."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from preheat.backends import layer as layer_module
from preheat.backends.base.collective import Collective
from preheat.backends.base.layers import ExpertsLayer, ExpertsWeights, LayerContext
from preheat.backends.cpu.backend import CpuBackend
from preheat.backends.cpu.lowrank import CpuAdapters
from preheat.errors import ModelError
from preheat.model import sources
from preheat.model.adapters import ModelAdapterSlots
from preheat.model.decoder import Decoder
from preheat.model.families import deal_experts, read_spec
from preheat.model.families.common import with_layers
from preheat.model.files import read_config
from preheat.model.loader import load_weights
from preheat.model.mlp_specs import MoeSpec
from preheat.model.shard import shard
from preheat.model.specs import LayerSpec, ModelSpec
from preheat.model.values import AdapterLimits, experts_of
from preheat.ops.kinds import Scheme
from preheat.ops.matmul import LowRankPair
from preheat.ops.moe import route
from preheat.ops.quantization import QuantizedWeight, empty_weight, quantize_weight
from tests.cpu.checkpoints import MODELS, save_checkpoint
from tests.cpu.test_model_families import logits_of, random_tokens
from tests.cpu.test_tensor_parallel import on_ranks, same

TOKENS, HIDDEN, EXPERTS, TOP_K, MAX_RANK = 24, 64, 8, 3, 16
CONFIG = {
    "architectures": ["Qwen3MoeForCausalLM"], "hidden_size": HIDDEN, "intermediate_size": 64, "num_hidden_layers": 1,
    "num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 16, "vocab_size": 64, "num_experts": EXPERTS,
    "num_experts_per_tok": TOP_K, "moe_intermediate_size": 80, "norm_topk_prob": True, "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}  # fmt: skip
SCHEMES = {
    "plain": None,
    "w8a8": Scheme(code="fp8", scales="channel", activations="token"),
    "w8a16": Scheme(code="int8", scales="channel"),
    "w4a16": Scheme(code="int4", scales="group", group=16),
}


def weights_of(scheme: Scheme | None, seed: int, *shape: int) -> Tensor | QuantizedWeight:
    numbers = torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * shape[-1] ** -0.5
    if scheme is None:
        return numbers
    out = empty_weight(scheme, *shape, dtype=torch.float32, device=torch.device("cpu"))
    for expert in range(len(numbers)):
        quantize_weight(numbers[expert], out.part(expert))
    return out


def spec_of(scheme: Scheme | None) -> ModelSpec:
    def stored(_: int, layer: LayerSpec) -> LayerSpec:
        assert isinstance(layer.mlp, MoeSpec)
        return replace(layer, mlp=replace(layer.mlp, experts=replace(layer.mlp.experts, scheme=scheme)))

    return with_layers(read_spec(CONFIG), stored)


def block_of(spec: ModelSpec) -> MoeSpec:
    (layer,) = spec.layers
    assert isinstance(layer.mlp, MoeSpec)
    return layer.mlp


def layer_of(
    block: MoeSpec, scheme: Scheme | None, context: LayerContext, slots: ModelAdapterSlots | None = None
) -> ExpertsLayer:
    """Return the layer of ``block``, of the same numbers for every number of ranks."""
    own = block.experts
    mine = slice(own.numbers.start, own.numbers.stop)
    gate_up, down = (weights_of(scheme, seed, EXPERTS, *shape) for seed, shape in enumerate(own.matrices))
    parts = (each[mine] if isinstance(each, Tensor) else each.part(mine) for each in (gate_up, down))
    value = experts_of(block, "float32", slots and slots.room)
    layer = CpuBackend().experts(value, ExpertsWeights(*parts), context)
    if slots is not None:
        slots.add_experts(own, layer)
    return layer


def inputs() -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(7)
    return torch.randn(TOKENS, HIDDEN, generator=draw), torch.randn(TOKENS, EXPERTS, generator=draw)


def dealt(collective: Collective, scheme: Scheme | None) -> Tensor:
    block = block_of(shard(deal_experts(spec_of(scheme)), collective.rank, collective.world))
    return layer_of(block, scheme, LayerContext(collective))(*inputs())


def plain(scheme: Scheme | None) -> Tensor:
    torch.set_num_threads(1)
    return layer_of(block_of(spec_of(scheme)), scheme, LayerContext())(*inputs())


@pytest.mark.parametrize("kind", SCHEMES)
def test_a_layer_of_many_ranks_has_the_bits_of_one(kind: str, tmp_path: Path) -> None:
    """One, two and four ranks give the bits of experts that no ranks share."""
    right = plain(SCHEMES[kind])
    for world in (1, 2, 4):
        found = on_ranks(world, tmp_path / str(world), lambda c: dealt(c, SCHEMES[kind]))
        assert same([right, *found])


def test_a_rank_without_rows_and_a_step_of_one_token(tmp_path: Path) -> None:
    """Tokens may all choose the experts of one rank; a step may have one token."""
    x, logits = inputs()
    logits[:, EXPERTS // 2 :] -= 100.0
    whole = layer_of(block_of(spec_of(None)), None, LayerContext())

    def run(collective: Collective, rows: int) -> Tensor:
        block = block_of(shard(deal_experts(spec_of(None)), collective.rank, collective.world))
        return layer_of(block, None, LayerContext(collective))(x[:rows], logits[:rows])

    for rows in (TOKENS, 1):
        found = on_ranks(2, tmp_path / str(rows), lambda c, rows=rows: run(c, rows))
        assert same([whole(x, logits)[:rows], *found])


def test_adapters_of_experts(tmp_path: Path) -> None:
    """Each rank adds the terms of its own experts, with the bits of one rank."""
    slots = np.array([0, -1, 0] * (TOKENS // 3), np.int32)

    def run(block: MoeSpec, context: LayerContext) -> Tensor:
        torch.set_num_threads(1)
        own = ModelAdapterSlots(CpuAdapters().rows(TOKENS, 1), AdapterLimits(1, MAX_RANK, "float32"))
        layer = layer_of(block, None, context._replace(rows=own.rows), own)
        draw, pairs = torch.Generator().manual_seed(3), {}
        for name, (outputs, size) in own.modules.items():
            a, b = torch.randn(5, size, generator=draw), torch.randn(outputs, 5, generator=draw)
            pairs[name] = LowRankPair(a, b, 0.5)
        assert len(pairs) == 3 * EXPERTS, "an adapter names the experts of all ranks"
        own.load(0, own.pack(pairs))
        own.describe(0, "tokens", slots)
        own.use("tokens")
        return layer(*inputs())

    def on(collective: Collective) -> Tensor:
        spec = shard(deal_experts(spec_of(None)), collective.rank, collective.world)
        return run(block_of(spec), LayerContext(collective))

    right = run(block_of(spec_of(None)), LayerContext())
    assert same([right, *on_ranks(4, tmp_path / "4", on)])
    bare, adapted = plain(None), torch.from_numpy(slots) == 0
    assert torch.equal(right[~adapted], bare[~adapted]) and not (right == bare).all(1)[adapted].any()


def by_rank(rows: Tensor, weights: Tensor, owners: Tensor, world: int) -> Tensor:
    """Return a token's sum of its slots, rank by rank."""
    total = torch.zeros(len(rows), rows.shape[2])
    for rank in range(world):
        share = torch.zeros_like(total)
        for slot in range(rows.shape[1]):
            share += torch.where((owners == rank)[:, slot, None], rows[:, slot] * weights[:, slot, None], 0.0)
        total += share
    return total


def test_a_sum_in_the_order_of_ranks_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Control: slots added rank by rank give other bits, and the same numbers."""
    right, owner = plain(None), EXPERTS // 2
    chosen, _ = route(inputs()[1], experts_of(block_of(spec_of(None)), "float32").routing)
    monkeypatch.setattr(layer_module, "combine", lambda rows, weights: by_rank(rows, weights, chosen // owner, 2))
    found = on_ranks(2, tmp_path / "2", lambda c: dealt(c, None))
    assert same(found) and not torch.equal(found[0], right)
    torch.testing.assert_close(found[0], right)


def experts_in(spec: ModelSpec) -> int:
    return sum(layer.expert_params for layer in spec.layers)


def test_a_model_reads_and_computes_its_own_experts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One and four ranks have the same logits; a rank reads the numbers that it keeps and no others.

    The model has a shared expert with a gate, which ranks divide.
    """
    kind, fields = MODELS["qwen2 moe"]
    save_checkpoint((kind, {**fields, "num_experts": 8}), tmp_path / "model")
    read, found = threading.local(), list[Tensor]()

    def counted(place: sources._Place, piece: object = None, take: Callable = sources._Place.read) -> Tensor:
        tensor = take(place, piece)
        read.numbers += tensor.numel()
        return tensor

    monkeypatch.setattr(sources._Place, "read", counted)
    spec = deal_experts(read_spec(read_config(tmp_path / "model")))

    def run(collective: Collective) -> Tensor:
        read.numbers = 0
        weights = load_weights(spec, tmp_path / "model", torch.float32, CpuBackend(), collective=collective)
        mine = shard(spec, collective.rank, collective.world)
        assert read.numbers == mine.num_params
        assert experts_in(mine) * collective.world == experts_in(spec)
        return logits_of(Decoder(mine, weights, 256), random_tokens(TOKENS))

    for world in (1, 4):
        found += on_ranks(world, tmp_path / str(world), run)
    assert same(found)


def test_experts_that_cannot_be_dealt_are_refused() -> None:
    spec = deal_experts(read_spec(CONFIG | {"num_experts": 6, "num_experts_per_tok": 2}))
    with pytest.raises(ModelError, match=r"6 experts cannot .* 4 ranks .*; lower --tensor-parallel-size") as error:
        shard(spec, 0, 4)
    assert error.value.param == "enable_expert_parallel"
    dense = {**CONFIG, "architectures": ["Qwen3ForCausalLM"]}
    with pytest.raises(ModelError, match="the model has no experts; leave --enable-expert-parallel out"):
        deal_experts(read_spec(dense))
