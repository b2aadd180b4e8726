"""Mixtral and Qwen3-MoE: their config.json, the cost of their steps, and both layouts of their checkpoints."""

from __future__ import annotations

from typing import Any

import pytest

from preheat.errors import ModelError
from preheat.model.families import read_spec
from preheat.model.formats import expected_tensors
from preheat.model.mlp_specs import DenseSpec, MoeSpec
from preheat.model.specs import ModelSpec
from preheat.plan.cost import ModelSizes

BASE: dict[str, Any] = {
    "vocab_size": 1000, "hidden_size": 128, "intermediate_size": 300, "num_hidden_layers": 4,
    "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 512,
}  # fmt: skip
MIXTRAL = {"architectures": ["MixtralForCausalLM"], "num_local_experts": 8, "num_experts_per_tok": 2}
QWEN = {
    "architectures": ["Qwen3MoeForCausalLM"], "num_experts": 16, "num_experts_per_tok": 4,
    "moe_intermediate_size": 40, "norm_topk_prob": True,
}  # fmt: skip


def spec_of(*parts: dict[str, Any]) -> ModelSpec:
    values: dict[str, Any] = {}
    for part in (BASE, *parts):
        values |= part
    return read_spec({name: value for name, value in values.items() if value is not None})


def test_mixtral():
    spec = spec_of(MIXTRAL)
    mlp = spec.layers[1].mlp
    assert isinstance(mlp, MoeSpec)
    assert (mlp.top_k, mlp.renormalize, mlp.round_weights) == (2, True, False)
    assert (mlp.experts.num_experts, mlp.experts.hidden, mlp.experts.inner) == (8, 128, 300)
    names = expected_tensors(spec)
    assert names["model.layers.1.block_sparse_moe.experts.7.w2.weight"] == (128, 300)
    assert names["model.layers.1.block_sparse_moe.gate.weight"] == (8, 128)
    assert spec.layers[0].attention.rope.theta == 1e6  # the reference's default; Llama has another


def test_qwen3_moe_has_dense_layers_where_it_says():
    kinds = [type(layer.mlp) for layer in spec_of(QWEN, {"mlp_only_layers": [2]}).layers]
    assert kinds == [MoeSpec, MoeSpec, DenseSpec, MoeSpec]
    kinds = [type(layer.mlp) for layer in spec_of(QWEN, {"decoder_sparse_step": 2}).layers]
    assert kinds == [DenseSpec, MoeSpec, DenseSpec, MoeSpec]
    mlp = spec_of(QWEN).layers[0].mlp
    assert isinstance(mlp, MoeSpec) and mlp.round_weights and mlp.renormalize
    assert spec_of(QWEN, {"num_experts": None, "num_local_experts": 16}) == spec_of(QWEN)


@pytest.mark.parametrize("name", ["num_hidden_layers", "head_dim", "norm_topk_prob", "num_key_value_heads"])
def test_fields_with_a_useless_class_default_must_be_written(name):
    with pytest.raises(ModelError, match=name):
        spec_of(QWEN, {name: None})


def test_more_chosen_than_there_are():
    with pytest.raises(ModelError, match="num_experts_per_tok is 9"):
        spec_of(MIXTRAL, {"num_experts_per_tok": 9})


def test_a_step_reads_the_experts_that_its_tokens_choose():
    """A step of many tokens reads all experts.

    A step of one token reads and computes the active parameters.
    """
    sizes = ModelSizes.of(spec_of(QWEN))
    experts = 4 * 16 * 3 * 128 * 40
    assert sizes.expert_params == experts
    assert sizes.read_by(1) == pytest.approx(2 * (sizes.layer_params + experts / 4))
    assert sizes.read_by(10_000) == pytest.approx(2 * (sizes.layer_params + experts))
    dense = ModelSizes.of(spec_of({"architectures": ["LlamaForCausalLM"]}))
    assert dense.read_by(1) == dense.read_by(100) == 2 * dense.layer_params


def test_the_size_of_a_published_model():
    """Mixtral 8x7B has 46.7 billion parameters."""
    published = {
        "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": None,
    }  # fmt: skip
    assert spec_of(MIXTRAL, published).num_params == 46_702_792_704
