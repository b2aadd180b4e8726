"""The laws of a plan, without any engine.

They are cover, round trip, account as far as a plan goes, and closed.
"""

import dataclasses

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from preheat.errors import OutsideLimits, SettingsError
from preheat.limits import Limits
from preheat.plan.buckets import Bucket, StepSize, padded_work
from preheat.plan.candidates import candidates
from preheat.plan.dispatcher import Dispatcher, WarnOnce, build_phase
from preheat.plan.options import PlanOptions
from preheat.plan.plan import Plan, make_plan
from preheat.plan.programs import Program
from preheat.plan.regions import DecodeByBlocks, MixedRegion, PromptRegion
from preheat.plan.step_items import ForwardItem

STRATEGIES = ("auto", "linear", "exponential", "padding_aware")

limits = st.builds(
    Limits,
    max_model_len=st.integers(1, 3000),
    max_num_seqs=st.integers(1, 70),
    max_num_batched_tokens=st.integers(1, 3000),
    max_num_prefill_seqs=st.none() | st.integers(1, 40),
    block_size=st.sampled_from([1, 16, 64]),
    num_blocks=st.integers(2, 4000),
)


@st.composite
def options(draw):
    """Draw any policy and strategy, with some ranges set: low maxima leave gaps that the fallback must fill."""
    policy = draw(st.sampled_from(["unified", "split"]))
    names = ["prompt_bs", "prompt_seq", "decode_bs"]
    if policy == "split":
        names.append(draw(st.sampled_from(["decode_block", "decode_seq"])))
    asked = {}
    for name in names:
        if draw(st.booleans()):
            low, high = sorted([draw(st.integers(1, 300)), draw(st.integers(1, 2000))])
            asked |= {f"{name}_bucket_min": low, f"{name}_bucket_max": high}
            asked |= {f"{name}_bucket_step": max(high // 12, draw(st.integers(1, 64)))}
    return PlanOptions(
        bucketing_policy=policy,
        enable_prefix_caching=draw(st.booleans()),
        bucketing_strategy=draw(st.sampled_from(STRATEGIES)),
        allow_large_plan=True,
        pads_context=draw(st.booleans()),
        verify_widths=draw(st.sampled_from([(), (2,), (2, 3, 5, 8)])) if policy == "unified" else (),
        **asked,
    )


def draw_need(data, phase, at: Limits, sharing: bool, at_widths: tuple[int, ...] = ()) -> StepSize:
    """Draw any need of a step within the limits, without the plan's own idea of possible needs."""
    pool = at.num_blocks - 1
    blocks_of = lambda tokens: -(-tokens // at.block_size)  # noqa: E731
    draw = lambda low, high: data.draw(st.integers(low, high))  # noqa: E731
    most_rows = min(at.max_num_seqs, at.max_num_batched_tokens, pool)  # each has a token, and a block of its own for it
    if phase == "decode":
        rows = draw(1, most_rows)
        longest = draw(1, min(at.max_model_len, (pool - rows + 1) * at.block_size))
        most = rows * blocks_of(longest)
        blocks = draw(blocks_of(longest) + rows - 1, most if sharing else min(pool, most))
        return StepSize(phase, rows, rows, longest, blocks)
    if phase == "verify":
        widths = [width for width in at_widths if width <= at.max_num_batched_tokens]
        width = data.draw(st.sampled_from(widths))
        rows = draw(1, min(most_rows, at.max_num_batched_tokens // width))
        longest = draw(2, width)
        return StepSize(phase, rows, draw(rows + longest - 1, rows * longest), longest)
    rows = draw(1, most_rows if phase == "mixed" else min(most_rows, at.max_num_prefill_seqs or most_rows))
    longest = draw(1, min(at.max_model_len, at.max_num_batched_tokens - rows + 1))
    tokens = draw(longest + rows - 1, min(rows * longest, at.max_num_batched_tokens))
    return StepSize(phase, rows, tokens, longest)


def within_budgets(shape: Bucket, at: Limits) -> bool:
    return (
        shape.tokens <= at.max_num_batched_tokens
        and shape.rows <= at.max_num_seqs
        and shape.longest <= at.max_model_len
        and shape.blocks <= at.max_num_seqs * at.max_blocks_per_seq
    )


def plan_of(at: Limits, how: PlanOptions, **more) -> Plan:
    """Return the plan of settings that a boot takes.

    `Limits.of` refuses drafts that leave no room for a prompt.
    """
    assume(max(how.verify_widths, default=0) < at.max_model_len)
    try:
        return make_plan(at, how, **more)
    except SettingsError:
        assume(False)
        raise


@settings(max_examples=75, deadline=None)
@given(limits, options(), st.data())
def test_cover_every_need_within_the_limits_gets_a_shape_within_the_budgets(at, how, data):
    plan = plan_of(at, how)
    for phase in plan.dispatcher.phases:
        for _ in range(8):
            need = draw_need(data, phase, at, how.enable_prefix_caching, how.verify_widths)
            shape = plan.fit(need)
            assert shape.holds(need)
            assert within_budgets(shape, at)
            assert Program("forward", shape) in {item.program for item in plan.items}


@settings(max_examples=60, deadline=None)
@given(limits, options(), st.data())
def test_closed_fit_chooses_the_cheapest_of_the_plan_and_reports_misses(at, how, data):
    misses = []
    plan = plan_of(at, how, on_miss=lambda need, shape: misses.append((need, shape)))
    before = plan.dispatcher.buckets
    for phase, part in plan.dispatcher.phases.items():
        need = draw_need(data, phase, at, how.enable_prefix_caching, how.verify_widths)
        shape = plan.fit(need)
        choices = [padded_work(s) for s in part.buckets if s.holds(need)]
        if choices:
            assert padded_work(shape) == min(choices)
            assert misses == []
        else:
            assert shape == part.fallback
            assert misses == [(need, shape)]
            misses.clear()
    assert plan.dispatcher.buckets == before


@settings(max_examples=75, deadline=None)
@given(limits, st.sampled_from(STRATEGIES), st.data())
def test_reach_rows_that_share_a_prefix_have_a_bucket_of_their_size(at, strategy, data):
    """Rows that share a prefix have a bucket of their size.

    They take no fallback, with the usual ranges. A bucket beyond the cache's blocks has less than twice the step's
    blocks.
    """
    misses = []
    how = PlanOptions(bucketing_policy="split", bucketing_strategy=strategy, allow_large_plan=True)
    plan = plan_of(at, how, on_miss=lambda *miss: misses.append(miss))
    pool, most = at.num_blocks - 1, at.max_blocks_per_seq
    rows = data.draw(st.integers(1, min(at.max_rows, pool)))
    shared = data.draw(st.integers(0, min(most - 1, pool - rows)))
    own = data.draw(st.integers(rows, min(rows * (most - shared), pool - shared)))
    need = StepSize("decode", rows, rows, blocks=rows * shared + own)
    shape = plan.fit(need)
    assert shape.holds(need)
    assert misses == []
    assert plan.dispatcher.phases["decode"].fallback is None
    if need.blocks > pool:
        assert shape.blocks < 2 * need.blocks


@settings(max_examples=60, deadline=None)
@given(limits, options())
def test_round_trip_every_shape_is_the_fit_of_its_example(at, how):
    plan = plan_of(at, how)
    for shape in plan.dispatcher.buckets:
        assert plan.fit(plan.dispatcher.example(shape)) == shape


@settings(max_examples=60, deadline=None)
@given(limits, options())
def test_account_every_candidate_is_an_item_or_dropped_with_a_reason(at, how):
    plan = plan_of(at, how)
    names = [item.name for item in plan.items]
    assert len(names) == len(set(names))
    dropped = {entry.bucket for entry in plan.dropped}
    items = {item.bucket for item in plan.items if isinstance(item, ForwardItem)}
    assert not dropped & items
    wanted = {shape for phase in plan.phases for shape in (*phase.buckets, *(shape for shape, _ in phase.over))}
    assert wanted == (dropped | items) - {item.bucket for item in plan.items if item.fallback}
    assert all(entry.reason for entry in plan.dropped)


@settings(max_examples=60, deadline=None)
@given(limits, options(), st.data())
def test_shadowed_shapes_are_never_missed(at, how, data):
    """No need gets another shape if the shadowed shapes are put back."""
    plan_of(at, how)
    for phase in candidates(at, how):
        part = build_phase(phase.region, phase.buckets, phase.fallback)
        need = draw_need(data, phase.phase, at, how.enable_prefix_caching, how.verify_widths)
        choices = [shape for shape in phase.buckets if shape.holds(need)]
        cheapest = min((padded_work(shape) for shape in choices), default=None)
        found = Dispatcher([part]).find(need)
        assert (padded_work(found) if found else None) == cheapest


def test_the_cover_law_can_fail():
    """Control: a ladder without its maximum, and no fallback, leaves needs out."""
    region = MixedRegion(100, 4, 100)
    table = Dispatcher(
        [dataclasses.replace(build_phase(region, [Bucket.mixed(64, 4)], Bucket.mixed(100, 4)), fallback=None)]
    )
    with pytest.raises(OutsideLimits, match=r"\(mixed, 65, 1\)"):
        table.fit(StepSize("mixed", 1, 65))


def test_cheapest_is_not_first_in_order():
    """The cheapest shape is chosen, not the first: for (1, 100) two rows of 128 cost less than (1, 2048)."""
    region = PromptRegion(8, 2048, 8192)
    shapes = [Bucket.prompt(1, 64), Bucket.prompt(1, 2048), Bucket.prompt(2, 128)]
    table = Dispatcher([build_phase(region, shapes, Bucket.mixed(8192, 8))])
    assert table.fit(StepSize("prompt", 1, 100, 100)) == Bucket.prompt(2, 128)


def test_an_equally_large_cheaper_shape_shadows_and_is_named():
    region = DecodeByBlocks(4, 2, 100)
    shapes = [Bucket.decode(4, blocks=8), Bucket.decode(4, blocks=64), Bucket.decode(2, blocks=8)]
    part = build_phase(region, shapes, Bucket.decode(4, blocks=8))
    assert part.buckets == (Bucket.decode(2, blocks=8), Bucket.decode(4, blocks=8))
    assert part.shadowed == ((Bucket.decode(4, blocks=64), None),)
    assert part.fallback is None


def test_a_need_outside_the_limits_is_an_error():
    part = build_phase(PromptRegion(4, 64, 256), [Bucket.prompt(4, 64)], Bucket.mixed(256, 4))
    with pytest.raises(OutsideLimits):
        Dispatcher([part]).fit(StepSize("prompt", 5, 5, 1))


def test_a_frozen_plan_cannot_grow():
    plan = make_plan(Limits(
        max_model_len=64, max_num_seqs=4, max_num_batched_tokens=64, max_num_prefill_seqs=None, block_size=16,
        num_blocks=17,
    ), PlanOptions())  # fmt: skip
    with pytest.raises(dataclasses.FrozenInstanceError):
        plan.items = ()
    with pytest.raises(AttributeError):
        plan.dispatcher._phases = {}
    with pytest.raises(AttributeError):
        plan.dispatcher.more = 1
    with pytest.raises(TypeError):
        plan.dispatcher.phases["prompt"] = None
    with pytest.raises(dataclasses.FrozenInstanceError):
        plan.items[0].fallback = True


def test_a_miss_is_warned_of_once_and_counted(caplog):
    watch = WarnOnce()
    part = build_phase(PromptRegion(8, 1024, 8192), [Bucket.prompt(4, 512)], Bucket.mixed(8192, 8))
    table = Dispatcher([part], watch)
    need = StepSize("prompt", 5, 3000, 700)
    assert [table.fit(need) for _ in range(3)] == [Bucket.mixed(8192, 8)] * 3
    assert [record.getMessage() for record in caplog.records] == [
        "Configuration: (prompt, 5, 700) is beyond the bucket sizes and runs as (mixed, 8192, 8)"
    ]
    assert sum(watch.counts.values()) == 3
    for length in range(513, 1025):
        table.fit(StepSize("prompt", 1, length, length))
    assert len(caplog.records) == 100
    assert sum(watch.counts.values()) == 515
