"""Drafters, the number of drafts, and the options of both. Without torch."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from preheat.configs.speculation import AUTO_MOST, Speculation
from preheat.core import SamplingParams, Stats
from preheat.errors import SettingsError
from preheat.execution.step_size import step_size_of
from preheat.limits import Limits
from preheat.metrics import Metrics
from preheat.plan.buckets import Bucket
from preheat.plan.options import PlanOptions
from preheat.plan.plan import Plan, make_plan
from preheat.plan.repeat_items import PaceItem
from preheat.plan.step_items import DraftItem, ForwardItem
from preheat.plan.step_times import StepTimes
from preheat.schedule.draft_length import PATIENCE, SOONEST, TRIALS, MeasuredLength
from preheat.schedule.ngram import NgramProposer
from preheat.schedule.slots import Slots
from preheat.schedule.suffix import SuffixProposer, SuffixTree
from preheat.settings import Settings
from preheat.warmup.dummy_batch import DummyBatches
from tests.pure.paper import request

NGRAM = {"method": "ngram", "num_speculative_tokens": 3}


def asked(**options) -> Speculation | None:
    return Settings.load(options, env={}).speculation


def test_nothing_is_asked_by_default():
    assert asked() is None


@pytest.mark.parametrize(("options", "expected"), [
    ({"speculative_config": NGRAM}, Speculation(method="ngram", tokens=3)),
    ({"speculative_config": '{"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 4}'},
     Speculation(method="ngram", tokens=3, lookup=(1, 4))),
    ({"speculative_model": "[ngram]", "num_speculative_tokens": 5, "ngram_prompt_lookup_max": 4,
      "ngram_prompt_lookup_min": 2}, Speculation(method="ngram", tokens=5, lookup=(2, 4))),
    ({"speculative_model": "some/model", "num_speculative_tokens": 2},
     Speculation(method="draft_model", tokens=2, model="some/model")),
    ({"speculative_config": {"model": "m", "num_speculative_tokens": 2, "draft_tensor_parallel_size": 1}},
     Speculation(method="draft_model", tokens=2, model="m")),
    ({"speculative_config": {"method": "suffix", "num_speculative_tokens": 9, "suffix_decoding_max_tree_depth": 8,
                             "suffix_decoding_max_cached_requests": 0, "suffix_decoding_max_spec_factor": 2,
                             "suffix_decoding_min_token_prob": 0.3}},
     Speculation(method="suffix", tokens=9, depth=8, requests=0, factor=2.0, likely=0.3)),
    ({"speculative_config": {"method": "ngram", "num_speculative_tokens": "auto"}},
     Speculation(method="ngram", tokens=AUTO_MOST, auto=True)),
    ({"speculative_config": {"method": "mtp", "num_speculative_tokens": 2}}, Speculation(method="mtp", tokens=2)),
    ({"speculative_config": {"method": "qwen3_next_mtp", "num_speculative_tokens": 2}},
     Speculation(method="mtp", tokens=2)),
    ({"speculative_config": NGRAM, "speculative_k": "auto"}, Speculation(method="ngram", tokens=3, auto=True)),
])  # fmt: skip
def test_options_in_vllms_words(options, expected):
    assert asked(**options) == expected


@pytest.mark.parametrize(("options", "said"), [
    ({"speculative_config": {**NGRAM, "lookup": 3}}, "unknown key 'lookup'"),
    ({"speculative_config": {"method": "medusa", "model": "m", "num_speculative_tokens": 3}}, "medusa is not"),
    ({"speculative_config": {"method": "mlp_speculator", "num_speculative_tokens": 3}}, "out of use"),
    ({"speculative_config": {"method": "eagle", "model": "m", "num_speculative_tokens": 3}}, "EAGLE-1 and 2"),
    ({"speculative_config": {"method": "mtp", "model": "m", "num_speculative_tokens": 3}}, "leave 'm' out"),
    ({"speculative_config": {"method": "mimo_mtp", "num_speculative_tokens": 3}}, "a family of checkpoints that"),
    ({"speculative_config": {"method": "eagle3", "num_speculative_tokens": 3}}, 'eagle3 needs the "model"'),
    ({"speculative_config": {"method": "ngrams", "num_speculative_tokens": 3}}, "did you mean"),
    ({"speculative_config": {**NGRAM, "rejection_sample_method": "fly"}}, "rejection_sample_method is not supported"),
    ({"speculative_config": {**NGRAM, "draft_tensor_parallel_size": 2}}, "one device"),
    ({"speculative_config": {"method": "ngram"}}, "num_speculative_tokens is missing"),
    ({"speculative_config": {"num_speculative_tokens": 3}}, "no method of drafting is named"),
    ({"speculative_config": NGRAM, "num_speculative_tokens": 4}, "give it once"),
    ({"speculative_config": {**NGRAM, "prompt_lookup_max": 2, "prompt_lookup_min": 3}}, "change one of them"),
    ({"speculative_config": {**NGRAM, "suffix_decoding_max_tree_depth": 3}}, "belongs to method suffix"),
    ({"speculative_config": {"method": "draft_model", "num_speculative_tokens": 3}}, 'needs the "model"'),
    ({"speculative_config": {**NGRAM, "num_speculative_tokens": 129}}, "between 1 and 128"),
    ({"speculative_config": {**NGRAM, "num_speculative_tokens": True}}, "is not a number"),
    ({"speculative_model": "[ngram]"}, "num_speculative_tokens is missing"),
    ({"speculative_k": "auto"}, "needs a method of drafting"),
    ({"num_scheduler_steps": 4, "async_scheduling": False}, "drop one of them"),
])  # fmt: skip
def test_unsupported_speculation_is_refused_by_name(options, said):
    with pytest.raises(SettingsError, match=said):
        asked(**options)


def sequence(tokens: list[int], number: int = 0, prompt: int = 1, size: int = 400) -> Slots:
    slots = Slots(2, size, 16)
    slots.take(request(number, tokens[:prompt], 1), np.array(tokens, np.int32))
    return slots


def drafts_of(proposer, tokens: list[int], most: int) -> list[int]:
    return proposer.propose(sequence(tokens), np.array([0]), np.array([most]))[0].tolist()


@given(st.lists(st.integers(0, 3), min_size=1, max_size=60), st.integers(1, 3), st.integers(0, 3), st.integers(1, 6))
def test_lookup_finds_the_longest_match_at_its_earliest_place(tokens, least, more, count):
    found = drafts_of(NgramProposer(count, least, least + more), tokens, count)
    expected: list[int] = []
    for length in range(min(least + more, len(tokens) - 1), least - 1, -1):
        ends = [at for at in range(length, len(tokens)) if tokens[at - length : at] == tokens[len(tokens) - length :]]
        if ends:
            expected = tokens[ends[0] : ends[0] + count]
            break
    assert found == expected


def stretches(texts: list[list[int]], depth: int) -> dict[tuple[int, ...], int]:
    counts: dict[tuple[int, ...], int] = {}
    for text in texts:
        for start in range(len(text)):
            for end in range(start + 1, min(start + depth, len(text)) + 1):
                stretch = tuple(text[start:end])
                counts[stretch] = counts.get(stretch, 0) + 1
    return counts


TEXTS = st.lists(st.lists(st.integers(0, 3), max_size=12), max_size=5)


@given(TEXTS, st.integers(1, 5), st.integers(0, 4))
def test_a_suffix_tree_counts_all_stretches_whole_or_in_parts_and_forgets(texts, depth, gone):
    tree = SuffixTree(depth)
    for text in texts:
        for at in range(1, len(text) + 1):  # as a sequence that grows
            tree.add(text[max(at - 1 - depth, 0) : at], 1)
    for text in texts[:gone]:
        tree.add(text, times=-1)
    left = stretches(texts[gone:], depth)
    assert tree.nodes == len(left)
    for stretch, count in left.items():
        node = tree._find(stretch)
        assert node is not None
        assert node.count == count


def test_suffix_drafts_follow_the_most_frequent_continuation():
    proposer = SuffixProposer(4, depth=8, requests=2, factor=8.0, likely=0.5)
    assert drafts_of(proposer, [1, 2, 3, 4, 1, 2], 3) == [3, 4, 1]
    assert drafts_of(proposer, [7, 8], 3) == []
    for number, answer in enumerate(([7, 8, 5, 6], [7, 8, 5, 9], [7, 8, 4, 4])):
        proposer.ended(sequence([0, *answer], number), [0])
        assert len(proposer._answers) <= 2
    assert drafts_of(proposer, [0, 7, 8], 3) == [4, 4]  # the oldest is forgotten: 5 and 4 follow as often
    assert proposer.past.nodes == len(stretches([[7, 8, 5, 9], [7, 8, 4, 4]], 8))
    proposer.ended(sequence([0, 3, 3, 3], -7), [0])  # a dummy request's
    assert len(proposer._answers) == 2


def test_suffix_drafts_are_bounded_for_each_matched_token():
    proposer = SuffixProposer(8, depth=8, requests=0, factor=1.0, likely=0.0)
    assert drafts_of(proposer, [1, 2, 3, 4, 5, 6, 1, 2], 8) == [3, 4]


def steps(rows: int, drafts: int) -> float:
    """Return a step's cost. It grows with rows and drafts: a little, and steeply above eight of them."""
    return 1.0 + 0.02 * rows * drafts + max(rows * (1 + drafts) - 8, 0) / 8


@pytest.mark.parametrize(
    ("rows", "right", "expected"), [(1, 1.0, 7), (1, 0.0, 0), (8, 0.0, 0), (32, 0.2, 0), (1, 0.6, 4)]
)
def test_as_many_tokens_are_drafted_as_pay(rows, right, expected):
    chance, length = random.Random(0), MeasuredLength((2, 3, 5, 8), steps)
    chosen = []
    for _ in range(300):
        most = length.most(rows, 7)
        keep = length.keep(rows, [most] * rows) if most else 0
        chosen.append(keep)
        if keep:
            accepted = [next((i for i in range(keep) if chance.random() >= right), keep) for _ in range(rows)]
            length.learn(np.full(rows, keep), np.array(accepted))
    usual = max(set(chosen[100:]), key=chosen[100:].count)
    assert usual == expected
    if not right:  # then it tries again now and then
        lost = sum(steps(rows, keep) - steps(rows, 0) for keep in chosen[100:])
        assert 0 < sum(map(bool, chosen[100:])) <= 200 / SOONEST + 1
        assert lost <= 200 * TRIALS * steps(rows, 0) + steps(rows, 1)  # it begins with one


@pytest.mark.parametrize("right", [0.0, 1.0])
def test_a_row_has_more_drafts_only_once_some_were_accepted(right):
    """A row has more drafts only once some were accepted.

    So drafts that are never right cost little until they are given up, and right drafts are all used soon.
    """
    length, chosen, lost = MeasuredLength((2, 3, 5, 8), lambda _, drafts: 1.0 + 0.05 * drafts), [], 0.0
    for _ in range(384):
        most = length.most(1, 7)
        chosen.append(length.keep(1, [most]) if most else 0)
        if chosen[-1]:
            length.learn(np.array(chosen[-1:]), np.array([int(right * chosen[-1])]))
            lost += 0.05 * chosen[-1]
    if right:
        assert chosen[:3] == [1, 2, 4] and chosen == sorted(chosen) and chosen[10] == 7
    else:
        assert max(chosen) == 1 and lost < 0.01 * len(chosen)


@pytest.mark.parametrize("rows", [1, 32])
def test_drafts_that_become_right_are_soon_used(rows):
    length = MeasuredLength((2, 3, 5, 8), lambda rows, drafts: 1.0 + 0.01 * rows * drafts)
    chosen = []
    for step in range(4000):
        most = length.most(rows, 7)
        chosen.append(length.keep(rows, [most] * rows) if most else 0)
        if chosen[-1]:
            length.learn(np.full(rows, chosen[-1]), np.full(rows, chosen[-1] if step >= 3000 else 0))
    assert sum(map(bool, chosen[2000:3000])) <= 1000 / SOONEST + 1
    assert all(chosen[3000 + 2 * SOONEST :])


def test_a_draft_model_is_not_asked_where_it_does_not_pay():
    dear = MeasuredLength((2, 8), steps, lambda rows: 2.0)
    assert dear.most(1, 7) == 0
    cheap = MeasuredLength((2, 8), steps, lambda rows: 0.01)
    assert cheap.most(1, 7) > 0
    asked = [dear.most(1, 7) > 0 for _ in range(500)]  # nothing is drafted: a trial waits a while, and ends
    assert sum(asked) == 2 * PATIENCE
    assert asked.index(True) == (steps(1, 1) + 2.0 - steps(1, 0)) / TRIALS - 2  # one step was before


@settings(max_examples=25)
@given(
    st.lists(st.floats(0.0, 1.0), min_size=4, max_size=4), st.integers(1, 64), st.sampled_from([0.0, 0.02, 0.3]),
    st.booleans(), st.sampled_from([1.0, 0.5, 0.1]),
)  # fmt: skip
def test_law_drafts_that_are_never_right_cost_no_time(more, rows, asking, waits, finds):
    """Hardly any of 2,000 steps has or asks for drafts, if drafts are never right.

    All steps together last at most 2 % longer than without drafts. The law holds for any cost of drafts, and for a
    proposer with drafts in each step or in few steps.
    """
    added = dict(zip((0, 1, 2, 4, 7), [0.0, *np.cumsum(more).tolist()], strict=True))
    length = MeasuredLength((2, 3, 5, 8), lambda _, drafts: 1.0 + added[drafts], lambda _: asking, waits=waits)
    chance, asked, drafted, lost = random.Random(0), 0, 0, 0.0
    for _ in range(2000):
        most = length.most(rows, 7)
        keep = length.keep(rows, [most] * rows) if most and chance.random() < finds else 0
        if keep:
            length.learn(np.full(rows, keep), np.zeros(rows, int))
        asked, drafted, lost = asked + (most > 0), drafted + (keep > 0), lost + asking * most + added[keep]
    assert drafted or finds < 1
    assert drafted < 0.02 * 2000
    assert asked < 0.02 * 2000 / finds
    assert lost < 0.02 * 2000 / finds


LIMITS = Limits(
    max_model_len=256, max_num_seqs=12, max_num_batched_tokens=64, max_num_prefill_seqs=None, block_size=16,
    num_blocks=100, num_speculative_tokens=7,
)  # fmt: skip


def planned(**more) -> Plan:
    return make_plan(LIMITS, PlanOptions(verify_widths=(2, 3, 5, 8), measures_drafts=True, **more))


def test_every_step_with_drafts_that_is_allowed_has_its_bucket():
    plan = planned()
    for rows in range(1, 13):
        most = plan.most_drafts(rows)
        assert rows * (1 + most) <= 64
        assert most == max(width - 1 for width in (2, 3, 5, 8) if rows * width <= 64)
        assert plan.sampler_rows(rows * (1 + most)) >= rows * (1 + most)
    assert plan.sampler_sizes[-1] == LIMITS.max_sampled == 64
    assert [part.fallback for phase, part in plan.dispatcher.phases.items() if phase == "verify"] == [None]


@pytest.mark.parametrize("blocks", [100, 6])
def test_dummy_rows_sample_as_many_positions_as_are_planned(blocks):
    """Dummy rows sample as many positions as planned.

    That holds even if the cache has fewer blocks than there are slots.
    """
    at = replace(LIMITS, num_blocks=blocks)
    plan = make_plan(at, PlanOptions(verify_widths=(2, 3, 5, 8)))
    slots = Slots(at.max_num_seqs, at.max_model_len, at.block_size)
    feed = DummyBatches(slots, at, 50)
    assert plan.sampler_sizes[-1] == min(64, 8 * at.max_rows)
    for size in plan.sampler_sizes[1:]:
        with feed.work(feed.sampled(size, SamplingParams())) as schedule:
            assert schedule.total_sampled == size
            assert plan.fit(step_size_of(schedule, slots, plan)).rows <= at.max_rows


def test_times_are_measured_or_estimated():
    plan = planned(draft_model=True)
    assert {item.item.kind for item in plan.items if isinstance(item, DraftItem)} == {"decode", "mixed", "sampler"}
    timed = [item.bucket for item in plan.items if isinstance(item, PaceItem) and not item.draft]
    assert {bucket.longest for bucket in timed} == {0, 2, 3, 5, 8}
    assert set(timed) <= {item.bucket for item in plan.items if isinstance(item, ForwardItem)}
    measured = {("target", bucket): 1.0 + bucket.tokens for bucket in timed} | {("draft", Bucket.decode(1)): 0.5}
    times = StepTimes(plan, measured)
    assert times(1, 0) == pytest.approx(2.0)
    assert times(3, 4) == pytest.approx(16.0)
    assert times(1, 7) == pytest.approx(9.0)
    assert times.drafting(4) == pytest.approx(0.5)
    assert StepTimes(plan, {})(4, 1) > 0


def test_drafts_are_in_the_metrics_where_there_are_any():
    metrics = Metrics("m")
    metrics.update(Stats())
    assert b"spec_decode" not in metrics.text()
    metrics.update(Stats(drafts=3, draft_tokens=6, accepted_tokens=4, accepted_per_pos=[3, 1]))
    text = metrics.text().decode()
    for line in (
        'spec_decode_num_drafts_total{engine="0",model_name="m"} 3.0',
        'spec_decode_num_draft_tokens_total{engine="0",model_name="m"} 6.0',
        'spec_decode_num_accepted_tokens_total{engine="0",model_name="m"} 4.0',
        'spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="1"} 1.0',
    ):
        assert f"preheat:{line}" in text


def asked_of(length: MeasuredLength, found: int, seconds: float) -> int:
    """Return in how many of 2,000 steps of four rows drafts are asked for.

    Each time ``found`` drafts are found, and all are right.
    """
    asked = 0
    for _ in range(2000):
        if most := length.most(4, 4):
            asked += 1
            length.asked(4, most, found * most, seconds)
            if found:
                length.learn(np.full(4, most), np.full(4, most))
    return asked


@pytest.mark.parametrize(("waits", "least", "most"), [(True, 10, 80), (False, 2000, 2000)])
def test_lookups_that_find_nothing_are_given_up_where_asking_waits(waits, least, most) -> None:
    length = MeasuredLength((2, 3, 5), lambda rows, drafts: 1 + 0.1 * (drafts > 0), waits=waits)
    assert least <= asked_of(length, 0, 0.0) <= most


@pytest.mark.parametrize(("seconds", "least", "most"), [(0.1, 2000, 2000), (9.0, 1, 80)])
def test_the_hosts_time_for_drafting_counts(seconds, least, most) -> None:
    length = MeasuredLength((2, 3, 5), lambda rows, drafts: 1 + 0.1 * (drafts > 0))
    assert least <= asked_of(length, 4, seconds) <= most
