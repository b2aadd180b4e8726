"""Texts that repeat themselves are found as by the definition, token by token."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from preheat.core import RepetitionDetectionParams, SamplingParams
from preheat.core.constraints import MAX_PATTERN
from preheat.errors import InvalidRequest
from preheat.frontend.params_checker import check_params
from preheat.frontend.repetition import RepetitionChecker, checker_of


def repeats(tokens: list[int], params: RepetitionDetectionParams) -> bool:
    """Return whether, for some size, the last tokens are ``min_count`` times the same pattern."""
    return any(
        len(tokens) >= size * params.min_count
        and tokens[-size * params.min_count :] == tokens[-size:] * params.min_count
        for size in range(max(params.min_pattern_size, 1), params.max_pattern_size + 1)
    )


@given(
    tokens=st.lists(st.integers(0, 2), max_size=80),
    least=st.integers(0, 5),
    more=st.integers(0, 6),
    count=st.integers(2, 5),
)
def test_found_as_the_definition_says(tokens: list[int], least: int, more: int, count: int) -> None:
    params = RepetitionDetectionParams(
        min_pattern_size=least, max_pattern_size=max(least, 1) + more, min_count=count
    )  # fmt: skip
    checker = RepetitionChecker(params)
    for end, token in enumerate(tokens, 1):
        assert checker.push(token) == repeats(tokens[:end], params)


@given(size=st.integers(1, 40), count=st.integers(2, 30), before=st.integers(0, 200))
def test_found_with_the_last_token_and_no_earlier(size: int, count: int, before: int) -> None:
    """A repetition is found with its last token and no earlier, however far into a text.

    The kept tokens of a text are moved now and then.
    """
    params = RepetitionDetectionParams(max_pattern_size=size, min_count=count)
    checker = RepetitionChecker(params)
    tokens = [*range(100, 100 + before), *(list(range(size)) * count)]
    found = [checker.push(token) for token in tokens]
    assert found[-1] and not any(found[:-1])


def test_none_is_looked_for_without_a_size() -> None:
    assert checker_of(None) is None and checker_of(RepetitionDetectionParams()) is None


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"max_pattern_size": 4}, "min_count must be at least 2"),
        ({"max_pattern_size": 4, "min_count": 1}, "min_count must be at least 2"),
        ({"max_pattern_size": 2, "min_pattern_size": 3, "min_count": 2}, "min_pattern_size <= max_pattern_size"),
        ({"max_pattern_size": -1, "min_count": 2}, "0 <= min_pattern_size"),
        ({"max_pattern_size": MAX_PATTERN + 1, "min_count": 2}, str(MAX_PATTERN)),
        ({"size": 1}, "size"),
    ],
)
def test_meaningless_repetition_settings_are_refused(given: dict[str, int], said: str) -> None:
    with pytest.raises(InvalidRequest, match="repetition_detection") as caught:
        check_params({"repetition_detection": given})
    assert said in caught.value.message and str(caught.value.param).startswith("repetition_detection")


def test_an_object_will_do() -> None:
    params = check_params({"repetition_detection": {"max_pattern_size": 3, "min_count": 2}})
    assert params == SamplingParams(repetition_detection=RepetitionDetectionParams(max_pattern_size=3, min_count=2))
