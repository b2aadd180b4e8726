"""No field of a checkpoint that changes numbers goes unread.

It is read, or has a value that changes none, or is refused by name.
"""

from __future__ import annotations

from typing import Any

import pytest

from preheat.errors import ModelError
from preheat.model.families import FAMILIES, read_spec
from preheat.model.unread import GENERATION, METHODS, MODEL, Neutral, refuse_unread
from tests.pure.test_model_spec import LATENT, config_of
from tests.pure.test_quantization_spec import LLAMA, SAID, spec_of


def odd(name: str, neutral: Neutral) -> Any:
    """Return a value of the field that changes numbers."""
    values = neutral[name]
    if values == (True,):
        return False
    return "odd" if isinstance(values[0], str) else 3


def with_field(plain: dict[str, Any], **fields: Any) -> dict[str, Any]:
    """Return the config with these fields, in its part for text if it has one."""
    return plain | ({"text_config": plain["text_config"] | fields} if "text_config" in plain else fields)


def outcome(config: dict[str, Any]) -> object:
    """Return the spec of a config, or the text of the error."""
    try:
        return read_spec(config)
    except ModelError as error:
        return str(error)


NEEDS = {"use_sliding_window": {"max_window_layers": 0, "sliding_window": 8, "num_hidden_layers": 4}}
"""Fields without which another has no effect."""
SHARES = {"num_kv_shared_layers": 1, "layer_types": ["full_attention"] * 2, "num_hidden_layers": 2}
"""Fields without which Gemma 4 has no layer with a wide block."""


@pytest.mark.parametrize("architecture", sorted(FAMILIES))
def test_a_field_of_a_model_is_refused_by_name_or_changes_its_spec(architecture: str) -> None:
    for name in MODEL:
        wide = name == "use_double_wide_mlp" and architecture.startswith("Gemma4")
        needs = SHARES if wide else NEEDS.get(name, {})
        layers = needs.get("num_hidden_layers", 1)  # a config may name the kind of each layer
        plain = with_field(config_of(architecture, head_dim=16, num_hidden_layers=layers), **needs)
        found = [outcome(with_field(plain, **{name: value})) for value in (odd(name, MODEL), True, False, 0.5)]
        refused = any(isinstance(each, str) and name in each for each in found)
        specs = [each for each in found if not isinstance(each, str)]
        assert refused or any(each != specs[0] for each in specs), f"{architecture}: {name} is ignored"


@pytest.mark.parametrize("architecture", sorted(FAMILIES))
def test_values_that_change_nothing_are_harmless(architecture: str) -> None:
    """Values that change nothing are harmless, as are nulls, and fields that no table knows."""
    plain = config_of(architecture, head_dim=16, num_hidden_layers=1)
    base = read_spec(plain)
    stated = plain.get("text_config", plain)
    meant = {"q_lora_rank"} if architecture in LATENT else set()  # null says that queries are made in one product
    assert read_spec(with_field(plain, **dict.fromkeys(MODEL.keys() - stated.keys() - meant))) == base
    assert read_spec(with_field(plain, unheard_of=7)) == base
    own = {"scoring_func", "topk_method"} if architecture in LATENT else set()  # their routers are of another kind
    for name, values in MODEL.items():
        for value in () if name in own else values:
            found = outcome(with_field(plain, **{name: value}))
            assert not isinstance(found, str) or "is not supported, only" not in found, found


def test_lists_are_looked_into() -> None:
    plain = config_of("LlamaForCausalLM")
    read_spec(plain | {"no_rope_layers": [1, 1, 1, 1], "layer_types": ["full_attention"] * 4, "pruned_heads": {}})
    for changed in ({"no_rope_layers": [1, 1, 0, 1]}, {"layer_types": ["full_attention", "linear_attention"] * 2},
                    {"pruned_heads": {"1": [2]}}):  # fmt: skip
        with pytest.raises(ModelError, match=f"{next(iter(changed))} .* is not supported"):
            read_spec(plain | changed)


@pytest.mark.parametrize("name", SAID)
def test_a_field_of_a_method_is_refused_by_name(name: str) -> None:
    config, _ = SAID[name]
    for field in METHODS[config["quant_method"]]:
        with pytest.raises(ModelError, match=field):
            spec_of(config | {field: odd(field, METHODS[config["quant_method"]])})
    spec_of(config | {"damp_percent": 0.1, "quantized_by": "someone"})


def test_a_field_of_the_generation_config_is_refused_by_name() -> None:
    for field in GENERATION:
        with pytest.raises(ModelError, match=f"here: {field} .*; turn it off"):
            refuse_unread("here", {field: odd(field, GENERATION)}, GENERATION, hint="; turn it off")
    refuse_unread(
        "here", {"num_beams": 1, "suppress_tokens": None, "temperature": 0.3, "bad_words_ids": []}, GENERATION
    )


def test_rope_parameters_are_a_closed_set() -> None:
    plain = config_of("LlamaForCausalLM")
    read_spec(plain | {"rope_scaling": {"type": "linear", "factor": 2.0, "finetuned": True}})
    with pytest.raises(ModelError, match="rope parameter mrope_section"):
        read_spec(plain | {"rope_scaling": {"type": "default", "mrope_section": [16, 24, 24]}})
    two = {"rope_parameters": {"rope_type": "default"}, "rope_scaling": {"rope_type": "linear", "factor": 2.0}}
    with pytest.raises(ModelError, match="rope_parameters and rope_scaling with different values"):
        read_spec(plain | two)


def test_two_counts_of_experts_agree() -> None:
    config = config_of("Qwen3MoeForCausalLM", head_dim=16, num_experts=3, num_local_experts=3)
    read_spec(config)
    with pytest.raises(ModelError, match="num_local_experts 5 is not supported, only 3"):
        read_spec(config | {"num_local_experts": 5})


def test_a_reader_is_asked_before_the_table() -> None:
    """Control: one family reads a field that is refused for another family."""
    assert read_spec(config_of("Qwen3MoeForCausalLM", head_dim=16) | {"norm_topk_prob": False}) is not None
    with pytest.raises(ModelError, match="norm_topk_prob False"):
        read_spec(LLAMA | {"norm_topk_prob": False})
