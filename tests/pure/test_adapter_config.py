"""An adapter's config, by PEFT's rules."""

import pytest

from preheat.errors import AdapterError
from preheat.lora.config import AdapterConfig

PLAIN = {"r": 8, "lora_alpha": 16, "target_modules": ["q_proj", "v_proj"]}
MODULES = [
    f"model.layers.{layer}.{name}"
    for layer in range(12)
    for name in ("self_attn.q_proj", "self_attn.v_proj", "mlp.down_proj", "mlp.experts.1.down_proj")
] + ["lm_head"]


def config(**fields):
    return AdapterConfig.of(PLAIN | fields).about(MODULES)


def test_ranks_and_scales():
    plain = config()
    assert (plain.rank_of(MODULES[0]), plain.scale_of(MODULES[0])) == (8, 2.0)
    assert config(use_rslora=True, r=16).scale_of(MODULES[0]) == 4.0


def test_the_first_pattern_that_matches_wins():
    patterned = config(
        rank_pattern={r"layers\.1\.self_attn\.q_proj": 4, "q_proj": 2, "^model.layers.2.self_attn.v_proj": 32},
        alpha_pattern={"self_attn.q_proj": 5, r".*\.1\..*": 6},
    )
    first, other, begins, eleventh = (f"model.layers.{name}_proj" for name in (
        "1.self_attn.q", "3.self_attn.q", "2.self_attn.v", "11.self_attn.q",
    ))  # fmt: skip
    assert [patterned.rank_of(name) for name in (first, other, begins, eleventh)] == [4, 2, 32, 2]
    assert [patterned.scale_of(name) for name in (first, other, begins)] == [5 / 4, 5 / 2, 16 / 32]
    assert patterned.scale_of("model.layers.1.mlp.down_proj") == 6 / 8


def test_the_fields_of_a_config_choose_modules():
    def named(**fields):
        asked = config(**fields)
        return {module for module in MODULES if asked.names(module)}

    assert len(named()) == 24
    assert named(layers_to_transform=0) == {MODULES[0], MODULES[1]}
    down = {"layers_to_transform": [1], "target_modules": ["down_proj"]}
    assert named(**down) == named(**down, layers_pattern="layers") == set(MODULES[6:8])
    assert named(**down, layers_pattern=["experts"]) == set(MODULES[3::4])
    assert named(layers_to_transform=[1], target_modules=[MODULES[0]]) == {MODULES[0]}
    assert named(target_modules=r".*layers\.[0-2]\.mlp\.down_proj") == {MODULES[2], MODULES[6], MODULES[10]}
    assert named(target_modules="all-linear") == set(MODULES[:-1])
    assert named(exclude_modules=["v_proj"]) == named(target_modules=["q_proj"])
    assert named(exclude_modules=r".*\.(\d\d|[1-9])\..*") == {MODULES[0], MODULES[1]}
    assert named(target_modules=["proj"]) == set()


REFUSED = {
    "use_dora": True,
    "alora_invocation_tokens": [1, 2],
    "lora_bias": True,
    "layer_replication": [[0, 4], [2, 5]],
    "use_qalora": True,
    "use_bdlora": {"nblocks": 2},
    "modules_to_save": ["lm_head"],
    "trainable_token_indices": [5],
    "target_parameters": "mlp.experts.gate_up_proj",
    "arrow_config": {"top_k": 2},
    "kasa_config": {"beta": 1e-4},
    "monteclora_config": {"num_samples": 8},
    "velora_config": {"num_groups": 64},
    "fan_in_fan_out": True,
    "bias": "lora_only",
    "peft_type": "ADALORA",
    "use_something_new": True,
    "r": 0,
    "lora_alpha": None,
    "target_modules": [],
    "rank_pattern": {"q_proj": 2.5},
    "alpha_pattern": {"q_(proj": 2},
    "layers_to_transform": ["1"],
    "exclude_modules": [1],
}


@pytest.mark.parametrize("field", REFUSED)
def test_unsupported_fields_are_refused_by_name(field):
    with pytest.raises(AdapterError, match=field) as error:
        config(**{field: REFUSED[field]})
    assert error.value.status == 400


@pytest.mark.parametrize("init", ["pissa", "pissa_niter_16", "olora", "OLoRA", "corda", "loftq", "lora_ga", "newest"])
def test_beginnings_that_change_the_base_model(init):
    with pytest.raises(AdapterError, match="init_lora_weights"):
        config(init_lora_weights=init)


@pytest.mark.parametrize("init", [True, False, "gaussian", "eva", "orthogonal"])
def test_beginnings_that_do_not(init):
    unset = dict.fromkeys(REFUSED.keys() - PLAIN.keys() - {"bias", "peft_type"})
    assert config(init_lora_weights=init, peft_version="0.21.2", lora_dropout=0.1, **unset).config.rank == 8


def test_a_file_that_is_not_there_or_no_object(tmp_path):
    with pytest.raises(AdapterError, match=r"no adapter_config\.json"):
        AdapterConfig.read(tmp_path)
    (tmp_path / "adapter_config.json").write_text("[]")
    with pytest.raises(AdapterError, match="JSON object"):
        AdapterConfig.read(tmp_path)


@pytest.mark.parametrize("number", [float("inf"), float("nan"), 10**400, -(10**400), "8", True])
def test_a_number_that_is_not_finite_is_refused_by_name(number):
    with pytest.raises(AdapterError, match="lora_alpha must be a finite number"):
        config(lora_alpha=number)
    with pytest.raises(AdapterError, match="alpha_pattern must be a finite number"):
        config(alpha_pattern={"q_proj": number})
