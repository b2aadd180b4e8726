"""The turns of long tests."""

from __future__ import annotations

import re
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests import turns
from tests.meta.source import ROOT

LONG = turns.LIST.read_text(encoding="utf-8").splitlines()


@given(st.lists(st.sampled_from(["a::short", "a::long[1]", "a::long[2]", "b::long"])), st.integers(1, 4))
def test_each_long_case_has_one_turn_and_each_short_case_all(ids: list[str], count: int) -> None:
    long = {"a::long", "b::long"}
    out = [list(turns.left_out(ids, long, own, count)) for own in range(count)]
    for number, id in enumerate(ids):
        runs = sum(not each[number] for each in out)
        assert runs == (1 if turns.test_of(id) in long else count)
    sizes = [sum(not gone and turns.test_of(id) in long for gone, id in zip(each, ids, strict=True)) for each in out]
    assert max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize("asked", ["3/3", "1", "x/2", "-1/3"])
def test_another_form_is_refused(asked: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TEST_TURN", asked)
    with pytest.raises(pytest.UsageError, match="such as 0/3"):
        turns.turn()


def test_a_turn_is_taken_and_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cases of all turns together are the cases of a run without turns."""
    every = [SimpleNamespace(nodeid=id) for id in ("a::short", *(f"{LONG[0]}[{n}]" for n in range(5)), LONG[1])]
    left: list[object] = []

    def deselected(*, items: list[object]) -> None:
        left.extend(items)

    config = SimpleNamespace(hook=SimpleNamespace(pytest_deselected=deselected))
    ran = []
    for asked in ("0/3", "1/3", "2/3"):
        monkeypatch.setenv("TEST_TURN", asked)
        items = list(every)
        turns.take_turn(config, items)  # type: ignore[arg-type]
        ran += items
        assert asked[0] in (turns.summary() or "")
    assert sorted(item.nodeid for item in ran) == sorted([item.nodeid for item in every] + 2 * ["a::short"])
    assert len(left) == 12
    monkeypatch.delenv("TEST_TURN")
    turns.take_turn(config, ran)  # type: ignore[arg-type]
    assert len(ran) == 9 and turns.summary() is None


def test_laws_of_the_sources_run_at_every_commit() -> None:
    """A change of one line can break them, and the quarter that ran would not have told."""
    assert all((ROOT / file).exists() for file in turns.LAWS)
    assert [test for test in LONG if test.startswith(turns.LAWS)] == []


def test_the_list_names_tests() -> None:
    """Every test of the list is in its file. After a renaming, run the module's command or change the line."""
    assert sorted(set(LONG)) == LONG
    for line in LONG:
        path, *names = line.split("::")
        source = (ROOT / path).read_text(encoding="utf-8")
        inherited = names[-1] == "runTest"  # of a state machine of Hypothesis
        assert inherited or re.search(rf"^\s*(async )?def {names[-1]}\(", source, re.MULTILINE), line
