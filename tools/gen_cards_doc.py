"""Write the tables of docs/cards.md: ``python -m tools.gen_cards_doc``.

They come from the table of cards and from the stored counts of ``tools.compile_matrix``.
"""

from __future__ import annotations

from pathlib import Path

from preheat.backends.cuda.device.card import CARDS, Card
from tools.compile_matrix import recorded

PAGE = Path(__file__).parents[1] / "docs" / "cards.md"


def cards() -> list[str]:
    """Return the table of the abilities of cards."""
    head = (
        "| Compute capability | Cards | bfloat16, int4, int8 | W8A8, e4m3 weights and cache | Shared memory | Kernels |"
    )
    return [head, "| --- | --- | --- | --- | --- | --- |", *map(_card, CARDS.values())]


def _card(card: Card) -> str:
    float8, ran = "yes" if card.float8 else "refused", "run" if card.ran else "compiled only"
    return f"| {card.version} | {card.names} | yes | {float8} | {card.shared_bytes // 1024} KB | {ran} |"


def matrix() -> list[str]:
    """Return the table of the counts of compiled configurations."""
    lines = [
        "| Compute capability | Compiled | Of | Kernels | Faults | Most shared memory, KB | Spill over 256 bytes | Products |",  # noqa: E501
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for version, each in sorted(recorded()["targets"].items(), key=lambda pair: tuple(map(int, pair[0].split(".")))):
        of = f"{each['configurations']} largest" if each["sample"] else f"all {each['configurations']}"
        lines.append(
            f"| {version} | {each['compiled']} | {of} | {each['kernels']} | {each['faults']} | "
            f"{each['most_shared'] / 1024:.0f} | {len(each['spills'])} | {', '.join(each['instructions'])} |"
        )
    return lines


def written(page: str) -> str:
    """Return ``page`` with its tables: a table follows the line of its name."""
    for name, lines in (("cards", cards()), ("matrix", matrix())):
        mark = f"<!-- {name} -->"
        before, _, rest = page.partition(mark)
        after = rest.lstrip("\n").partition("\n\n")[2]
        page = f"{before}{mark}\n\n" + "\n".join(lines) + f"\n\n{after}"
    return page


def main() -> None:
    PAGE.write_text(written(PAGE.read_text()))


if __name__ == "__main__":
    main()
