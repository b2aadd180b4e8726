"""Write docs/combinations.md from the table of features: ``python -m tools.gen_combinations_doc``."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from pathlib import Path

from preheat.backends.registry import FACTS
from preheat.combinations import ONE_OF, ROWS, RULES, TRAITS, Refused, Row, Works, pairs

DOC = Path(__file__).parents[1] / "docs" / "combinations.md"

HEAD = """# Feature combinations

<!-- Written by tools/gen_combinations_doc.py from src/preheat/combinations.py: change it there. -->

Look up whether two features work together, and the reason if they do not. A boot asks this table once, before weights
are read, and refuses a pair with the names of both features, the reason and the remedy.
"""

MATRIX = """
## In pairs

✓ works, as a test says · **✗** not yet · – not at all, or one of the two at a time. Columns have the numbers of rows.

"""


def verdicts(rows: Sequence[Row] = ROWS) -> dict[frozenset[str], list[Row | None]]:
    """Return the rows on each pair of traits.

    None: an engine has one of the two at most.
    """
    found: dict[frozenset[str], list[Row | None]] = {frozenset(pair): [] for pair in combinations(TRAITS, 2)}
    for group in ONE_OF:
        for pair in combinations(group.split(), 2):
            found[frozenset(pair)].append(None)
    for row in rows:
        for pair in set(map(frozenset, pairs(row))):
            found[pair].append(row)
    return found


def render() -> str:
    """Return the text of docs/combinations.md."""
    parts = [HEAD, MATRIX, _matrix(), _refused(), _lacking(), _rules(), _tests()]
    return "".join(parts)


def _table(columns: str, rows: list[str]) -> str:
    heads = columns.split(" | ")
    return f"| {columns} |\n|{' --- |' * len(heads)}\n" + "".join(f"| {row} |\n" for row in rows)


def _matrix() -> str:
    """Return a table of all pairs of traits.

    It has a row for each trait, with its option, and a column for each.
    """
    said = verdicts()
    rows = []
    for number, (name, trait) in enumerate(TRAITS.items(), 1):
        cells = ["" if name == other else _mark(said[frozenset((name, other))]) for other in TRAITS]
        option = f" `{trait.option}`" if trait.option else ""
        rows.append(f"{number} | {trait.name}{option} | {' | '.join(cells)}")
    return _table(f"# | Feature | {' | '.join(map(str, range(1, len(TRAITS) + 1)))}", rows)


def _mark(said: list[Row | None]) -> str:
    refused = [row for row in said if isinstance(row, Refused)]
    if refused:
        return "**✗**" if refused[0].yet else "–"
    return "–" if None in said else "✓" * bool(said)


def _names(names: str) -> str:
    return ", ".join(TRAITS[name].name for name in names.split())


def _refused() -> str:
    rows = [
        f"{_names(row.left)} | {_names(row.right)} | {'not yet: ' * row.yet}{row.reason}"
        for row in ROWS
        if isinstance(row, Refused)
    ]
    return f"\n## Why not\n\n{_table('Feature | With | Reason', rows)}"


def _lacking() -> str:
    """Return the table of features that platforms lack.

    The page of execution modes lists each platform's modes.
    """
    rows = [
        f"{facts.name} | {' with '.join(TRAITS[name].name for name in names)} | {reason}"
        for facts in FACTS.values()
        for names, reason in facts.lacks.items()
    ]
    note = "[Execution modes](execution-modes.md) and [quantized layers](quantization.md) of platforms have pages.\n\n"
    return f"\n## Missing on a platform\n\n{note}{_table('Platform | Feature | Reason', rows)}"


def _rules() -> str:
    options = "".join(f"- {rule.message}.\n".replace("{s.", "{") for rule in RULES)
    return f"\n## Options that need each other\n\n{options}"


def _tests() -> str:
    """Return the table of tests that traits work together."""
    rows = [
        f"`{row.test}` | {_names(row.left)} | {'each other' if row.left == row.right else _names(row.right)}"
        for row in ROWS
        if isinstance(row, Works)
    ]
    return f"\n## The tests\n\n{_table('Test | Features | With', rows)}"


if __name__ == "__main__":
    DOC.write_text(render(), encoding="utf-8")
