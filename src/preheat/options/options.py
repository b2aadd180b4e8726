"""Options: each is declared once, as a field of a dataclass.

Its value comes from a flag, the environment, a file or a keyword. The module :mod:`preheat.settings` lists the options;
this module parses, checks and documents them.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import json
import math
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping
from fractions import Fraction
from typing import Any, Literal

from preheat.errors import SettingsError
from preheat.utils.text import brief, did_you_mean, plain_number

LARGEST = 2**63 - 1
"""The largest whole number of an option."""

_TRUE, _FALSE = {"1", "true", "yes"}, {"0", "false", "no"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Option:
    """One option.

    ``kinds`` are the Python types of its values; a ``bool`` does not count as an ``int``. ``later`` is the reason why
    values other than the default are rejected: the feature is not implemented. A mapping gives the reasons for single
    values. ``env`` is vLLM's variable, ``later_env`` its name in later versions. A list's flag takes several words.
    With ``one_word`` it takes one word and is repeated for more, so the next word is never part of the list. ``unset``
    are values that other engines write for the default. ``several`` is the option that replaces this one if it is given
    several times, or as NAME=VALUE. ``path`` is what the option names, if it names a path; a new one may be missing.
    ``no_paths`` are its values that are words instead.
    """

    name: str
    kinds: tuple[type, ...]
    default: Any
    help: str
    group: str
    env: str | None = None
    later_env: str | None = None
    choices: tuple[str, ...] | None = None
    low: float | None = None
    high: float | None = None
    later: str | Mapping[Any, str] | None = None
    parse: Callable[[str], Any] | None = None
    default_text: str | None = None
    one_word: bool = False
    unset: tuple[Any, ...] = ()
    several: str | None = None
    path: Literal["file", "folder", "new file", "new folder"] | None = None
    no_paths: tuple[str, ...] = ()

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")

    @functools.cached_property
    def env_names(self) -> tuple[str, ...]:
        """The environment variables of this option; the first one that is set counts."""
        return tuple(name for name in (f"PREHEAT_{self.name.upper()}", self.later_env, self.env) if name)

    def convert(self, value: object, source: str) -> Any:
        """Return ``value`` in the option's type, parsed if it is text, and checked. Errors name its ``source``."""
        if isinstance(value, list | tuple) and tuple in self.kinds:
            value = _words(value)
        elif isinstance(value, str | int) and str(value).lower() in self.unset:
            value = self.default
        elif isinstance(value, str):
            value = self._from_text(value, source)
        elif type(value) is int and float in self.kinds and int not in self.kinds:
            value = float(value)
        self.check(value, source)
        return value

    def check(self, value: object, source: str) -> None:
        """Raise SettingsError unless ``value`` may be used."""
        if type(value) not in self.kinds:
            raise SettingsError(f"{source}: {value!r} is not {_EXPECTED[self.kinds[0]]}", param=self.name)
        for chosen in value if isinstance(value, tuple) else (value,):
            if self.choices and chosen is not None and chosen not in self.choices:
                raise SettingsError(
                    f"{source}: {chosen!r} is not one of {', '.join(self.choices)}{did_you_mean(chosen, self.choices)}",
                    param=self.name,
                )
        if any("\0" in text for text in _texts(value)):
            raise SettingsError(f"{source} has a NUL byte, and paths and names cannot have one", param=self.name)
        if isinstance(value, int) and abs(value) > max(LARGEST, self.high or 0):
            raise SettingsError(f"{source}: {brief(value)} must be at most {LARGEST}", param=self.name)
        if isinstance(value, int | float) and not self._in_range(value):
            raise SettingsError(f"{source}: {value!r} must be {self._range()}", param=self.name)
        if reason := self._rejection(value):
            raise SettingsError(
                f"{source}: {_show(value)} is not supported yet: {reason}. Leave it {self._at_default}.",
                param=self.name,
            )

    @property
    def shown_default(self) -> str:
        return _show(self.default) if self.default_text is None else self.default_text

    @property
    def _at_default(self) -> str:
        return "unset" if self.default is None or self.default == () else f"at {_show(self.default)}"

    def _from_text(self, text: str, source: str) -> Any:
        if self.parse is not None:
            return self.parse(text)
        if type(None) in self.kinds and not text.strip():
            return None
        kind = self.kinds[0]
        if kind is str:
            return text
        try:
            return _PARSERS[kind](text.strip())
        except ValueError:
            raise SettingsError(f"{source}: {text!r} is not {_EXPECTED[kind]}", param=self.name) from None

    def _in_range(self, value: float) -> bool:
        low, high = self.low, self.high
        return (low is None or value >= low) and (high is None or value <= high) and not math.isnan(value)

    def _range(self) -> str:
        low, high = (None if bound is None else plain_number(bound) for bound in (self.low, self.high))
        if low is not None and high is not None:
            return f"between {low} and {high}"
        return f"at least {low}" if low is not None else f"at most {high}"

    def _rejection(self, value: object) -> str | None:
        if isinstance(self.later, str):
            return self.later if value != self.default else None
        return self.later.get(value) if self.later else None


def _texts(value: object) -> Iterator[str]:
    """Yield all texts in ``value``."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        yield from (text for pair in value.items() for each in pair for text in _texts(each))
    elif isinstance(value, list | tuple):
        yield from (text for each in value for text in _texts(each))


def _show(value: object) -> str:
    """Return ``value`` in the form of the environment."""
    if value is None or value == ():
        return "unset"
    if isinstance(value, tuple):
        return ",".join(value)
    if isinstance(value, dict):
        return json.dumps(value)
    return str(value).lower() if isinstance(value, bool) else str(value)


def parse_bool(text: str) -> bool:
    """Parse 1, true, yes or 0, false, no, in any case. Raises ValueError for anything else."""
    word = text.strip().lower()
    if word not in _TRUE | _FALSE:
        raise ValueError(text)
    return word in _TRUE


def _parse_list(text: str) -> tuple[str, ...]:
    """Parse ``a,b`` or a JSON list of strings."""
    items = json.loads(text) if text.startswith("[") else text.split(",")
    return tuple(word for item in items if (word := _word(item).strip()))


def _words(items: Iterable[object]) -> tuple[str, ...]:
    """Return the words of a list; an item may be a JSON list, as in vLLM: ``["GET", "POST"]``."""
    return tuple(word for item in items for word in _listed(item))


def _listed(item: object) -> tuple[str, ...]:
    if isinstance(item, str) and item.startswith("[") and item.endswith("]"):
        with contextlib.suppress(ValueError):
            return _parse_list(item)
    return (_word(item),)


def _word(item: object) -> str:
    """Return an item of a list in the form of its flag: an object as JSON."""
    return json.dumps(item) if isinstance(item, dict) else str(item)


def _parse_object(text: str) -> dict[str, Any]:
    """Parse a JSON object. Raises ValueError for anything else."""
    value = json.loads(text)
    if not isinstance(value, dict):
        raise ValueError(text)
    return value


def parse_count(text: str) -> int:
    """Parse a whole number, or a short form of vLLM.

    ``8k`` is 8,000, ``8K`` 8,192, ``1.5m`` 1,500,000. Raises ValueError for anything else, and for a fraction of a
    power of two.
    """
    scale = _SCALES.get(text[-1:])
    if scale is None:
        return int(text)
    number = Fraction(text[:-1]) * scale
    if number.denominator != 1 or ("/" in text) or (text[-1].isupper() and "." in text):
        raise ValueError(text)
    return int(number)


_SCALES = {letter: 1000**power for power, letter in enumerate("kmgt", 1)} | {
    letter: 1024**power for power, letter in enumerate("KMGT", 1)
}


_PARSERS: dict[type, Callable[[str], Any]] = {
    bool: parse_bool,
    int: parse_count,
    float: float,
    tuple: _parse_list,
    dict: _parse_object,
}
_EXPECTED: dict[type, str] = {
    bool: "a yes or no (use 1/0, true/false or yes/no)",
    int: "a whole number",
    float: "a number",
    tuple: "a list",
    dict: 'a JSON object, such as {"name": 1}',
    str: "text",
}


def option(default: Any, help: str, *, group: str, secret: bool = False, **more: Any) -> Any:  # noqa: A002
    """Return an option as a dataclass field.

    ``more`` are fields of :class:`Option`. A ``secret`` is hidden in the repr.
    """
    declared = {"default": default, "help": help, "group": group, **more}
    return dataclasses.field(default=default, metadata={"option": declared}, repr=not secret)


@functools.cache
def registry(cls: type) -> dict[str, Option]:
    """Return the options that dataclass ``cls`` declares, by name, in order."""
    hints = typing.get_type_hints(cls)
    return {
        field.name: Option(name=field.name, kinds=_kinds(hints[field.name]), **field.metadata["option"])
        for field in dataclasses.fields(cls)
    }


def _kinds(hint: Any) -> tuple[type, ...]:
    parts = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    return tuple(typing.get_origin(part) or part for part in parts)


def add_flags(parser: argparse.ArgumentParser, options: Iterable[Option]) -> None:
    """Add ``options`` as flags, in their groups. Flags that are not given are absent from the namespace.

    The help leaves out options that are not implemented; giving one is an error with the reason.
    """
    groups: dict[str, Any] = {}
    for opt in options:
        group = groups.get(opt.group) or groups.setdefault(opt.group, parser.add_argument_group(opt.group))
        keywords: dict[str, Any] = {"dest": opt.name, "default": argparse.SUPPRESS, "help": _flag_help(opt)}
        if opt.kinds[0] is bool:
            keywords["action"] = argparse.BooleanOptionalAction
        elif opt.kinds[0] is tuple:
            keywords |= {"action": "append"} if opt.one_word else {"action": "extend", "nargs": "+"}
            keywords["metavar"] = "VALUE"
        elif opt.kinds[0] is dict:
            keywords["metavar"] = "JSON"
        elif opt.several is not None:
            keywords |= {"action": "append", "metavar": opt.kinds[0].__name__.upper()}
        else:
            keywords["metavar"] = "|".join(opt.choices) if opt.choices else opt.kinds[0].__name__.upper()
        group.add_argument(opt.flag, **keywords)


def _flag_help(opt: Option) -> str:
    if isinstance(opt.later, str):
        return argparse.SUPPRESS
    return f"{opt.help} [{opt.shown_default}]".replace("%", "%%")
