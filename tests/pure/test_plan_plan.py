import argparse
import json
from dataclasses import replace
from types import SimpleNamespace

import pytest

from preheat.backends import FACTS
from preheat.errors import SettingsError
from preheat.limits import Limits
from preheat.plan import commands
from preheat.plan.buckets import Bucket, StepSize
from preheat.plan.cost import Costs, ModelSizes
from preheat.plan.options import PlanOptions
from preheat.plan.plan import make_plan
from preheat.settings import Settings
from tests.specs import LLAMA_8B

SIZES = ModelSizes.of(LLAMA_8B)
LIMITS = Limits(
    max_model_len=4096,
    max_num_seqs=256,
    max_num_batched_tokens=8192,
    max_num_prefill_seqs=None,
    block_size=64,
    num_blocks=256 * 64 + 1,
)
COSTS = Costs(SIZES, FACTS["cuda"].machine, 64)


ENGINE = {
    "dtype": "auto",
    "max_model_len": 4096,
    "max_num_seqs": 256,
    "max_num_batched_tokens": 8192,
    "max_num_prefill_seqs": None,
    "block_size": 64,
    "num_gpu_blocks_override": None,
    "kv_cache_memory_bytes": None,
}


def settings(**more):
    """Stands for Settings, which refuse the options of planning until warm-up is wired to them."""
    return SimpleNamespace(**{**vars(PlanOptions()), **ENGINE, **more})


def test_the_default_plan_of_an_8b_model_pads_little():
    plan = make_plan(LIMITS, PlanOptions(), COSTS)
    assert plan.padding["decode"].mean <= 0.10
    assert plan.padding["mixed"].mean <= 0.10
    assert plan.programs < 250
    assert plan.largest == Bucket.mixed(8192, 256)


def test_padding_is_what_it_says():
    """Against the definition, on every need in turn."""
    plan = make_plan(LIMITS, PlanOptions())
    extra = [plan.fit(StepSize("decode", rows, rows)).rows / rows - 1 for rows in range(1, 257)]
    assert plan.padding["decode"].mean == pytest.approx(sum(extra) / 256)
    assert plan.padding["decode"].worst == pytest.approx(max(extra))
    weights = {tokens: 1 / tokens for tokens in range(16, 8193)}
    extra = [w * (plan.fit(StepSize("mixed", 1, t)).tokens / t - 1) for t, w in weights.items()]
    assert plan.padding["mixed"].mean == pytest.approx(sum(extra) / sum(weights.values()), abs=0.01)
    coarse = make_plan(LIMITS, PlanOptions(decode_bs_bucket_step=128, bucketing_strategy="linear"))
    assert coarse.padding["decode"].mean > 0.25


def test_estimates_follow_the_models_sizes():
    assert SIZES.layer_params == pytest.approx(6.98e9, rel=0.01)
    assert SIZES.kv_bytes_per_token == 131072
    plan = make_plan(LIMITS, PlanOptions(), COSTS)
    small, large = plan.by_name["(mixed, 8, 256)"], plan.by_name["(mixed, 8192, 256)"]
    assert large.estimated_seconds > 5 * small.estimated_seconds > 0
    assert large.estimated_bytes > 100 * small.estimated_bytes > 0


def test_measured_costs_replace_estimates():
    measured = {"(decode, 256)": 1.5, "(swap, 8)": 2.5}
    before = make_plan(LIMITS, PlanOptions(), COSTS)
    plan = make_plan(LIMITS, PlanOptions(), Costs(SIZES, FACTS["cuda"].machine, 64, measured))
    assert plan.by_name["(decode, 256)"].estimated_seconds == 1.5
    assert plan.by_name["(swap, 8)"].estimated_seconds == 2.5
    assert plan.by_name["(decode, 256)"].estimated_bytes == before.by_name["(decode, 256)"].estimated_bytes
    assert plan.by_name["(decode, 1)"] == before.by_name["(decode, 1)"]


def test_items_come_in_stages_and_kinds_in_order():
    plan = make_plan(LIMITS, PlanOptions(), COSTS, checks=["alone vs co-batched"])
    kinds = list(dict.fromkeys(item.kind for item in plan.items))
    assert kinds == ["mixed", "decode", "sampler", "swap", "determinism", "check"]
    assert [item.key for item in plan.items if item.kind == "swap"] == [8, 16, 32, 64, 128, 256, 512]
    assert [item.stage for item in plan.items if item.kind in ("determinism", "check")] == ["last"] * 4
    assert plan.items[0].key == plan.largest


def test_swaps_belong_to_unified_and_determinism_to_invariance():
    split = make_plan(LIMITS, PlanOptions(bucketing_policy="split"))
    assert not [item for item in split.items if item.kind == "swap"]
    off = make_plan(LIMITS, PlanOptions(batch_invariant=False))
    assert not [item for item in off.items if item.kind == "determinism"]
    five = make_plan(LIMITS, PlanOptions(determinism_warmup_iterations=5))
    assert len([item for item in five.items if item.kind == "determinism"]) == 5


def test_sampling_is_padded_to_planned_sizes():
    plan = make_plan(LIMITS, PlanOptions())
    assert plan.sampler_sizes[:4] == (0, 1, 2, 4)
    assert [plan.sampler_rows(rows) for rows in (0, 1, 3, 256)] == [0, 1, 4, 256]


@pytest.mark.parametrize("policy", ["unified", "split"])
def test_no_more_rows_are_sampled_than_the_cache_has_blocks_for(policy):
    """Else warm-up would be asked for a step that cannot be."""
    plan = make_plan(replace(LIMITS, num_blocks=28), PlanOptions(bucketing_policy=policy))
    assert plan.sampler_sizes[-1] == 27


def test_a_large_plan_is_refused_naming_the_knob():
    many = {"bucketing_strategy": "linear", "prompt_seq_bucket_step": 4}
    with pytest.raises(SettingsError, match=r"raise VLLM_PROMPT_SEQ_BUCKET_STEP .now 4, .*--allow-large-plan"):
        make_plan(LIMITS, PlanOptions(**many))
    assert make_plan(LIMITS, PlanOptions(**many, allow_large_plan=True)).programs > 2000


def test_more_candidates_than_can_be_planned_are_refused_before_they_are_made():
    many = PlanOptions(
        bucketing_policy="split",
        bucketing_strategy="linear",
        decode_bs_bucket_step=1,
        decode_block_bucket_min=1,
        decode_block_bucket_step=1,
        allow_large_plan=True,
    )
    with pytest.raises(SettingsError, match=r"4,194,304 decode buckets .* raise VLLM_DECODE_BLOCK_BUCKET_STEP"):
        make_plan(LIMITS, many)


def test_the_plan_as_json():
    text = commands.plan(
        settings(bucketing_policy="split", prompt_seq_bucket_max=1024), LLAMA_8B, 8192, facts=FACTS["cpu"], as_json=True
    )
    found = json.loads(text)
    for item in found["items"]:
        assert {"kind", "shape", "stage", "estimated_seconds", "estimated_bytes"} <= set(item)
        assert item["stage"] in ("before_cache", "after_cache", "last")
        assert item["estimated_seconds"] > 0
    assert all(entry["reason"] for entry in found["dropped"])
    assert found["dropped"]
    assert {"prompt", "decode"} == set(found["padding"])
    first = next(item for item in found["items"] if item["kind"] == "prompt")
    assert set(first["shape"]) == {"rows", "longest"}


def test_the_plan_for_people():
    text = commands.plan(settings(), LLAMA_8B, 8192, facts=FACTS["cuda"])
    assert "unified policy, exponential ladders" in text
    assert "padding of decode: 8.2%" in text
    assert "(decode, 1) ... (decode, 256)" in text
    assert "fallback (mixed, 8192, 256)" in commands.plan(
        settings(bucketing_policy="split"), LLAMA_8B, 8192, facts=FACTS["cpu"]
    )


def test_limits_asked_for():
    assert commands.asked_limits(settings(), SIZES, 8192) == LIMITS
    asked = commands.asked_limits(settings(max_model_len=None, kv_cache_memory_bytes=1 << 30), SIZES, 8192)
    assert (asked.max_model_len, asked.num_blocks) == (8192, 128)
    assert commands.asked_limits(settings(num_gpu_blocks_override=7), SIZES, 8192).num_blocks == 7
    with pytest.raises(SettingsError, match="exceeds the 2048 positions"):
        commands.asked_limits(settings(), SIZES, 2048)


def test_a_cache_of_the_pad_block_alone_is_refused():
    with pytest.raises(SettingsError, match="holds nothing"):
        commands.plan(settings(num_gpu_blocks_override=1), LLAMA_8B, 8192, facts=FACTS["cpu"])


def buckets(*flags):
    parser = argparse.ArgumentParser()
    commands.add_bucket_flags(parser)
    return commands.buckets(parser.parse_args(flags))


def test_the_buckets_command():
    flags = ["--strategy", "linear", "--min", "2", "--step", "32", "--max", "64"]
    assert json.loads(buckets(*flags, "--json")) == [2, 4, 8, 16, 32, 64]
    assert buckets(*flags) == "6 buckets: 2, 4, 8, 16, 32, 64"
    more = ["--min", "0", "--step", "8", "--max", "64", "--pad-max", "16", "--pad-percent", "50", "--json"]
    assert json.loads(buckets("--strategy", "padding_aware", *more)) == [0, 1, 2, 4, 8, 16, 32, 48, 64]
    with pytest.raises(SettingsError, match="must not exceed"):
        buckets("--min", "9", "--step", "1", "--max", "8")


def test_options_carry_the_settings_names():
    """What the plan reads of the settings exists there, with the same default."""
    missing = {name for name in vars(PlanOptions()) if name not in Settings.__dataclass_fields__}
    assert missing <= {"bucket_pad_max", "bucket_pad_percent"}
    for name, value in vars(PlanOptions()).items():
        if name not in missing:
            assert getattr(Settings(), name) == value
