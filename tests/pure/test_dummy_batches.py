"""The law of the round trip: dummy work for a shape needs exactly that shape."""

import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from preheat.core import Request, SamplingParams
from preheat.errors import SettingsError
from preheat.execution.step_size import step_size_of
from preheat.limits import Limits
from preheat.plan.buckets import Bucket
from preheat.plan.options import PlanOptions
from preheat.plan.plan import make_plan
from preheat.schedule.slots import Slots
from preheat.warmup.dummy_batch import GREEDY, DummyBatches, DummyRow, rows_of
from tests.pure.test_plan_laws import options

limits = st.builds(
    Limits,
    max_model_len=st.integers(2, 600),
    max_num_seqs=st.integers(1, 40),
    max_num_batched_tokens=st.integers(2, 900),
    max_num_prefill_seqs=st.none() | st.integers(1, 40),
    block_size=st.sampled_from([16, 64]),
    num_blocks=st.integers(40, 900),
)


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(limits, options())
def test_work_for_a_shape_runs_in_that_shape(at, chosen):
    try:
        plan = make_plan(at, chosen, on_miss=lambda need, shape: None)
    except SettingsError:
        return  # ranges that make no sense
    if max(chosen.verify_widths, default=0) >= at.max_model_len:
        return  # such limits are refused
    slots = Slots(at.max_num_seqs, at.max_model_len, at.block_size)
    feed = DummyBatches(slots, at, vocab_size=50)
    for shape in plan.dispatcher.buckets:
        rows = rows_of(plan.dispatcher.example(shape), at)
        assert all(0 < row.cached + row.extend <= at.max_model_len for row in rows)
        with feed.work(rows) as schedule:
            assert schedule.rows <= at.max_num_seqs
            assert schedule.tokens <= at.max_num_batched_tokens
            assert plan.fit(step_size_of(schedule, slots, plan)) == shape
        assert slots.num_free == at.max_num_seqs
    assert not slots.block_table.any()


def test_other_work_runs_in_another_shape():
    at = Limits(
        max_model_len=64,
        max_num_seqs=4,
        max_num_batched_tokens=64,
        max_num_prefill_seqs=None,
        block_size=16,
        num_blocks=17,
    )
    plan, slots = make_plan(at, PlanOptions()), Slots(4, 64, 16)
    with DummyBatches(slots, at, 50).work([DummyRow(0, 1, decoding=True)] * 3) as schedule:
        assert plan.fit(step_size_of(schedule, slots, plan)) != Bucket.mixed(64, 4)


@given(
    st.lists(st.tuples(st.integers(1, 20), st.integers(0, 20)), max_size=6),
    st.sampled_from([GREEDY, SamplingParams(temperature=0.5, min_p=0.1), SamplingParams(min_tokens=2, logprobs=1)]),
    st.sampled_from([[], [3, 5], [1, 2, 3, 4, 2**40]]),
)
def test_slots_taken_together_are_as_if_taken_one_by_one(lengths, params, stop_ids):
    together, alone = (Slots(6, 64, 16) for _ in range(2))
    requests = [Request(-2 - n, [1] * prompt, params, n, 9, stop_ids=stop_ids) for n, (prompt, _) in enumerate(lengths)]
    tokens = [np.arange(prompt + more, dtype=np.int32) for prompt, more in lengths]
    one_by_one = [alone.take(request, known) for request, known in zip(requests, tokens, strict=True)]
    assert together.take_alike(requests, tokens).tolist() == one_by_one
    found, expected = vars(together), vars(alone)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert np.array_equal(found[name], value), name
