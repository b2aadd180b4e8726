"""Compile and render chat templates, in a process of :mod:`preheat.frontend.template_process`."""

from __future__ import annotations

import json
import pickle
from datetime import datetime
from decimal import Decimal
from functools import lru_cache
from typing import Any

import jinja2
import jinja2.ext
from jinja2 import meta, nodes
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from preheat.frontend.template_process import FAILED, REFUSED, RENDERED
from preheat.utils.helper import Work

_MESSAGE_CHARS = 1_000


class _GenerationTag(jinja2.ext.Extension):
    """``{% generation %}`` marks the model's own text for training; rendering ignores it."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Refusal(jinja2.TemplateError):
    """An error that a template raises on purpose, about a conversation that its model cannot have."""


def _raise_exception(message: str) -> None:
    raise _Refusal(message)


def _tojson(value: object, **options: Any) -> str:
    """Return ``value`` as JSON, without escapes of HTML.

    Jinja's own filter escapes HTML, but a model reads the result, not a browser. A number with more digits than a float
    becomes a float.
    """
    usual: dict[str, Any] = {"ensure_ascii": False, "default": _as_float}
    return json.dumps(value, **(usual | options))


def _as_float(value: object) -> float:
    if isinstance(value, Decimal):
        return float(value)
    raise TypeError(f"{type(value).__name__} is not JSON")


@lru_cache(maxsize=16)
def _compiled(source: str) -> jinja2.Template:
    extensions = [_GenerationTag, jinja2.ext.loopcontrols]
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=extensions)
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda pattern: datetime.now().strftime(pattern)
    return environment.from_string(source)


def _variables(source: str) -> str:
    """Return the names of the variables that the template looks at, with spaces between."""
    return " ".join(sorted(meta.find_undeclared_variables(_compiled(source).environment.parse(source))))


def make_work(_: bytes) -> Work:
    """Return the function that renders a template, or names its variables.

    Its argument is a pickled pair: the template's source, and the variables, or None to name them.
    """

    def work(job: bytes) -> bytes:
        source, known = pickle.loads(job)
        try:
            text = _variables(source) if known is None else _compiled(source).render(known)
            return RENDERED + text.encode("utf-8", "surrogatepass")
        except MemoryError:
            raise
        except Exception as error:  # an expression in a template may raise anything
            kind, where = REFUSED if isinstance(error, _Refusal) else FAILED, ""
            if isinstance(error, jinja2.TemplateSyntaxError):
                where = f"line {error.lineno}: "
            return kind + f"{where}{error}"[:_MESSAGE_CHARS].encode("utf-8", "surrogatepass")

    return work
