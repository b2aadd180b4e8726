"""``EngineArgs``: the options of an engine before it boots, for vLLM's scripts."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any, Self

from preheat.options.command_words import dashed, plain_words
from preheat.options.options import add_flags
from preheat.settings import OPTIONS, Settings


class _Given:
    """The fields that ``dataclasses`` finds.

    They are all options of the class, and the given ones of an object.
    """

    def __get__(self, args: EngineArgs | None, owner: type[EngineArgs]) -> dict[str, Any]:
        every = Settings.__dataclass_fields__
        return dict(every) if args is None else {name: every[name] for name in args.given if name in every}


class EngineArgs:
    """Options of :class:`preheat.LLM` by name; reading one that is not given returns its default.

    ``dataclasses.asdict`` and ``replace`` work with the given options. An option may be set until an engine is made.
    Raises SettingsError for an unknown name, and the errors of :meth:`create_engine_config` for values.
    """

    __dataclass_fields__ = _Given()

    def __init__(self, model: str | None = None, **options: Any) -> None:
        self.given = options if model is None else {"model": model, **options}
        self.create_engine_config()

    def __getattr__(self, name: str) -> Any:
        given = self.__dict__.get("given", {})
        if name not in given and name not in OPTIONS:
            raise AttributeError(f"an engine has no option {name!r}")
        return given[name] if name in given else OPTIONS[name].default

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "given":
            super().__setattr__(name, value)
        else:
            self.given[name] = value

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and self.given == other.given

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in self.given.items())})"

    def create_engine_config(self, usage_context: object = None) -> Settings:
        """Return the settings: the options, then the environment, then the defaults. Raises SettingsError.

        ``usage_context`` identifies the caller for vLLM's usage statistics; preheat has none and ignores it.
        """
        return Settings.load(self.given)

    @classmethod
    def add_cli_args(cls, parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        """Add a flag for each option, and return ``parser``. Flags that are not given leave no attribute."""
        add_flags(parser, OPTIONS.values())
        return parser

    @classmethod
    def from_cli_args(cls, args: argparse.Namespace) -> Self:
        """Make the options from the attributes of ``args`` that are options."""
        return cls(**{name: value for name, value in vars(args).items() if name in OPTIONS})


class AsyncEngineArgs(EngineArgs):
    """The options of an :class:`preheat.AsyncLLM`: the same."""


class GivenArgs(argparse.Namespace):
    """Given flags; reading an engine option that is not given returns its default."""

    def __getattr__(self, name: str) -> Any:
        if name not in OPTIONS:
            raise AttributeError(name)
        return OPTIONS[name].default


class FlexibleArgumentParser(argparse.ArgumentParser):
    """A parser that accepts vLLM's forms of flags: underscores, ``-tp``, ``--object.key value``.

    ``vars`` of its result are the given flags, and defaults of the script's own flags.
    """

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        own = self._option_string_actions
        switches = {flag for flag, action in own.items() if isinstance(action, argparse.BooleanOptionalAction)}
        given = sys.argv[1:] if args is None else args
        words = [word if word.partition("=")[0] in own else dashed(word) for word in given]
        found, rest = super().parse_known_args(plain_words(words, switches), namespace)
        return (GivenArgs(**vars(found)) if namespace is None else found), rest
