"""The values of layers: each feature sets fields of its own.

A backend tells for a value whether it can run it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from preheat.backends.base.facts import Facts
from preheat.backends.cpu.facts import FACTS as CPU
from preheat.backends.cuda.facts import FACTS as CUDA
from preheat.backends.cuda.lacking import lacking_terms
from preheat.backends.hpu.facts import FACTS as HPU
from preheat.backends.support import DIVIDED, supports
from preheat.model.shard import shard
from preheat.model.values import AdapterLimits, experts_of, values_of
from preheat.ops.kinds import Scheme
from preheat.ops.values import (
    PART,
    TILE,
    Experts,
    LowRank,
    Matmul,
    Ok,
    Refused,
    SumOrder,
    Value,
    WeightFormat,
    WithoutTerms,
    k_splits_of,
)
from tests.pure.test_quantization_spec import LLAMA, MOE, spec_of

ROOM = AdapterLimits(3, 24, "float32")
FP8 = Scheme(code="fp8", scales="channel", activations="token")
INT4 = Scheme(code="int4", scales="group", group=32)


def layers(values: Any) -> dict[str, Matmul]:
    """Return every matrix by its path.

    Paths of experts have one word more.
    """
    found = {}
    for path, value in values:
        own = {"": value} if isinstance(value, Matmul) else {".gate_up": value.gate_up, ".down": value.down}
        found |= {path + more: each for more, each in own.items()}
    return found


def differing(one: Matmul, other: Matmul) -> set[str]:
    return {name for name in vars(one) if getattr(one, name) != getattr(other, name)}


@pytest.mark.parametrize("config", [LLAMA, MOE], ids=["dense", "experts"])
def test_each_feature_sets_fields_of_its_own(config):
    plain = layers(values_of(spec_of(None, config), "bfloat16"))
    adapted = layers(values_of(spec_of(None, config), "bfloat16", ROOM))
    assert {"embedding"} == adapted.keys() - plain.keys()
    assert all(differing(value, adapted[path]) == {"terms"} for path, value in plain.items())
    coded = layers(values_of(spec_of(None, config, asked="fp8"), "bfloat16"))
    assert {name for path in plain for name in differing(plain[path], coded[path])} == {"weight", "input"}
    for rank in (0, 1):
        shared = layers(values_of(shard(spec_of(None, config), rank, 2), "bfloat16"))
        found = {name for path in plain for name in differing(plain[path], shared[path])}
        assert found == {"outputs", "inputs", "order"}


def test_ranks_have_neighboring_splits_and_the_terms_of_their_rows():
    for world in (1, 2, 4):
        found = [layers(values_of(shard(spec_of(None, MOE), rank, world), "bfloat16", ROOM)) for rank in range(world)]
        own = k_splits_of(world) // world
        for name in ("layers.0.attention.o", "layers.0.mlp.experts.down", "layers.1.mlp.shared.block.down"):
            orders = [each[name].order for each in found]
            assert orders == [SumOrder(4, (rank * own, (rank + 1) * own)) for rank in range(world)]
            assert {each[name].terms[0].shared for each in found} == {"inputs"}
        parts = [each["layers.0.attention.qkv"].terms[0].parts for each in found]
        assert [sum(each) for each in zip(*parts, strict=True)] == [256, max(128, 64 * world), max(128, 64 * world)]
        assert {each["layers.0.mlp.experts.down"].terms[0].joins for each in found} == {"combined"}


def test_the_matrices_of_a_term_are_layers_with_a_group_for_each_slot():
    value = Matmul(outputs=72, inputs=1100, weight=WeightFormat("bfloat16"), terms=(LowRank((72,), 3, 23, "bfloat16"),))
    first, second = value.pair(value.terms[0], 0)
    assert (first.outputs, first.inputs, second.outputs, second.inputs) == (32, 1100, 72, 32)
    assert (first.order.part, second.order.part) == (PART, TILE)
    assert {each.groups.slots for each in (first, second)} == {3} and first.weight.dtype == "bfloat16"
    assert value.pair(replace(value.terms[0], dtype="float32"), 0)[0].weight.dtype == "float32"


def test_values_carry_no_names_and_a_layer_of_one_kind_has_one_value():
    found = dict(values_of(spec_of(None, LLAMA), "bfloat16", ROOM))
    assert found["layers.0.mlp.down"] == found["layers.1.mlp.down"]
    assert len(set(found.values())) == 6 and "layers" not in repr(list(found.values()))


def dense(scheme: Scheme | None, *, split: bool, adapted: bool) -> Value:
    order = SumOrder(4, (0, 2)) if split else SumOrder()
    terms = (LowRank((64,), 2, 16, "bfloat16", shared="inputs" if split else "whole"),) if adapted else ()
    return Matmul(outputs=64, inputs=64, weight=WeightFormat("bfloat16", scheme), order=order, terms=terms)


def routed(scheme: Scheme | None, *, split: bool, adapted: bool, divided: bool = False) -> Experts:
    spec = spec_of(None, MOE)
    block: Any = (shard(spec, 0, 2) if split else spec).layers[0].mlp
    block = replace(block, experts=replace(block.experts, scheme=scheme))
    return experts_of(block, "bfloat16", replace(ROOM, divided=divided) if adapted else None)


def refused(facts: Facts, scheme: Scheme | None, split: bool, adapted: bool, experts: bool) -> type:
    """Return the expected answer: HPU refuses activation scales and K splits when quantized, and serves no terms."""
    if facts is HPU and scheme is not None and (scheme.activations or split):
        return Refused
    return WithoutTerms if facts is HPU and adapted else Ok


@pytest.mark.parametrize("facts", [CPU, CUDA, HPU], ids=lambda facts: facts.name)
@pytest.mark.parametrize("scheme", [None, FP8, INT4], ids=lambda scheme: scheme.kind if scheme else "plain")
def test_devices_support_the_values_that_they_serve(facts, scheme):
    for split in (False, True):
        for adapted in (False, True):
            for make in (dense, routed):
                found = supports(facts, make(scheme, split=split, adapted=adapted))
                assert type(found) is refused(facts, scheme, split, adapted, make is routed), (split, adapted, make)
    divided = supports(CPU, routed(None, split=True, adapted=True, divided=True))
    assert divided == WithoutTerms(DIVIDED)


def test_a_refusal_has_the_device_and_the_reason():
    found = supports(HPU, dense(FP8, split=False, adapted=False))
    assert isinstance(found, Refused) and "w8a8" in found.reason and "on hpu" in found.reason
    found = supports(HPU, dense(INT4, split=True, adapted=False))
    assert found == Refused("not on hpu: ranks have no kernels for quantized layers there")
    found = supports(HPU, dense(None, split=False, adapted=True))
    assert found == WithoutTerms("on hpu: it has no kernels for adapters yet")


def test_a_gpu_names_the_experts_whose_terms_it_cannot_add():
    assert lacking_terms(dense(INT4, split=True, adapted=True)) is None
    assert lacking_terms(routed(INT4, split=True, adapted=False)) is None
    assert lacking_terms(routed(None, split=True, adapted=True)) is None
    assert lacking_terms(routed(INT4, split=True, adapted=True)) == "with this device, quantization and ranks"
    other = routed(None, split=False, adapted=True)
    other = replace(other, gate_up=replace(other.gate_up, finish=other.gate_up.finish._replace(activation="gelu")))
    assert lacking_terms(other) == "with this device and experts with gelu"
