"""The table of combinations is complete and true.

Every pair is decided, and the tests that it names exist.
"""

from __future__ import annotations

import ast
from itertools import combinations, product
from typing import get_args

import pytest

from preheat.backends.base.facts import Mode
from preheat.backends.registry import FACTS
from preheat.errors import SettingsError
from preheat.ops.kinds import Scheme
from preheat.settings import OPTIONS
from preheat.settings.combinations import ROWS, TRAITS, Refused, Row, Trait, Works, check, pairs
from tests.meta.source import ROOT
from tools import gen_combinations_doc
from tools.gen_combinations_doc import DOC, render, verdicts

REFUSED = [row for row in ROWS if isinstance(row, Refused)]
TESTS = sorted({row.test for row in ROWS if isinstance(row, Works)})


def undecided(rows: tuple[Row, ...]) -> list[set[str]]:
    """Return pairs that the table does not decide, or decides both ways."""
    return [set(pair) for pair, said in verdicts(rows).items() if len({type(row) for row in said}) != 1]


def test_every_pair_is_decided():
    assert undecided(ROWS) == []


def test_a_pair_that_nobody_decided_is_seen():
    assert {"sleep", "replicas"} in undecided(tuple(row for row in ROWS if "replicas" not in row.right.split()))
    assert undecided((*ROWS, Works("x", "sleep", "replicas"))) == [{"sleep", "replicas"}]


def test_a_toy_feature_needs_a_row_for_each_other_feature(monkeypatch):
    monkeypatch.setattr(gen_combinations_doc, "TRAITS", {**TRAITS, "toy": Trait("a toy", "", None)})
    others = " ".join(TRAITS)
    assert undecided(ROWS) == [{"toy", other} for other in TRAITS]
    assert undecided((*ROWS, Works("tests/cpu/test_toy_backend.py::test_it", "toy", others))) == []
    assert undecided((*ROWS, Refused("toy", others, "it is a toy"))) == []


@pytest.mark.parametrize("test", TESTS)
def test_tests_that_are_named_exist(test):
    path, name = test.split("::")
    tree = ast.parse((ROOT / path).read_text())
    assert name in {node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}


def test_names_are_options_modes_and_kinds():
    assert {name for row in ROWS for name in (row.left + " " + row.right).split()} <= TRAITS.keys()
    assert {trait.option for trait in TRAITS.values()} - {""} <= OPTIONS.keys()
    assert set(get_args(Mode)) <= TRAITS.keys()
    schemes = product(("fp8", "int8", "int4"), (None, "token"))
    kinds = {Scheme(code=code, scales="channel", activations=inputs).kind for code, inputs in schemes}
    assert kinds - {"w4a8"} <= TRAITS.keys()
    for facts in FACTS.values():
        assert set(facts.quantized) | {name for names in facts.lacks for name in names} <= TRAITS.keys()


@pytest.mark.parametrize("row", REFUSED, ids=lambda row: f"{row.left}, {row.right}")
def test_refusals_name_both_traits_and_their_remedies(row):
    for left, right in pairs(row):
        with pytest.raises(SettingsError) as error:
            check({left, right})
        for trait in (TRAITS[left], TRAITS[right]):
            assert str(trait) in error.value.message and trait.remedy in error.value.message
        assert error.value.param in {TRAITS[left].option or TRAITS[right].option or None}


def test_working_combinations_are_not_refused():
    refused = {frozenset(pair) for row in REFUSED for pair in pairs(row)}
    for pair in combinations(TRAITS, 2):
        if frozenset(pair) not in refused:
            check(set(pair))
    for row in ROWS:
        if isinstance(row, Works) and row.left == row.right:
            check(set(row.left.split()))


@pytest.mark.parametrize("facts", FACTS.values(), ids=lambda facts: facts.name)
def test_traits_that_a_platform_lacks_are_refused_only_there(facts):
    where = {f"on {facts.name}": facts.lacks}
    for names, reason in facts.lacks.items():
        with pytest.raises(SettingsError, match=f"cannot be used on {facts.name}: {reason}"):
            check(set(names), where)
        check(set(names[1:]), where)


def test_the_page_is_written_from_the_table():
    assert DOC.read_text() == render(), "run: python -m tools.gen_combinations_doc"
