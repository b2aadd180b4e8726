"""The ``file`` strategy: one tuple of a bucket's dimensions a line.

Source: the bucketing files of vLLM on Gaudi. Every element of a tuple is an integer, a list or a ``range(...)``, and
a line stands for the product of its elements; ``#`` starts a comment. Any other line is skipped.
"""

from __future__ import annotations

import ast
import itertools
import logging
import math

from preheat.errors import SettingsError

logger = logging.getLogger(__name__)

MAX_RANGE = 10_000
MAX_LINE = 1_000_000


def parse_bucket_file(text: str, name: str = "bucket file") -> list[tuple[int, ...]]:
    """Return the tuples in ``text``, in order, without repetitions.

    A line that is not a tuple of integers, lists and ranges is skipped with a warning that names it. Raises
    SettingsError for a file without tuples.
    """
    found: dict[tuple[int, ...], None] = {}
    for number, line in enumerate(text.splitlines(), 1):
        content = line.partition("#")[0].strip()
        if content:
            try:
                found.update(dict.fromkeys(_line(content)))
            except (ValueError, SyntaxError, RecursionError, MemoryError) as error:
                reason = error.msg if isinstance(error, SyntaxError) else str(error)
                logger.warning("%s, line %d is skipped: %r is not a bucket: %s", name, number, content, reason)
    if not found:
        raise SettingsError(f"{name} has no buckets: write one tuple a line, such as (4, range(128, 1025, 128))")
    return list(found)


def _line(content: str) -> list[tuple[int, ...]]:
    node = ast.parse(content, mode="eval").body
    if not isinstance(node, ast.Tuple) or not 2 <= len(node.elts) <= 3:
        raise ValueError("write a tuple of two or three elements")
    elements = [_element(element) for element in node.elts]
    product = math.prod(map(len, elements))
    if product > MAX_LINE:
        raise ValueError(f"it stands for {product:,} buckets, at most {MAX_LINE:,} are allowed")
    return list(itertools.product(*elements))


def _element(node: ast.expr) -> list[int]:
    if isinstance(node, ast.List):
        values = [_integer(element) for element in node.elts]
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "range":
        if node.keywords or not 1 <= len(node.args) <= 3:
            raise ValueError("range takes one to three integers")
        span = range(*(_integer(argument) for argument in node.args))
        if len(span) > MAX_RANGE:
            raise ValueError(f"a range of {len(span):,} values is too long, at most {MAX_RANGE:,} are allowed")
        values = list(span)
    else:
        values = [_integer(node)]
    if not values:
        raise ValueError("an element has no values")
    if min(values) < 0:
        raise ValueError("values must not be negative")
    return values


def _integer(node: ast.expr) -> int:
    value = ast.literal_eval(node)
    if type(value) is not int:
        raise ValueError(f"{ast.unparse(node)} is not an integer")
    return value
