"""A row's token depends only on the row.

It depends neither on the batch, the level, the threads, nor earlier runs.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch

from preheat.core import Level, SamplingParams
from preheat.execution.logit_stages import sampling_input
from preheat.ops import sampler as module
from preheat.ops.sampler import HostSampler
from preheat.ops.top_k_top_p import SamplingMetadata
from tests.cpu.sampling_reference import Row, fill

KINDS: list[dict[str, object]] = [
    {"temperature": 0.0},
    {},
    {"temperature": 0.7, "top_p": 0.9, "top_k": 50},
    {"temperature": 1.2, "top_p": 0.8, "top_k": 100},
    {"temperature": 0.8, "top_p": 0.85},
    {"temperature": 3.0, "top_p": 0.99},
    {"min_p": 0.1},
    {"temperature": 2.0, "min_p": 0.001, "top_k": 400},
    {"temperature": 0.0, "presence_penalty": 1.5, "frequency_penalty": 0.5},
    {"repetition_penalty": 1.3, "top_k": 20},
    {"logit_bias": {5: 4.0, 17: -100.0}, "top_p": 0.95},
    {"min_tokens": 30, "max_tokens": 64, "temperature": 1.1},
]
VOCAB = 1999


def mixed_rows(copies: int) -> list[Row]:
    rng = np.random.default_rng(7)
    return [
        Row(
            logits=(rng.standard_normal(VOCAB) * 2.5).astype(np.float32),
            params=SamplingParams(**kind),  # type: ignore[arg-type]
            prompt=rng.integers(0, VOCAB, 20).tolist(),
            output=rng.integers(0, VOCAB, int(rng.integers(0, 20))).tolist(),
            stop_ids=[3, 4],
            seed=int(rng.integers(0, 2**63)),
            choice=int(rng.integers(0, 3)),
        )
        for _ in range(copies)
        for kind in KINDS
    ]


Draw = Callable[[list[Row]], list[int]]


def sample(rows: list[Row]) -> list[int]:
    sampler = HostSampler(len(rows), VOCAB)
    batch = sampling_input(fill(rows), np.arange(len(rows)))
    return sampler.sample(torch.from_numpy(np.stack([row.logits for row in rows])), batch).tolist()


def differing(rows: list[Row], draw: Draw) -> int:
    """Return how many rows of the batch get another token.

    Each row is drawn alone, in a shuffled batch and in a part of it.
    """
    whole = draw(rows)
    order = np.random.default_rng(8).permutation(len(rows))
    shuffled = dict(zip(order.tolist(), draw([rows[i] for i in order]), strict=True))
    thirds = [token for start in range(0, len(rows), 3) for token in draw(rows[start : start + 3])]
    alone = [draw([row])[0] for row in rows]
    return sum(len({whole[i], shuffled[i], thirds[i], alone[i]}) > 1 for i in range(len(rows)))


@pytest.fixture(params=[1, 2])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def test_batch_composition_changes_nothing(threads: int) -> None:
    assert differing(mixed_rows(3), sample) == 0


def test_threads_change_nothing() -> None:
    before, rows = torch.get_num_threads(), mixed_rows(3)
    answers = []
    for count in (1, 2, 4):
        torch.set_num_threads(count)
        answers.append(sample(rows))
    torch.set_num_threads(before)
    assert answers[0] == answers[1] == answers[2]


def test_noise_keyed_by_row_position_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Control: a sampler whose noise knows the row's place fails the test above."""
    take = SamplingMetadata.take

    def by_place(self: SamplingMetadata, index: np.ndarray | slice) -> SamplingMetadata:
        taken = take(self, index)
        taken.seed = taken.rows.astype(np.uint64)
        return taken

    monkeypatch.setattr(SamplingMetadata, "take", by_place)
    assert differing(mixed_rows(1), sample) > len(KINDS) // 2


def test_a_filter_that_looks_at_the_batch_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Control: a temperature that depends, ever so little, on the number of rows."""
    deficits = module.deficits

    def of_batch(logits: np.ndarray, peak: np.ndarray, temperature: np.ndarray) -> np.ndarray:
        return deficits(logits, peak, temperature * np.float32(1 + 0.2 * (len(logits) > 3)))

    monkeypatch.setattr(module, "deficits", of_batch)
    assert differing(mixed_rows(4), sample) > 0


@pytest.mark.parametrize("place", range(len(KINDS)))
def test_the_level_changes_nothing(place: int) -> None:
    """A row has the same token at every level of its step.

    Another row lifts the step to a higher level.
    """
    row = mixed_rows(1)[place]
    lifts = {Level.GREEDY: {"temperature": 0.0}, Level.FILTERED: {"top_k": 3}, Level.FULL: {"presence_penalty": 1.0}}
    own, (token,) = sampling_input(fill([row]), np.arange(1)).level, sample([row])
    for level, params in lifts.items():
        companion = Row(row.logits, SamplingParams(**params), seed=9)  # type: ignore[arg-type]
        assert sampling_input(fill([companion, row]), np.arange(2)).level == max(level, own)
        assert sample([companion, row])[1] == token


def test_repeated_runs_agree() -> None:
    rows = mixed_rows(1)
    assert sample(rows) == sample(rows)


def test_global_generators_are_left_alone() -> None:
    """No draw comes from, or moves, the generators of Python, numpy or torch."""
    rows = mixed_rows(1)
    np_before, torch_before, py_before = np.random.get_state()[1].copy(), torch.get_rng_state(), random.getstate()
    first = sample(rows)
    assert np.array_equal(np.random.get_state()[1], np_before)
    assert torch.equal(torch.get_rng_state(), torch_before)
    assert random.getstate() == py_before
    torch.manual_seed(1), np.random.seed(2), random.seed(3)
    assert sample(rows) == first
    torch.set_rng_state(torch_before)
    random.setstate(py_before)


@pytest.mark.parametrize("function", [np.log, np.exp])
def test_numpy_logarithm_and_exponential_are_element_wise(function: Callable[..., np.ndarray]) -> None:
    """The rounding functions in use are element-wise.

    A number has the same bits at every offset and length of an array.
    """
    values = np.abs(np.random.default_rng(4).standard_normal(20_011) * 6).astype(np.float32)
    values = -values if function is np.exp else values
    whole = function(values)
    for length in (*range(1, 40), 127, 1000, 4099):
        for offset in (0, 1, 5, 9973):
            assert np.array_equal(function(values[offset : offset + length]), whole[offset : offset + length])
    square = values[: 141 * 141].reshape(141, 141)
    assert np.array_equal(function(square).ravel(), whole[: 141 * 141])
