from dataclasses import replace

import pytest

from preheat.errors import SettingsError
from preheat.limits import Limits
from preheat.plan import lines
from preheat.plan.bucket_sizes import bucket_sizes
from preheat.plan.buckets import Bucket, StepSize
from preheat.plan.candidates import candidates
from preheat.plan.options import PlanOptions
from preheat.plan.plan import make_plan
from preheat.plan.programs import Program

# The logged example: 4 sequences of up to 2,048 tokens, blocks of 128.
LIMITS = Limits(
    max_model_len=2048,
    max_num_seqs=4,
    max_num_batched_tokens=8192,
    max_num_prefill_seqs=None,
    block_size=128,
    num_blocks=1520,
)
LOGGED = PlanOptions(
    bucketing_policy="split",
    bucketing_strategy="linear",
    prompt_bs_bucket_min=1,
    prompt_bs_bucket_step=32,
    prompt_bs_bucket_max=4,
    prompt_seq_bucket_max=1024,
    decode_bs_bucket_step=128,
    decode_seq_bucket_min=128,
    decode_seq_bucket_step=128,
    decode_seq_bucket_max=2048,
)
PROMPTS = [(rows, seq) for rows in (1, 2, 4) for seq in range(128, 1025, 128)]
DECODES = [(rows, seq) for rows in (1, 2, 4) for seq in range(128, 2049, 128)]


def test_the_logged_buckets_come_out_line_by_line():
    prompt, decode = candidates(LIMITS, LOGGED)
    plan = make_plan(LIMITS, LOGGED)
    assert (
        lines.bucket_config(prompt)
        == "Prompt bucket config (min, step, max_warmup) bs:[1, 32, 4], seq:[128, 128, 1024]"
    )
    assert (
        lines.bucket_config(decode)
        == "Decode bucket config (min, step, max_warmup) bs:[1, 128, 4], seq:[128, 128, 2048]"
    )
    prompt, decode = (plan.dispatcher.phases[phase].buckets for phase in ("prompt", "decode"))
    assert lines.generated("prompt", prompt) == f"Generated 24 prompt buckets: {PROMPTS}"
    assert lines.generated("decode", decode) == f"Generated 48 decode buckets: {DECODES}"
    assert not plan.dropped


def test_the_story_of_three_sequences():
    """Sequences of 412 tokens are padded to (4, 512), until one leaves or one grows beyond."""
    plan = make_plan(LIMITS, LOGGED)
    assert plan.fit(StepSize("prompt", 3, 3 * 412, 412)) == Bucket.prompt(4, 512)
    assert plan.fit(StepSize("decode", 3, 3, 413)) == Bucket.decode(4, longest=512)
    assert plan.fit(StepSize("decode", 2, 2, 500)) == Bucket.decode(2, longest=512)
    assert plan.fit(StepSize("decode", 3, 3, 513)) == Bucket.decode(4, longest=640)


def test_warm_up_runs_the_largest_first_as_logged():
    plan = make_plan(LIMITS, LOGGED)
    for phase in ("prompt", "decode"):
        shapes = [item.bucket for item in plan.items if item.kind == phase]
        text = [lines.running(phase, s, i, len(shapes), 59517685432) for i, s in enumerate(shapes, 1)]
        if phase == "prompt":
            assert text[:3] == [
                f"[Warmup][Prompt][{i}/24] batch_size:4 seq_len:{n} free_mem:55.43 GiB"
                for i, n in ((1, 1024), (2, 896), (3, 768))
            ]
            assert text[-1] == "[Warmup][Prompt][24/24] batch_size:1 seq_len:128 free_mem:55.43 GiB"
        else:
            assert text[2] == "[Warmup][Decode][3/48] batch_size:4 seq_len:1792 free_mem:55.43 GiB"
            assert text[-2:] == [
                "[Warmup][Decode][47/48] batch_size:2 seq_len:128 free_mem:55.43 GiB",
                "[Warmup][Decode][48/48] batch_size:1 seq_len:128 free_mem:55.43 GiB",
            ]


@pytest.mark.parametrize(("seqs", "length", "block"), [(256, 4096, 64), (16, 2048, 128), (4, 100, 16)])
def test_the_defaults_of_the_twelve_variables(seqs, length, block):
    limits = Limits(
        max_model_len=length,
        max_num_seqs=seqs,
        max_num_batched_tokens=1 << 20,
        max_num_prefill_seqs=None,
        block_size=block,
        num_blocks=1 << 20,
    )
    for strategy in ("linear", "exponential", "auto"):
        prompt, decode = candidates(limits, PlanOptions(bucketing_policy="split", bucketing_strategy=strategy))
        spans = [(axis.low, axis.step, axis.high) for axis in (*prompt.axes, *decode.axes)]
        assert spans == [
            (1, min(seqs, 32), min(seqs, 64)),
            (block, block, length),
            (1, min(seqs, 32), seqs),
            (block, block, max(128, seqs * -(-length // block))),
        ]


def test_sizes_double_beyond_the_blocks_that_the_cache_has():
    """Sizes double beyond the cache's blocks as far as rows with shared prefixes need.

    A given maximum is the last.
    """
    few = replace(LIMITS, num_blocks=21)
    for sharing, asked, most in ((True, None, [32, 40, 64]), (False, None, []), (True, 20, [])):
        options = PlanOptions(bucketing_policy="split", enable_prefix_caching=sharing, decode_block_bucket_max=asked)
        _, decode = candidates(few, options)
        assert decode.axes[1].high == 20
        assert sorted({bucket.blocks for bucket in decode.buckets if bucket.blocks > 20}) == most
        fallback = make_plan(few, options).dispatcher.phases["decode"].fallback
        assert fallback == (Bucket.decode(4, blocks=64) if asked else None)


def test_exponential_sizes_have_the_number_of_points_of_the_original():
    limits = replace(LIMITS, max_num_seqs=256, max_model_len=8192, num_blocks=20_000)
    prompt, decode = candidates(limits, PlanOptions(bucketing_policy="split", bucketing_strategy="exponential"))
    assert prompt.axes[1].values == bucket_sizes("exponential", 128, 128, 8192, count=13)
    assert decode.axes[0].values == bucket_sizes("exponential", 1, 32, 256, count=9)
    assert decode.axes[1].values == bucket_sizes("exponential", 128, 128, 16384, count=15)


def test_no_bucket_is_above_the_largest_step():
    small = Limits(
        max_model_len=300,
        max_num_seqs=8,
        max_num_batched_tokens=200,
        max_num_prefill_seqs=2,
        block_size=16,
        num_blocks=51,
    )
    split = {"bucketing_policy": "split", "bucketing_strategy": "linear"}
    plan = make_plan(small, PlanOptions(**split, enable_prefix_caching=False))
    prompts, decodes = plan.dispatcher.phases["prompt"].buckets, plan.dispatcher.phases["decode"].buckets
    assert max(shape.rows for shape in prompts) == 2
    assert max(shape.tokens for shape in prompts) <= 200
    assert max(shape.blocks for shape in decodes) == 50
    assert plan.dispatcher.phases["decode"].fallback is None
    shared = make_plan(small, PlanOptions(**split)).dispatcher.phases["decode"]
    assert max(shape.blocks for shape in shared.buckets) == 8 * 19  # a shared block counts once for each row
    assert shared.fallback is None


def test_over_budget_buckets_are_listed():
    plan = make_plan(LIMITS, PlanOptions(bucketing_policy="split", bucketing_strategy="linear", prompt_bs_bucket_max=4))
    assert not [entry for entry in plan.dropped if "over budget" in entry.reason]
    tight = make_plan(
        Limits(
            max_model_len=2048,
            max_num_seqs=4,
            max_num_batched_tokens=4096,
            max_num_prefill_seqs=None,
            block_size=128,
            num_blocks=1520,
        ),
        PlanOptions(bucketing_policy="split", bucketing_strategy="linear"),
    )
    assert "over budget: 4,608 tokens exceed --max-num-batched-tokens 4,096" in {d.reason for d in tight.dropped}


def test_beyond_the_ladders_a_named_fallback_is_planned():
    plan = make_plan(LIMITS, LOGGED)
    shape = plan.fit(StepSize("prompt", 3, 3600, 1200))
    assert shape == Bucket.mixed(8192, 4)
    assert [item.fallback for item in plan.items if item.program == Program("forward", shape)] == [True]
    low = PlanOptions(decode_bs_bucket_max=2)
    assert make_plan(LIMITS, low).fit(StepSize("decode", 3, 3)) == Bucket.decode(4)


def test_unified_has_one_key_for_all_contexts():
    plan = make_plan(LIMITS, PlanOptions())
    assert set(plan.dispatcher.phases) == {"mixed", "decode"}
    assert (
        plan.fit(StepSize("decode", 3, 3, longest=2000))
        == plan.fit(StepSize("decode", 3, 3, longest=4))
        == Bucket.decode(4)
    )
    assert plan.fit(StepSize("mixed", 2, 20)) == Bucket.mixed(24, 4)
    assert all(part.fallback is None for part in plan.dispatcher.phases.values())


@pytest.mark.parametrize("seqs", [1, 2, 3, 32, 100, 255, 256, 1000])
def test_powers_of_two_and_the_most_rows_are_never_padded_in_unified(seqs):
    """Powers of two and the most rows are never padded under the unified policy.

    Tiles of kernels end there, so a step just beyond does the work of twice the rows.
    """
    limits = replace(LIMITS, max_num_seqs=seqs, num_blocks=17 * seqs)
    plan = make_plan(limits, PlanOptions())
    sizes = [rows for rows in {1 << n for n in range(11)} | {seqs} if rows <= seqs]
    assert [plan.fit(StepSize("decode", rows, rows)).rows for rows in sizes] == sizes
    assert [plan.fit(StepSize("mixed", 1, tokens)).tokens for tokens in (64, 256, 1024, 2048)] == [64, 256, 1024, 2048]


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"bucketing_policy": "both"}, "bucketing_policy must be one of"),
        ({"bucketing_strategy": "cubic"}, "strategy must be one of"),
        ({"bucketing_policy": "split", "decode_block_bucket_max": 64, "decode_seq_bucket_max": 64}, "either"),
        ({"prompt_seq_bucket_min": 9, "prompt_seq_bucket_max": 8}, "VLLM_PROMPT_SEQ_BUCKET_.*min .9. must not exceed"),
        ({"prompt_seq_bucket_min": 9, "prompt_seq_bucket_max": 8}, "skip warm-up .VLLM_SKIP_WARMUP=true"),
        ({"decode_bs_bucket_step": 0}, "VLLM_DECODE_BS_BUCKET_.*step must be at least 1"),
        ({"bucketing_strategy": "file"}, "needs the file"),
        ({"bucketing_strategy": "file", "bucketing_from_file": "/nowhere"}, "/nowhere cannot be read"),
    ],
)
def test_options_that_make_no_sense_are_refused(more, message):
    with pytest.raises(SettingsError, match=message):
        make_plan(LIMITS, PlanOptions(**more))


def test_skipping_warm_up_skips_the_mistake_too(caplog):
    plan = make_plan(LIMITS, PlanOptions(skip_warmup=True, prompt_seq_bucket_min=9, prompt_seq_bucket_max=8))
    assert "VLLM_PROMPT_SEQ_BUCKET_MIN, _STEP and _MAX are 9" in caplog.text
    assert max(bucket.tokens for bucket in plan.dispatcher.phases["mixed"].buckets) == 8192


def test_a_minimum_above_the_default_maximum_is_a_range_of_one():
    """A minimum above the default maximum is a range of one.

    It may come from the environment of a longer model.
    """
    prompt, _ = candidates(LIMITS, PlanOptions(bucketing_policy="split", prompt_seq_bucket_min=4096))
    assert prompt.axes[1].values == (2048,)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (
            {"decode_block_bucket_max": 4},
            "VLLM_DECODE_BLOCK_BUCKET_* has no effect: the length of contexts is not part",
        ),
        ({"bucketing_strategy": "linear", "bucket_pad_max": 4}, "VLLM_PROMPT_SEQ_BUCKET_*: its padding has no effect"),
    ],
)
def test_ranges_without_effect_are_named(more, message, caplog):
    make_plan(LIMITS, PlanOptions(**more))
    assert message in caplog.text


def test_a_range_alone_is_linear_and_the_others_stay_as_they_are():
    mixed, decode = candidates(LIMITS, PlanOptions(decode_bs_bucket_step=3))
    assert [axis.strategy for axis in (*mixed.axes, *decode.axes)] == ["exponential", "linear"]
    assert decode.axes[0].values == (1, 2, 3, 4)
    _, decode = candidates(LIMITS, PlanOptions(decode_bs_bucket_pad_percent=0))
    assert decode.axes[0].strategy == "padding_aware"


def test_buckets_of_equal_rows_are_one_program_without_contexts():
    """Buckets of equal rows are one program if contexts are no part of it.

    Once each bucket was a program, with padding of contexts for nothing.
    """
    limits = replace(LIMITS, max_num_seqs=16, block_size=16, num_blocks=4096)
    options = PlanOptions(bucketing_policy="split", bucketing_strategy="linear", pads_context=False)
    plan, padded = make_plan(limits, options), make_plan(limits, replace(options, pads_context=True))
    decode = plan.dispatcher.phases["decode"]
    assert decode.buckets == padded.dispatcher.phases["decode"].buckets
    assert len(decode.buckets) == 248
    programs = {plan.program_of(Program("forward", bucket)) for bucket in decode.buckets}
    assert programs == {Program("forward", Bucket.decode(rows)) for rows in (1, 2, 4, 8, 16)}
    assert padded.programs - plan.programs == len(decode.buckets) - 5
    assert {plan.program_of(item.program).size for item in plan.items if item.kind == "prompt"} == set(
        plan.dispatcher.phases["prompt"].buckets
    )
    paid = [plan.fit(StepSize("decode", rows, rows, blocks=rows)).rows / rows - 1 for rows in range(1, 17)]
    assert plan.padding["decode"].mean == pytest.approx(sum(paid) / 16, abs=0.05)
    assert padded.padding["decode"].mean > plan.padding["decode"].mean


def test_prompts_that_fit_no_bucket_together_wait_for_each_other():
    """Prompts that fit no bucket together wait for each other.

    Else every step of several prompts would run as the fallback of the whole budget.
    """
    plan = make_plan(LIMITS, PlanOptions(bucketing_policy="split", prompt_bs_bucket_max=2))
    budget = LIMITS.max_num_batched_tokens
    assert plan.padded(2, 300, 200) == 512
    assert plan.padded(3, 450, 200) > budget
    assert plan.padded(1, 2048, 2048) == 2048


def test_a_file_replaces_both_ladders(tmp_path, caplog):
    path = tmp_path / "buckets.txt"
    path.write_text(
        "([1, 2], 256, [0, 8])  # context is no part of a prompt's program\n(4, 1, range(16, 65, 16))\n(9, 64)\n"
        "(4, 2048)\n(5, 4096)\n"
    )
    options = PlanOptions(bucketing_policy="split", bucketing_from_file=str(path))
    plan = make_plan(replace(LIMITS, max_num_batched_tokens=4096), options)
    assert plan.dispatcher.phases["prompt"].buckets == (
        Bucket.prompt(4, 64), Bucket.prompt(1, 256), Bucket.prompt(2, 256)
    )  # fmt: skip
    assert [shape.blocks for shape in plan.dispatcher.phases["decode"].buckets] == [16, 32, 48, 64]
    assert [entry.reason for entry in plan.dropped] == [
        "over budget: 8,192 tokens exceed --max-num-batched-tokens 4,096"
    ]
    assert "bucket (prompt, 4, 2048) is dropped: over budget" in caplog.text
    assert plan.fit(StepSize("decode", 4, 4, blocks=60)).blocks == 64
    path.write_text("\ufeff(4, [64, 512])\n([2, 4], 1)\n", encoding="utf-8")  # as editors on Windows write it
    plan = make_plan(LIMITS, PlanOptions(bucketing_strategy="file", bucketing_from_file=str(path)))
    assert plan.fit(StepSize("mixed", 3, 65)) == Bucket.mixed(512, 4)
    assert plan.fit(StepSize("decode", 1, 1)) == Bucket.decode(2)
    assert plan.fit(StepSize("mixed", 3, 600)) == Bucket.mixed(8192, 4)


def test_entries_of_a_file_are_cut_to_the_largest_step(tmp_path):
    path = tmp_path / "buckets.txt"
    path.write_text("([2, 4], 1, range(8, 32, 8))\n(4, 1, 64)\n(9, 1, 8)\n(2, 9000)\n(1, 9000)\n")
    limits = replace(LIMITS, max_model_len=1024, max_num_batched_tokens=2048)  # 8 blocks a row
    plan = make_plan(limits, PlanOptions(bucketing_policy="split", bucketing_from_file=str(path)))
    _, decode = plan.phases
    assert [bucket.dims for bucket in decode.buckets] == [(2, 8), (2, 16), (4, 8), (4, 16), (4, 24), (4, 32)]
    assert plan.dispatcher.phases["prompt"].buckets == (Bucket.prompt(1, 1024), Bucket.prompt(2, 1024))


@pytest.mark.parametrize("line", ["(0, 5)", "(1, 1)", "(1, 1, 0)"])
def test_a_bucket_that_its_policy_cannot_run_is_skipped_and_named(tmp_path, line, caplog):
    path = tmp_path / "buckets.txt"
    path.write_text(f"{line}\n(1, 128)\n")
    plan = make_plan(LIMITS, PlanOptions(bucketing_policy="split", bucketing_from_file=str(path)))
    assert plan.dispatcher.phases["prompt"].buckets == (Bucket.prompt(1, 128),)
    assert f"bucket {line} is skipped: " in caplog.text
