"""Reading config.json: both of its dialects, every difference between the families, and refusals by name."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from preheat.backends.cuda.device.card import HOPPER
from preheat.backends.cuda.lacking import lacking
from preheat.errors import ModelError, SettingsError
from preheat.limits import resolve_limits
from preheat.model.attention_specs import RopeSpec
from preheat.model.config import resolve_dtype
from preheat.model.families import FAMILIES, check_architecture, read_spec
from preheat.model.families.mpt import alibi_slopes
from preheat.model.families.needs import NEEDS, need_of
from preheat.model.files import (
    find_checkpoint,
    find_model,
    find_tokenizer,
    indexed_names,
    read_config,
    weight_files,
)
from preheat.model.formats import expected_tensors
from preheat.model.kv_spec import KVSpec
from preheat.model.mlp_specs import STACKED, DenseSpec, ExpertsSpec
from preheat.model.recurrence_specs import ConvSpec, DeltaSpec
from preheat.model.spec_tree import Leaf, leaves
from preheat.model.specs import LayerSpec, ModelSpec, layer_kind
from preheat.model.tensor_specs import LinearSpec, NormSpec, PatchSpec
from preheat.ops.kinds import Scheme
from preheat.settings import Settings

BASE: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 1000,
    "hidden_size": 128,
    "intermediate_size": 300,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "eos_token_id": [7, 8],
    "bos_token_id": 1,
    "torch_dtype": "bfloat16",
}


def spec_of(family: str = "Llama", **changes: Any) -> ModelSpec:
    return read_spec(BASE | {"architectures": [f"{family}ForCausalLM"]} | changes)


def test_a_plain_config():
    spec = spec_of()
    assert (spec.head_dim, spec.num_kv_heads, spec.final_norm.eps, spec.dtype) == (16, 2, 1e-6, "bfloat16")
    assert spec.eos_ids == (7, 8)
    assert spec.layers[0].attention.rope == RopeSpec(kind="default", theta=10000.0, original_length=512)
    assert spec.layer_windows == (None,) * 4
    assert not any(linear.bias for _, linear in spec.linears())
    assert (spec.layers[3].attention.qk_norm, spec.tied) == (None, False)
    assert spec.layers[0].kv == KVSpec(num_kv_heads=2, head_dim=16)
    assert spec.kv_bytes_per_token(2) == 4 * 2 * 2 * 16 * 2
    assert spec.layers[0].attention.scale == 0.25


def test_a_layer_names_its_tensors():
    """The tensors of one layer are the whole tree, written by hand."""
    layer = spec_of("Qwen3", head_dim=16, attention_bias=True).layers[2]
    at, eps = "model.layers.2", 1e-6
    parts = tuple((f"{at}.self_attn.{name}_proj", size) for name, size in (("q", 128), ("k", 32), ("v", 32)))
    assert layer.attention.qkv == LinearSpec(parts=parts, inputs=128, bias=True)
    assert layer.attention.qk_norm == tuple(NormSpec(f"{at}.self_attn.{name}_norm", 16, eps) for name in "qk")
    assert layer.mlp.gate_up == LinearSpec(
        parts=((f"{at}.mlp.gate_proj", 300), (f"{at}.mlp.up_proj", 300)), inputs=128, activation="silu_and_mul"
    )
    assert layer.mlp.down == LinearSpec(parts=((f"{at}.mlp.down_proj", 128),), inputs=300)
    assert layer.input_norm == NormSpec(f"{at}.input_layernorm", 128, eps)
    assert layer.post_norm == NormSpec(f"{at}.post_attention_layernorm", 128, eps)


def test_published_llama_3_1_8b():
    """The published config.json of Llama-3.1-8B, in the older dialect."""
    spec = read_spec(read_config(Path(__file__).parents[1] / "models" / "llama-3.1-8b"))
    assert spec.layers[0].attention.rope == RopeSpec(kind="llama3", theta=5e5, factor=8, original_length=8192)
    assert spec.max_position_embeddings == 131072
    assert spec.num_params == 8_030_261_248


def test_both_dialects_say_the_same():
    scaling = {"factor": 4.0, "original_max_position_embeddings": 128}
    old = spec_of("Qwen3", rope_theta=1e6, rope_scaling={"type": "yarn", **scaling})
    new = spec_of("Qwen3", rope_parameters={"rope_type": "yarn", "rope_theta": 1e6, **scaling}, dtype="bfloat16")
    assert old == new
    assert old.layers[0].attention.rope.kind == "yarn"


def test_the_longest_sequence_counts_scaling_once():
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}
    assert spec_of(rope_scaling=yarn).max_position_embeddings == 2048
    assert spec_of(rope_scaling=yarn, max_position_embeddings=2048).max_position_embeddings == 2048
    assert spec_of(rope_scaling={"type": "linear", "factor": 2.0}).max_position_embeddings == 1024


def test_windows():
    assert spec_of("Llama", sliding_window=64).layer_windows == (None,) * 4
    assert spec_of("Mistral", sliding_window=64).layer_windows == (64,) * 4
    assert spec_of("Mistral").layer_windows == (4096,) * 4
    assert spec_of("Mistral", sliding_window=None).layer_windows == (None,) * 4
    qwen = {"sliding_window": 64, "max_window_layers": 3}
    assert spec_of("Qwen2", **qwen).layer_windows == (None,) * 4
    assert spec_of("Qwen2", **qwen, use_sliding_window=True).layer_windows == (None, None, None, 64)
    kinds = ["sliding_attention", "full_attention"] * 2
    assert spec_of("Qwen3", **qwen, use_sliding_window=True, layer_types=kinds).layer_windows == (64, None, 64, None)


def test_biases_and_norms_by_family():
    def biases(layer: LayerSpec) -> list[bool]:
        return [leaf.bias for _, leaf in leaves(layer) if isinstance(leaf, LinearSpec)]

    assert biases(spec_of("Llama", attention_bias=True, mlp_bias=True).layers[0]) == [True] * 4
    qwen2, qwen3 = spec_of("Qwen2").layers[0], spec_of("Qwen3").layers[0]
    assert biases(qwen2) == [True, False, False, False]
    assert biases(qwen3) == [False] * 4
    assert (qwen2.attention.qk_norm is None, qwen3.attention.qk_norm is None) == (True, False)
    assert qwen3.attention.head_dim == 128


QUANTIZED = Scheme(code="int4", scales="group", group=32)
OTHER_VALUES = {
    "window": lambda layer: replace(layer, attention=replace(layer.attention, window=7)),
    "no rope": lambda layer: replace(layer, attention=replace(layer.attention, rope=None)),
    "head size": lambda layer: replace(
        layer, attention=replace(layer.attention, kv=replace(layer.kv, head_dim=2 * layer.kv.head_dim))
    ),
    "cache": lambda layer: replace(
        layer, attention=replace(layer.attention, kv=replace(layer.kv, dtype="fp8_e4m3"))
    ),
    "one quantized linear": lambda layer: replace(
        layer, mlp=replace(layer.mlp, down=replace(layer.mlp.down, scheme=QUANTIZED))
    ),
    "stored in another format": lambda layer: replace(
        layer, attention=replace(layer.attention, o=replace(layer.attention.o, format="awq"))
    ),
    "width": lambda layer: replace(layer, mlp=replace(layer.mlp, down=replace(layer.mlp.down, inputs=64))),
    "norm": lambda layer: replace(layer, post_norm=replace(layer.post_norm, kind="layer")),
}  # fmt: skip


@pytest.mark.parametrize("change", OTHER_VALUES.values(), ids=OTHER_VALUES)
def test_layers_with_other_kernels_are_of_different_kinds(change):
    layer = spec_of().layers[0]
    assert layer_kind(change(layer)) != layer_kind(layer)
    assert hash(layer_kind(change(layer))) is not None


def test_names_and_the_scales_of_a_cache_make_no_kind():
    first, *others = spec_of(num_hidden_layers=4).layers
    assert all(other != first for other in others)
    scaled = replace(first, attention=replace(first.attention, kv=replace(first.kv, scales=(0.5, 2.0))))
    assert {layer_kind(layer) for layer in (first, scaled, *others)} == {layer_kind(first)}


def test_values_that_differ_between_layers_stay_separate():
    spec = spec_of()
    other = replace(spec.layers[1], attention=replace(spec.layers[1].attention, kv=KVSpec(4, 16)))
    mixed = replace(spec, layers=(spec.layers[0], other))
    assert [layer.kv.num_kv_heads for layer in mixed.layers] == [2, 4]
    with pytest.raises(ModelError, match="num_key_value_heads that differ between layers"):
        assert mixed.num_kv_heads


REJECTED = {
    "architecture BloomForCausalLM is not supported: it needs ALiBi with a norm": {
        "architectures": ["BloomForCausalLM"]
    },
    "it needs keys and values compressed to a latent vector": {"architectures": ["MiniCPM3ForCausalLM"]},
    "it needs attention that looks ahead": {"architectures": ["ElectraModel"]},
    "it needs a head that is not read": {"architectures": ["NomicBertForSequenceClassification"]},
    "max_position_embeddings is 1, and the first 2 are unused": {
        "architectures": ["RobertaModel"],
        "max_position_embeddings": 1,
    },
    "is not supported; did you mean LlamaForCausalLM?; supported are": {"architectures": ["LlammaForCausalLM"]},
    "architecture Of_My_Own is not supported; supported are": {"architectures": ["Of_My_Own"]},
    "none named": {"architectures": None},
    "hidden_act 'gelu'": {"hidden_act": "gelu"},
    "rope type 'dynamic'": {"rope_scaling": {"type": "dynamic", "factor": 2.0}},
    "rope type 'longrope' needs short_factor": {"rope_parameters": {"rope_type": "longrope"}},
    "longrope needs 8 short and long factors, got 2": {
        "rope_parameters": {"rope_type": "longrope", "short_factor": [1, 2], "long_factor": [1, 2]}
    },
    "differ between layers": {"rope_parameters": {"full_attention": {"rope_type": "default"}}},
    "rope parameter mscale": {"rope_scaling": {"type": "linear", "factor": 2.0, "mscale": 1.0, "mscale_all_dim": 1.0}},
    "rope parameter llama_4_scaling_beta": {"rope_parameters": {"rope_type": "default", "llama_4_scaling_beta": 0.1}},
    "needs low_freq_factor": {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}},
    "factor of the rope parameters must be a positive number, got 0": {"rope_scaling": {"type": "linear", "factor": 0}},
    "factor of the rope parameters must be a positive number, got -2.0": {
        "rope_scaling": {"type": "yarn", "factor": -2.0}
    },
    "high_freq_factor of the rope parameters must be a positive": {
        "rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": -4.0}
    },
    "original_max_position_embeddings of the rope": {
        "rope_scaling": {"type": "yarn", "factor": 2.0, "original_max_position_embeddings": -8}
    },
    "the rope's factor 1e+300 makes": {"rope_scaling": {"type": "linear", "factor": 1e300}},
    "divides by the logarithm of rope_theta": {"rope_scaling": {"type": "yarn", "factor": 2.0, "rope_theta": 1.0}},
    "divides by the logarithm of original_max_position_embeddings": {
        "rope_parameters": {
            "rope_type": "longrope",
            "short_factor": [1.0],
            "long_factor": [1.0],
            "original_max_position_embeddings": 1,
        }
    },
    "mscale of the rope parameters must be a number, got inf": {
        "rope_scaling": {"type": "yarn", "factor": 2.0, "mscale": float("inf")}
    },
    "partial_rotary_factor": {"partial_rotary_factor": 0.5},
    "quantized checkpoints (bitsandbytes)": {"quantization_config": {"quant_method": "bitsandbytes"}},
    "no vocab_size": {"vocab_size": None},
    "hidden_size must be": {"hidden_size": "big"},
    "cannot share 3": {"num_key_value_heads": 3},
    "head_dim must be even": {"head_dim": 15},
    "dtype 'float64'": {"torch_dtype": "float64"},
    "rms_norm_eps must be a positive number, got 0": {"rms_norm_eps": 0},
    "rms_norm_eps must be a positive number, got -1e-05": {"rms_norm_eps": -1e-5},
    "rms_norm_eps must be a positive number, got nan": {"rms_norm_eps": float("nan")},
    "rms_norm_eps must be a positive number, got 'small'": {"rms_norm_eps": "small"},
    "rope_theta must be a positive number, got -1.0": {"rope_theta": -1.0},
    "rope_theta must be a positive number, got 0": {"rope_parameters": {"rope_type": "default", "rope_theta": 0}},
}


@pytest.mark.parametrize("message", REJECTED)
def test_rejected_by_name(message):
    with pytest.raises(ModelError) as error:
        read_spec(BASE | REJECTED[message])
    assert message in str(error.value)


def test_missing_needs_are_listed_only_for_unsupported_architectures():
    assert not any(name.removesuffix("Model") in NEEDS or name in NEEDS for name in FAMILIES)
    assert all(need and not need.endswith(".") for need in NEEDS.values())
    assert need_of("DeepseekForCausalLM") != need_of("DeepseekV2ForCausalLM") == NEEDS["Deepseek"]
    assert need_of("Of_My_Own") == ""


def test_the_architecture_is_judged_by_its_name_alone():
    check_architecture({})
    check_architecture({"architectures": ["LlamaModel"]})
    with pytest.raises(ModelError, match="it needs norms that subtract a mean"):
        check_architecture({"architectures": ["NemotronForCausalLM"]})


REJECTED_BY_FAMILY = {
    "qk_ln True": ("Mpt", {"attn_config": {"qk_ln": True}}),
    "prefix_lm True": ("Mpt", {"attn_config": {"prefix_lm": True}}),
    "attn_type 'multiquery_attention'": ("Mpt", {"attn_config": {"attn_type": "multiquery_attention"}}),
    "attn_type 'grouped_query_attention'": ("MPT", {"attn_config": {"attn_type": "grouped_query_attention"}}),
    "rope True": ("Mpt", {"attn_config": {"rope": True}}),
    "alibi false": ("Mpt", {"attn_config": {"alibi": False}}),
    "attn_config must be an object": ("Mpt", {"attn_config": "none"}),
    "logit_scale 'inv_sqrt_d_model'": ("Mpt", {"logit_scale": "inv_sqrt_d_model"}),
    "norm_type 'rmsnorm'": ("Mpt", {"norm_type": "rmsnorm"}),
    "no_bias false": ("Mpt", {"no_bias": False}),
    "config.json has no d_model": ("Mpt", {"d_model": None}),
    "n_head must be a positive integer": ("GPTBigCode", {"n_head": "many"}),
    "add_cross_attention True": ("GPTBigCode", {"add_cross_attention": True}),
    "activation 'relu'": ("GPTBigCode", {"activation_function": "relu"}),
    "activation 'silu'": ("Starcoder2", {"hidden_act": "silu"}),
    "final_logit_softcapping 30.0": ("Gemma3", {"final_logit_softcapping": 30.0}),
    "attn_logit_softcapping 50.0": ("Gemma3", {"attn_logit_softcapping": 50.0}),
    "use_bidirectional_attention True": ("Gemma3", {"use_bidirectional_attention": True}),
    "hidden_activation 'gelu'": ("Gemma3", {"hidden_activation": "gelu"}),
    "use_sliding_window True": ("Qwen2Moe", {"use_sliding_window": True}),
    "rope type 'dynamic'": ("Phi3", {"rope_scaling": {"type": "dynamic", "factor": 2.0}}),
}


@pytest.mark.parametrize("message", REJECTED_BY_FAMILY)
def test_a_family_rejects_unsupported_fields_by_name(message):
    family, changes = REJECTED_BY_FAMILY[message]
    config = config_of(f"{family}ForCausalLM", head_dim=16)
    read_spec(config)
    with pytest.raises(ModelError) as error:
        read_spec(config | changes)
    assert message in str(error.value)


def test_slopes_of_alibi():
    """Slopes follow the paper's recipe if the greatest exponent is 8, else the field, for any number of heads."""
    assert alibi_slopes(8, 8) == tuple(2.0**-i for i in range(1, 9))
    assert alibi_slopes(4, 16) == tuple(2.0 ** -(4 * i) for i in range(1, 5))
    assert alibi_slopes(6, 8) == tuple(2.0**-i for i in (2, 4, 6, 8, 1, 3))
    for heads in range(1, 70):
        assert len(set(alibi_slopes(heads, 8))) == heads


def test_learned_positions_bound_the_length():
    spec = read_spec(config_of("GPTBigCodeForCausalLM", max_position_embeddings=300))
    assert spec.max_position_embeddings == 300
    assert spec.positions is not None and spec.positions.shape == (300, spec.hidden_size)
    sizes = {"max_num_seqs": 4, "max_num_batched_tokens": 64, "block_size": 16}
    length = spec.max_position_embeddings
    assert resolve_limits(Settings(max_model_len=300, **sizes), length, 1).max_model_len == 300
    with pytest.raises(SettingsError, match="max_model_len 301 exceeds the 300 positions"):
        resolve_limits(Settings(max_model_len=301, **sizes), length, 1)


def test_gemma_has_two_ropes_in_both_dialects():
    sizes = {"head_dim": 16, "num_hidden_layers": 4, "sliding_window": 9}
    old = {"rope_theta": 1e6, "rope_local_base_freq": 5e3, "rope_scaling": {"rope_type": "linear", "factor": 8.0}}
    new = {
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 5e3},
        }
    }
    kinds = ["sliding_attention", "full_attention"] * 2
    older = read_spec(config_of("Gemma3ForCausalLM", **sizes, **old, sliding_window_pattern=2))
    newer = read_spec(config_of("Gemma3ForCausalLM", **sizes, **new, layer_types=kinds))
    assert older == newer
    assert older.layer_windows == (9, None, 9, None)
    assert [layer.attention.rope.theta for layer in older.layers] == [5e3, 1e6] * 2
    assert older.max_position_embeddings == 512  # stated as it is after scaling


def test_phi_in_its_own_words():
    """The fields of the published Phi-4-mini are read.

    A part of a head rotates, by one of two lists of factors.
    """
    rope = {"type": "longrope", "short_factor": [1.0] * 6, "long_factor": [2.0] * 6}
    fields = {"head_dim": 16, "rope_scaling": rope, "original_max_position_embeddings": 128}
    spec = read_spec(config_of("Phi3ForCausalLM", **fields, partial_rotary_factor=0.75))
    found = spec.layers[0].attention.rope
    assert (found.kind, found.factor, found.original_length, found.turned(16)) == ("longrope", 4.0, 128, 12)
    assert spec.layers[0].attention.qkv.order[:5] == ((0, 6), (12, 14), (6, 12), (14, 16), (16, 22))
    assert spec.max_position_embeddings == 512
    again = rope | {"partial_rotary_factor": 0.75}  # transformers 5.17 writes the factor twice
    twice = config_of("Phi3ForCausalLM", **fields | {"rope_scaling": again}, partial_rotary_factor=0.75)
    assert read_spec(twice) == spec


FIELDS = (
    "architectures vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads "
    "head_dim max_position_embeddings original_max_position_embeddings eos_token_id bos_token_id torch_dtype dtype "
    "rope_theta rope_scaling rope_parameters sliding_window use_sliding_window max_window_layers layer_types "
    "rms_norm_eps hidden_act tie_word_embeddings attention_bias quantization_config n_embd n_head n_inner d_model "
    "attn_config expansion_ratio logit_scale short_factor long_factor partial_rotary_factor query_pre_attn_scalar "
    "sliding_window_pattern num_experts mlp_only_layers shared_expert_intermediate_size activation_function norm_type "
    "norm_epsilon layer_norm_epsilon ffn_config"
).split()
WRONG = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**12), 10**12) | st.floats() | st.text(max_size=4),
    lambda inner: (
        st.lists(inner, max_size=2)
        | st.dictionaries(st.sampled_from(["rope_type", "factor", "rope_theta", "x", *FIELDS]), inner, max_size=3)
    ),
    max_leaves=4,
)


@given(st.sampled_from(sorted(FAMILIES)), st.dictionaries(st.sampled_from(FIELDS), WRONG, min_size=1, max_size=2))
def test_any_config_makes_a_spec_or_a_model_error(architecture, changes):
    made, refused = None, ""
    try:
        made = read_spec(config_of(architecture) | changes)
    except ModelError as error:
        refused = error.message
    assert refused or (made is not None and made.layers and made.num_params > 0)


@pytest.mark.parametrize("changes", [{"num_hidden_layers": 10**9}, {"vocab_size": 2**40}])
def test_sizes_are_bounded_before_anything_is_made_of_them(changes):
    (name,) = changes
    with pytest.raises(ModelError, match=f"{name} is .* but at most"):
        spec_of(**changes)


def test_rejected_layer_types():
    switch = {"use_sliding_window": True}
    with pytest.raises(ModelError, match="3 entries for 4 layers"):
        spec_of("Qwen2", **switch, layer_types=["full_attention"] * 3)
    with pytest.raises(ModelError, match="'linear_attention'"):
        spec_of("Qwen2", **switch, layer_types=["linear_attention"] * 4)
    with pytest.raises(ModelError, match="sliding_window must be"):
        spec_of("Mistral", sliding_window=0)


@pytest.mark.parametrize(
    ("asked", "checkpoint", "native", "dtype"),
    [
        ("auto", "bfloat16", True, "bfloat16"),
        ("auto", "bfloat16", False, "float32"),
        ("auto", "float16", True, "bfloat16"),
        ("auto", "float32", True, "float32"),
        ("float16", "bfloat16", True, "bfloat16"),
        ("bfloat16", "float32", False, "bfloat16"),
        ("float32", "bfloat16", True, "float32"),
    ],
)
def test_dtype(asked, checkpoint, native, dtype):
    got, remark = resolve_dtype(asked, checkpoint, native)
    assert got == dtype
    assert (remark is not None) == (dtype != (checkpoint if asked == "auto" else asked))


@pytest.mark.parametrize(("asked", "checkpoint"), [("auto", "float16"), ("float16", "bfloat16")])
@pytest.mark.parametrize("native", [True, False])
def test_float16_where_it_runs_as_it_is(asked, checkpoint, native):
    assert resolve_dtype(asked, checkpoint, native, float16=True) == ("float16", None)


def test_unknown_dtype():
    with pytest.raises(ModelError, match="int8"):
        resolve_dtype("int8", "bfloat16", True)


def tensors_of(leaf: Leaf) -> list[str]:
    if isinstance(leaf, ExpertsSpec) and leaf.format == STACKED:
        names = (leaf.gate, leaf.down)
        return [f"{name.format(at)}{end}" for name in names for at in range(leaf.num_experts) for end in ("", "_bias")]
    if isinstance(leaf, ExpertsSpec):
        names = (leaf.gate, leaf.up, leaf.down)
        return [f"{name.format(expert)}.weight" for name in names for expert in range(leaf.num_experts)]
    kinds = (
        ("weight", "bias")
        if isinstance(leaf, ConvSpec | LinearSpec | NormSpec | PatchSpec) and leaf.bias
        else ("weight",)
    )
    if isinstance(leaf, NormSpec) and leaf.kind == "identity":
        return []
    names = [name for name, _ in leaf.parts] if isinstance(leaf, LinearSpec) else [leaf.name]
    return [f"{name}.{kind}" for name in names for kind in kinds]


OWN_NAMES = {
    "num_hidden_layers": ("n_layer", "n_layers"), "num_attention_heads": ("n_head", "n_heads"),
    "hidden_size": ("n_embd", "d_model"), "max_position_embeddings": ("n_positions", "max_seq_len"),
}  # fmt: skip
EXPERTS = {
    "num_local_experts": 3, "num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 20,
    "shared_expert_intermediate_size": 24, "norm_topk_prob": True,
}  # fmt: skip


LATENT = ("DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM", "Glm4MoeLiteForCausalLM")
"""Families whose keys and values are one latent vector."""


def config_of(architecture: str, **changes: Any) -> dict[str, Any]:
    """Return a config of any family, in its own dialect too."""
    config = BASE | {"architectures": [architecture]} | EXPERTS | changes
    if architecture in LATENT:
        config |= {"num_key_value_heads": config["num_attention_heads"], "n_routed_experts": 8, "n_group": 1,
                   "first_k_dense_replace": 0,
                   "topk_group": 1, "norm_topk_prob": architecture != "DeepseekV2ForCausalLM"}  # fmt: skip
    if architecture.startswith("GraniteMoeHybrid"):
        config |= {"mamba_n_heads": config["hidden_size"] // 4, "mamba_d_state": 16, "shared_intermediate_size": 24}
    if architecture.startswith(("Qwen3Next", "Qwen3_5", "GraniteMoeHybrid")) and "layer_types" not in changes:
        config["layer_types"] = ["linear_attention"] * (config["num_hidden_layers"] - 1) + ["full_attention"]
    if architecture.startswith("Gemma4"):
        config |= {"global_head_dim": config.get("head_dim", 16), "hidden_size_per_layer_input": 8,
                   "vocab_size_per_layer_input": config["vocab_size"], "top_k_experts": 2}  # fmt: skip
    if architecture == "Gemma4ForConditionalGeneration":
        return {"architectures": [architecture], "text_config": config}
    if architecture == "LlavaForConditionalGeneration":
        return {"architectures": [architecture], "text_config": config | {"model_type": "llama"}, "image_token_id": 0}
    if architecture == "Mistral3ForConditionalGeneration":
        return {"architectures": [architecture], "text_config": config | {"model_type": "mistral"}}
    if architecture == "Qwen3VLForConditionalGeneration":
        tower = {"out_hidden_size": config["hidden_size"], "deepstack_visual_indexes": []}
        text = config | {"model_type": "qwen3_vl_text", "rope_parameters": {"mrope_section": [2, 1, 1]}}
        return {"architectures": [architecture], "text_config": text, "vision_config": tower, "image_token_id": 0}
    if architecture.startswith("Qwen3_5") and architecture.endswith("ForConditionalGeneration"):
        kind = "qwen3_5_moe_text" if "Moe" in architecture else "qwen3_5_text"
        text = config | {"model_type": kind, "rope_parameters": {"mrope_section": [1, 0, 0]}}
        tower = {"out_hidden_size": config["hidden_size"], "depth": 2}
        return {"architectures": [architecture], "text_config": text, "vision_config": tower, "image_token_id": 0}
    return config | {own: config[name] for name, names in OWN_NAMES.items() for own in names}


GRANITE_4_H = {
    "350m": {
        "hidden_size": 768, "intermediate_size": 2048, "shared_intermediate_size": 2048, "num_attention_heads": 12,
        "num_key_value_heads": 4, "mamba_n_heads": 48, "mamba_d_head": 32, "num_hidden_layers": 32,
    },
    "1b": {
        "hidden_size": 1536, "intermediate_size": 4096, "shared_intermediate_size": 4096, "num_attention_heads": 12,
        "num_key_value_heads": 4, "mamba_n_heads": 48, "mamba_d_head": 64,
    },
    "micro": {
        "hidden_size": 2048, "intermediate_size": 8192, "shared_intermediate_size": 8192, "num_attention_heads": 32,
        "num_key_value_heads": 8, "mamba_n_heads": 64, "mamba_d_head": 64,
    },
    "tiny": {
        "hidden_size": 1536, "intermediate_size": 512, "shared_intermediate_size": 1024, "num_attention_heads": 12,
        "num_key_value_heads": 4, "mamba_n_heads": 48, "mamba_d_head": 64, "num_local_experts": 64,
        "num_experts_per_tok": 6,
    },
    "small": {
        "hidden_size": 4096, "intermediate_size": 768, "shared_intermediate_size": 1536, "num_attention_heads": 32,
        "num_key_value_heads": 8, "mamba_n_heads": 128, "mamba_d_head": 64, "num_local_experts": 72,
        "num_experts_per_tok": 10,
    },
}  # fmt: skip
"""Sizes of the released models."""
GRANITE_4_H_FIELDS: dict[str, Any] = {
    "architectures": ["GraniteMoeHybridForCausalLM"], "model_type": "granitemoehybrid", "attention_bias": False,
    "attention_dropout": 0.0, "attention_multiplier": 0.015625, "bos_token_id": 100257, "dtype": "bfloat16",
    "embedding_multiplier": 12, "eos_token_id": 100257, "hidden_act": "silu", "init_method": "mup",
    "initializer_range": 0.1, "logits_scaling": 8, "mamba_chunk_size": 256, "mamba_conv_bias": True,
    "mamba_d_conv": 4, "mamba_d_state": 128, "mamba_expand": 2, "mamba_n_groups": 1, "mamba_proj_bias": False,
    "max_position_embeddings": 131072, "normalization_function": "rmsnorm", "num_experts_per_tok": 0,
    "num_hidden_layers": 40, "num_local_experts": 0, "output_router_logits": False, "pad_token_id": 100256,
    "position_embedding_type": "nope", "residual_multiplier": 0.22, "rms_norm_eps": 1e-5, "rope_scaling": None,
    "rope_theta": 10000, "router_aux_loss_coef": 0.01, "tie_word_embeddings": True, "use_cache": True,
    "vocab_size": 100352,
}  # fmt: skip


@pytest.mark.parametrize("name", GRANITE_4_H)
def test_released_models_with_states_of_mamba_2_are_read(name):
    """Both cards and CPUs run them; layers have the kinds of the released files."""
    config = GRANITE_4_H_FIELDS | GRANITE_4_H[name]
    kinds = ["mamba"] * config["num_hidden_layers"]
    kinds[5::10] = ["attention"] * len(kinds[5::10])
    spec = read_spec(config | {"layer_types": kinds})
    assert [isinstance(each.attention, DeltaSpec) for each in spec.layers] == [kind == "mamba" for kind in kinds]
    assert all(each.rope is None for each in spec.attentions)
    assert spec.has_experts == (config["num_local_experts"] > 0)
    value = spec.layers[0].attention.value
    assert value.rule.normed == value.value_heads == config["mamba_n_heads"]
    assert lacking(HOPPER, value) is None
    assert spec == read_spec(config | {"layers_block_type": kinds})


@given(
    st.sampled_from(sorted(FAMILIES)),
    st.integers(1, 6),
    st.integers(1, 3),
    st.integers(1, 4),
    st.booleans(),
)
def test_every_tensor_has_one_place(architecture, layers, kv_heads, group, tied):
    """The checkpoint's tensors are exactly the tensors of the tree's leaves, each once."""
    tied = tied and architecture != "PhiForCausalLM"
    heads = kv_heads * group
    sizes = {"hidden_size": 8 * heads, "head_dim": 8, "num_attention_heads": heads, "num_key_value_heads": kv_heads}
    spec = read_spec(config_of(architecture, num_hidden_layers=layers, tie_word_embeddings=tied, **sizes))
    shapes = expected_tensors(spec)
    names = [name for path, leaf in leaves(spec) if path != "head" for name in tensors_of(leaf)]
    assert len(set(names)) == len(names)
    head = spec.head
    assert head is not None
    assert shapes.keys() - set(names) == (set() if tied else {*tensors_of(head)})
    assert spec.num_params == sum(math.prod(shape) for shape in shapes.values())
    paths = [path for path, _ in spec.linears()]
    assert len(set(paths)) == len(paths) >= 3 * layers + 1
    assert paths[-1] == "head"
    for layer in () if architecture in LATENT else spec.layers:
        if isinstance(layer.attention, DeltaSpec):
            assert layer.attention.qkv.outputs == layer.attention.value.inputs
        else:
            gates = heads * layer.attention.gated
            assert layer.attention.qkv.outputs == (heads + 2 * layer.kv.num_kv_heads + gates) * 8
            assert layer.attention.o.inputs == heads * 8
        rows = sorted(row for start, end in layer.attention.qkv.order for row in range(start, end))
        assert rows in ([], list(range(layer.attention.qkv.outputs)))
        if isinstance(layer.mlp, DenseSpec):
            gated = str(layer.mlp.gate_up.activation).endswith("_and_mul")
            assert layer.mlp.down.inputs * (1 + gated) == layer.mlp.gate_up.outputs


def write(folder: Path, **files: Any) -> Path:
    for name, value in files.items():
        (folder / f"{name}.json").write_text(json.dumps(value))
    return folder


def test_finding_checkpoints(tmp_path):
    with pytest.raises(ModelError, match=r"holds no config\.json"):
        find_checkpoint(str(tmp_path))
    write(tmp_path, config=BASE)
    assert find_checkpoint(str(tmp_path)) == tmp_path
    assert read_config(tmp_path) == BASE
    with pytest.raises(ModelError, match="neither a directory nor"):
        find_checkpoint(str(tmp_path / "absent"))
    with pytest.raises(ModelError, match="neither a directory nor"):
        find_checkpoint("llama")


def test_overrides_replace_fields_of_the_config(tmp_path):
    write(tmp_path, config=BASE)
    rope = {"rope_type": "linear", "factor": 2.0}
    spec = read_spec(read_config(tmp_path, {"rope_scaling": rope, "eos_token_id": 3}))
    assert (spec.max_position_embeddings, spec.eos_ids) == (1024, (3,))


def test_a_byte_order_mark_is_dropped(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(BASE), encoding="utf-8-sig")
    assert read_config(tmp_path) == BASE


def test_the_tokenizer_is_called_so_and_needs_no_config(tmp_path):
    with pytest.raises(ModelError, match=r"^tokenizer 'nowhere' is neither") as error:
        find_tokenizer(Settings(tokenizer="nowhere"))
    assert error.value.param == "tokenizer"
    assert find_tokenizer(Settings(tokenizer=str(tmp_path))) == tmp_path


def test_the_download_folder_reaches_the_hub(monkeypatch, tmp_path):
    import huggingface_hub

    folders = []

    def snapshot(model: str, **options: Any) -> str:
        folders.append(options["cache_dir"])
        return str(write(tmp_path, config=BASE))

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    find_model(Settings(model="org/name", download_dir="/models"))
    find_tokenizer(Settings(model="org/name", tokenizer="org/other", download_dir="/models"))
    find_model(Settings(model="org/name"))
    assert folders == ["/models", "/models", None]


def test_hub_errors_name_the_model(monkeypatch):
    import huggingface_hub

    asked = {}

    def refuse(model: str, **options: Any) -> str:
        asked.update(options)
        raise OSError("401 Client Error\nlong story")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", refuse)
    with pytest.raises(ModelError, match=r"'org/name' at revision v2 from the Hub: 401 Client Error$"):
        find_checkpoint("org/name", "v2", with_weights=False)
    assert asked["revision"] == "v2"
    assert "*.safetensors" not in asked["allow_patterns"]


def test_weight_files(tmp_path):
    with pytest.raises(ModelError, match="load-format dummy"):
        weight_files(tmp_path)
    for name in ("a.safetensors", "b.safetensors", "consolidated.safetensors"):
        (tmp_path / name).touch()
    assert [path.name for path in weight_files(tmp_path)] == ["a.safetensors", "b.safetensors"]
    (tmp_path / "model.safetensors").touch()
    assert [path.name for path in weight_files(tmp_path)] == ["model.safetensors"]
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"x": "b.safetensors", "y": "c.safetensors"}}))
    assert indexed_names(tmp_path) == {"x", "y"}
    with pytest.raises(ModelError, match=r"lacks c\.safetensors"):
        weight_files(tmp_path)


def test_broken_json_is_named(tmp_path):
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelError, match="not valid JSON"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ModelError, match="not hold a JSON object"):
        read_config(tmp_path)


def test_the_error_of_a_folder_of_gguf_files_names_them(tmp_path):
    with pytest.raises(ModelError, match=r"holds no config\.json$"):
        find_checkpoint(str(tmp_path))
    (tmp_path / "q.gguf").touch()
    with pytest.raises(ModelError, match=r"no config\.json, but GGUF files: give the path of one, such as .*q\.gguf"):
        find_checkpoint(str(tmp_path))
