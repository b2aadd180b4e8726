"""A finding of `preheat doctor`."""

from __future__ import annotations

from typing import Literal, NamedTuple

Verdict = Literal["ok", "note", "fail"]


class Finding(NamedTuple):
    """The ``verdict`` on a subject.

    ``what`` names the subject in a few words, ``found`` is its state. ``advice`` is the remedy. "note": it works and
    may surprise. "fail": it keeps preheat from running as asked.
    """

    what: str
    found: str
    verdict: Verdict = "ok"
    advice: str = ""
