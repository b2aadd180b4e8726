"""The environment of another engine boots this one.

Each variable keeps its meaning, or is said to have no effect.
"""

import itertools
import logging

import pytest

from preheat.backends.cpu.facts import FACTS as CPU
from preheat.errors import SettingsError
from preheat.limits import resolve_limits
from preheat.options import environment
from preheat.plan.buckets import Bucket, StepSize
from preheat.plan.modes import check_options, resolve, with_defaults
from preheat.plan.options import PlanOptions
from preheat.plan.plan import make_plan
from preheat.settings import OPTIONS, Settings

TWELVE = {
    f"VLLM_{phase}_{dim}_BUCKET_{part}": value
    for phase, dims in {"PROMPT": ("BS", "SEQ"), "DECODE": ("BS", "BLOCK")}.items()
    for dim in dims
    for part, value in {"MIN": "1", "STEP": "32", "MAX": "64"}.items()
}


@pytest.fixture(autouse=True)
def said(caplog):
    environment.warn.cache_clear()
    caplog.set_level(logging.WARNING)
    return caplog


def boots(env, args=None):
    """Return the plan of a boot as far as it goes without a model."""
    settings = Settings.load({"max_num_seqs": 256, "max_num_batched_tokens": 2048} | (args or {}), env)
    check_options(settings, CPU)
    resolve(CPU, settings)
    settings = with_defaults(settings, CPU)
    return make_plan(resolve_limits(settings, 2048, 1 << 16), PlanOptions.of(settings, CPU))


@pytest.mark.parametrize("name", TWELVE)
def test_each_of_the_twelve_variables_boots_and_is_not_silent_about_the_policy(name, said):
    plan = boots({name: TWELVE[name]})
    unified = "DECODE_BS" in name or name == "VLLM_PROMPT_BS_BUCKET_MAX"
    assert plan.policy.name == ("unified" if unified else "split")
    assert (name in said.text) is ("DECODE_BS" not in name)


def test_all_of_them_together_keep_their_meaning(said):
    plan = boots(TWELVE)
    prompt, decode = plan.phases
    assert (plan.policy.name, plan.strategy) == ("split", "linear")
    assert [axis.values for axis in (*prompt.axes, *decode.axes)] == [(1, 2, 4, 8, 16, 32, 64)] * 4
    (message,) = said.messages
    assert "bucketing policy split" in message
    assert all(name in message for name in TWELVE if "DECODE_BS" not in name and name != "VLLM_PROMPT_BS_BUCKET_MAX")


def test_the_largest_prompt_batch_bounds_prompts_and_not_decoding_rows(said):
    """The largest prompt batch bounds prompts, not decoding rows, under the unified policy too.

    Once it bounded both, and nearly every step with prompts ran as the fallback.
    """
    plan = boots({"VLLM_PROMPT_BS_BUCKET_MAX": "4"})
    assert plan.limits.max_num_prefill_seqs == 4
    assert all(part.fallback is None for part in plan.dispatcher.phases.values())
    assert plan.fit(StepSize("mixed", 100, 300)) == Bucket.mixed(320, 256)
    boots({"VLLM_PROMPT_BS_BUCKET_MAX": "4"})
    assert said.messages == ["VLLM_PROMPT_BS_BUCKET_MAX: the unified policy reads it as --max-num-prefill-seqs 4"]
    split = boots({"VLLM_PROMPT_BS_BUCKET_MAX": "4"}, {"bucketing_policy": "split"})
    assert max(bucket.rows for bucket in split.dispatcher.phases["prompt"].buckets) == 4
    assert split.padded(5, 500, 100) > split.limits.max_num_batched_tokens


def test_options_of_the_unified_policy_win(said):
    env = {"VLLM_PROMPT_BS_BUCKET_MAX": "4", "VLLM_DECODE_BLOCK_BUCKET_MAX": "64"}
    settings = Settings.load({"max_num_mixed_tokens": 64, "max_num_prefill_seqs": 3}, env)
    assert (settings.bucketing_policy, settings.max_num_prefill_seqs, settings.prompt_bs_bucket_max) == (
        "unified", 3, None
    )  # fmt: skip
    assert boots(env, {"bucketing_policy": "unified"}).policy.name == "unified"
    assert "VLLM_DECODE_BLOCK_BUCKET_* has no effect" in said.text


def test_a_file_alone_is_enough(tmp_path, said):
    path = tmp_path / "buckets.txt"
    path.write_text("(1, 2048, 0)\n(64, 1, 1024)\n")
    plan = boots({"VLLM_BUCKETING_FROM_FILE": str(path)})
    assert (plan.policy.name, plan.strategy) == ("split", "file")
    plan = boots({"VLLM_BUCKETING_FROM_FILE": str(path), "VLLM_PROMPT_BS_BUCKET_MAX": "4"})
    assert plan.strategy == "file"
    assert "VLLM_PROMPT_BS_BUCKET_* has no effect" in said.text
    assert boots({"VLLM_BUCKETING_FROM_FILE": str(path), "VLLM_BUCKETING_STRATEGY": "pad"}).strategy == "file"
    assert "bucketing strategy padding_aware has no effect" in said.text


@pytest.mark.parametrize(
    "env",
    [
        {"VLLM_DEBUG": "steps"},
        {"VLLM_DEBUG": "1"},
        {"PT_HPUGRAPH_DISABLE_TENSOR_CACHE": "false"},
        {"PT_HPU_ENABLE_LAZY_COLLECTIVES": "true"},
        {"PT_HPU_METRICS_GC_DETAILS": "1"},
        {"QUANT_CONFIG": "maxabs_quant_g3.json"},
        {"VLLM_PROMPT_CTX_BUCKET_MAX": "0"},
        {"VLLM_DEFRAG_WITH_GRAPHS": "true"},
    ],
)
def test_unsupported_variables_are_named_once_and_stop_no_boot(env, said):
    (name,) = env
    assert boots(env).policy.name == "unified"
    boots(env)
    (message,) = said.messages
    assert message.startswith(name)
    assert "has no effect" in message


def test_known_items_of_a_list_variable_apply():
    assert Settings.load(env={"VLLM_DEBUG": "steps,defrag"}).debug == ("defrag",)
    with pytest.raises(SettingsError, match="PREHEAT_DEBUG: 'steps' is not one of defrag"):
        Settings.load(env={"PREHEAT_DEBUG": "steps"})


@pytest.mark.parametrize("lazy", ["0", "1"])
@pytest.mark.parametrize("args", [{}, {"enforce_eager": True}, {"execution_mode": "eager"}])
def test_the_bridges_mode_boots(lazy, args):
    """The bridge's variable picks a mode that this platform has, unless an option names one."""
    env = {"PT_HPU_LAZY_MODE": lazy}
    assert boots(env, args).items
    mode = "eager" if args else {"0": "compile", "1": "graphs"}[lazy]  # by Gaudi's table
    assert resolve(CPU, Settings.load(args, env)) == mode


@pytest.mark.parametrize(
    ("env", "strategy"),
    [
        ({"VLLM_BUCKETING_STRATEGY": "exp"}, "exponential"),
        ({"VLLM_BUCKETING_STRATEGY": "lin"}, "linear"),
        ({"VLLM_BUCKETING_STRATEGY": "pad"}, "padding_aware"),
        ({"VLLM_EXPONENTIAL_BUCKETING": "true"}, "exponential"),
        ({"VLLM_EXPONENTIAL_BUCKETING": "False", "VLLM_BUCKETING_STRATEGY": "pad"}, "linear"),
        ({"VLLM_EXPONENTIAL_BUCKETING": "0", "PREHEAT_BUCKETING_STRATEGY": "exponential"}, "exponential"),
        ({"PREHEAT_BUCKETING_STRATEGY": "lin"}, "linear"),
    ],
)
def test_the_later_names_of_strategies(env, strategy):
    assert Settings.load(env=env).bucketing_strategy == strategy


def test_the_older_switch_warns_of_its_deprecation(said):
    Settings.load(env={"VLLM_EXPONENTIAL_BUCKETING": "true", "VLLM_BUCKETING_STRATEGY": "lin"})
    assert said.messages == [
        "VLLM_EXPONENTIAL_BUCKETING is deprecated: bucketing strategy exponential instead of linear"
    ]
    with pytest.raises(SettingsError, match="VLLM_EXPONENTIAL_BUCKETING"):
        Settings.load(env={"VLLM_EXPONENTIAL_BUCKETING": "maybe"})


def test_the_later_names_of_ranges():
    settings = Settings.load(
        {"block_size": 64},
        env={
            "VLLM_PROMPT_QUERY_BUCKET_MAX": "512",
            "VLLM_PROMPT_SEQ_BUCKET_MAX": "256",
            "VLLM_PROMPT_SEQ_BUCKET_STEP": "32",
            "VLLM_DECODE_BS_BUCKET_PAD_MAX": "8",
            "VLLM_DECODE_BS_BUCKET_PAD_PERCENT": "10",
        },
    )
    assert (settings.prompt_seq_bucket_max, settings.prompt_seq_bucket_step) == (512, 32)
    plan = make_plan(resolve_limits(with_defaults(settings, CPU), 2048, 1 << 16), PlanOptions.of(settings, CPU))
    by_label = {(phase.phase, axis.label): axis for phase in plan.phases for axis in phase.axes}
    assert by_label["decode", "bs"].strategy == "padding_aware"
    assert by_label["prompt", "seq"].values == (64, *range(96, 513, 32))
    assert max(b - a for a, b in itertools.pairwise(by_label["decode", "bs"].values)) <= 9


@pytest.mark.parametrize("dim", ["PROMPT_BS", "PROMPT_SEQ", "DECODE_BS", "DECODE_BLOCK"])
@pytest.mark.parametrize(("part", "value"), [("PAD_MAX", "16"), ("PAD_PERCENT", "10")])
def test_padding_can_be_set_for_each_dimension(dim, part, value):
    name = f"{dim}_BUCKET_{part}".lower()
    assert getattr(Settings.load(env={f"VLLM_{dim}_BUCKET_{part}": value}), name) == int(value)
    assert OPTIONS[name].group == "Buckets"
