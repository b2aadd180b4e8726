"""Long tests in turns: CI runs a part of their cases at each commit, and all tests that are short.

``TEST_TURN=1/4 scripts/test`` leaves out three quarters of the cases of the tests in ``long_tests.txt``. Without the
variable every case runs. A test is long if its cases together take LONG seconds. After a run of all tests with
``--junitxml=FILE``, ``python -m tests.turns FILE ...`` writes the list again.
"""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from xml.etree import ElementTree

import pytest

FOLDER = Path(__file__).parent
LIST = FOLDER / "long_tests.txt"
LONG = 1.5

LAWS = tuple(
    f"tests/meta/test_{name}.py" for name in "files imports layer_names messages opens platforms words".split()
)
"""Files of tests that read all sources: any commit can break them, so they take no turns."""

INSIDE = "tests/meta/test_kernels.py::test_the_kernels_in_the_interpreter"
"""A test that runs other tests. They take turns, so that it does not."""


def test_of(item: str) -> str:
    """Return the test of the case with a node's id."""
    return item.partition("[")[0]


def turn() -> tuple[int, int] | None:
    """Return the turn that the environment asks for and the number of turns, or None for all cases.

    Raises ``pytest.UsageError`` if the variable has another form.
    """
    asked = os.environ.get("TEST_TURN")
    if not asked:
        return None
    own, _, all_ = asked.partition("/")
    if not (own.isdigit() and all_.isdigit() and int(own) < int(all_)):
        raise pytest.UsageError(f"TEST_TURN={asked}: give a turn and the number of turns, such as 0/3, 1/3 or 2/3")
    return int(own), int(all_)


def left_out(ids: Iterable[str], long: set[str], own: int, turns: int) -> Iterator[bool]:
    """Return, case by case, whether it belongs to another turn. Each ``turns``-th case of long tests is of a turn."""
    number = 0
    for id in ids:
        is_long = test_of(id) in long
        yield is_long and number % turns != own
        number += is_long


def take_turn(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Take the cases of other turns out of ``items``."""
    if (asked := turn()) is None:
        return
    long = set(LIST.read_text(encoding="utf-8").splitlines())
    others = list(left_out([item.nodeid for item in items], long, *asked))
    config.hook.pytest_deselected(items=[item for item, other in zip(items, others, strict=True) if other])
    items[:] = [item for item, other in zip(items, others, strict=True) if not other]


def summary() -> str | None:
    """Return the line that says what a run left out."""
    if (asked := turn()) is None:
        return None
    return f"Turn {asked[0]} of 0 to {asked[1] - 1}: cases of long tests in other turns were left out (tests/turns.py)"


def node(case: ElementTree.Element) -> str:
    """Return the id of a case in a file of JUnit's form."""
    names = (case.get("classname") or "").split(".")
    while names and not (path := FOLDER.parent.joinpath(*names).with_suffix(".py")).exists():
        names.pop()
    classes = (case.get("classname") or "").split(".")[len(names) :]
    return "::".join([str(path.relative_to(FOLDER.parent)), *classes, case.get("name") or ""]) if names else ""


def write(files: list[str]) -> None:
    seconds: Counter[str] = Counter()
    for file in files:
        for case in ElementTree.parse(file).iter("testcase"):
            seconds[test_of(node(case))] += float(case.get("time") or 0)  # type: ignore[assignment]
    long = sorted(
        test for test, time in seconds.items() if time >= LONG and test != INSIDE and not test.startswith(LAWS)
    )
    LIST.write_text("".join(f"{test}\n" for test in long), encoding="utf-8")


if __name__ == "__main__":
    write(sys.argv[1:])
