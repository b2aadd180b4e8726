"""A field that a config does not state has the value of the reference's config class, or the model is refused."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from typing import Any

import pytest
import transformers

from preheat.errors import ModelError
from preheat.model.families import read_spec
from preheat.model.specs import ModelSpec, attention_of
from tests.cpu.checkpoints import MODELS, SMALL, Model

KEPT = {"vocab_size", "bos_token_id", "eos_token_id", "pad_token_id", "num_nextn_predict_layers"}
"""Fields that follow other rules: ids of tokens come from the tokenizer, and layers of drafts from the checkpoint."""

COMMON = transformers.PretrainedConfig().to_dict().keys() - {"tie_word_embeddings"}
"""Fields of every config class: none changes a model's numbers."""

OF_FAMILIES = {family: (family, changes) for family, changes in reversed(MODELS.values())}
"""The first model of each family."""


def stated(model: Model) -> dict[str, Any]:
    """Return the fields of a model's config file."""
    family, changes = model
    return dict(kind(family)(**SMALL | changes).to_dict())


def kind(family: str) -> Any:
    return getattr(transformers, f"{family}Config")


def read(family: str, fields: Mapping[str, Any]) -> ModelSpec | None:
    """Return the spec of a config, None if it is refused."""
    try:
        return read_spec({**fields, "architectures": [f"{family}ForCausalLM"]})
    except ModelError:
        return None


def of_reference(family: str, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields that the reference makes of a config file's."""
    return dict(kind(family).from_dict(deepcopy(dict(fields))).to_dict())


@pytest.mark.parametrize("family", OF_FAMILIES)
def test_a_field_that_is_not_stated(family: str) -> None:
    fields = stated(OF_FAMILIES[family])
    assert read(family, fields) is not None
    unused = {"num_key_value_heads"} if "kv_lora_rank" in fields else set()  # heads share one latent vector
    for name in fields.keys() - COMMON - KEPT - unused:
        less = {other: value for other, value in fields.items() if other != name}
        found = read(family, less)
        assert found is None or found == read(family, of_reference(family, less)), name


def in_old_form(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields as transformers 4 wrote them: ``rope_theta`` beside ``rope_scaling``."""
    rope = dict(fields["rope_parameters"])
    outer = {name: rope.pop(name) for name in ("rope_theta", "partial_rotary_factor") if name in rope}
    rope["type"] = rope.pop("rope_type")
    rest = {name: value for name, value in fields.items() if name != "rope_parameters"}
    return rest | outer | {"rope_scaling": None if rope == {"type": "default"} else rope}


def test_the_old_form_of_rope() -> None:
    models = {name: stated(model) for name, model in MODELS.items()}
    turns = {name: each for name, each in models.items() if "rope_type" in (each.get("rope_parameters") or {})}
    assert len(turns) > 40  # the others do not turn, or turn by layer
    for name, fields in turns.items():
        family, old = MODELS[name][0], in_old_form(fields)
        assert read(family, old) == read(family, of_reference(family, old)) == read(family, fields) is not None, name


def test_windows_that_no_layer_has() -> None:
    """Layers of EXAONE 4 turn if the config has no window, and not only if no layer has one."""
    fields = stated(MODELS["exaone 4 without windows"])
    without, idle = read("Exaone4", fields), read("Exaone4", fields | {"sliding_window": 5})
    assert without is not None and idle is not None
    assert all(attention_of(layer).rope for layer in without.layers)
    assert not any(attention_of(layer).rope for layer in idle.layers)


@pytest.mark.parametrize("family", ["Qwen2", "Qwen3", "Qwen3Moe", "SmolLM3"])
def test_windows_that_the_config_contradicts(family: str) -> None:
    """The reference fails, or sees a window by one kernel of attention and not by another."""
    fields = stated(OF_FAMILIES[family]) | {"use_sliding_window": False, "sliding_window": 9}
    kinds = ["sliding_attention"] + ["full_attention"] * (fields["num_hidden_layers"] - 1)
    assert read(family, fields | {"layer_types": kinds[::-1][:-1] + kinds[1:2]}) is not None
    assert read(family, fields | {"layer_types": kinds}) is None


def test_an_outer_length_wins() -> None:
    """The reference prefers the config's own field to the same field of the rope's parameters."""
    family, fields = MODELS["qwen3 with yarn"][0], stated(MODELS["qwen3 with yarn"])
    both = fields | {"original_max_position_embeddings": 32}
    assert read(family, both) == read(family, of_reference(family, both)) != read(family, fields)
