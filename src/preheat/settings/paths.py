"""The check of the options that name files and folders, before anything is read or loaded.

The rows of the options say what each path leads to.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

from preheat.errors import SettingsError
from preheat.options.options import Option
from preheat.settings import OPTIONS, Settings
from preheat.utils.files import is_shells_pipe, shown


def check_paths(settings: Settings) -> None:
    """Raise SettingsError, with the remedy, if an option names a file for a folder, or a path that cannot be used."""
    for opt in OPTIONS.values():
        value = getattr(settings, opt.name)
        if opt.path is not None and value is not None and value not in opt.no_paths:
            check_path(opt, value)


def check_path(opt: Option, value: str) -> None:
    """Raise SettingsError unless ``value`` leads to what the option ``opt`` needs."""
    new, what = (opt.path or "").startswith("new "), (opt.path or "").removeprefix("new ")
    try:
        path = Path(value).expanduser()
        mode = _mode(path, new)
        wrong = mode is not None and _wrong(value, what, mode)
        reads = os.R_OK | (os.X_OK if what == "folder" else 0)
        if not new and not wrong and not os.access(path, reads):
            wrong = "this user may not read it: change its permissions"
    except (OSError, RuntimeError) as error:  # RuntimeError: no home folder for ~
        reason = getattr(error, "strerror", None) or str(error)
        wrong = f"{reason}: {'name another' if new else 'make it, or name another'} {what}"
    if wrong:
        verb = "used" if new else "read"
        raise SettingsError(f"{opt.name} {shown(value)} cannot be {verb}: {wrong}", param=opt.name)


def _mode(path: Path, new: bool) -> int | None:
    """Return the mode of ``path``, None if it may be ``new`` and can be made in folders that are there or can be made.

    Raises OSError.
    """
    try:
        return path.stat().st_mode
    except FileNotFoundError:
        if not new:
            raise
    for parent in path.absolute().parents:
        if parent.exists():
            os.stat(parent / ".")  # raises NotADirectoryError for a file
            return None
    return None


def _wrong(value: str, what: str, mode: int) -> str:
    """Return what is wrong about something with this ``mode`` in place of a file or a folder, "" if nothing is."""
    if what == "folder":
        return "" if stat.S_ISDIR(mode) else "it is no folder: name a folder"
    if stat.S_ISREG(mode) or (stat.S_ISFIFO(mode) and is_shells_pipe(value)):
        return ""
    return f"it is {'a folder' if stat.S_ISDIR(mode) else 'no regular file'}: name a file"
