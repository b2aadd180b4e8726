"""Write docs/combinations.md from the table of features: ``python -m tools.gen_combinations_doc``."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import combinations
from pathlib import Path

from preheat.backends.registry import FACTS
from preheat.settings import OPTIONS
from preheat.settings.combinations import ONE_OF, ROWS, RULES, TRAITS, Refused, Row, Works, pairs

DOC = Path(__file__).parents[1] / "docs" / "combinations.md"

HEAD = """# Feature combinations

<!-- Written by tools/gen_combinations_doc.py from src/preheat/settings/combinations.py: change it there. -->

Look up whether two features work together, and the reason if they do not. A boot asks this table once, before weights
are read, and refuses a pair with the names of both features, the reason and the remedy.
"""

PAIRS = """
## By feature

Each section lists the features that exclude its feature, with the reasons, and then all that work with it. *Not yet*
means that only missing work is in the way. A pair that works has [a test](#the-tests). A platform may [lack
more](#missing-on-a-platform).
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
    parts = [HEAD, PAIRS, *_features(), _lacking(), _rules(), _tests()]
    return "".join(parts)


def _table(columns: str, rows: list[str]) -> str:
    heads = columns.split(" | ")
    return f"| {columns} |\n|{' --- |' * len(heads)}\n" + "".join(f"| {row} |\n" for row in rows)


def _features() -> Iterator[str]:
    """Yield a section for each trait: its option, the traits that exclude it with the reasons, and all others."""
    said = verdicts()
    for name, trait in TRAITS.items():
        found = {other: said[frozenset((name, other))] for other in TRAITS if other != name}
        refused = {other: row for other, rows in found.items() for row in rows if isinstance(row, Refused)}
        exclusive = [other for other, rows in found.items() if None in rows and other not in refused]
        works = [other for other in found if other not in refused and other not in exclusive]
        lines = [
            f"Not yet with: {_reasons(row for row in refused.items() if row[1].yet)}",
            f"Not with: {_reasons(row for row in refused.items() if not row[1].yet)}",
            f"One at a time: this or {_names(exclusive)}",
            f"Works with: {_names(works) if len(works) < len(found) else 'every other feature'}",
        ]
        head = f"\n### {trait.name[0].upper()}{trait.name[1:]}\n\n"
        option = f"Option: `{OPTIONS[trait.option].flag}`.\n\n" if trait.option else ""
        yield head + option + "".join(f"- {line}.\n" for line in lines if not line.endswith((": ", "or ")))


def _reasons(refused: Iterable[tuple[str, Refused]]) -> str:
    """Return traits with the reasons of their refusals; traits with the same reason are together."""
    groups: dict[str, list[str]] = defaultdict(list)
    for name, row in refused:
        groups[row.reason].append(name)
    return "; ".join(f"**{_names(names)}** ({reason})" for reason, names in groups.items())


def _names(names: Iterable[str]) -> str:
    return ", ".join(TRAITS[name].name for name in names)


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
        f"`{row.test}` | {_names(row.left.split())} | "
        f"{'each other' if row.left == row.right else _names(row.right.split())}"
        for row in ROWS
        if isinstance(row, Works)
    ]
    return f"\n## The tests\n\n{_table('Test | Features | With', rows)}"


if __name__ == "__main__":
    DOC.write_text(render(), encoding="utf-8")
