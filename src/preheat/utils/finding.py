"""What `preheat doctor` finds."""

from __future__ import annotations

from typing import Literal, NamedTuple

Verdict = Literal["ok", "note", "fail"]


class Finding(NamedTuple):
    """``verdict`` on ``what`` (a few words), which is ``found``; ``advice`` says what to change. "note" is for what
    works and may surprise, "fail" for what keeps preheat from running as asked.
    """

    what: str
    found: str
    verdict: Verdict = "ok"
    advice: str = ""
