"""Parts of many commands: their arguments, their settings, and their output."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from preheat.errors import SettingsError
from preheat.options.options import Option, add_flags
from preheat.settings import OPTIONS, Settings
from preheat.settings.paths import check_paths
from preheat.utils.files import is_shells_pipe, shown
from preheat.utils.log import printable

FAILURE = 1

ENGINE_OPTIONS = [opt for opt in OPTIONS.values() if opt.group != "Server"]


def add_command(
    commands: Any, name: str, run: Callable[[dict[str, Any]], int], options: Iterable[Option], text: str
) -> argparse.ArgumentParser:
    """Add a command with the model as its argument."""
    parser: argparse.ArgumentParser = commands.add_parser(
        name, help=text, allow_abbrev=False, usage=f"preheat {name} [MODEL] [--flag VALUE ...]"
    )
    parser.set_defaults(run=run)
    parser.add_argument("model_argument", nargs="?", metavar="MODEL", help="same as --model")
    add_flags(parser, options)
    return parser


def say(text: str) -> None:
    """Print a line that may have control characters."""
    print(printable(text), flush=True)


def flag_of(name: str) -> str:
    """Return the flag of an option."""
    return "--" + name.replace("_", "-")


def check_folder(flag: str, path: str | None) -> None:
    """Raise SettingsError if no file can be written at the ``path`` of ``flag``, before any work. None is no file."""
    why = ""
    if path is not None and Path(path).is_dir():
        why = "it is a folder: name a file"
    elif path is not None and not Path(path).absolute().parent.is_dir():
        why = "its folder does not exist; create it, or name another file"
    elif path is not None and not os.access(path if Path(path).exists() else Path(path).absolute().parent, os.W_OK):
        why = "it cannot be written: name another file"
    elif path is not None and Path(path).is_fifo() and not is_shells_pipe(path):
        why = "it is a pipe: name a file"
    if why:
        raise SettingsError(f"{flag} {shown(path or '')}: {why}")


def load(values: dict[str, Any]) -> Settings:
    """Return the settings of a command with the model as its argument. Raises SettingsError for several models."""
    settings = loaded(values)
    if settings.models:
        raise SettingsError("several models are for `preheat serve`: name one, as --model PATH", param="models")
    return settings


def loaded(values: dict[str, Any]) -> Settings:
    """Return the settings of a command with the model as its argument, or with several models."""
    model = values.pop("model_argument")
    if model is not None and values.setdefault("model", [model]) != [model]:
        raise SettingsError(f"the model is given twice, as {model!r} and by --model: leave one out", param="model")
    settings = Settings.load(values)
    check_paths(settings)
    return settings
