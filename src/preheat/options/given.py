"""Values by name: our options and vLLM's flags.

The names come from a file of options, from flags or from keywords. A name may have dashes or underscores, begin with
``no-`` for a switch, and end with the key of a JSON object behind a dot. The module :mod:`preheat.options.vllm_flags`
has the flags of vLLM that are no options here.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from preheat.errors import SettingsError
from preheat.options.environment import warn
from preheat.options.options import Option
from preheat.options.vllm_flags import FOREIGN, INSTEAD, Foreign, refuse
from preheat.utils.text import misspelled


def given_options(given: Mapping[str, object], options: Mapping[str, Option], where: str = "") -> dict[str, Any]:
    """Return the values that ``given`` sets, by the names of ``options``.

    ``where`` is the file that sets them. Raises SettingsError for an unknown name, and for a value that cannot be used.
    """
    found: dict[str, Any] = {}
    for written, value in given.items():
        for path, asked in _meant(written.replace("-", "_"), value, options, where):
            name, *keys = path.split(".")
            source = f"{where}: {written}" if where else written
            more = options[name].convert(nested(keys, asked) if keys else asked, source)
            before = found.get(name)
            found[name] = {**before, **more} if isinstance(before, dict) and isinstance(more, dict) else more
    return found


def nested(keys: Iterable[str], value: object) -> dict[str, Any]:
    """Return an object with ``value`` at the end of ``keys``."""
    first, *rest = keys
    return {first: nested(rest, value) if rest else read_json(value)}


def read_json(value: object) -> object:
    """Return ``value``; a text that is JSON is read."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except ValueError:
        return value


def _meant(name: str, value: object, options: Mapping[str, Option], where: str) -> Iterator[tuple[str, object]]:
    """Yield the options, or keys of their objects, that ``name`` sets, with their values."""
    head, dot, _ = name.partition(".")
    row = FOREIGN.get(head)
    if name in options and isinstance(value, list) and (several := options[name].several) is not None:
        yield (name, value[0]) if len(value) == 1 and not _is_named(str(value[0])) else (several, value)
    elif head in options:
        yield name, value
    elif row is not None and dot:
        raise refuse(row, value) if row.verdict == "refused" else _unknown(name, options, where)
    elif row is not None:
        yield from _of_vllm(row, value)
    elif name.startswith("no_") and _is_switch(name.removeprefix("no_"), options):
        yield from _meant(name.removeprefix("no_"), value in (False, "false"), options, where)
    else:
        raise _unknown(name, options, where)


def _is_named(text: str) -> bool:
    """Return whether ``text`` is NAME=PATH, and not a path itself."""
    name, equals, _ = text.partition("=")
    return bool(equals) and "/" not in name and not os.path.exists(text)


def _of_vllm(row: Foreign, value: object) -> Iterator[tuple[str, object]]:
    if row.verdict == "sets":
        yield row.says, value
    elif not row.takes(value):
        raise refuse(row, value)
    elif row.verdict == "unused" and value is not False:
        warn(f"{row.flag} has no effect: {row.says}")


def _is_switch(name: str, options: Mapping[str, Option]) -> bool:
    return bool in options[name].kinds if name in options else name in FOREIGN and FOREIGN[name].switch


def _unknown(name: str, options: Mapping[str, Option], where: str) -> SettingsError:
    at = f"option in {where}:" if where else "option"
    return SettingsError(f"unknown {at} {name!r}{instead_of(name, options)}", param=name)


def instead_of(name: str, known: Iterable[str]) -> str:
    """Return a hint for the unknown ``name``: its name here, or a known similar name."""
    flag = "--" + name.lstrip("-").replace("_", "-") if not name.startswith("-") or name.startswith("--") else name
    return f": write {INSTEAD[flag]}" if flag in INSTEAD else misspelled(name, known)
