"""Words of a command line in vLLM's forms, rewritten for the parser.

The forms are underscores in names, short names (``-tp``), ``--switch true``, and ``--object.key value`` in place of
JSON.
"""

from __future__ import annotations

import json
import re
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from preheat.errors import SettingsError
from preheat.options.given import nested, read_json
from preheat.options.vllm_flags import SHORT

_FLAG = re.compile(r"--?[A-Za-z][\w.+-]*")
_LEVEL = re.compile(r"-O(\d)")


def dashed(word: str) -> str:
    """Return ``word`` with dashes in the flag's name; keys behind a dot stay as they are."""
    name, equals, value = word.partition("=")
    head, dot, keys = name.partition(".")
    return head.replace("_", "-") + dot + keys + equals + value if word.startswith("--") else word


def plain_words(words: Sequence[str], switches: Collection[str]) -> list[str]:
    """Return ``words`` in the parser's form.

    Each flag has its long name, each of ``switches`` one form, each dotted flag one object. Raises SettingsError for a
    key without a value.
    """
    out: list[str] = []
    objects: dict[str, dict[str, Any]] = {}
    dotted = {_long(word.partition("=")[0]).partition(".")[0] for word in words if _has_key(word)}
    rest = deque(words)
    while rest:
        word = rest.popleft()
        flag, equals, value = _LEVEL.sub(r"-O=\1", word).partition("=")
        if not _FLAG.fullmatch(flag):
            out.append(word)
            continue
        head, _, keys = _long(flag).partition(".")
        if head in dotted:
            if not equals and not rest:
                raise SettingsError(f"{flag} needs a value after it")
            given = value if equals else rest.popleft()
            if head not in objects:
                out.append(head)  # its value follows when all keys are known
            _merge(objects.setdefault(head, {}), _object(head, keys, given))
        elif head in switches and (said := value if equals else rest[0] if rest else "").lower() in ("true", "false"):
            out.append(head if said.lower() == "true" else f"--no-{head.removeprefix('--')}")
            if not equals:
                rest.popleft()
        else:
            out.append(head + equals + value)
    return [f"{word}={json.dumps(objects[word])}" if word in objects else word for word in out]


def _has_key(word: str) -> bool:
    flag = word.partition("=")[0]
    return "." in flag and _FLAG.fullmatch(flag) is not None


def _long(flag: str) -> str:
    head, dot, keys = flag.partition(".")
    return SHORT.get(head, head) + dot + keys


def _object(head: str, keys: str, text: str) -> dict[str, Any]:
    """Return the object of a flag with ``keys``; a key with a plus adds to a list."""
    if keys:
        adds = keys.endswith("+")
        return nested(keys.removesuffix("+").split("."), [read_json(text)] if adds else text)
    value = read_json(text)
    if not isinstance(value, dict):
        raise SettingsError(f"{head}: {text!r} is not a JSON object")
    return value


def _merge(into: dict[str, Any], more: Mapping[str, Any]) -> None:
    """Put ``more`` into an object: merge objects, join lists, else the last value counts."""
    for key, value in more.items():
        before = into.get(key)
        if isinstance(before, dict) and isinstance(value, dict):
            _merge(before, value)
        elif isinstance(before, list) and isinstance(value, list):
            before.extend(value)
        else:
            into[key] = value
