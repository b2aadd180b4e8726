"""The sampler against a plain float64 reference over all parameters, and its edges: ties, NaN, no possible token."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from preheat.core import Level, SamplingParams
from preheat.execution.logit_stages import sampling_input
from preheat.ops import top_k_top_p as survivors
from preheat.ops.sampler import HostSampler
from preheat.ops.top_k_top_p import deficits, furthest, keep_ordered
from tests.cpu.sampling_reference import Row, answer, edited, fill


def sample(rows: list[Row], duplicates: bool = False) -> list[int]:
    slots, vocab = fill(rows), len(rows[0].logits)
    sampler = HostSampler(len(rows), vocab, handle_topk_duplicates=duplicates)
    logits = torch.from_numpy(np.stack([row.logits for row in rows]))
    return sampler.sample(logits, sampling_input(slots, np.arange(len(rows)))).tolist()


def one(logits: list[float], **params: object) -> int:
    params = {"temperature": 0.0} | params
    row = Row(np.array(logits, np.float32), SamplingParams(**params))  # type: ignore[arg-type]
    return sample([row])[0]


def survivors_of(row: Row, duplicates: bool) -> list[int]:
    """Return the survivors that the engine's filters leave, ascending."""
    random = sampling_input(fill([row]), np.arange(1)).random
    assert random is not None
    logits = np.array([edited(row)], np.float32)
    peak = logits.max(-1)
    if random.ordered(logits.shape[1])[0]:
        groups = keep_ordered(logits, peak, random, duplicates)
        return sorted(token for _, found in groups for token in found.ids.tolist())
    keep = deficits(logits, peak, random.temperature) <= furthest(random.min_p)[:, None]
    return np.flatnonzero(keep[0]).tolist()


@st.composite
def a_row(draw: st.DrawFn, vocab: int) -> Row:
    """Draw logits on a coarse grid, and parameters over their ranges.

    A coarse grid has many true ties.
    """
    token = st.integers(0, vocab - 1)
    grid = st.integers(-24, 24).map(lambda x: x / 4)
    tokens = st.lists(token, max_size=12)
    logits = draw(st.lists(grid | st.just(-np.inf), min_size=vocab, max_size=vocab))
    stop_ids = draw(st.lists(token, max_size=3, unique=True))
    params = SamplingParams(
        temperature=draw(st.just(0.0) | st.sampled_from([0.3, 1.0, 2.0]) | st.floats(0.01, 100)),
        top_p=draw(st.just(1.0) | st.floats(0.0, 1, exclude_min=True)),
        top_k=draw(st.sampled_from([0, -1]) | st.integers(1, vocab + 2)),
        min_p=draw(st.just(0.0) | st.floats(0, 1)),
        presence_penalty=draw(st.just(0.0) | st.floats(-2, 2)),
        frequency_penalty=draw(st.just(0.0) | st.floats(-2, 2)),
        repetition_penalty=draw(st.just(1.0) | st.floats(0.1, 10)),
        logit_bias=draw(st.none() | st.dictionaries(token, st.floats(-100, 100), max_size=4)),
        min_tokens=draw(st.integers(0, 14)),
        max_tokens=64,
    )
    return Row(
        logits=np.array(logits, np.float32),
        params=params,
        prompt=[0, *draw(tokens)],
        output=draw(tokens),
        stop_ids=stop_ids,
        seed=draw(st.integers(0, 2**64 - 1)),
        choice=draw(st.integers(0, 127)),
    )


@given(data=st.data(), vocab=st.integers(2, 24), window=st.sampled_from([1, 2, 5, 128]), duplicates=st.booleans())
@settings(max_examples=250, deadline=None)
def test_equals_the_reference(data: st.DataObject, vocab: int, window: int, duplicates: bool) -> None:
    rows = data.draw(st.lists(a_row(vocab), min_size=1, max_size=4))
    rows = [row for row in rows if max(edited(row)) > -np.inf]
    expected = [answer(row, duplicates) for row in rows]
    clear = [(row, right) for row, right in zip(rows, expected, strict=True) if right.clear]
    assume(clear)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(survivors, "WINDOW", window)
        got = sample([row for row, _ in clear], duplicates)
        assert got == [right.token for _, right in clear]
        for row, right in clear:
            if np.float32(row.params.temperature) > 0:
                assert survivors_of(row, duplicates) == sorted(right.survivors)


@pytest.mark.parametrize("temperature", [0.7, 1.5])
@pytest.mark.parametrize("params", [{}, {"top_k": 40}, {"top_p": 0.9}, {"top_k": 1500}, {"min_p": 0.02, "top_p": 0.99}])
def test_equals_the_reference_over_a_large_vocabulary(params: dict[str, float], temperature: float) -> None:
    """The sampler equals the reference where windows widen, noise is sparse or whole, and the vocabulary is odd.

    The vocabulary is no multiple of 4.
    """
    rng = np.random.default_rng(3)
    rows = [
        Row(
            (rng.standard_normal(2999) * 2).astype(np.float32),
            SamplingParams(temperature=temperature, **params),
            seed=i,
        )
        for i in range(6)
    ]
    expected = [answer(row) for row in rows]
    assert sample(rows) == [right.token for right in expected]


@pytest.mark.parametrize("top_p", [0.3, 0.5, 0.9])
def test_top_p_is_a_share_of_the_tokens_that_min_p_leaves(top_p: float) -> None:
    """top_p is a share of the tokens that min_p leaves.

    They may be more tokens than are sorted at first. The total is then summed apart.
    """
    row = Row(np.arange(0, -30, -0.01, dtype=np.float32), SamplingParams(top_p=top_p, min_p=float(np.exp(-2.005))))
    right = answer(row)
    assert right.clear
    assert survivors_of(row, duplicates=False) == sorted(right.survivors)


def test_levels() -> None:
    def level(**params: object) -> Level:
        row = Row(np.zeros(4, np.float32), SamplingParams(**params), stop_ids=[1])  # type: ignore[arg-type]
        return sampling_input(fill([row]), np.arange(1)).level

    assert level(temperature=0) is Level.GREEDY
    assert level(temperature=0, top_k=5, top_p=0.5) is Level.GREEDY
    assert level() is Level.FILTERED
    assert level(temperature=0, min_tokens=3) is Level.FULL
    assert level(temperature=0, logit_bias={1: 2.0}) is Level.FULL
    assert level(presence_penalty=1.0) is Level.FULL


def test_ties_go_to_the_lowest_id() -> None:
    assert one([1, 3, 3, 2, 3]) == 1
    assert one([0.0, -0.0, 0.0]) == 0
    assert one([-0.0, 0.0]) == 0
    assert one([2, 5, 5, 5], temperature=1.0, top_k=1) == 1
    assert one([2, 5, 5, 5], temperature=1.0, top_p=1e-9) == 1


def test_top_k_among_equals() -> None:
    """Exactly k tokens survive, the lowest ids of the equal ones.

    With duplicates, all tokens equal to the k-th survive.
    """

    def reached(duplicates: bool) -> set[int]:
        logits = np.array([1, 2, 2, 2, 5, 2, 0], np.float32)
        rows = [Row(logits, SamplingParams(top_k=3, temperature=3.0), seed=seed) for seed in range(200)]
        return set(sample(rows, duplicates))

    assert reached(duplicates=False) == {4, 1, 2}
    assert reached(duplicates=True) == {4, 1, 2, 3, 5}


def test_top_p_counts_the_mass_before_a_token() -> None:
    """Of 0.5, 0.25, 0.125, 0.125 a top_p of 0.75 keeps two, and anything above keeps the third."""
    logits = np.log(np.array([0.125, 0.5, 0.125, 0.25])).astype(np.float32) + np.float32(3)

    def reached(top_p: float) -> set[int]:
        return set(sample([Row(logits, SamplingParams(top_p=top_p), seed=seed) for seed in range(300)]))

    assert reached(0.5) == {1}
    assert reached(0.74) == {1, 3}
    assert reached(0.76) == {0, 1, 3}
    assert reached(0.88) == {0, 1, 2, 3}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("filters", [{}, {"top_k": 2}, {"top_p": 0.5}, {"min_p": 0.5}])
class TestBadLogits:
    """Logits of a broken model crash nothing and have one defined answer."""

    def test_nan_is_impossible(self, temperature: float, filters: dict[str, float]) -> None:
        nan, low = float("nan"), float("-inf")
        assert one([nan, low, 1, low, nan], temperature=temperature, **filters) == 2

    def test_plus_infinity_is_the_best(self, temperature: float, filters: dict[str, float]) -> None:
        assert one([1, float("inf"), float("nan"), -5, 2], temperature=temperature, **filters) == 1

    def test_nothing_possible(self, temperature: float, filters: dict[str, float]) -> None:
        assert one([float("-inf")] * 5, temperature=temperature, **filters) == 0
        assert one([float("nan")] * 5, temperature=temperature, **filters) == 0

    def test_nothing_possible_that_is_not_banned(self, temperature: float, filters: dict[str, float]) -> None:
        params = SamplingParams(temperature=temperature, min_tokens=1, **filters)  # type: ignore[arg-type]
        logits = np.array([3, float("-inf"), 2, float("nan"), float("-inf")], np.float32)
        assert sample([Row(logits, params, stop_ids=[0, 2])]) == [1]
        assert sample([Row(logits[:3], params, stop_ids=[0, 1, 2])]) == [0]

    def test_neighbours_do_not_notice(self, temperature: float, filters: dict[str, float]) -> None:
        params = SamplingParams(temperature=temperature, **filters)  # type: ignore[arg-type]
        good = Row(np.array([0.5, 1, 0.7, 0.1], np.float32), params, seed=5)
        bad = Row(np.full(4, np.nan, np.float32), params)
        assert sample([bad, good, bad])[1] == sample([good])[0]


def test_tiny_temperature_is_greedy_in_the_limit() -> None:
    for temperature in (1e-50, 1e-40, 1e-30, 1e-6):  # the first is 0 as a float32, the second denormal
        assert one([1.0, 1.0001, 0.5], temperature=temperature) == 1


def test_extreme_penalties_do_not_crash() -> None:
    row = Row(np.array([-1.0, 0.0, 2.0], np.float32), SamplingParams(repetition_penalty=1e-50), [0, 1, 2])
    assert sample([row]) == [2]


def test_min_tokens_ends() -> None:
    """A stop id may be drawn from position ``min_tokens`` on.

    A stop id out of range harms nothing.
    """
    params = SamplingParams(temperature=0, min_tokens=2)
    logits = np.array([0, 1, 9], np.float32)
    rows = [Row(logits, params, [0], output, stop_ids=[2, 999, -1]) for output in ([], [1], [1, 1])]
    assert sample(rows) == [1, 1, 2]


def test_wrong_logits_are_refused() -> None:
    batch = sampling_input(fill([Row(np.zeros(3, np.float32), SamplingParams())]), np.arange(1))
    for logits in (torch.zeros(1, 3, dtype=torch.bfloat16), torch.zeros(2, 3)):
        with pytest.raises(ValueError, match="float32 logits of 1 rows"):
            HostSampler(1, 3).sample(logits, batch)


def test_a_free_slot_is_refused() -> None:
    slots = fill([Row(np.zeros(3, np.float32), SamplingParams(presence_penalty=1.0))])
    slots.give_back(0)
    with pytest.raises(ValueError, match="slot 0 is free"):
        sampling_input(slots, np.arange(1))


def test_no_rows() -> None:
    batch = sampling_input(fill([Row(np.zeros(3, np.float32), SamplingParams())]), np.arange(0))
    assert HostSampler(1, 3).sample(torch.zeros(0, 3), batch).shape == (0,)
