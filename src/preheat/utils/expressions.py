"""Match regular expressions from a file, in limited time and memory.

Python backtracks where an expression does not match. An expression of twenty characters can take years, and no thread
can be stopped. So a child process matches all expressions of a file, and ends when it takes too long. The child runs
this file, so it imports nothing of preheat.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import NamedTuple

SECONDS = 3
"""CPU seconds for all expressions of a file."""

PATIENCE = 10.0
"""Seconds by the clock for all expressions of a file."""

MEMORY_BYTES = 1 << 30


class Expressions(NamedTuple):
    """The expressions of a ``field``, in order; ``whole``: they match a whole name, not just its beginning."""

    field: str
    texts: Sequence[str]
    whole: bool = False


class Match(NamedTuple):
    """The ``number`` of the first expression that matches a name, and its first ``group``, if any."""

    number: int
    group: str | None


Found = dict[str, Match]
"""Matches by name; a name without a match is not in it."""


class BadExpression(ValueError):
    """An expression is invalid or takes too long. The message names the field."""


def first_matches(asked: Sequence[Expressions], names: Sequence[str]) -> list[Found]:
    """Return, for each of ``asked``, the first matches in ``names``, by Python's rules. Raises BadExpression."""
    if not any(each.texts for each in asked):
        return [{} for _ in asked]
    lines, ended = _answers_of(json.dumps([asked, names]))
    found: list[Found] = []
    for each, line in zip(asked, lines, strict=False):
        answer = json.loads(line)
        if "wrong" in answer:
            raise BadExpression(f"{each.field} holds {answer['wrong']}")
        found.append({names[place]: Match(number, group) for place, number, group in answer["found"]})
    if len(found) < len(asked):
        raise BadExpression(f"{asked[len(found)].field} {ended}: list names in place of a regular expression")
    return found


def _answers_of(question: str) -> tuple[list[str], str]:
    """Return the lines that the child has answered, and the reason why it ended early."""
    command = [sys.executable, "-I", "-S", __file__]
    try:
        done = subprocess.run(command, input=question, capture_output=True, text=True, timeout=PATIENCE, check=False)
        said, status, last = done.stdout, done.returncode, done.stderr.strip().rpartition("\n")[2]
    except subprocess.TimeoutExpired as error:
        said, status, last = (error.stdout or b"").decode(), -1, ""
    slow = f"takes more than {SECONDS} seconds to match"
    return said.rpartition("\n")[0].splitlines(), slow if status < 0 else f"cannot be matched ({last})"


def _first(texts: Sequence[str], whole: bool, names: Sequence[str]) -> dict[str, object]:
    """Return the answer for the expressions of one field."""
    compiled = []
    for text in texts:
        try:
            compiled.append(re.compile(text))
        except (re.error, OverflowError, RecursionError) as error:
            return {"wrong": f"{text[:200]!r}, and that is not a regular expression: {error}"}
    found = []
    for place, name in enumerate(names):
        for number, each in enumerate(compiled):
            if match := each.fullmatch(name) if whole else each.match(name):
                found.append((place, number, match[1] if each.groups else None))
                break
    return {"found": found}


def _limit(kind: int, most: int) -> None:
    import resource

    _, hard = resource.getrlimit(kind)
    most = most if hard == resource.RLIM_INFINITY else min(most, hard)
    resource.setrlimit(kind, (most, most))


def main() -> None:
    """Answer the question on standard input, within this process's limits."""
    import resource

    _limit(resource.RLIMIT_CPU, SECONDS)
    with suppress(*() if sys.platform == "linux" else (OSError, ValueError)):  # macOS knows no limit of addresses
        _limit(resource.RLIMIT_AS, MEMORY_BYTES)
    _limit(resource.RLIMIT_CORE, 0)
    asked, names = json.load(sys.stdin)
    for _, texts, whole in asked:
        sys.stdout.write(json.dumps(_first(texts, whole, names)) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
