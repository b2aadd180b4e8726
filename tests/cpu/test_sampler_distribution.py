"""Over many seeds, positions and choices, tokens fall as their exact probabilities say (chi-square at 5 sigma)."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from preheat.core import SamplingParams
from preheat.execution.logit_stages import sampling_input
from preheat.ops.sampler import HostSampler
from preheat.ops.sampling import SamplingInput
from preheat.ops.top_k_top_p import SamplingMetadata
from tests.cpu.sampling_reference import Row, answer, edited, fill, weights

DRAWS = 12_000
LOGITS = np.array([1.0, 0.2, -0.5, 2.0, 1.5, -3.0, 0.0, 0.7, 1.9, -1.0, 0.3], np.float32)

KINDS: dict[str, dict[str, object]] = {
    "plain": {},
    "cold": {"temperature": 0.5},
    "hot": {"temperature": 2.0},
    "top_k": {"top_k": 4},
    "top_p": {"top_p": 0.8},
    "min_p": {"min_p": 0.2},
    "all filters": {"temperature": 1.3, "min_p": 0.05, "top_k": 7, "top_p": 0.9},
    "presence": {"presence_penalty": 1.0},
    "frequency": {"frequency_penalty": 0.7},
    "repetition": {"repetition_penalty": 1.5},
    "bias": {"logit_bias": {3: -2.0, 5: 4.0}},
    "min_tokens": {"min_tokens": 20, "max_tokens": 30},
    "everything": {
        "temperature": 0.9,
        "top_p": 0.95,
        "top_k": 8,
        "min_p": 0.01,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.25,
        "repetition_penalty": 1.2,
        "logit_bias": {1: 1.0},
        "min_tokens": 20,
        "max_tokens": 30,
    },
}


def exact(row: Row) -> np.ndarray:
    """Return the probabilities, float64 [vocab], of the row's next token."""
    weight, probabilities = weights(row, edited(row)), np.zeros(len(row.logits))
    for token in answer(row).survivors:
        probabilities[token] = weight[token]
    return probabilities / probabilities.sum()


def sigmas(counts: np.ndarray, probabilities: np.ndarray) -> float:
    """Return how far chi-square is above its mean.

    It is infinite if an impossible token was drawn.
    """
    possible = probabilities > 0
    if counts[~possible].any():
        return math.inf
    expected = probabilities[possible] * counts.sum()
    freedom = int(possible.sum()) - 1
    chi = float(((counts[possible] - expected) ** 2 / expected).sum())
    return (chi - freedom) / math.sqrt(2 * freedom)


def a_row(kind: str) -> Row:
    params = SamplingParams(**KINDS[kind])  # type: ignore[arg-type]
    return Row(LOGITS, params, prompt=[0, 3, 9], output=[4, 4, 8, 1], stop_ids=[8])


def draw(row: Row, key: str) -> np.ndarray:
    """Return counts [vocab] of ``DRAWS`` draws that differ in one part of the key: seed, position or choice."""
    batch = sampling_input(fill([row]), np.zeros(1, np.int64))
    assert batch.random is not None
    random = batch.random.take(np.zeros(DRAWS, np.int64))
    random = replace(random, rows=np.arange(DRAWS), **{key: np.arange(DRAWS).astype(getattr(random, key).dtype)})
    single = torch.from_numpy(np.array([edited(row)], np.float32))
    plain = SamplingInput(DRAWS, random, None, None)
    tokens = HostSampler(1, len(LOGITS)).sample(single.repeat(DRAWS, 1), plain)
    return np.bincount(tokens.numpy(), minlength=len(LOGITS))


@pytest.mark.parametrize("kind", KINDS)
def test_seeds(kind: str) -> None:
    row = a_row(kind)
    assert sigmas(draw(row, "seed"), exact(row)) < 5


@pytest.mark.parametrize("key", ["position", "choice"])
def test_positions_and_choices(key: str) -> None:
    assert sigmas(draw(a_row("plain"), key), exact(a_row("plain"))) < 5


def test_logit_changes_are_sampled_too() -> None:
    """The distribution holds through penalties, bias and ban as the sampler applies them, over 2,000 seeds."""
    row = a_row("everything")
    rows = [replace(row, seed=seed) for seed in range(2000)]
    batch = sampling_input(fill(rows), np.arange(len(rows)))
    logits = torch.from_numpy(np.stack([LOGITS] * len(rows)))
    tokens = HostSampler(len(rows), len(LOGITS)).sample(logits, batch)
    assert sigmas(np.bincount(tokens.numpy(), minlength=len(LOGITS)), exact(row)) < 5


def test_a_wrong_distribution_is_seen() -> None:
    """Control: a temperature off by a tenth, and noise that repeats."""
    row = a_row("plain")
    warmer = replace(row, params=SamplingParams(temperature=1.1))
    assert sigmas(draw(row, "seed"), exact(warmer)) > 5
    few = np.bincount(np.random.default_rng(0).choice(draw(row, "seed").nonzero()[0], DRAWS), minlength=len(LOGITS))
    assert sigmas(few, exact(row)) > 5


def test_row_type_carries_the_whole_key() -> None:
    """The key has no part but the seed, position and choice that the draws above replace."""
    assert {"seed", "position", "choice"} <= set(SamplingMetadata.__dataclass_fields__)
