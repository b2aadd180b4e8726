"""Shards: each rank's share of a model, and refused divisions."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace

import pytest

from preheat.backends.cpu.facts import FACTS
from preheat.errors import ModelError, SettingsError
from preheat.model.families import read_spec
from preheat.model.shard import shard, sums_k_splits
from preheat.model.spec_tree import leaves
from preheat.model.specs import ModelSpec
from preheat.model.tensor_specs import LinearSpec
from preheat.model.traits import check_traits
from preheat.settings import Settings
from tests.specs import LLAMA_8B, llama

MOE = read_spec(
    {
        "architectures": ["Qwen3MoeForCausalLM"], "hidden_size": 64, "num_hidden_layers": 2, "vocab_size": 250,
        "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 16, "num_experts": 4,
        "num_experts_per_tok": 2, "moe_intermediate_size": 32, "intermediate_size": 64, "norm_topk_prob": True,
    }
)  # fmt: skip
PHI = read_spec(
    {
        "architectures": ["Phi3ForCausalLM"], "hidden_size": 96, "num_hidden_layers": 1, "vocab_size": 200,
        "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 24, "intermediate_size": 64,
        "partial_rotary_factor": 0.5, "pad_token_id": 0,
    }
)  # fmt: skip


def rows_of(spec: LinearSpec) -> list[tuple[str, int]]:
    return [(name, row) for name, (first, last) in spec.pieces() for row in range(first, last)]


def linears(spec: ModelSpec) -> dict[str, LinearSpec]:
    return dict(spec.linears())


DENSE = llama(hidden=96, inner=160, layers=1, heads=8, kv_heads=4, head_dim=16, vocab=199)


@pytest.mark.parametrize("spec", [DENSE, MOE, PHI], ids=["dense", "moe", "one part for three, in another order"])
@pytest.mark.parametrize("world", [1, 2, 4])
def test_ranks_have_each_row_and_column_once(spec, world):
    ranks = [linears(shard(spec, rank, world)) for rank in range(world)]
    for path, whole in linears(spec).items():
        mine = [rank[path] for rank in ranks]
        if not mine[0].sharded:
            assert mine == [mine[0]] * world  # the router, or all of it on one rank
        elif mine[0].columns:
            edges = [each.columns for each in mine]
            assert edges[0][0] == 0 and edges[-1][1] == whole.inputs == mine[0].stored_inputs
            assert all(a[1] == b[0] for a, b in itertools.pairwise(edges))
            assert sum(each.k_splits for each in mine) == 4
        else:
            rows = [row for each in mine for row in rows_of(each)]
            repeats = path.endswith("qkv") and spec.num_kv_heads < world
            assert set(rows) == set(rows_of(whole)) and (repeats or len(rows) == len(set(rows)))
        for each in mine:
            assert not each.tiles or sum(each.tiles) == each.outputs


def test_the_parts_of_a_layer_stay_in_order():
    """The parts of a layer stay in order.

    The orders are queries, keys, values; gates, ups; and heads with the keys that they look at.
    """
    first, last = (shard(LLAMA_8B, rank, 4).layers[0] for rank in (0, 3))
    assert [name.rpartition(".")[2] for name, _ in first.attention.qkv.pieces()] == ["q_proj", "k_proj", "v_proj"]
    assert [rows for _, rows in last.attention.qkv.pieces()] == [(3072, 4096), (768, 1024), (768, 1024)]
    assert [rows for _, rows in last.mlp.gate_up.pieces()] == [(10752, 14336)] * 2
    assert (last.attention.num_heads, last.kv.num_kv_heads, last.mlp.down.inputs) == (8, 2, 3584)


def test_heads_of_keys_are_repeated_where_there_are_fewer_than_ranks():
    kept = [[rows for _, rows in shard(MOE, rank, 4).layers[0].attention.qkv.pieces()][1] for rank in range(4)]
    assert kept == [(0, 16), (0, 16), (16, 32), (16, 32)]
    assert shard(MOE, 3, 4).num_kv_heads == 1


@pytest.mark.parametrize("spec", [LLAMA_8B, MOE], ids=["8b", "moe"])
def test_sizes_of_products_do_not_depend_on_the_number_of_ranks(spec):
    """Sizes of tiles and K splits are equal on all sizes of groups.

    The order of a library's sum may depend on them.
    """
    for path in linears(spec):
        sizes = set()
        for world in (1, 2, 4):
            mine = linears(shard(spec, 0, world))[path]
            split = mine.inputs // mine.k_splits if mine.k_splits else mine.inputs
            # The head's last tile may be smaller, on the rank that has it.
            sizes.add((split, *sorted(set(mine.tiles[:1] if path == "head" else mine.tiles))))
        assert len(sizes) == 1, path


def test_every_rank_has_every_token_of_the_vocabulary_between_them():
    heads = [shard(MOE, rank, 4).head for rank in range(4)]
    assert [head.order for head in heads] == [((0, 63),), ((63, 126),), ((126, 189),), ((189, 250),)]


def test_eight_ranks_have_a_k_split_each():
    spec = shard(LLAMA_8B, 7, 8)
    assert spec.layers[0].mlp.down.k_splits == 1 and spec.layers[0].mlp.down.inputs == 14336 // 8


def test_alibi_goes_with_its_heads():
    layer = LLAMA_8B.layers[0]
    slopes = tuple(range(32))
    spec = replace(LLAMA_8B, layers=(replace(layer, attention=replace(layer.attention, alibi=slopes)),))
    assert shard(spec, 1, 4).layers[0].attention.alibi == slopes[8:16]


@pytest.mark.parametrize(
    ("sizes", "world", "said"),
    [
        ({"heads": 6, "kv_heads": 6}, 4, "6 attention heads cannot be divided into 4 equal parts; lower --tensor-par"),
        ({"heads": 12, "kv_heads": 3}, 4, "3 key/value heads"),
        ({"inner": 90}, 2, "90 intermediate numbers cannot be divided into 4"),
        ({"inner": 90}, 1, "leave --tp-invariant out"),
        ({"vocab": 5}, 4, "5 tokens of the vocabulary"),
    ],
)
def test_sizes_that_cannot_be_divided_are_named(sizes, world, said):
    usual = {"hidden": 64, "inner": 64, "layers": 1, "heads": 4, "kv_heads": 4, "head_dim": 16, "vocab": 64}
    spec = llama(**usual | sizes)
    with pytest.raises(ModelError, match=said) as error:
        [shard(spec, rank, world) for rank in range(world)]
    assert error.value.param == "tensor_parallel_size"


def test_a_format_without_a_cut_is_refused():
    layer = DENSE.layers[0]
    other = replace(layer.mlp, down=replace(layer.mlp.down, format="other"))
    with pytest.raises(ModelError, match="stored as other yet"):
        shard(replace(DENSE, layers=(replace(layer, mlp=other),)), 0, 2)


def test_norms_of_all_heads_are_refused(tmp_path):
    config = {
        "architectures": ["Olmo2ForCausalLM"], "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1,
        "vocab_size": 200, "num_attention_heads": 4,
    }  # fmt: skip
    with pytest.raises(ModelError, match="ranks cannot share norms of all query heads together"):
        shard(read_spec(config), 0, 2)
    (tmp_path / "config.json").write_text(json.dumps(config))
    for more in ({"tensor_parallel_size": 2}, {"tp_invariant": True}):
        with pytest.raises(SettingsError, match=r"with this model.* norms all query heads together"):
            check_traits(Settings(model=str(tmp_path), **more), FACTS)


def test_norms_and_embeddings_are_whole():
    whole, mine = dict(leaves(LLAMA_8B)), dict(leaves(shard(LLAMA_8B, 1, 4)))
    assert whole.keys() == mine.keys()
    assert all(mine[path] == leaf for path, leaf in whole.items() if not isinstance(leaf, LinearSpec))


def test_settings():
    assert not sums_k_splits(Settings())
    assert sums_k_splits(Settings(tp_invariant=True)) and sums_k_splits(Settings(tensor_parallel_size=2))
    with pytest.raises(SettingsError, match="1, 2, 4 or 8, got 3"):
        Settings(tensor_parallel_size=3)
    with pytest.raises(SettingsError, match="only add in the order of tp_invariant"):
        Settings(tensor_parallel_size=2, tp_invariant=False)
