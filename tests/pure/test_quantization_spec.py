"""A config's quantization, layer by layer; everything unknown is refused by name."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from preheat.backends.cpu.facts import FACTS as CPU
from preheat.backends.cuda.facts import FACTS as CUDA
from preheat.backends.hpu.facts import FACTS as HPU
from preheat.backends.support import supports
from preheat.errors import ModelError, SettingsError
from preheat.model.families import read_spec
from preheat.model.mlp_specs import ExpertsSpec
from preheat.model.quantization import bytes_by_scheme
from preheat.model.quantization_methods import METHODS
from preheat.model.spec_tree import leaves
from preheat.model.specs import ModelSpec
from preheat.model.values import check_supported
from preheat.ops.kinds import Scheme

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "vocab_size": 512, "hidden_size": 256, "intermediate_size": 384,
    "num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 128,
}  # fmt: skip
MOE = LLAMA | {
    "architectures": ["Qwen2MoeForCausalLM"], "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 128,
    "shared_expert_intermediate_size": 128, "num_key_value_heads": 2,
}  # fmt: skip
WEIGHTS = {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True, "dynamic": False}
INPUTS = {"num_bits": 8, "type": "float", "strategy": "token", "symmetric": True, "dynamic": True}
INT4 = WEIGHTS | {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128}
FP8 = Scheme(code="fp8", scales="channel", activations="token")


def ct(*, weights: Any = WEIGHTS, inputs: Any = INPUTS, targets: Any = ("Linear",), **more: Any) -> dict[str, Any]:
    group = {"targets": list(targets), "weights": weights, "input_activations": inputs}
    base = {"quant_method": "compressed-tensors", "format": "float-quantized", "ignore": ["lm_head"]}
    return base | {"config_groups": {"group_0": group}} | more


def spec_of(config: dict[str, Any] | None, model: dict[str, Any] = LLAMA, asked: str | None = None) -> ModelSpec:
    return read_spec(model if config is None else model | {"quantization_config": config}, asked)


def schemes(spec: ModelSpec) -> dict[str, Scheme]:
    return {path: leaf.scheme for path, leaf in leaves(spec) if getattr(leaf, "scheme", None)}  # type: ignore[union-attr]


LAYERS = [f"layers.{i}.{part}" for i in (0, 1) for part in ("attention.qkv", "attention.o", "mlp.gate_up", "mlp.down")]
MODULES = [
    f"model.layers.{i}.{part}_proj" for i in (0, 1)
    for part in (*(f"self_attn.{each}" for each in "qkvo"), "mlp.gate", "mlp.up", "mlp.down")
]  # fmt: skip
SAID: dict[str, tuple[dict[str, Any], Scheme]] = {
    "FP8_DYNAMIC": (ct(), FP8),
    "weights only": (ct(inputs=None), Scheme(code="fp8", scales="channel")),
    "a dynamic scale per tensor is one per token": (ct(inputs=INPUTS | {"strategy": "tensor"}), FP8),
    "static": (ct(inputs=INPUTS | {"strategy": "tensor", "dynamic": False}),
               Scheme(code="fp8", scales="channel", activations="static")),
    "asymmetric int4": (ct(weights=INT4 | {"symmetric": False}, inputs=None, format="pack-quantized"),
                        Scheme(code="int4", scales="group", group=128, zeros=True)),
    "fp8": ({"quant_method": "fp8"}, Scheme(code="fp8", scales="tensor", activations="token")),
    "fp8 in blocks": ({"quant_method": "fp8", "weight_block_size": [128, 128], "modules_to_not_convert": None},
                      Scheme(code="fp8", scales="block", group=128, activations="block")),
    "modelopt": ({"quant_method": "modelopt", "quant_algo": "FP8", "exclude_modules": ["lm_head"]},
                 Scheme(code="fp8", scales="tensor", activations="static")),
    "awq": ({"quant_method": "awq", "w_bit": 4, "q_group_size": 64},
            Scheme(code="int4", scales="group", group=64, zeros=True)),
    "gptq": ({"quant_method": "gptq", "bits": 8, "group_size": -1, "desc_act": True},
             Scheme(code="int8", scales="channel", zeros=True)),
    "gptq with desc_act": ({"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": True},
                           Scheme(code="int4", scales="group", group=128, zeros=True, indexed=True)),
    "gguf": ({"quant_method": "gguf", "modules": dict.fromkeys(MODULES, "Q4_0")},
             Scheme(code="int4", scales="group", group=32)),
}  # fmt: skip


@pytest.mark.parametrize("name", SAID)
def test_every_layer_but_the_head_has_the_scheme_of_the_config(name: str) -> None:
    config, scheme = SAID[name]
    assert schemes(spec_of(config)) == dict.fromkeys(LAYERS, scheme)
    assert schemes(spec_of(config, asked=config["quant_method"])) == dict.fromkeys(LAYERS, scheme)


def test_every_method_is_said_above_or_of_stacked_experts() -> None:
    assert {config["quant_method"] for config, _ in SAID.values()} | {"mxfp4"} == METHODS.keys()


GPT_OSS = LLAMA | {
    "architectures": ["GptOssForCausalLM"], "num_local_experts": 4, "num_experts_per_tok": 2, "num_key_value_heads": 4,
}  # fmt: skip


def test_mxfp4_is_of_stacked_experts_that_are_not_named() -> None:
    config = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}
    scheme = Scheme(code="fp4", scales="group", group=32)
    assert schemes(spec_of(config, GPT_OSS)) == {f"layers.{number}.mlp.experts": scheme for number in (0, 1)}
    config["modules_to_not_convert"].append("model.layers.1.mlp")  # type: ignore[attr-defined]
    assert schemes(spec_of(config, GPT_OSS)) == {"layers.0.mlp.experts": scheme}
    with pytest.raises(ModelError, match="stacked experts are plain or of MXFP4; fp8 per channel"):
        spec_of(ct(), GPT_OSS)


@pytest.mark.parametrize(
    "ignored",
    [
        ["lm_head", r"re:.*layers\.1\..*"],
        ["lm_head", r"re:model\.layers\.1"],
        [
            "lm_head",
            *(
                f"model.layers.1.{name}_proj"
                for name in (
                    "self_attn.q",
                    "self_attn.k",
                    "self_attn.v",
                    "self_attn.o",
                    "mlp.gate",
                    "mlp.up",
                    "mlp.down",
                )
            ),
        ],
    ],
)
def test_ignored_modules_stay_plain(ignored: list[str]) -> None:
    assert schemes(spec_of(ct(ignore=ignored))).keys() == set(LAYERS[:4])


def test_a_module_around_linear_layers_is_not_ignored() -> None:
    """The children of an ignored module are quantized all the same.

    A part of a name means nothing either.
    """
    for ignored in ("model.layers.1", "model.layers.0.mlp", "mlp", "down_proj"):
        assert schemes(spec_of(ct(ignore=["lm_head", ignored]))).keys() == set(LAYERS)


@pytest.mark.parametrize("prefix", ["language_model.model.", "model.language_model.", "model."])
def test_names_of_another_layout_are_understood(prefix: str) -> None:
    """Names may be of another layout of models that see images: the Hub's, or transformers 5's."""
    llava = {
        "architectures": ["LlavaForConditionalGeneration"], "text_config": LLAMA | {"model_type": "llama"},
        "image_token_index": 0,
    }  # fmt: skip
    head = "lm_head" if prefix == "model." else "language_model.lm_head"
    ignored = [head, f"{prefix}layers.0.mlp.down_proj", f"re:{prefix}layers.1.self_attn"]
    found = schemes(spec_of(ct(ignore=ignored), llava))
    assert found.keys() == set(LAYERS) - {"layers.0.mlp.down", "layers.1.attention.qkv", "layers.1.attention.o"}
    assert "head" in schemes(spec_of(ct(ignore=["model.lm_head.other"]), llava))


def test_names_of_a_model_without_a_head_lack_the_first_part() -> None:
    base = LLAMA | {"architectures": ["LlamaModel"]}
    ignored = ["layers.0.mlp.down_proj", r"re:layers\.1\.self_attn"]
    without = {"layers.0.mlp.down", "layers.1.attention.qkv", "layers.1.attention.o"}
    assert schemes(spec_of(ct(ignore=ignored), base)).keys() == set(LAYERS) - without
    assert schemes(spec_of(ct(ignore=[*ignored, "lm_head"]))).keys() == set(LAYERS)


def test_gptq_says_which_layers_are_plain() -> None:
    config = {"quant_method": "gptq", "bits": 4, "group_size": 128}
    mlp = {path for path in LAYERS if "mlp" in path}
    chosen = [["mlp.gate_proj", "mlp.up_proj"], ["mlp.down_proj"]]
    assert schemes(spec_of(config | {"modules_in_block_to_quantize": chosen})).keys() == mlp
    left = schemes(spec_of(config | {"dynamic": {r"-:.*self_attn": {}}}))
    assert left.keys() == mlp
    with pytest.raises(ModelError, match=r"'re:\(' is not a regular expression"):
        spec_of(config | {"dynamic": {"-:(": {}}})


def test_a_name_means_whole_words() -> None:
    config = {"quant_method": "awq", "bits": 4, "group_size": 128, "modules_to_not_convert": ["gate", "down_proj"]}
    assert schemes(spec_of(config)).keys() == {path for path in LAYERS if not path.endswith("down")}


def test_layers_may_have_different_schemes() -> None:
    """Layers may have different schemes: names count before kinds, and groups before later ones."""
    mixed = ct(format="mixed-precision")
    mixed["config_groups"] = {
        "a": {"targets": ["Linear"], "weights": WEIGHTS, "input_activations": INPUTS, "format": "float-quantized"},
        "b": {"targets": [r"re:.*down_proj$"], "weights": INT4, "input_activations": None, "format": "pack-quantized"},
    }
    found = schemes(spec_of(mixed))
    assert {path: scheme.kind for path, scheme in found.items()} == {
        path: "w4a16" if path.endswith("down") else "w8a8" for path in LAYERS
    }


def test_online_quantization_leaves_heads_and_routers() -> None:
    assert schemes(spec_of(None, asked="fp8")) == dict.fromkeys(LAYERS, FP8)
    found = schemes(spec_of(None, MOE, asked="fp8"))
    assert set(found.values()) == {FP8}
    assert {path.rpartition(".")[2] for path in found} == {"qkv", "o", "experts", "gate_up", "down"}


def test_a_head_that_is_named_is_quantized() -> None:
    assert schemes(spec_of(ct(ignore=[])))["head"] == FP8
    gptq = {"quant_method": "gptq", "bits": 4, "group_size": 128, "lm_head": True}
    assert "head" in schemes(spec_of(gptq))


REFUSED: dict[str, dict[str, Any]] = {
    "(bitsandbytes) are not supported; supported are compressed-tensors, fp8, modelopt, awq, gptq": {
        "quant_method": "bitsandbytes"
    },
    "activation_scheme 'other' is not supported; supported: dynamic, static": {
        "quant_method": "fp8", "activation_scheme": "other"
    },
    "weight_block_size [64, 64]": {"quant_method": "fp8", "weight_block_size": [64, 64]},
    "static' is not supported; supported: dynamic, with": {
        "quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "static"
    },
    "quant_algo 'NVFP4'": {"quant_method": "modelopt", "quant_algo": "NVFP4"},
    "version 'gemv'": {"quant_method": "awq", "bits": 4, "version": "gemv"},
    "zero_point False": {"quant_method": "awq", "bits": 4, "zero_point": False},
    "bits 3 is not supported; supported: 4, 8": {"quant_method": "gptq", "bits": 3},
    "checkpoint_format 'marlin'": {"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"},
    "dynamic {'+:x': {}}": {"quant_method": "gptq", "bits": 4, "dynamic": {"+:x": {}}},
    "256 inputs are not a multiple of the group size 96": {"quant_method": "gptq", "bits": 4, "group_size": 96},
    "actorder 'group'": ct(weights=INT4 | {"actorder": "group"}, inputs=None, format="pack-quantized"),
    "format 'int-quantized with 8 bits int'": ct(weights=WEIGHTS | {"type": "int"}, format="int-quantized"),
    "input_activations 'set, with pack-quantized weights'": ct(weights=INT4, format="pack-quantized"),
    "strategy 'token, static'": ct(inputs=INPUTS | {"dynamic": False}),
    "strategy 'attn_head'": ct(weights=WEIGHTS | {"strategy": "attn_head"}),
    "transform_config": ct(transform_config={"config_groups": {}}),
    "q_proj and model.layers.0.self_attn.k_proj are computed as one": ct(ignore=["lm_head", r"re:.*k_proj"]),
    "num_bits 4": ct(kv_cache_scheme={"num_bits": 4, "type": "float", "strategy": "tensor"}),
    "strategy 'channel' is not": ct(kv_cache_scheme={"num_bits": 8, "type": "float", "strategy": "channel"}),
    "weights: dynamic True": ct(weights=WEIGHTS | {"dynamic": True}),
    "sym 'yes'": {"quant_method": "gptq", "bits": 4, "sym": "yes"},
    "quantized embeddings are not supported: target 'Embedding'": ct(targets=["Linear", "Embedding"]),
    "quantized embeddings are not supported: model.embed_tokens": ct(targets=[r"re:.*embed.*"]),
    "target 'Conv2d'": ct(targets=["Conv2d"]),
    "not a regular expression": ct(ignore=["re:("]),
    "ignore must be a list of names": ct(ignore="lm_head"),
    "config_groups must be an object": ct(config_groups=[1]),
    "weights must be an object": ct(weights=None),
    "group_size must be a positive number": {"quant_method": "awq", "bits": 4, "group_size": 0},
}  # fmt: skip


@pytest.mark.parametrize("message", REFUSED)
def test_unsupported_quantization_is_named(message: str) -> None:
    with pytest.raises(ModelError) as error:
        spec_of(REFUSED[message])
    assert message in error.value.message


def test_a_tied_head_must_not_be_quantized() -> None:
    with pytest.raises(ModelError, match="lm_head has to be among the modules to ignore"):
        spec_of(ct(ignore=[]), LLAMA | {"tie_word_embeddings": True})
    assert "head" not in schemes(spec_of(ct(), LLAMA | {"tie_word_embeddings": True}))


def test_gates_of_experts_must_not_be_quantized() -> None:
    with pytest.raises(ModelError, match="shared_expert_gate is not supported"):
        spec_of(ct(), MOE)
    found = schemes(spec_of(ct(ignore=["lm_head", r"re:.*mlp\.gate$", "re:.*shared_expert_gate"]), MOE))
    assert not any("router" in path for path in found)
    gptq = schemes(spec_of({"quant_method": "gptq", "bits": 4, "group_size": 128}, MOE))
    assert not any("router" in path for path in gptq)
    with pytest.raises(ModelError, match="experts with desc_act"):
        spec_of({"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": True}, MOE)


@pytest.mark.parametrize(
    ("config", "asked", "message"),
    [
        (ct(), "fp8", "quantized by compressed-tensors"),
        (None, "awq", "only fp8, int8, int4 and inc can be made while loading"),
    ],
)
def test_a_method_that_the_checkpoint_has_not_is_an_error(config: Any, asked: str, message: str) -> None:
    with pytest.raises(SettingsError, match=message) as error:
        spec_of(config, asked=asked)
    assert error.value.param == "quantization"


def test_a_backend_refuses_schemes_without_kernels() -> None:
    awq = {
        "quant_method": "awq",
        "bits": 4,
        "group_size": 128,
        "modules_to_not_convert": ["mlp.gate", "shared_expert_gate"],
    }
    for facts in (CPU, CUDA):
        check_supported(spec_of(awq), "bfloat16", partial(supports, facts))
        check_supported(spec_of(awq, MOE), "bfloat16", partial(supports, facts))
    with pytest.raises(ModelError, match=r"^layers\.0\.attention\.qkv: .* on hpu; supported: w8a16, w4a16"):
        check_supported(spec_of(ct()), "bfloat16", partial(supports, HPU))


def test_bytes_count_codes_and_scales() -> None:
    plain = spec_of(None)
    linear = sum(leaf.weights for path, leaf in plain.linears() if path != "head")
    outputs = sum(leaf.outputs for path, leaf in plain.linears() if path != "head")
    rest = 2 * (plain.num_params - linear)
    assert bytes_by_scheme(plain, CUDA, 2) == {"not quantized": 2 * plain.num_params}
    fp8 = spec_of(ct())
    assert bytes_by_scheme(fp8, CUDA, 2) == {"not quantized": rest, FP8.name: linear + 4 * outputs}
    assert bytes_by_scheme(fp8, CPU, 2) == {"not quantized": rest, FP8.name: 8 * linear}
    awq = spec_of({"quant_method": "awq", "bits": 4, "group_size": 128})
    (size,) = (size for name, size in bytes_by_scheme(awq, CUDA, 2).items() if name != "not quantized")
    assert size == linear // 2 + linear // 128 * (4 + 4)  # scales and zero points
    experts = spec_of(None, MOE, asked="fp8")
    inside = [leaf for _, leaf in leaves(experts) if isinstance(leaf, ExpertsSpec)]
    assert all(leaf.params < leaf.weight_bytes(2) < 1.1 * leaf.params for leaf in inside)


NAMES = (
    "activation_scheme fmt ignored_layers modules_to_not_convert weight_block_size quant_algo exclude_modules ignore "
    "version bits w_bit zero_point group_size q_group_size checkpoint_format dynamic desc_act lm_head sparsity_config "
    "transform_config config_groups targets weights input_activations output_activations format type num_bits strategy "
    "symmetric actorder block_structure"
).split()
ANY = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**9), 10**9) | st.floats() | st.text(max_size=4) | st.just("re:("),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from(NAMES), inner, max_size=3),
    max_leaves=4,
)


@given(
    st.sampled_from(sorted(SAID)), st.dictionaries(st.sampled_from(NAMES), ANY, min_size=1, max_size=3), st.booleans()
)
def test_any_config_makes_a_spec_or_a_model_error(name: str, changes: dict[str, Any], deep: bool) -> None:
    config = SAID[name][0]
    if deep and "config_groups" in config:
        group = config["config_groups"]["group_0"]
        changes = {"config_groups": {"group_0": group | changes | {"weights": {**group["weights"], **changes}}}}
    made, refused = None, ""
    try:
        made = spec_of(config | changes)
    except ModelError as error:
        refused = error.message
    assert refused or (made is not None and made.layers)
