"""Log-probabilities, ranks and alternatives of the raw logits, against float64."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from preheat.core import TokenLogprobs
from preheat.ops.logprobs import token_logprobs


def reference(logits: list[float], token: int, n: int) -> TokenLogprobs:
    peak = max(logits)
    total = math.log(math.fsum(math.exp(x - peak) for x in logits)) + peak
    order = sorted(range(len(logits)), key=lambda t: (-logits[t], t))
    top = [(t, logits[t] - total) for t in order[:n]]
    return TokenLogprobs(token, logits[token] - total, order.index(token) + 1, tuple(top))


def assert_close(got: TokenLogprobs, right: TokenLogprobs) -> None:
    assert (got.token, got.rank, [t for t, _ in got.top]) == (right.token, right.rank, [t for t, _ in right.top])
    values = [got.logprob, *(x for _, x in got.top)], [right.logprob, *(x for _, x in right.top)]
    assert values[0] == pytest.approx(values[1], rel=1e-5, abs=1e-5)


@given(data=st.data(), vocab=st.integers(1, 30), rows=st.integers(1, 5))
@settings(max_examples=80, deadline=None)
def test_equals_the_reference(data: st.DataObject, vocab: int, rows: int) -> None:
    """Log-probabilities equal the reference, with ties, -0.0, impossible tokens, and any count of alternatives.

    Rows ask for different counts, also for more than the vocabulary has.
    """
    value = st.integers(-8, 8).map(float) | st.just(-0.0) | st.just(-math.inf) | st.floats(-50, 50, width=32)
    line = st.lists(value, min_size=vocab, max_size=vocab).filter(lambda xs: max(xs) > -math.inf)
    logits = data.draw(st.lists(line, min_size=rows, max_size=rows))
    tokens = data.draw(st.lists(st.integers(0, vocab - 1), min_size=rows, max_size=rows))
    wanted = data.draw(st.lists(st.integers(0, vocab + 3), min_size=rows, max_size=rows))
    tensor = torch.tensor(logits, dtype=torch.float32)
    before = tensor.clone()
    for got, xs, token, n in zip(
        token_logprobs(tensor, np.array(tokens), np.array(wanted)), logits, tokens, wanted, strict=True
    ):
        assert_close(got, reference(xs, token, n))
    assert torch.equal(tensor, before)


def test_plain_python_comes_out() -> None:
    """Numbers are plain Python that msgspec packs: no numpy scalar."""
    (entry,) = token_logprobs(torch.zeros(1, 4), np.array([2], np.int32), np.array([2], np.int32))
    assert (entry.token, entry.rank, [t for t, _ in entry.top]) == (2, 3, [0, 1])
    assert [type(x) for x in (entry.token, entry.logprob, entry.rank, *entry.top[0])] == [int, float, int, int, float]


def test_nan_and_infinities() -> None:
    """NaN is impossible, +inf the best.

    If no token is possible, every log-probability is -inf.
    """
    nan, inf = math.nan, math.inf
    logits = torch.tensor([[nan, 1.0, 1.0], [0.0, inf, nan], [-inf, -inf, nan]])
    mixed, sure, none = token_logprobs(logits, np.array([1, 0, 2]), np.array([3, 1, 1]))
    assert mixed.top == ((1, pytest.approx(math.log(0.5))), (2, pytest.approx(math.log(0.5))), (0, -inf))
    assert (sure.rank, sure.top) == (2, ((1, 0.0),))
    assert (none.logprob, none.rank, none.top) == (-inf, 3, ((0, -inf),))


Compute = Callable[[torch.Tensor], list[TokenLogprobs]]


def compute(logits: torch.Tensor) -> list[TokenLogprobs]:
    return token_logprobs(logits, np.arange(len(logits)) * 0 + 7, np.full(len(logits), 5))


def differing(logits: torch.Tensor, run: Compute) -> int:
    """Return how many rows have other bits alone or in a part than in the whole."""
    whole, part = run(logits), run(logits[1:4])
    return sum(run(logits[i : i + 1])[0] != whole[i] for i in range(len(logits))) + (part != whole[1:4])


@pytest.fixture(params=[1, 2])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.mark.parametrize("vocab", [1000, 4096, 40_001, 128_256])
def test_rows_and_threads_change_no_bit(vocab: int, threads: int) -> None:
    logits = torch.from_numpy((np.random.default_rng(vocab).standard_normal((9, vocab)) * 3).astype(np.float32))
    assert differing(logits, compute) == 0
    torch.set_num_threads(3 - threads)
    other = compute(logits)
    torch.set_num_threads(threads)
    assert other == compute(logits)


def test_a_batch_dependent_sum_is_seen() -> None:
    """Control: one unit in the last place, added only in batches, is seen."""

    def planted(logits: torch.Tensor) -> list[TokenLogprobs]:
        return compute(logits * (1 + (len(logits) > 1) * 2**-22))

    logits = torch.from_numpy(np.random.default_rng(0).standard_normal((9, 4096)).astype(np.float32))
    assert differing(logits, planted) > 0
