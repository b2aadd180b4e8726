"""The report page of ``preheat diff``: one HTML file that works from a disk, without scripts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import jinja2

from preheat import __version__
from preheat.verify.diff import Compared, summary


class Texts(NamedTuple):
    """The texts of two answers: the part that ``both`` share, and the rest of each."""

    both: str
    one: str
    other: str


def texts_of(each: Compared, decode: Callable[[list[int]], str]) -> Texts:
    """Return the texts of the answers in ``each``; ``decode`` makes text of token ids."""
    return Texts(decode(each.one[: each.equal]), decode(each.one[each.equal :]), decode(each.other[each.equal :]))


def render(found: Sequence[Compared], names: tuple[str, str], decode: Callable[[list[int]], str]) -> str:
    """Return the page. ``names`` describe the two configurations. The same answers give the same bytes."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent), autoescape=True, trim_blocks=True,
        undefined=jinja2.StrictUndefined,
    )  # fmt: skip
    shown = [(each, texts_of(each, decode)) for each in found]
    return environment.get_template("diff.html").render(
        first=names[0], second=names[1], summary=summary(found), found=found, shown=shown, version=__version__
    )
