"""Expressions that a file brings match as Python's do, and in limited time."""

from __future__ import annotations

import re
import threading
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from preheat.errors import AdapterError
from preheat.lora.config import AdapterConfig
from preheat.utils import expressions
from preheat.utils.expressions import BadExpression, Expressions, Match, first_matches

NAMES = [f"model.layers.{at}.{name}" for at in (0, 7, 31) for name in ("self_attn.q_proj", "mlp.up_proj")]
PARTS = st.sampled_from([*"qu.*?+|()[]\\0", "layers", "_proj", r"\d+", r"(\d)", "(?!x)", "(?i)", "(?=m)", r"\b", "{2}"])
TEXTS = st.lists(PARTS, max_size=5).map("".join)


def expected(texts: list[str], whole: bool) -> dict[str, Match] | None:
    """Return matches by Python itself, in this process.

    An invalid expression gives None.
    """
    found = {}
    try:
        compiled = [re.compile(text) for text in texts]
    except re.error:
        return None
    for name in NAMES:
        for number, each in enumerate(compiled):
            if match := each.fullmatch(name) if whole else each.match(name):
                found[name] = Match(number, match[1] if each.groups else None)
                break
    return found


@given(st.lists(st.tuples(st.lists(TEXTS, max_size=3), st.booleans()), min_size=1, max_size=3))
@settings(max_examples=40, deadline=None)
def test_the_first_that_matches_is_that_of_python(asked):
    right = [expected(texts, whole) for texts, whole in asked]
    given_ = [Expressions(f"field {at}", texts, whole) for at, (texts, whole) in enumerate(asked)]
    if None in right:
        with pytest.raises(BadExpression, match=f"field {right.index(None)} .*not a regular expression"):
            first_matches(given_, NAMES)
    else:
        assert first_matches(given_, NAMES) == right


SLOW = {
    "target_modules": r"(?:\w+\w*[._]?)+!",
    "exclude_modules": r"((a|m|o|d|e|l|\.|[a-z0-9_])+)+Z",
    "rank_pattern": {r"(.?.?.?.?)*#": 4},
    "alpha_pattern": {r"([\w.]|\w\w|.)*-": 4},
    "layers_pattern": [r"(?:(?:\w+)*\.*)*,"],
}
PLAIN = {"r": 8, "lora_alpha": 16, "target_modules": ["q_proj"], "layers_to_transform": [1]}


@pytest.mark.parametrize("field", SLOW)
def test_no_expression_holds_this_process_up(field, monkeypatch):
    """An expression takes little time of this process, and other threads go on."""
    monkeypatch.setattr(expressions, "PATIENCE", 0.7)
    config = AdapterConfig.of(PLAIN | {field: SLOW[field]})
    ticks, done = [], threading.Event()
    ticking = threading.Thread(target=lambda: [ticks.append(1) for _ in iter(lambda: done.wait(0.02), True)])
    ticking.start()
    begun = time.process_time()
    try:
        with pytest.raises(AdapterError, match=f"{field} takes more than") as refused:
            config.about(NAMES)
    finally:
        done.set()
        ticking.join()
    assert refused.value.status == 400 and time.process_time() - begun < 1
    assert len(ticks) > 10


def test_memory_is_limited_too():
    with pytest.raises(BadExpression, match=r"cannot be matched|takes more"):
        first_matches([Expressions("field", ["|".join(f"a{n}b" for n in range(400_000))])], ["x" * 50] * 10)


def test_a_list_of_names_needs_no_child(monkeypatch):
    monkeypatch.setattr(expressions, "_answers_of", lambda question: pytest.fail("a process was started"))
    rules = AdapterConfig.of(PLAIN | {"exclude_modules": ["x"], "layers_to_transform": None}).about(NAMES)
    assert [name for name in NAMES if rules.names(name)] == NAMES[::2]


def test_many_names_are_matched_by_sets():
    many = {"target_modules": [f"m{n}" for n in range(300_000)] + ["q_proj"], "exclude_modules": ["up_proj"] * 300_000}
    config = AdapterConfig.of(PLAIN | many | {"layers_to_transform": None})
    begun = time.process_time()
    rules = config.about(NAMES * 500)
    assert sum(rules.names(name) for name in NAMES * 500) == 1500
    assert time.process_time() - begun < 1


def test_a_group_that_is_no_number_is_an_error():
    rules = AdapterConfig.of(PLAIN | {"layers_pattern": "(layers)"}).about(NAMES)
    with pytest.raises(AdapterError, match="layers_pattern matches 'layers'"):
        rules.names(NAMES[0])
