"""Chat templates, compiled and rendered in other processes.

A template is a program that comes with a checkpoint. One line of it can multiply texts, unfold lists or count for
hours, also while it is compiled. No limit within Jinja catches all of that. The system bounds the process: see
:mod:`preheat.utils.helper`.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from preheat.errors import InvalidRequest
from preheat.utils.helper import HelperEnded, Helpers, Kind

AT_ONCE = 2
"""Templates that are rendered at the same time."""

CPU_SECONDS, MEMORY = 5.0, 1 << 29
"""Bounds of one rendering: about a hundred times the needs of the longest conversation."""

RENDERED, REFUSED, FAILED = b"T", b"R", b"F"
"""The first byte of an answer: a rendered text, a message of the template, or an error about the template."""

_helpers = Helpers(Kind("preheat.frontend.template_work:make_work", b"", CPU_SECONDS, MEMORY), AT_ONCE)


class TemplateFailed(Exception):
    """The template cannot be compiled or rendered."""


class TemplateRefused(TemplateFailed):
    """The template raised an error on purpose, about a conversation that its model cannot have."""


class TemplateExhausted(TemplateFailed):
    """The template took more time or memory than allowed."""


def render(source: str, known: Mapping[str, Any]) -> str:
    """Return the text of the template, rendered with the ``known`` variables. Raises TemplateFailed."""
    return _answer(source, dict(known))


@lru_cache(maxsize=16)
def variables(source: str) -> frozenset[str]:
    """Return the variables that the template looks at. Raises TemplateFailed, also if it cannot be compiled."""
    return frozenset(_answer(source, None).split())


def warm_up(source: str) -> None:
    """Start all processes and compile the template in each."""
    _helpers.run_on_each(_job(source, None))


def _answer(source: str, known: dict[str, Any] | None) -> str:
    try:
        answer = _helpers.run(_job(source, known))
    except HelperEnded as ended:
        took = {"time": f"more than {CPU_SECONDS:g} s of CPU time", "memory": f"more than {MEMORY >> 20} MiB"}
        raise TemplateExhausted(f"it took {took.get(ended.reason, 'its process down')}") from ended
    text = str(memoryview(answer)[1:], "utf-8", "surrogatepass")
    if answer[:1] in (REFUSED, FAILED):
        raise (TemplateRefused if answer[:1] == REFUSED else TemplateFailed)(text)
    return text


def _job(source: str, known: dict[str, Any] | None) -> bytes:
    try:
        return pickle.dumps((source, known))
    except Exception as error:  # objects may raise anything
        raise InvalidRequest(f"Variables of a chat template must be plain data: {error}", param="messages") from error
