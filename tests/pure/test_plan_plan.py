import argparse
import json
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest

from preheat.backends.cpu.facts import FACTS as CPU
from preheat.backends.cuda.facts import FACTS as CUDA
from preheat.backends.hpu.facts import FACTS as HPU
from preheat.errors import SettingsError
from preheat.limits import Limits, resolve_limits
from preheat.plan import commands
from preheat.plan.buckets import Bucket, StepSize
from preheat.plan.cache_items import SwapItem
from preheat.plan.cost import Costs, ModelSizes
from preheat.plan.modes import step_limits, with_defaults
from preheat.plan.of_model import for_model
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
COSTS = Costs(SIZES, CUDA.machine, 64)


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
    return Settings(**ENGINE | more)


def by_name(plan):
    return {item.name: item for item in plan.items}


def test_the_default_plan_of_an_8b_model_pads_little():
    plan = make_plan(LIMITS, PlanOptions(), COSTS)
    assert plan.padding["decode"].mean <= 0.10
    assert plan.padding["mixed"].mean <= 0.10
    assert plan.programs < 250
    assert plan.items[0].bucket == Bucket.mixed(8192, 256)


def test_reported_padding_equals_its_definition():
    """The reported padding equals its definition, computed on every need in turn."""
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
    small, large = (by_name(plan)[name].estimate for name in ("(mixed, 8, 256)", "(mixed, 8192, 256)"))
    assert large.seconds > 5 * small.seconds > 0
    assert large.bytes > 100 * small.bytes > 0


def test_measured_costs_replace_estimates():
    measured = {"(decode, 256)": 1.5, "(swap, 8)": 2.5}
    before = make_plan(LIMITS, PlanOptions(), COSTS)
    plan = make_plan(LIMITS, PlanOptions(), Costs(SIZES, CUDA.machine, 64, measured))
    items, others = by_name(plan), by_name(before)
    assert items["(decode, 256)"].estimate.seconds == 1.5
    assert items["(swap, 8)"].estimate.seconds == 2.5
    assert items["(decode, 256)"].estimate.bytes == others["(decode, 256)"].estimate.bytes
    assert items["(decode, 1)"] == others["(decode, 1)"]


def test_items_come_in_stages_and_kinds_in_order():
    plan = make_plan(LIMITS, PlanOptions(), COSTS, checks=["alone vs co-batched"])
    kinds = list(dict.fromkeys(item.kind for item in plan.items))
    assert kinds == ["mixed", "decode", "sampler", "swap", "determinism", "check"]
    assert [item.pairs for item in plan.items if isinstance(item, SwapItem)] == [8, 16, 32, 64, 128, 256, 512]
    assert [item.stage for item in plan.items if item.kind in ("determinism", "check")] == ["last"] * 4
    assert plan.items[0].bucket == max(plan.dispatcher.buckets, key=lambda bucket: bucket.tokens)


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
    """No more rows are sampled than the cache has blocks for, else warm-up would need an impossible step."""
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
        settings(bucketing_policy="split", prompt_seq_bucket_max=1024), LLAMA_8B, 8192, facts=CPU, as_json=True
    )
    found = json.loads(text)
    for item in found["items"]:
        assert {"kind", "shape", "stage", "estimated_seconds", "estimated_bytes"} <= set(item)
        assert item["stage"] in ("first", "after_cache", "last")
        assert item["estimated_seconds"] > 0
    assert all(entry["reason"] for entry in found["dropped"])
    assert found["dropped"]
    assert {"prompt", "decode"} == set(found["padding"])
    first = next(item for item in found["items"] if item["kind"] == "prompt")
    assert set(first["shape"]) == {"rows", "longest"}


def test_the_plan_for_people():
    text = commands.plan(settings(), LLAMA_8B, 8192, facts=CUDA)
    assert "unified policy, exponential bucket sizes" in text
    assert "padding of decode: 8.2%" in text
    assert "(decode, 1) ... (decode, 256)" in text
    assert "fallback (mixed, 8192, 256)" in commands.plan(settings(bucketing_policy="split"), LLAMA_8B, 8192, facts=CPU)


def test_limits_asked_for():
    block = 64 * SIZES.kv_bytes_per_token
    assert resolve_limits(settings(), 8192, block) == LIMITS
    asked = resolve_limits(settings(max_model_len=None, kv_cache_memory_bytes=1 << 30), 8192, block)
    assert (asked.max_model_len, asked.num_blocks) == (8192, 128)
    assert resolve_limits(settings(num_gpu_blocks_override=7), 8192, block).num_blocks == 7
    with pytest.raises(SettingsError, match="exceeds the 2048 positions"):
        resolve_limits(settings(), 2048, block)


@pytest.mark.parametrize(("facts", "usual", "routed"), [(CPU, 1024, 1024), (HPU, 2048, 2048), (CUDA, 2048, 8192)])
def test_a_gpu_has_more_tokens_a_step_for_experts(facts, usual, routed):
    def tokens(asked=None, **model):
        spec = SimpleNamespace(**{"has_experts": True, "encodes": False, "max_position_embeddings": 9000} | model)
        return for_model(settings(max_num_batched_tokens=asked, max_model_len=None), facts, spec).max_num_batched_tokens

    assert (tokens(has_experts=False), tokens(), tokens(512)) == (usual, routed, 512)
    assert tokens(encodes=True) == 9000
    assert not LLAMA_8B.has_experts


def test_limits_that_are_not_set_are_the_backends():
    unset = settings(max_num_seqs=None, max_num_batched_tokens=None)
    sizes = [step_limits(unset, facts) for facts in (CPU, CUDA)]
    assert sizes == [(64, 1024), (256, 2048)]
    assert step_limits(settings(max_num_seqs=None), CPU) == (64, 8192)
    assert resolve_limits(with_defaults(unset, CPU), 8192, 1000).max_num_seqs == 64
    with pytest.raises(ValueError, match="no defaults before there is a backend"):
        resolve_limits(unset, 8192, 1000)
    assert "64 sequences x 4,096 tokens, 1,024 tokens a step" in commands.plan(unset, LLAMA_8B, 8192, facts=CPU)


def test_limits_follow_the_memory_that_is_there():
    usable = partial(resolve_limits, max_positions=8192, block_bytes=1000)
    assert usable(settings(), usable=500_500).num_blocks == 500
    assert usable(settings(), usable=500_500, cache_bytes=9_000).num_blocks == 9
    assert usable(settings(kv_cache_memory_bytes=400_000), usable=500_500, cache_bytes=9_000).num_blocks == 400
    assert usable(settings(), usable=1 << 60).num_blocks == LIMITS.num_blocks
    assert usable(settings(num_gpu_blocks_override=7), usable=500_500).num_blocks == 7
    assert usable(settings(num_gpu_blocks_override=500), usable=500_500).num_blocks == 500
    with pytest.raises(SettingsError, match=r"num_gpu_blocks_override 501 takes .* there is room for 500 blocks"):
        usable(settings(num_gpu_blocks_override=501), usable=500_500)
    with pytest.raises(SettingsError, match="kv_cache_memory_bytes 600000 is more than the 500500 bytes"):
        usable(settings(kv_cache_memory_bytes=600_000, gpu_memory_utilization=0.9), usable=500_500)


def test_a_cache_of_the_pad_block_alone_is_refused():
    with pytest.raises(SettingsError, match="holds nothing"):
        commands.plan(settings(kv_cache_memory_bytes=64 * SIZES.kv_bytes_per_token), LLAMA_8B, 8192, facts=CPU)


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
    """Each setting that the plan reads exists under its name, with the same default."""
    missing = {name for name in vars(PlanOptions()) if name not in Settings.__dataclass_fields__}
    assert missing == {
        "pads_context", "host_sampler", "grammars", "draft_model", "measures_drafts", "pools", "verify_widths",
            "functions",
    }  # fmt: skip
    for name, value in vars(PlanOptions()).items():
        if name not in missing:
            assert getattr(Settings(), name) == (None if name == "bucketing_policy" else value)  # a device's own
