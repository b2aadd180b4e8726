"""Beginning and end of an answer's reasoning, for grammars and parsers.

A grammar sees tokens and a parser sees text. Both turn their input into a :class:`Sign`, and :func:`phase_after` has
the same answer for both.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from types import MappingProxyType

SPACE = " \t\n\r\v\f"
"""White space, as defined by ``bytes.isspace``."""


class Sign(Enum):
    """The meaning of a token or a piece of text for the reasoning."""

    START = "start"
    END = "end"
    CALL = "call of a tool"
    SPACE = "white space"
    TEXT = "text"


class Phase(Enum):
    """The progress of an answer. ``UNKNOWN``: the first sign that is no white space decides about reasoning."""

    UNKNOWN = "unknown"
    WITHIN = "within"
    ENDED = "ended"
    NEVER = "never began"

    @property
    def is_content(self) -> bool:
        """Whether the reasoning is over or never began: all later text is content, whatever it looks like."""
        return self in (Phase.ENDED, Phase.NEVER)


_AFTER: Mapping[tuple[Phase, Sign], Phase] = MappingProxyType(
    {
        (Phase.UNKNOWN, Sign.START): Phase.WITHIN,
        (Phase.UNKNOWN, Sign.SPACE): Phase.UNKNOWN,
        (Phase.UNKNOWN, Sign.END): Phase.NEVER,
        (Phase.UNKNOWN, Sign.CALL): Phase.NEVER,
        (Phase.UNKNOWN, Sign.TEXT): Phase.NEVER,
        (Phase.WITHIN, Sign.END): Phase.ENDED,
        (Phase.WITHIN, Sign.CALL): Phase.ENDED,
    }
)


def phase_after(phase: Phase, sign: Sign) -> Phase:
    """Return the phase behind ``sign``. A call belongs to the content that it begins; an end mark to neither side."""
    return _AFTER.get((phase, sign), phase)
