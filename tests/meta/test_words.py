"""Words name things: docstrings, comments and pages hold few words that point at a thing instead."""

from functools import cache

import pytest

from tests.meta.source import ROOT
from tests.meta.words import FOLDERS, Count, count, count_files, prose, prose_of_page, together

MOST, MOST_OF_A_FILE, MOST_OF_A_PAGE = 8.0, 15.0, 10.0
"""Pointing words in 1,000: of a folder, of a Python file and of a page."""
SHORT = 200
"""Words up to which a file is too short for a bound of its own."""

EXCEPTIONS = {
    "CONTRIBUTING.md": 39.9,  # quotes sentences that point, beside better ones
}
"""Files above the bound, each with its own bound until it is rewritten."""

PAGES = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md")]
PAGES += sorted((ROOT / "docs").rglob("*.md"))


@cache
def of_folder(folder: str) -> dict[str, Count]:
    """Return the counts of the Python files below ``folder``."""
    return count_files(sorted((ROOT / folder).rglob("*.py")))


def judged(counts: dict[str, Count], most: float, exceptions: dict[str, float], short: int = 0) -> list[str]:
    """Return the complaints about ``counts``.

    A file is above its bound, or has an exception without need.
    """
    found = []
    for name, each in counts.items():
        bound = exceptions.get(name, most)
        if each.words > short and each.rate > bound:
            found.append(f"{name}: {each.rate:.1f} pointing words in 1,000, at most {bound:g}")
        if name in exceptions and (each.words <= short or each.rate <= most):
            found.append(f"{name}: {each.rate:.1f} pointing words in 1,000, its exception is no longer needed")
    return found


@pytest.mark.parametrize("folder", [*FOLDERS, "all"])
def test_docstrings_and_comments_name_things(folder):
    folders = FOLDERS if folder == "all" else (folder,)
    found = together(each for name in folders for each in of_folder(name).values())
    assert found.words > 1_000
    assert found.rate <= MOST, f"python -m tests.meta.words {' '.join(folders)} --lines"


def test_each_file_names_things():
    counts = {name: each for folder in FOLDERS for name, each in of_folder(folder).items()}
    assert judged(counts, MOST_OF_A_FILE, EXCEPTIONS, SHORT) == [], "python -m tests.meta.words FILE --lines"
    assert [name for name in EXCEPTIONS if name not in counts and name.endswith(".py")] == []


def test_each_page_names_things():
    counts = count_files(PAGES)
    assert judged(counts, MOST_OF_A_PAGE, EXCEPTIONS) == [], "python -m tests.meta.words PAGE --lines"
    assert [name for name in EXCEPTIONS if name not in counts and name.endswith(".md")] == []


def test_a_file_above_its_bound_and_an_exception_without_need_are_seen():
    counts = {"a": Count(1_000, 16), "b": Count(1_000, 14), "c": Count(100, 50), "d": Count(1_000, 30)}
    assert [each.partition(":")[0] for each in judged(counts, 15, {"b": 20, "c": 600, "d": 30}, SHORT)] == list("abc")
    assert [each.partition(":")[0] for each in judged(counts, 15, {"a": 16, "d": 29}, SHORT)] == ["d"]


def test_prose_of_a_file_is_its_docstrings_and_comments():
    source = '"""Those of ``what``."""\nx = "which"  # whose: all that\ny = 1  # noqa: what\n'
    assert count(text for _, text in prose(source)) == Count(6, 3)


def test_prose_of_a_page_has_no_code_and_nothing_that_a_tool_writes():
    page = (
        "# Those\n\nA `what`, [which](what.md) <b>word</b>.\n\n```sh\necho which\n```\n\n    echo what\n\n"
        "1. item\n    which\n\n<!-- tables: written by a tool -->\nwhat\n<!-- end of tables -->\n"
    )
    found = list(prose_of_page(page))
    assert [number for number, line in found if count([line]).pointing] == [1, 3, 12]
    assert count(line for _, line in found) == Count(7, 3)
    assert list(prose_of_page("# Page\n\n<!-- Written by tools/x.py: change it there. -->\n\nwhat\n")) == []
