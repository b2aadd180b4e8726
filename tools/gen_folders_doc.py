"""Write the table of folders in CONTRIBUTING.md: ``python -m tools.gen_folders_doc``.

A folder's purpose is the first line of its docstring.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE, PAGE = ROOT / "src" / "preheat", ROOT / "CONTRIBUTING.md"
BEGIN, END = "<!-- folders -->", "<!-- end of folders -->"


def folders() -> Iterator[tuple[str, str]]:
    """Yield each folder of the package with its purpose, in alphabetical order."""
    for path in sorted(path.parent for path in PACKAGE.rglob("*/__init__.py")):
        purpose = ast.get_docstring(ast.parse((path / "__init__.py").read_text())) or ""
        yield path.relative_to(PACKAGE).as_posix(), purpose.partition("\n")[0].replace("``", "`")


def written(page: str) -> str:
    """Return ``page`` with its table."""
    before, _, rest = page.partition(BEGIN)
    after = rest.partition(END)[2]
    rows = [f"| `{name}` | {purpose} |" for name, purpose in folders()]
    table = "\n".join(["| Folder of `src/preheat` | Purpose |", "| --- | --- |", *rows])
    return f"{before}{BEGIN}\n\n{table}\n\n{END}{after}"


def main() -> None:
    PAGE.write_text(written(PAGE.read_text()))


if __name__ == "__main__":
    main()
